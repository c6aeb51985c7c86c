"""Drafters compared: tokens per cycle paired by prompt and averaged over seeds, and what an
accepted length is worth.
"""

import types

import numpy as np
import pandas as pd
import pytest
import torch

import specdec
from specdec import runs
from specdec.data.suites import conversation, gather
from specdec.evaluation import stats
from specdec.models.load import shipped_folder
from specdec.training.drafter import eagle3, networks, presets
from specdec.training.drafter.chats import Regeneration, conversation_document

from experiments import drafters
from experiments.drafters import compare_tau, speed_by_accepted, trees_by_candidates


def rows():
    """Two prompts of one suite by the starting drafter and by two seeds of another, 24 tokens in
    cycles each.
    """
    made = []
    for drafter, seed, cycles in (
        ("start", 0, (10, 14)),
        ("ppow", 0, (8, 12)),
        ("ppow", 1, (6, 10)),
    ):
        for prompt, count in zip("ab", cycles, strict=True):
            shared = dict(
                temperature=0.0, seed=seed, drafter=drafter, suite="s", prompt=prompt, new_tok=25
            )
            made.append(shared | dict(method="tree", cycles=count, cycle_tok=24, total_ms=50.0))
            if drafter == "start":  # plain decoding takes its turn once for all
                made.append(
                    shared | dict(method="autoregressive", cycles=0, cycle_tok=0, total_ms=100.0)
                )
    return pd.DataFrame(made)


def test_rows_of_the_comparison_are_whole():
    # Two methods at two temperatures; a ratio of sums, averaged over seeds; the interval of a
    # single seed by its own columns.
    timed = rows()
    timed.loc[(timed["drafter"] == "ppow") & (timed["seed"] == 1), "total_ms"] = 30.0
    two = compare_tau(timed).set_index(["suite", "drafter"])
    assert two.loc[("s", "ppow"), "speedup"] == pytest.approx((100 / 160) / (50 / 200)), (
        "of all prompts and seeds"
    )
    assert two.loc[("all", "start"), ["tau", "speedup"]].tolist() == [2, 2]
    assert two.loc[("s", "start"), ["over_baseline", "low", "high"]].tolist() == [1.0, 1.0, 1.0]
    found = two.loc[("all", "ppow")]
    assert found["tau"] == pytest.approx((48 / 20 + 48 / 16) / 2) and found["seeds"] == 2
    assert found["over_baseline"] == pytest.approx((24 / 20 + 24 / 16) / 2)
    assert found["low"] < found["over_baseline"] < found["high"]
    assert found[["worst_seed", "best_seed"]].tolist() == pytest.approx([24 / 20, 24 / 16])
    every = pd.concat(
        [rows().assign(temperature=t, total_ms=rows()["total_ms"] * (1 + t)) for t in (0.0, 1.0)]
    )
    table = compare_tau(every)
    columns = "temperature method suite drafter prompts seeds tau over_baseline low high worst_seed best_seed speedup"  # noqa: E501
    assert list(table) == columns.split()
    keys = [
        [t, "tree", suite, name]
        for suite in ("s", "all")
        for t in (0.0, 1.0)
        for name in ("start", "ppow")
    ]
    assert table[["temperature", "method", "suite", "drafter"]].values.tolist() == keys
    one = (
        compare_tau(rows()[rows()["seed"] == 0])
        .set_index(["suite", "drafter"])
        .loc[("all", "ppow")]
    )
    columns = np.array([[24, 10, 24, 8], [24, 14, 24, 12]], dtype=float)
    found = stats.interval(
        columns, lambda means: means[..., 2] / means[..., 3] * means[..., 1] / means[..., 0]
    )
    assert one[["prompts", "seeds", "tau"]].tolist() == [2, 1, pytest.approx(48 / 20)]
    assert one[["over_baseline", "low", "high"]].tolist() == pytest.approx(
        [24 / 20, found.low, found.high]
    )
    assert one["worst_seed"] == one["best_seed"] == pytest.approx(24 / 20)
    # Of chains, which nobody timed.
    table = compare_tau(rows().drop(columns=["new_tok", "total_ms"]), "ppow").set_index(
        ["suite", "drafter"]
    )
    ppow = (48 / 20 + 48 / 16) / 2
    assert table.loc[("all", "start"), "over_baseline"] == pytest.approx(48 / 24 / ppow)
    assert table.loc[("all", "ppow"), "over_baseline"] == 1 and "speedup" not in table
    assert table.loc[("all", "ppow"), "worst_seed"] == pytest.approx(48 / 20 / ppow)


