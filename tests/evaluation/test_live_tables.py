"""Tables of live decoding, by hand: the arguments of the bench, and which ratio is of what."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from fakes.rows import speedup

from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import compare_live, stats
from specdec.evaluation.compare import Baselines, Comparison
from specdec.evaluation.compare_live import Live
from specdec.identity import Method

DEFAULT = TreeConfig(16, 4, 3)
TUNED = TreeConfig(6, 2, 3)
TREES = Baselines((DEFAULT,), TUNED, {"toy/x": TreeConfig(5, 2, 3), "toy/y": TreeConfig(4, 1, 3)})
OURS = Method("ours", "equal")
IDENTITY = {**OURS.fields, "temperature": 0.5, "machine": "here"}
TIMES = {
    "autoregressive": (100, 60),
    "d": (50, 40),
    "tuned static": (40, 30),
    "ours #0": (25, 20),
    "ours #1": (32, 30),
}


@pytest.fixture
def live() -> Live:
    """Two suites of two prompts by plain decoding, two trees and two seeds; a policy's share of the
    time is an eighth.
    """
    prompts = []
    cycles = []
    for name, both in TIMES.items():
        for suite, longer in (("x", 0), ("y", 4)):
            for number, ms in enumerate(both):
                key = dict(suite=suite, prompt=f"{suite}/{number}", turn=0, method=name, repeat=0)
                counted = 0 if name == "autoregressive" else 4
                row = {**key, "new_tok": 11 + longer, "cycles": counted, "cycle_tok": 3 * counted}
                row.update(prompt_tok=7, total_ms=ms + 5.0, decode_ms=float(ms))
                row.update(clock="wall", neighbours=9e9 if name == "d" else 0.0)
                row.update(same=name != "d" or number == 0)
                row.update(correct=number == 0 if suite == "x" else None)
                prompts.append(row)
                lap = dict(draft_calls=3 + number, verify_nodes=8, policy_ms=1.0, total_ms=8.0)
                cycles += [{**key, **lap}] * counted
    labels = {name: (name, 0) for name in ("autoregressive", "d", "tuned static")}
    labels.update({"ours #0": (OURS, 0), "ours #1": (OURS, 1)})
    table = pd.DataFrame(prompts).astype({"correct": "boolean"})
    return Live((), table, pd.DataFrame(cycles), labels, (OURS,), "d", None, 0.5, "here")


def test_a_row_by_the_clock_is_whole(live):
    table = compare_live.live_table(live)
    assert table["suite"].tolist() == ["x"] * 5 + ["y"] * 5 + ["all"] * 5
    assert table["method"].tolist() == ["autoregressive", "d", "tuned static", OURS, OURS] * 3
    assert table["seed"].tolist() == [0, 0, 0, 0, 1] * 3
    row = {"suite": "all", "method": str(OURS), "seed": 0, "prompts": 4, "tau_macro": 3.0}
    row.update(tau=3.0, tau_low=3.0, tau_high=3.0, tok_per_s=pytest.approx(1e3 * 52 / 110))
    references = {"speedup": "autoregressive", "over_default": "d", "over_tuned": "tuned static"}
    for name, reference in references.items():
        spreads = []
        for ours in ("ours #0", "ours #1"):
            columns = []
            for method in (ours, reference):
                rows = live.prompts[live.prompts["method"] == method].set_index("prompt")
                columns += [rows[column].to_numpy(float) for column in ("new_tok", "total_ms")]
            spreads.append(speedup(*columns))
        for column, value in stats.spread_of(name, spreads[0]).items():
            row[column] = pytest.approx(value)
        if name != "speedup":
            adjusted = stats.holm([spread.p_value for spread in spreads])[0]
            row[f"{stats.p_name(name)}_holm"] = pytest.approx(adjusted)
    row.update(draft_calls=3.5, verify_nodes=8.0, policy_frac=1 / 8)
    row.update(same_frac=1.0, checked=2, accuracy_frac=0.5, crowded=False)
    assert table.iloc[13].to_dict() == {**row, **IDENTITY}
    plain = table.iloc[10]
    missing = ["over_default", "over_tuned", "p_tuned_holm", "policy_frac", "draft_calls"]
    assert plain[missing].isna().all()
    assert table.iloc[1][["same_frac", "crowded"]].tolist() == [0.5, True]
    assert np.isnan(table.iloc[5]["accuracy_frac"])
    assert table["p_tuned_holm"].notna().sum() == 6, "baselines are no hypotheses"
    untested = compare_live.live_table(replace(live, policies=()))
    assert not [name for name in untested if name.startswith("p_")]


@pytest.fixture
def predicted() -> Comparison:
    """Of the same turns and one more; times of the first prompt are as by the clock, of the second
    twice as long.
    """
    rows = []
    for name, both in {**TIMES, "clairvoyant": (5, 4)}.items():
        for suite, longer in (("x", 0), ("y", 4), ("z", 0)):
            for number, ms in enumerate(both):
                row = dict(suite=suite, prompt=f"{suite}/{number}", turn=0, part="test")
                row.update(seed=int(name == "ours #1"), new_tok=10 + longer, cycles=4, cycle_tok=12)
                row.update(method=str(OURS) if name.startswith("ours") else name, policy_ms=0.0)
                row.update(plain_ms=(100.0, 60.0)[number], time_ms=ms * (1.0 + number))
                row.update(draft_calls=0 if name == "autoregressive" else 8, verified_tok=9)
                rows.append(row)
    trees = SimpleNamespace(default="d", trees={})
    return Comparison(pd.DataFrame(rows), pd.DataFrame(), trees, {OURS: 0.0})


def test_a_row_beside_the_clock_is_whole(live, predicted):
    table = compare_live.beside(predicted, live)
    order = table[["suite", "method", "seed"]].values.tolist()
    methods = ["autoregressive", "d", "tuned static", OURS, OURS]
    seeds = [0, 0, 0, 0, 1]
    assert order == [
        [s, m, n] for s in ("x", "y", "all") for m, n in zip(methods, seeds, strict=True)
    ]
    row = table.iloc[13].to_dict()
    expected = {"suite": "all", "method": str(OURS), "seed": 0, "prompts": 4}
    ratios = {"speedup": (320 / 130, 320 / 90), "over_default": (260 / 130, 180 / 90)}
    ratios["over_tuned"] = (200 / 130, 140 / 90)
    for name, (replayed, timed) in ratios.items():
        low, high = row.pop(f"live_{name}_low"), row.pop(f"live_{name}_high")
        assert low <= timed * (1 + 1e-9) and timed <= high * (1 + 1e-9)
        expected[f"replay_{name}"] = pytest.approx(replayed)
        expected[f"live_{name}"] = pytest.approx(timed)
        expected[f"{name}_off"] = pytest.approx(replayed / timed - 1)
        expected[f"{name}_inside"] = low <= replayed <= high
    ms, live_ms = (25 + 40) * 2 / 48, (25 + 20) * 2 / 48
    expected.update(replay_ms_per_tok=pytest.approx(ms), live_ms_per_tok=pytest.approx(live_ms))
    expected.update(ms_per_tok_off=pytest.approx(ms / live_ms - 1))
    assert row == {**expected, **IDENTITY}
    assert not row["speedup_inside"] and row["over_default_inside"]
    first = live.prompts[live.prompts["prompt"] == "x/0"]
    one = compare_live.beside(predicted, replace(live, prompts=first))
    assert set(one["suite"]) == {"x"} and one["speedup_inside"].isna().all()


def test_turns_of_one_token_are_left_out(live, predicted):
    short = live.prompts["prompt"] == "x/1"
    live.prompts.loc[short, "new_tok"] = 1
    table = compare_live.beside(predicted, live).set_index(["suite", "method", "seed"])
    assert table.loc[("x", OURS, 0), "live_ms_per_tok"] == pytest.approx(25 / 10)
    assert table.loc[("x", OURS, 0), "prompts"] == 1
    expected = (100 + 100 + 60) / (32 + 32 + 30)
    assert table.loc[("all", OURS, 1), "live_speedup"] == pytest.approx(expected)
    live.prompts["new_tok"] = 1
    pytest.raises(SpecdecError, compare_live.beside, predicted, live).match("share no turn")


def test_agreement_by_hand():
    columns = "suite method replay_over_tuned live_over_tuned ms_per_tok_off"
    columns = [*columns.split(), "replay_ms_per_tok", "live_ms_per_tok"]
    tuned = ("x", "tuned static", 1.0, 1.5, 0.5, 3.0, 3.0)
    first = ("x", "a", 2.0, 1.75, -0.25, 1.0, 2.0)
    second = ("x", "b", 1.5, 1.0, 0.125, 2.0, 1.0)
    rows = pd.DataFrame([tuned, first, second], columns=columns)
    expected = {"methods": 3.0, "median_frac": 0.25, "worst_frac": 0.5, "spearman": 0.5}
    expected.update(gain_median=0.375, gain_worst=0.5)
    assert compare_live.agreement(rows) == pytest.approx(expected)
    pooled = pd.concat([rows.assign(ms_per_tok_off=9.0), rows.assign(suite="all")])
    assert compare_live.agreement(pooled) == pytest.approx(expected)
