"""Names of methods are made of what they hold, and tables that hold names alone are understood."""

import itertools
import pickle

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as some

from specdec import runs
from specdec.identity import FIELDS, TERMS, Method, with_fields

from workbook.old_names import identified

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


def test_tables_hold_the_fields_keep_methods_apart_and_old_names_are_understood():
    table = pd.DataFrame({"method": ["LTD, equal terms", "mine"], "speedup": [1.0, 2.0]})
    told = with_fields(table, [Method("LTD", "equal"), "mine"], temperature=0.0)
    assert told[["system", "terms", "temperature"]].values.tolist() == [
        ["LTD", "equal", 0.0],
        ["mine", "", 0.0],
    ]
    assert identified(told) is told, "fields that are there stay"
    assert identified(table.drop(columns="method")).columns.tolist() == ["speedup"]
    for run in runs.shipped_dir().glob("*/*.parquet"):
        table = pd.read_parquet(run)
        if "method" in table and "system" not in table:
            before = table["method"].str.replace(r",? seed \d+$", "", regex=True)
            assert identified(table)["method"].nunique() == before.nunique(), run
    for old, method in [
        ("default 60,7,10", Method("static", "default", "60,7,10")),
        ("per-suite tuned static", Method("static", "per suite")),
        ("GS", Method("tuned static of width 10")),
        ("Re-SpS", Method("Re-SpS", "equal")),
        ("Re-SpS, paper", Method("Re-SpS", "paper")),
        ("LTD, official", Method("LTD", "official")),
        ("LTD, live", Method("LTD", "live")),
        ("ours as shipped", Method("ours", "shipped")),
        ("RADAR, released ds", Method("RADAR", "released", "ds")),
        ("C2T", Method("C2T")),
        ("C2T, tuned, carried", Method("C2T", "tuned", adapted="carried")),
        ("ours, re-priced", Method("ours", "equal", adapted="re-priced")),
        ("iter3, seed 1", Method("LTD", preset="iter3")),
        ("ours seed 1", Method("ours", "equal")),
        ("hybrid, gated", Method("hybrid, gated")),
        ("clairvoyant", Method("clairvoyant")),
    ]:
        table = identified(pd.DataFrame({"method": [old], "seed": [0]}))
        assert table.loc[0, list(FIELDS)].to_dict() == method.fields
        assert table["method"][0] == method
        assert table["seed"][0] == (1 if old.endswith("1") else 0)
