"""Facts about cycles and texts: every column by hand, on a few cycles of two methods."""

import numpy as np
import pandas as pd
import pytest

from specdec import machine
from specdec.evaluation import metrics

# suite, prompt, turn, method, accepted_tok, verify_nodes, draft_calls
HAND = [
    ("s", "a", 0, "m", 2, 4, 2),
    ("s", "a", 0, "m", 0, 4, 2),
    ("s", "a", 1, "m", 1, 2, 1),
    ("s", "b", 0, "m", 0, 0, 0),
    ("s", "a", 0, "n", 1, 1, 1),
]
COLUMNS = "suite prompt turn method accepted_tok verify_nodes draft_calls".split()


@pytest.fixture
def rows():
    table = pd.DataFrame(HAND, columns=COLUMNS)
    table["new_tok"], table["verified_tok"] = table["accepted_tok"] + 1, table["verify_nodes"] + 1
    return table.assign(expansions=(table["draft_calls"] - 1).clip(lower=0), top_k=3)


def test_facts_of_a_method_are_whole(rows):
    table = metrics.cycle_facts(rows)
    assert table.index.tolist() == ["m", "n"] and table.index.name == "method"
    assert table.loc["m"].to_dict() == {
        "cycles": 4,
        "turns": 3,
        "tau_pooled": 7 / 4,
        "tau_macro": (6 / 3 + 1) / 2,
        "calls_macro": (5 / 3 + 0) / 2,
        "rounds_per_turn": 4 / 3,
        "rounds_per_turn_sd": pytest.approx(1 / 3**0.5),
        "accepted_per_node": 3 / 10,
        # of the two turns in which nodes were verified
        "accepted_per_node_macro": (2 / 8 + 1 / 2) / 2,
        "accepted_per_level": 3 / 5,
        "accepted_per_level_macro": (2 / 4 + 1) / 2,
        "unique_actions": 3,
        "effective_actions": pytest.approx(np.exp(0.5 * np.log(2) + 0.5 * np.log(4))),
        "commonest": "5/1/3",
        "commonest_frac": 0.5,
        "collapsed": False,
    }
    nothing = metrics.cycle_facts(rows[rows["prompt"] == "b"]).loc["m"]
    assert np.isnan(nothing["accepted_per_node"]) and np.isnan(nothing["accepted_per_level_macro"])


@pytest.mark.parametrize("column", ["repeat", "seed"])
def test_each_repeat_is_a_decoding_pooled_or_not(rows, column):
    once = metrics.cycle_facts(rows)
    twice = pd.concat([rows.assign(**{column: 0}), rows.assign(**{column: 1})])
    assert metrics.cycle_facts(twice, ["method", column]).loc[("m", 1)].equals(once.loc["m"])
    columns = ["turns", "rounds_per_turn", "tau_macro"]
    pooled = metrics.cycle_facts(twice).loc["m", columns]
    assert pooled.tolist() == pytest.approx([6, 4 / 3, 1.5])


def test_histograms(rows):
    shares = metrics.action_shares(rows)
    assert list(shares) == ["method", *metrics.ACTION, "cycles", "share"]
    assert shares.reset_index().values.tolist() == [
        [0, "m", 5, 1, 3, 2, 0.5],
        [1, "m", 3, 0, 3, 1, 0.25],
        [2, "m", 1, 0, 3, 1, 0.25],
        [3, "n", 2, 0, 3, 1, 1.0],
    ]
    each = metrics.answer_shares(rows, columns=["expansions", "verify_nodes"])
    assert list(each) == ["method", "answer", "value", "cycles", "share"]
    assert each[each["method"] == "m"].values.tolist() == [
        ["m", "expansions", 1, 2, 0.5],
        ["m", "expansions", 0, 2, 0.5],
        ["m", "verify_nodes", 4, 2, 0.5],
        ["m", "verify_nodes", 2, 1, 0.25],
        ["m", "verify_nodes", 0, 1, 0.25],
    ]
    counts = metrics.answer_counts(rows.assign(seed=4))
    names = "suite method seed expansions verify_nodes top_k draft_calls accepted_tok cycles"
    assert list(counts) == names.split()
    assert counts.values.tolist()[0] == ["s", "m", 4, 1, 4, 3, 2, 2, 1] and len(counts) == 5


def test_a_policy_of_one_action_has_collapsed(rows):
    same = pd.concat([rows[:1]] * 99 + [rows[2:3]], ignore_index=True)
    effective = pytest.approx(np.exp(-0.99 * np.log(0.99) - 0.01 * np.log(0.01)))
    (row,) = metrics.actions(same).to_dict("records")
    assert list(row.values()) == [2, effective, "5/1/3", 0.99, True]
    assert not metrics.actions(pd.concat([same, rows[2:3]]))["collapsed"]["m"]


def test_texts_are_counted(monkeypatch):
    monkeypatch.setattr(machine, "ENOUGH_CORES", 0.8)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    texts = [("s", "n", True, None), ("s", "m", True, True), ("s", "m", False, False)]
    texts.append(("s", "m", True, None))
    prompts = pd.DataFrame(texts, columns=["suite", "method", "same", "correct"])
    # weighted by their time, 0.45 CPUs were busy beside "m" and 0.35 beside "n"
    prompts = prompts.assign(neighbours=[0.35, 0.6, 0.3, None], total_ms=[1.0, 3.0, 3.0, 9.0])
    prompts["clock"] = "wall"
    table = metrics.text_facts(prompts.astype({"correct": "boolean"}))
    assert table.index.tolist() == [("s", "n"), ("s", "m")]
    assert list(table) == ["same_frac", "checked", "accuracy_frac", "crowded"]
    assert table.loc[("s", "m")].tolist() == [pytest.approx(2 / 3), 2, 0.5, True]
    assert not table.loc[("s", "n"), "crowded"]
    assert table.loc[("s", "n")].tolist()[:2] == [1.0, 0]
    assert np.isnan(table.loc[("s", "n"), "accuracy_frac"])