def test_what_gradients_have_in_common_and_trees_by_candidates():
    # Of half a common direction and half noise: a cosine of a half, exact where a float32 sum of
    # squares is not. Of three
    # directions at 0, 60 and 120 degrees: a half, a half and minus a half.
    common, noise = torch.zeros(4_000_000), torch.zeros(2, 4_000_000)
    common[::2], noise[0, 1::4], noise[1, 3::4] = 1.0, 2**0.5, 2**0.5
    agree, direction = drafters.common_direction(list(common + noise))
    assert agree == pytest.approx(0.5, abs=1e-7) and float(direction @ direction) == pytest.approx(
        1, abs=1e-9
    )
    assert drafters.common_direction([common, -3 * common])[0] == pytest.approx(-1, abs=1e-9)
    thirds = [
        torch.tensor([1.0, 0.0]),
        torch.tensor([0.5, 0.75**0.5]) * 3,
        torch.tensor([-0.5, 0.75**0.5]),
    ]
    agree, direction = drafters.common_direction(thirds)
    assert agree == pytest.approx(1 / 6, abs=1e-7) and isinstance(agree, float)
    assert direction.tolist() == pytest.approx([0.5, 0.75**0.5], abs=1e-7)
    trees = trees_by_candidates(2, (1, 4))
    assert {name: tree.plan.text for name, tree in trees.items()} == {
        "candidates 1": "4,2,1",
        "candidates 4": "13,2,4",
    }


@pytest.fixture
def exact(monkeypatch):
    """Target and drafters compute in float32 on every CPU."""
    for module in (drafters, eagle3, networks):
        monkeypatch.setattr(module, "compute_dtype", lambda device: torch.float32)


def test_chains_along_the_targets_text_are_those_of_decoding(tiny, exact, tmp_path):
    items = gather(["toy/gsm8k", "toy/humaneval"], part="test", limit=3)
    start = {("start", 0): shipped_folder("tiny") / "drafter"}
    rows = drafters.chain_rows(
        "tiny", start, items, folder=tmp_path, max_new_tokens=96, drafts=3
    ).set_index("prompt")
    same = 0
    for item in items:
        out = specdec.decode(
            tiny, conversation(tiny, item, 0, []), specdec.Static(4, 2, 1), max_new_tokens=96
        )
        if (
            out.finish_reason == "stop"
        ):  # the chat template closes a cut answer, which decoding never reads
            same += 1
            assert (
                rows.loc[item.id, "cycles"] == len(out.rows)
                and rows.loc[item.id, "cycle_tok"] == out.new_tok - 1
            )
    assert same > 2


def test_each_objective_goes_on_at_its_best_rate_and_all_curves_are_one_table(
    tmp_path, monkeypatch
):
    found = {("a", 0.1): 2.0, ("a", 0.2): 3.0, ("b", 0.1): 5.0, ("b", 0.2): 4.0}
    trained = []

    def train(target, conversations, *, out_dir, objective, settings, budget, start_from):
        trained.append((objective.name, settings.learning_rate, budget.seed))
        results = {"held_out_tau_chain": found[trained[-1][:2]]}
        runs.write_json(out_dir / "drafter_training" / "plan.json", {"results": results})

    monkeypatch.setattr(drafters, "train_drafter", train)
    objectives = {name: types.SimpleNamespace(name=name, network="eagle3") for name in "ab"}
    settings = dict(rates=[0.1, 0.2], seeds=[0, 1, 2], start_from=tmp_path, out_dir=tmp_path)
    kept, tried = drafters.train_at_best_rate(
        "tiny", [], objectives, presets.Settings(), **settings
    )
    assert trained[:4] == [("a", 0.1, 0), ("a", 0.2, 0), ("b", 0.1, 0), ("b", 0.2, 0)]
    assert sorted(trained[4:]) == [("a", 0.2, 1), ("a", 0.2, 2), ("b", 0.1, 1), ("b", 0.1, 2)]
    assert tried["chosen"].tolist() == [False, True, True, False]
    assert [kept["a", seed].parent.name for seed in range(3)] == [
        f"a-at-0.2-{seed}" for seed in range(3)
    ]
    assert list(kept) == [
        ("start", 0),
        *(("a", seed) for seed in range(3)),
        *(("b", seed) for seed in range(3)),
    ]
    trained = {("start", 0): tmp_path / "start" / "drafter"}
    for name, seed, losses in (("a", 0, [3.0, 2.0]), ("b", 4, [1.0])):
        trained[name, seed] = tmp_path / f"{name}-{seed}" / "drafter"
        table = pd.DataFrame(
            {"loss": losses, "step": range(len(losses)), "held_out_tau_chain": 1.5}
        )
        runs.write_table(tmp_path / f"{name}-{seed}" / "drafter_training" / "loss.parquet", table)
    found = drafters.training_curves(trained)
    assert list(found) == ["drafter", "seed", "step", "loss", "held_out_tau_chain"]
    assert found.index.tolist() == [0, 1, 2]
    assert found.values.tolist() == [
        ["a", 0, 0, 3.0, 1.5],
        ["a", 0, 1, 2.0, 1.5],
        ["b", 4, 0, 1.0, 1.5],
    ]


