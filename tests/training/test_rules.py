"""Rules tuned on the terms of controllers: what is tried, on which parts, that it is found again; calibration by hand."""

import numpy as np
import pandas as pd
import pytest
from fakes.traces import COSTS, synthetic_trace

from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import compare
from specdec.policies.base import choices_of
from specdec.replays.replay import replay
from specdec.replays.trace import NEVER, Trace
from specdec.training import classifiers, rules
from specdec.training.rules import ENGINES, RULES, TUNED, Tuner, calibration_error, temperatures
from specdec.training.terms import Arena, EqualTerms

TERMS = EqualTerms(shapes=((3,), (9,)), depth=4, total_tokens=(1, 2, 4, 8, 16))
pytestmark = pytest.mark.filterwarnings("ignore:the policy in .* goes by the prices")


def arena(folder, **options) -> Arena:
    trace = synthetic_trace(turns=6, positions=24, depth=5, **{"top_ks": (1, 3), **options})
    trace.turns["part"] = ["train", "tune", "test"] * 2
    return Arena(trace, COSTS, folder, TERMS, progress=False)


def test_calibration_error_by_hand():
    chances, happened = np.array([0.95, 0.95, 0.35, 0.31]), np.array([True, True, True, False])
    assert calibration_error(chances, happened) == pytest.approx((2 * 0.05 + abs(0.66 - 1)) / 4)
    assert calibration_error(np.array([1.0]), np.array([True])) == 0.0


def test_temperatures_are_found_level_by_level():
    # tokens of probability 0.8 that are right two times in three: sigmoid(log(4) / 2) = 2 / 3. Those below of 0.2, right
    # one time in three: sigmoid(-log(4) / 2) = 1 / 3, both together 2 / 9
    rows = np.arange(18)
    scores = np.log(np.array([[0.8, 0.16]] * 18, np.float32))
    ranks = np.full((18, 2, 2), NEVER, np.int16)
    ranks[:12, :, 0] = 0
    ranks[:4, 1, 1] = 1
    columns = {"scores_1": scores, "ranks_1": ranks, "context_tok": rows.astype(np.int32)}
    turns = pd.DataFrame({"suite": ["a"], "prompt": ["p"], "turn": 0, "part": "train", "first": 0, "positions": 18})
    trace = Trace({"depth": 1, "top_ks": [1], "most_nodes": 2}, turns, columns)
    assert temperatures(trace, 1) == pytest.approx((2.0, 2.0))


def test_every_rule_is_tuned_on_train_and_tune_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(classifiers, "EPOCHS", dict.fromkeys(classifiers.EPOCHS, 1))
    here = arena(tmp_path)
    tuner = Tuner(here, tmp_path, seeds=(0, 1))
    assert tuner.shapes("ucb") == [(1, ()), (3, ())] and tuner.nodes((1, ())) == 5
    expected = tuner.expected_s()
    assert min(expected.values()) > 0
    policies, table = tuner.all(expected=expected)
    assert (table["state"] == "tuned").all(), table[["method", "state"]]
    assert list(table["method"]) == [name + TUNED for name in RULES]
    assert set(policies) == {*ENGINES, *table["method"]}
    for name, some in policies.items():
        plain = name.removesuffix(TUNED)
        assert len(some) == (2 if RULES[plain].seeded and name != plain else 1)
        for policy in some:
            parts = {row["part"] for row in choices_of(policy)}
            assert parts == ({"none"} if name == plain else {"train", "tune"})
            assert policy.limits.total_tokens <= 17 and policy.limits.depth <= 5
    tried = {row["method"]: row["replays"] for row in table.to_dict("records")}
    assert tried["ucb" + TUNED] == 2 * (4 + 1) and tried["llamacpp_p_min" + TUNED] == 2 * (5 + 1)
    held = here.trace.select(part="tune")
    row = table.set_index("method").loc["DDD" + TUNED]
    free = replay(held, policies["DDD" + TUNED][0], COSTS).ms_per_tok
    assert free <= row["ms_per_tok"], "its answers are priced"
    again, found = Tuner(here, tmp_path, seeds=(0, 1)).all()
    assert (found["state"] == "found").all() and found["ms_per_tok"].equals(table["ms_per_tok"])
    assert all(
        [str(policy) for policy in some] == [str(policy) for policy in again[name]] for name, some in policies.items()
    )
    kept = compare.Baselines.choose(here.trace, COSTS, parts=("tune",), defaults=(TreeConfig(4, 2, 3),))
    judged = compare.compare_replay(here.trace, COSTS, again, baselines=kept, random_seeds=(), progress=False).table
    assert judged["headroom_frac"].max() <= 1 and set(policies) <= set(judged["method"])


def test_a_budget_leaves_the_rest_and_what_cannot_be_had_is_refused(tmp_path, monkeypatch):
    tuner = Tuner(arena(tmp_path), tmp_path, names=("hf_heuristic", "ucb", "DDD"))
    policies, table = tuner.all(minutes=1, expected={"hf_heuristic": 1.0, "ucb": 1e6, "DDD": 1e6})
    assert table["state"].tolist() == ["tuned", "left", "left"] and list(policies) == [
        "hf_heuristic",
        "hf_heuristic, tuned",
        "ucb",
    ]
    bare = Tuner(arena(tmp_path, top_ks=(3,)), tmp_path / "bare", names=("hf_heuristic", "DDD"))
    policies, table = bare.all(expected=dict.fromkeys(bare.names, 1.0))
    assert table["state"][0].startswith("refused: hf_heuristic drafts chains, which were not recorded")
    assert list(policies) == ["DDD, tuned"] and table["shape"][1] == "[3, []]"
    monkeypatch.setattr(rules.engines, "rule", lambda *_, **__: (_ for _ in ()).throw(SpecdecError("no")))
    with pytest.raises(SpecdecError, match="no settings of ucb fit this recording"):
        Tuner(arena(tmp_path), tmp_path / "none", names=("ucb",)).tune("ucb")
    with pytest.raises(SpecdecError, match="unknown rule 'DDT'; did you mean 'DDD'"):
        Tuner(arena(tmp_path), tmp_path, names=("DDT",))
