"""Drafters compared: tokens per cycle paired by prompt and averaged over seeds, and what an
accepted length is worth.
"""

import itertools
import types

import pandas as pd
import pytest
import torch

import specdec
from specdec import runs
from specdec.data.suites import conversation, gather
from specdec.models.load import shipped_folder
from specdec.training.drafter import eagle3, presets
from specdec.training.drafter.chats import conversation_document

from experiments import drafters
from experiments.drafters import compare_tau, speed_by_accepted

NAMES = ("start", "ppow")


def rows():
    """Two prompts by the starting drafter and by two seeds of another, 24 tokens in cycles each."""
    made = []
    for drafter, seed, counts in (
        ("start", 0, (10, 14)),
        ("ppow", 0, (8, 12)),
        ("ppow", 1, (6, 10)),
    ):
        for prompt, cycles in zip("ab", counts, strict=True):
            row = dict(temperature=0.0, seed=seed, drafter=drafter, suite="s", prompt=prompt)
            row["new_tok"] = 25
            made.append(row | dict(method="tree", cycles=cycles, cycle_tok=24, total_ms=50.0))
            # plain decoding takes its turn once for all
            if drafter == "start":
                plain = dict(method="autoregressive", cycles=0, cycle_tok=0, total_ms=100.0)
                made.append(row | plain)
    return pd.DataFrame(made)


def test_rows_of_the_comparison_are_whole():
    # 1. a ratio of sums, averaged over seeds; the speed of all prompts and seeds
    timed = rows()
    timed.loc[(timed["drafter"] == "ppow") & (timed["seed"] == 1), "total_ms"] = 30.0
    table = compare_tau(timed)
    keys = table[["temperature", "method", "suite", "drafter"]].values.tolist()
    assert keys == [[0.0, "tree", *key] for key in itertools.product(("s", "all"), NAMES)]
    two = table.set_index(["suite", "drafter"])
    assert two.loc[("s", "ppow"), "speedup"] == pytest.approx((100 / 160) / (50 / 200))
    assert two.loc[("all", "start"), ["tau", "speedup"]].tolist() == [2, 2]
    assert two.loc[("s", "start"), ["over_baseline", "low", "high"]].tolist() == [1.0, 1.0, 1.0]
    row = two.loc[("all", "ppow")]
    assert row["tau"] == pytest.approx((48 / 20 + 48 / 16) / 2)
    assert row["seeds"] == 2
    assert row["over_baseline"] == pytest.approx((24 / 20 + 24 / 16) / 2)
    assert row["low"] < row["over_baseline"] < row["high"]
    assert row[["worst_seed", "best_seed"]].tolist() == pytest.approx([24 / 20, 24 / 16])
    # 2. of chains, which nobody timed, over another drafter
    table = compare_tau(rows().drop(columns=["new_tok", "total_ms"]), "ppow")
    assert "speedup" not in table
    table = table.set_index(["suite", "drafter"])
    ppow = (48 / 20 + 48 / 16) / 2
    assert table.loc[("all", "start"), "over_baseline"] == pytest.approx(48 / 24 / ppow)
    assert table.loc[("all", "ppow"), "worst_seed"] == pytest.approx(48 / 20 / ppow)


@pytest.fixture
def exact(monkeypatch):
    """Target and drafters compute in float32 on every CPU."""
    for module in (drafters, eagle3):
        monkeypatch.setattr(module, "compute_dtype", lambda device: torch.float32)


def test_chains_along_the_targets_text_are_those_of_decoding(tiny, exact, tmp_path):
    items = gather(["toy/gsm8k", "toy/humaneval"], part="test", limit=3)
    start = {("start", 0): shipped_folder("tiny") / "drafter"}
    settings = dict(folder=tmp_path, max_new_tokens=96, drafts=3)
    rows = drafters.chain_rows("tiny", start, items, **settings).set_index("prompt")
    same = 0
    for item in items:
        prompt = conversation(tiny, item, 0, [])
        out = specdec.decode(tiny, prompt, specdec.Static(4, 2, 1), max_new_tokens=96)
        # the chat template closes a cut answer, which decoding never reads
        if out.finish_reason == "stop":
            same += 1
            assert rows.loc[item.id, "cycles"] == len(out.rows)
            assert rows.loc[item.id, "cycle_tok"] == out.new_tok - 1
    assert same > 2


