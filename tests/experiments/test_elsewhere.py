"""Contenders at another machine's prices: who is made for it, who is carried there under which
name, and what answers cost.
"""

import dataclasses

import pytest
from fakes.notebooks import functions_of
from fakes.traces import round_costs, synthetic_trace

from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.evaluation import compare
from specdec.identity import Method
from specdec.policies import value
from specdec.policies.base import changed
from specdec.policies.heuristics import SVIP
from specdec.training.value import train_value

from workbook import rules, terms

elsewhere = functions_of("33_heuristics")

EQUAL = terms.EqualTerms(shapes=((3,),), depth=4, depths=(0, 1, 3), total_tokens=(1, 2, 4, 8, 16))
DEAR = round_costs(name="dear nodes@abc123", verify=(4.0, 12.0, 200.0), errors={"tree_frac": 0.01})


@pytest.fixture
def recording():
    trace = synthetic_trace(turns=12, positions=30, depth=5, top_ks=(1, 3), features=9)
    trace.turns["part"] = ["train", "tune", "test", "train", "tune", "test"] * 2
    trace.header["key"] = "made-up"
    return trace


@pytest.fixture
def ours(recording):
    tree = dict(top_k=3, most_expansions=4, sizes=(0, 1, 3, 7, 15))
    config = changed(value.OURS, dict(steps=5, rounds=1, **tree))
    train, start = recording.select(part="train"), TreeConfig(4, 2, 3)
    return train_value(train, round_costs(), config, start=start, progress=False)[0]


def tuner(recording, folder, names=("sglang_ema",)):
    return rules.Tuner(
        terms.Arena(recording, DEAR, folder, EQUAL, progress=False), folder, (0,), names
    )


def test_networks_are_carried_and_what_holds_prices_is_repriced(recording, ours):
    here = {"ours": [ours], "C2T (paper)": [Static(4, 2, 3)], "sglang_ema": [Static(2, 1, 1)]}
    here[Method("SVIP", "tuned")] = [SVIP()]
    found = elsewhere.carried(here, recording.select(part="tune"), DEAR)
    names = "ours, carried", "ours, re-priced", "C2T (paper), carried"
    assert tuple(found) == names, "rules without a network are tuned anew there"
    assert found[names[0]] == [ours] and found[names[2]] == here["C2T (paper)"]
    (moved,) = found[names[1]]
    assert moved.priced_for == DEAR.name and ours.priced_for != DEAR.name
    assert moved.verify_ms[-1] == pytest.approx(DEAR.verify_ms(ours.sizes[-1], 0))


def test_systems_learn_the_prices_where_an_effort_is_given(recording, home, tmp_path, monkeypatch):
    calls = []

    def train_all(arena, jobs, minutes):
        calls.append((arena, jobs, minutes))
        return {"LTD": [Static(4, 2, 3)]}, None

    monkeypatch.setattr(terms, "train_all", train_all)
    rules_there = {"sglang_ema", "sglang_ema, tuned"}
    there = tuner(recording, tmp_path)
    assert set(elsewhere.made_there(there, [0], 0.0, None, "laptop", 0.0)) == rules_there
    assert not calls
    trained = elsewhere.made_there(there, [0, 1], 0.25, None, "laptop", 7.0)
    assert set(trained) == rules_there | {"LTD"}
    ((arena, jobs, minutes),) = calls
    assert arena.terms == dataclasses.replace(EQUAL, effort=0.25)
    assert arena.costs is DEAR
    assert len(jobs) == 2 * len(terms.TERMS[terms.EQUAL])
    assert minutes == 7.0


def test_everybody_is_judged_at_the_prices_there(recording, ours, tmp_path):
    there = tuner(recording, tmp_path)
    fixed = Static(8, 3, 3)
    contenders = {"ours": [ours], "fixed": [fixed]}
    defaults = (TreeConfig(4, 2, 3),)
    made = elsewhere.made_there(there, [0], 0.0, None, "laptop", 0.0)
    made |= elsewhere.carried(contenders, recording.select(part="tune"), DEAR)
    table = elsewhere.judge(there.arena, made, {"fixed": 2.0}, defaults)
    rows = table[table["suite"] == "all"].set_index("method")
    names = {"ours, carried", "ours, re-priced", "fixed, carried", "sglang_ema, tuned"}
    assert names | {compare.TUNED, compare.CLAIRVOYANT} <= set(rows.index)
    assert compare.RANDOM not in rows.index
    # charged by the name that it has elsewhere
    trees = compare.Baselines.choose(recording, DEAR, defaults=defaults)
    options = {"policy_ms": {"fixed": 2.0}, "baselines": trees, "progress": False}
    alone = compare.compare_replay(recording, DEAR, {"fixed": [fixed]}, **options).table
    same = alone.query("suite == 'all' and method == 'fixed'")["ms_per_tok"].item()
    assert rows.loc["fixed, carried", "ms_per_tok"] == pytest.approx(same)
    assert rows.loc["ours, re-priced", "ms_per_tok"] < rows.loc["ours, carried", "ms_per_tok"]
