"""Drafters compared: tokens per cycle paired by prompt and averaged over seeds, and what an accepted length is worth."""

import types

import pandas as pd
import pytest
import torch

import specdec
from specdec import runs
from specdec.data.prompts import conversation, gather
from specdec.evaluation import drafters
from specdec.evaluation.drafters import compare_tau, speed_by_accepted, trees_by_candidates
from specdec.models.load import shipped_folder
from specdec.training.drafter import eagle3


def rows():
    """Two prompts of one suite by the starting drafter and by two seeds of another, 24 tokens in cycles each."""
    made = []
    for drafter, seed, cycles in (("start", 0, (10, 14)), ("ppow", 0, (8, 12)), ("ppow", 1, (6, 10))):
        for prompt, count in zip("ab", cycles, strict=True):
            shared = dict(temperature=0.0, seed=seed, drafter=drafter, suite="s", prompt=prompt, new_tok=25)
            made.append(shared | dict(method="tree", cycles=count, cycle_tok=24, total_ms=50.0))
            if drafter == "start":  # plain decoding takes its turn once for all
                made.append(shared | dict(method="autoregressive", cycles=0, cycle_tok=0, total_ms=100.0))
    return pd.DataFrame(made)


def test_tau_is_a_ratio_of_sums_and_seeds_are_averaged():
    table = compare_tau(rows()).set_index(["suite", "drafter"])
    assert table.loc[("s", "start"), "tau"] == pytest.approx(48 / 24)
    assert table.loc[("all", "ppow"), "tau"] == pytest.approx((48 / 20 + 48 / 16) / 2)
    found = table.loc[("s", "ppow")]
    assert found["over_baseline"] == pytest.approx((24 / 20 + 24 / 16) / 2) and found["seeds"] == 2
    assert found["low"] < found["over_baseline"] < found["high"]
    assert table.loc[("s", "start"), ["over_baseline", "low", "high"]].tolist() == [1.0, 1.0, 1.0]
    assert found["worst_seed"] == pytest.approx(24 / 20) and found["best_seed"] == pytest.approx(24 / 16)
    assert (table["speedup"] == 2).all()


def test_a_baseline_of_several_seeds_is_their_mean():
    """Of chains, which nobody timed."""
    table = compare_tau(rows().drop(columns=["new_tok", "total_ms"]), "ppow").set_index(["suite", "drafter"])
    ppow = (48 / 20 + 48 / 16) / 2
    assert table.loc[("all", "start"), "over_baseline"] == pytest.approx(48 / 24 / ppow)
    assert table.loc[("all", "ppow"), "over_baseline"] == 1 and "speedup" not in table
    assert table.loc[("all", "ppow"), "worst_seed"] == pytest.approx(48 / 20 / ppow)


def test_what_an_accepted_length_is_worth():
    prompts = pd.DataFrame([dict(method="autoregressive", decode_ms=40.0, new_tok=11)])  # 4 ms a token
    cycles = pd.DataFrame({"method": "chain", "accepted_tok": [0, 0, 2], "total_ms": [7.0, 9.0, 8.0]})
    table = speed_by_accepted(prompts, cycles, "chain", window=2, gamma=0.5)
    assert table["accepted_tok"].tolist() == [0, 1, 2] and table["cycles"].tolist() == [2, 0, 1]
    assert table["measured"].tolist() == pytest.approx([4 / 8, 8 / 8, 12 / 8])  # of length 1 none was seen: the mean
    assert table["cost_aware"].tolist() == pytest.approx([0, 1 / 1.5, 2 / 2])


def test_trees_by_candidates_have_that_many_leaves():
    trees = trees_by_candidates(2, (1, 4))
    assert [(tree.plan.total_tokens, tree.plan.depth, tree.plan.top_k) for tree in trees.values()] == [
        (4, 2, 1),
        (13, 2, 4),
    ]


def test_chains_along_the_targets_text_are_those_of_decoding(tmp_path, monkeypatch):
    for module in (drafters, eagle3):
        monkeypatch.setattr(module, "compute_dtype", lambda device: torch.float32)
    items = gather(["toy/gsm8k", "toy/humaneval"], part="test", limit=3)
    start = {("start", 0): shipped_folder("tiny") / "drafter"}
    rows = drafters.chain_rows("tiny", start, items, folder=tmp_path, max_new_tokens=96, drafts=3).set_index("prompt")
    pair, same = specdec.load_pair("tiny", dtype="float32"), 0
    for item in items:
        out = specdec.decode(pair, conversation(pair, item, 0, []), specdec.Static(4, 2, 1), max_new_tokens=96)
        if out.finish_reason == "stop":  # the chat template closes a cut answer, which decoding never reads
            same += 1
            assert rows.loc[item.id, "cycles"] == len(out.rows) and rows.loc[item.id, "cycle_tok"] == out.new_tok - 1
    assert same > 2


def test_what_gradients_have_in_common():
    """Of half a common direction and half noise: a cosine of a half, and exact where a float32 sum of squares is not."""
    common, noise = torch.zeros(4_000_000), torch.zeros(2, 4_000_000)
    common[::2], noise[0, 1::4], noise[1, 3::4] = 1.0, 2**0.5, 2**0.5
    agree, direction = drafters.common_direction(list(common + noise))
    assert agree == pytest.approx(0.5, abs=1e-7) and float(direction @ direction) == pytest.approx(1, abs=1e-9)
    assert drafters.common_direction([common, -3 * common])[0] == pytest.approx(-1, abs=1e-9)


def test_each_objective_goes_on_at_its_best_rate(tmp_path, monkeypatch):
    """The first seed tries every rate, the others take the one that did best on held-out text."""
    found = {("a", 0.1): 2.0, ("a", 0.2): 3.0, ("b", 0.1): 5.0, ("b", 0.2): 4.0}
    trained = []

    def train(target, conversations, *, out_dir, objective, settings, budget, start_from):
        trained.append((objective.name, settings.learning_rate, budget.seed))
        results = {"held_out_tau_chain": found[trained[-1][:2]]}
        runs.write_json(out_dir / "drafter_training" / "plan.json", {"results": results})

    monkeypatch.setattr(drafters, "train_drafter", train)
    objectives = {name: types.SimpleNamespace(name=name, network="eagle3") for name in "ab"}
    settings = dict(rates=[0.1, 0.2], seeds=[0, 1, 2], start_from=tmp_path, out_dir=tmp_path)
    kept, tried = drafters.train_at_best_rate("tiny", [], objectives, eagle3.Settings(), **settings)
    assert trained[:4] == [("a", 0.1, 0), ("a", 0.2, 0), ("b", 0.1, 0), ("b", 0.2, 0)]
    assert sorted(trained[4:]) == [("a", 0.2, 1), ("a", 0.2, 2), ("b", 0.1, 1), ("b", 0.1, 2)]
    assert tried["chosen"].tolist() == [False, True, True, False]
    assert {key: place.parent.name for key, place in kept.items() if key[0] == "a"} == {
        ("a", seed): f"a-at-0.2-{seed}" for seed in range(3)
    }
