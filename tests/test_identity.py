"""Names of methods are made of what they hold, and tables that hold names alone are understood."""

import itertools
import pickle

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as some

from specdec.identity import TERMS, Method, with_fields

from workbook.method_rows import identified

NAMED = {
    "LTD, equal terms": Method("LTD", "equal"),
    "LTD, the paper's settings": Method("LTD", "paper"),
    "RADAR, the released weights, llama3": Method("RADAR", "released", "llama3"),
    "default 60,7,10": Method("static", "default", "60,7,10"),
    "tuned static": Method("static", "tuned"),
    "per-suite tuned static": Method("static", "per suite"),
    "DDD, tuned": Method("DDD", "tuned"),
    "LTD, equal terms, carried": Method("LTD", "equal", trained_on="float32", adapted="carried"),
    "LTD, iter0-depth": Method("LTD", preset="iter0-depth"),
    "a name of the caller's": Method("a name of the caller's"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_method_is_a_text_made_of_fields_and_travels(name):
    method = NAMED[name]
    again = pickle.loads(pickle.dumps(method))
    assert isinstance(again, Method)
    assert again == str(method) == name
    assert again.fields == method.fields
    assert Method.of(method) is method and method.but(terms=method.terms) == method


@given(
    some.sampled_from([*TERMS, ""]),
    some.sampled_from(["", "x"]),
    some.sampled_from(["", "carried", "re-priced"]),
)
def test_methods_that_differ_have_other_names(terms, preset, adapted):
    method = Method("LTD", terms, preset, "a100", adapted)
    every = itertools.product([*TERMS, ""], ("", "x"), ("", "carried", "re-priced"))
    others = {str(Method("LTD", *some, "", change)) for *some, change in every}
    assert len(others) == 3 * 2 * (len(TERMS) + 1) and method in others


def test_tables_hold_the_fields_and_keep_methods_apart():
    table = pd.DataFrame({"method": ["LTD, equal terms", "mine"], "speedup": [1.0, 2.0]})
    labelled = with_fields(table, [Method("LTD", "equal"), "mine"], temperature=0.0)
    assert labelled[["system", "terms", "temperature"]].values.tolist() == [
        ["LTD", "equal", 0.0],
        ["mine", "", 0.0],
    ]
    assert identified(labelled) is labelled, "fields that are there stay"
    assert identified(table.drop(columns="method")).columns.tolist() == ["speedup"]