def test_chains_that_cannot_be_judged_are_left_out(exact, tmp_path, monkeypatch):
    asked, items = [], gather({"mine": ["What is 2 + 3?", "Say nothing."]})

    def regenerate(model, tokenizer, chats, how, *, folder):
        asked.append((chats, how, folder))
        said = {"What is 2 + 3?": "2 + 3 = 5", "Say nothing.": ""}
        return [
            [chat[0], chat[1] | {"content": said[chat[0]["content"]]}] for chat in reversed(chats)
        ]

    monkeypatch.setattr(drafters, "regenerate", regenerate)
    folder = shipped_folder("tiny") / "drafter"
    trained = {("start", 0): folder, ("again", 4): folder}
    rows = drafters.chain_rows("tiny", trained, items, folder=tmp_path, max_new_tokens=9)
    turns = [
        [{"role": "user", "content": item.turns[0]}, {"role": "assistant", "content": ""}]
        for item in items
    ]
    assert asked == [(turns, Regeneration(greedy_frac=1.0, max_new_tokens=9), tmp_path)]
    first = rows.to_dict("records")[0]
    cycles, tokens = first.pop("cycles"), first.pop("cycle_tok")
    expected = dict(
        temperature=0.0, seed=0, drafter="start", suite="mine", prompt="mine/0", method="chain"
    )
    assert 0 < cycles <= tokens and first == expected
    again = first | {"seed": 4, "drafter": "again", "cycles": cycles, "cycle_tok": tokens}
    assert rows.to_dict("records")[1:] == [again]


def test_only_the_chain_and_plain_decoding_count_for_an_accepted_length():
    plain = dict(method="autoregressive", decode_ms=20.0)
    # 40 ms for 4 tokens and for the one that a turn of the prefill's token alone counts as
    chain = dict(method="chain", decode_ms=9.0, new_tok=2)
    prompts = pd.DataFrame([plain | {"new_tok": 5}, plain | {"new_tok": 1}, chain])
    cycles = pd.DataFrame({"method": ["chain"] * 3 + ["tree"], "accepted_tok": [1, 1, 0, 1]})
    cycles["total_ms"] = [6.0, 10.0, 2.0, 99.0]
    table = speed_by_accepted(prompts, cycles, "chain", window=2, gamma=0.25)
    assert table.fillna(-1.0).to_dict("list") == {
        "accepted_tok": [0, 1, 2],
        "cycles": [1, 2, 0],
        "cycle_ms": [2.0, 8.0, -1.0],
        "measured": [8 / 2, 2 * 8 / 8, 3 * 8 / 6],
        "cost_aware": [0.0, 1 / 1.25, 2 / 1.5],
    }


def test_windows_on_held_out_text_are_those_of_decoding(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(drafters, "load_pair", lambda **named: asked.append(named) or tiny)

    def chat(question, answer, part="held-out"):
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer, "part": part},
        ]

    asks = "Name a river.", "What is 2 + 3?"
    says = [
        specdec.autoregress(tiny, [{"role": "user", "content": text}], 40).text for text in asks
    ]
    chats = [
        chat("Learn this.", "Never measured.", "train"),
        chat(asks[0], says[0]),
        chat("Hi", ""),
    ]
    chats.append(chat(asks[1], says[1]))
    folder, settings = shipped_folder("tiny") / "drafter", presets.Settings(held_out=9, length=60)
    trained = {("start", 0): folder, ("again", 2): folder}
    table = drafters.window_facts("tiny", trained, chats, settings, 2)
    assert asked == [{"target": "tiny"}]
    assert list(table) == ["drafter", "seed", "text", "slot", "accepted_tok", "nabla", "hard"]
    halves = [table[table["drafter"] == name].reset_index(drop=True) for name in ("start", "again")]
    assert len(halves[0]) + len(halves[1]) == len(table) and (halves[1]["seed"] == 2).all()
    pd.testing.assert_frame_equal(*(half.drop(columns=["drafter", "seed"]) for half in halves))
    assert set(table["text"]) == {0, 2} and table.index.tolist() == list(range(len(table)))
    assert (
        table["hard"].tolist() == (table["accepted_tok"] < 2).tolist()
        and table["hard"].nunique() == 2
    )
    for number, text in ((0, chats[1]), (2, chats[3])):
        document = conversation_document(tiny.tokenizer, text)
        ids, own = document.ids[:60].tolist(), halves[0][halves[0]["text"] == number]
        written = document.answer[:60].tolist()
        starts = [slot for slot in range(len(ids) - 3) if all(written[slot + 1 : slot + 4])]
        assert own["slot"].tolist() == starts
        for slot, accepted in zip(own["slot"], own["accepted_tok"], strict=True):
            chain = specdec.decode(
                tiny, ids[: slot + 1], specdec.Static(3, 1, 1), max_new_tokens=4, stop_tokens=()
            )
            if (
                chain.tokens[0] == ids[slot + 1]
            ):  # decoding's own first token is the one that the window follows
                assert chain.rows[0].accepted_tok == accepted
    few = drafters.window_facts("tiny", {("start", 0): folder}, chats, settings, 2, most=9)
    step = round(len(halves[0][halves[0]["text"] == 0]) * 3 / 9)
    assert (
        few[few["text"] == 0]["slot"].tolist()
        == halves[0][halves[0]["text"] == 0]["slot"].tolist()[::step]
    )