def test_every_objective_is_trained_with_every_seed(tmp_path, monkeypatch):
    calls = []

    def train(target, conversations, *, out_dir, objective, settings, budget, start_from=None):
        calls.append((objective.name, settings.steps, budget.seed, start_from))
        results = {"held_out_tau_chain": settings.steps + budget.seed}
        runs.write_json(out_dir / "drafter_training" / "plan.json", {"results": results})

    monkeypatch.setattr(drafters, "train_drafter", train)
    objectives = {
        "a": types.SimpleNamespace(name="a", network="eagle3"),
        "b": types.SimpleNamespace(name="b", network="medusa"),
    }
    settings = {"a": presets.Settings(steps=3), "b": presets.Settings(steps=5)}
    where = dict(start_from=tmp_path / "start", out_dir=tmp_path)
    trained = drafters.train_all("tiny", [], objectives, settings, seeds=(0, 4), **where)
    start = tmp_path / "start"
    assert calls == [("a", 3, 0, start), ("a", 3, 4, start), ("b", 5, 0, None), ("b", 5, 4, None)]
    assert list(trained) == [("start", 0), ("a", 0), ("a", 4), ("b", 0), ("b", 4)]
    assert trained["b", 4] == tmp_path / "b-4" / "drafter"
    assert drafters.results_of(trained["b", 4]) == {"held_out_tau_chain": 9}


def test_all_curves_are_one_table(tmp_path):
    trained = {("start", 0): tmp_path / "start" / "drafter"}
    for name, seed, losses in (("a", 0, [3.0, 2.0]), ("b", 4, [1.0])):
        folder = tmp_path / f"{name}-{seed}"
        trained[name, seed] = folder / "drafter"
        table = pd.DataFrame({"loss": losses, "step": range(len(losses))})
        runs.write_table(folder / "drafter_training" / "loss.parquet", table)
    curves = drafters.training_curves(trained)
    assert list(curves) == ["drafter", "seed", "step", "loss"]
    assert curves.values.tolist() == [["a", 0, 0, 3.0], ["a", 0, 1, 2.0], ["b", 4, 0, 1.0]]


def test_chains_that_cannot_be_judged_are_left_out(exact, tmp_path, monkeypatch):
    asked = []
    items = gather({"mine": ["What is 2 + 3?", "Say nothing."]})

    def regenerate(model, tokenizer, chats, **how):
        asked.append(how)
        (first, answer), (second, empty) = chats
        return [[second, empty], [first, answer | {"content": "2 + 3 = 5"}]]

    monkeypatch.setattr(drafters.chats, "regenerate", regenerate)
    folder = shipped_folder("tiny") / "drafter"
    trained = {("start", 0): folder, ("again", 4): folder}
    rows = drafters.chain_rows("tiny", trained, items, folder=tmp_path, max_new_tokens=9, drafts=6)
    assert asked == [{"folder": tmp_path, "greedy_frac": 1.0, "max_new_tokens": 9}]
    first, again = rows.to_dict("records")
    assert 0 < first["cycles"] <= first["cycle_tok"]
    assert (first["drafter"], first["prompt"], first["method"]) == ("start", "mine/0", "chain")
    assert again == first | {"seed": 4, "drafter": "again"}


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
    monkeypatch.setattr(drafters, "load_pair", lambda target: tiny)

    def chat(question, answer, part="held-out"):
        answer = {"role": "assistant", "content": answer, "part": part}
        return [{"role": "user", "content": question}, answer]

    chats = [chat("Learn this.", "Never measured.", "train"), chat("Hi", "")]
    for question in ("Name a river.", "What is 2 + 3?"):
        prompt = [{"role": "user", "content": question}]
        chats.append(chat(question, specdec.autoregress(tiny, prompt, 40).text))
    folder = shipped_folder("tiny") / "drafter"
    settings = presets.Settings(held_out=9, length=60)
    trained = {("start", 0): folder, ("again", 2): folder}
    # 1. both drafters are the same
    table = drafters.window_facts("tiny", trained, chats, settings, 2)
    start = table[table["drafter"] == "start"].reset_index(drop=True)
    again = table[table["drafter"] == "again"].reset_index(drop=True)
    assert len(start) + len(again) == len(table)
    pd.testing.assert_frame_equal(*(rows.iloc[:, 2:] for rows in (start, again)))
    assert table["hard"].tolist() == (table["accepted_tok"] < 2).tolist()
    assert table["hard"].nunique() == 2
    # 2. windows begin where an answer goes on, and are accepted as in decoding
    assert set(table["text"]) == {1, 2}
    for number, rows in start.groupby("text"):
        document = conversation_document(tiny.tokenizer, chats[number + 1])
        ids = document.ids[:60].tolist()
        written = document.answer[:60].tolist()
        starts = [slot for slot in range(len(ids) - 3) if all(written[slot + 1 : slot + 4])]
        assert rows["slot"].tolist() == starts
        for slot, accepted in zip(rows["slot"], rows["accepted_tok"], strict=True):
            chain = specdec.Static(3, 1, 1)
            out = specdec.decode(tiny, ids[: slot + 1], chain, 4, stop_tokens=())
            # the window follows decoding's first token
            if out.tokens[0] == ids[slot + 1]:
                assert out.rows[0].accepted_tok == accepted
    # 3. evenly fewer
    monkeypatch.setattr(drafters, "WINDOWS", 9)
    few = drafters.window_facts("tiny", {("start", 0): folder}, chats, settings, 2)
    slots = start.loc[start["text"] == 1, "slot"].tolist()
    step = round(len(slots) * 3 / 9)
    assert few.loc[few["text"] == 1, "slot"].tolist() == slots[::step]
