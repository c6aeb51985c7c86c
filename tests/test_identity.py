"""Names of methods are made of what they hold, and tables that hold names alone are understood."""

import pickle

import pandas as pd
import pytest

from specdec.identity import Method, with_fields

NAMED = {
    "LTD, equal terms": Method("LTD", "equal"),
    "RADAR, the released weights, llama3": Method("RADAR", "released", "llama3"),
    "default 60,7,10": Method("static", "default", "60,7,10"),
    "tuned static": Method("static", "tuned"),
    "LTD, equal terms, carried": Method("LTD", "equal", trained_on="float32", adapted="carried"),
    "LTD, iter0-depth": Method("LTD", preset="iter0-depth"),
    "a name of the caller's": Method("a name of the caller's"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_method_is_a_text_made_of_fields_and_travels(name):
    method = NAMED[name]
    again = pickle.loads(pickle.dumps(method))
    assert again == str(method) == name
    assert again.fields == method.fields
    assert Method.of(method) is method and method.but(terms=method.terms) == method


def test_tables_hold_the_fields():
    table = pd.DataFrame({"method": ["LTD, equal terms", "mine"], "speedup": [1.0, 2.0]})
    labelled = with_fields(table, [Method("LTD", "equal"), "mine"], temperature=0.0)
    rows = labelled[["system", "terms", "temperature"]].values.tolist()
    assert rows == [["LTD", "equal", 0.0], ["mine", "", 0.0]]
