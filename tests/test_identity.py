"""Names of methods are made of what they hold, and tables that hold names alone are understood."""

import pickle

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as some

from specdec import identity, runs
from specdec.identity import FIELDS, TERMS, Method, identified, with_fields

METHODS = [
    Method("LTD", "equal"),
    Method("LTD", "paper"),
    Method("RADAR", "released", "llama3"),
    Method("static", "default", "60,7,10"),
    Method("static", "tuned"),
    Method("static", "per suite"),
    Method("DDD", "tuned"),
    Method("LTD", "equal", trained_on="float32", adapted="carried"),
    Method("LTD", preset="iter0-depth"),
    Method("a name of the caller's"),
]
NAMES = [
    "LTD, equal terms",
    "LTD, the paper's settings",
    "RADAR, the released weights, llama3",
    "default 60,7,10",
    "tuned static",
    "per-suite tuned static",
    "DDD, tuned",
    "LTD, equal terms, carried",
    "LTD, iter0-depth",
    "a name of the caller's",
]


def test_names_are_made_of_fields():
    assert METHODS == NAMES
    assert len(set(map(str, METHODS))) == len(METHODS)


@given(some.sampled_from([*TERMS, ""]), some.sampled_from(["", "x"]), some.sampled_from(["", "carried", "re-priced"]))
def test_methods_that_differ_have_other_names(terms, preset, adapted):
    method = Method("LTD", terms, preset, "a100", adapted)
    others = {
        str(Method("LTD", t, p, "", a)) for t in [*TERMS, ""] for p in ("", "x") for a in ("", "carried", "re-priced")
    }
    assert len(others) == 3 * 2 * (len(TERMS) + 1) and method in others


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_method_is_a_text_and_travels(method):
    again = pickle.loads(pickle.dumps(method))
    assert isinstance(again, Method) and again == str(method) and again.fields == method.fields
    assert Method.of(method) is method and method.but(terms=method.terms) == method


def test_tables_hold_the_fields():
    table = pd.DataFrame({"method": ["LTD, equal terms", "mine"], "speedup": [1.0, 2.0]})
    told = with_fields(table, [METHODS[0], "mine"], temperature=0.0)
    assert told[["system", "terms", "temperature"]].values.tolist() == [["LTD", "equal", 0.0], ["mine", "", 0.0]]
    assert identified(told) is told, "fields that are there stay"
    assert identified(table.drop(columns="method")).columns.tolist() == ["speedup"]


@pytest.mark.parametrize(
    ("old", "method"),
    [
        ("default 60,7,10", Method("static", "default", "60,7,10")),
        ("per-suite tuned static", Method("static", "per suite")),
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
    ],
)
def test_old_names_are_understood(old, method):
    table = identified(pd.DataFrame({"method": [old], "seed": [0]}))
    assert table.loc[0, list(FIELDS)].to_dict() == method.fields and table["method"][0] == method
    assert table["seed"][0] == (1 if old.endswith("1") else 0)


def test_every_published_table_keeps_its_methods_apart():
    for run in runs.shipped_dir().glob("*/*.parquet"):
        table = pd.read_parquet(run)
        if "method" in table and "system" not in table:
            seeds = table["method"].map(identity._old_seed)
            before = (
                table["method"] if seeds.isna().all() else table["method"].str.replace(r",? seed \d+$", "", regex=True)
            ).nunique()
            assert identified(table)["method"].nunique() == before, run
