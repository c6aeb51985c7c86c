"""Drafters compared: tokens per cycle paired by prompt and averaged over seeds, and what an accepted length is worth."""

import dataclasses
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import specdec
from specdec import fanout, runs
from specdec.data.suites import conversation, gather
from specdec.evaluation import methods, stats
from specdec.models.load import shipped_folder
from specdec.training.drafter import eagle3, networks, presets
from specdec.training.drafter.chats import ANSWER, Regeneration, conversation_document
from specdec.training.drafter.online import OnlineConfig

from experiments import drafters
from experiments.drafters import compare_tau, speed_by_accepted, trees_by_candidates


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
    assert {name: tree.plan for name, tree in trees.items()} == {
        "candidates 1": specdec.TreeConfig(4, 2, 1),
        "candidates 4": specdec.TreeConfig(13, 2, 4),
    }


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
    kept, tried = drafters.train_at_best_rate("tiny", [], objectives, presets.Settings(), **settings)
    assert trained[:4] == [("a", 0.1, 0), ("a", 0.2, 0), ("b", 0.1, 0), ("b", 0.2, 0)]
    assert sorted(trained[4:]) == [("a", 0.2, 1), ("a", 0.2, 2), ("b", 0.1, 1), ("b", 0.1, 2)]
    assert tried["chosen"].tolist() == [False, True, True, False]
    assert {key: place.parent.name for key, place in kept.items() if key[0] == "a"} == {
        ("a", seed): f"a-at-0.2-{seed}" for seed in range(3)
    }


@dataclasses.dataclass(frozen=True)
class Drawing:
    """An objective that draws, for another network than EAGLE's."""

    seed: int = 0
    network: str = "medusa"


def test_every_training_is_a_shard_of_its_own(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(drafters.fanout, "run", lambda *given, **named: ran.append((given, named)))
    plain, settings = types.SimpleNamespace(network="eagle3"), {"a": presets.Settings(), "b": presets.Settings(steps=7)}
    options = dict(start_from=tmp_path / "from", out_dir=tmp_path, seeds=(0, 5), on="local", jobs=3)
    trained = drafters.train_all("tiny", ["chats"], {"a": plain, "b": Drawing()}, settings, **options)
    places = {(name, seed): tmp_path / f"{name}-{seed}" for name in "ab" for seed in (0, 5)}
    assert trained == {("start", 0): tmp_path / "from"} | {key: place / "drafter" for key, place in places.items()}
    expected = []
    for (name, seed), place in places.items():
        asked = dict(out_dir=place, budget=presets.Budget(seed=seed), settings=settings[name])
        asked |= dict(objective=plain, start_from=tmp_path / "from") if name == "a" else {}
        asked |= dict(objective=Drawing(seed), start_from=None) if name == "b" else {}
        given = ("tiny", ["chats"], asked)
        expected.append(fanout.Shard(f"{name}-{seed}", drafters._train, given, {"folder": place}))
    assert ran == [((expected, "local", 3), {"desc": "drafters"})]
    same = drafters.train_all("tiny", [], {"a": plain}, presets.Settings(steps=9), start_from="from", out_dir=tmp_path)
    assert same == {("start", 0): Path("from"), ("a", 0): tmp_path / "a-0" / "drafter"}
    (shards, on, jobs), _ = ran[1]
    assert shards[0].arguments[2]["settings"] == presets.Settings(steps=9) and (on, jobs) == (None, None)
    done = []
    monkeypatch.setattr(drafters, "train_drafter", lambda *given, **named: done.append((given, named)))
    shards[0].call(*shards[0].arguments)
    assert done == [(("tiny", []), shards[0].arguments[2])]


def test_rates_are_tried_with_one_seed_unless_told_otherwise(tmp_path, monkeypatch):
    """Nothing else is trained where the only seed has tried everything; other options reach both rounds."""
    rounds = []

    def train_all(target, conversations, objectives, settings, **named):
        rounds.append((target, conversations, objectives, settings, named))
        for name in objectives:
            tau = {"a-at-0.1": 2.0, "a-at-1e-05": 1.5}[name]
            runs.write_json(
                tmp_path / name / "drafter_training" / "plan.json", {"results": {"held_out_tau_chain": tau}}
            )
        made = {(name, seed): tmp_path / name / "drafter" for name in objectives for seed in named["seeds"]}
        return {("start", 0): Path("from")} | made

    monkeypatch.setattr(drafters, "train_all", train_all)
    given = "tiny", ["chats"], {"a": "objective"}, presets.Settings(batch=3)
    kept, tried = drafters.train_at_best_rate(*given, [0.1, 1e-5], start_from="from", on="ray")
    own = {
        "a-at-0.1": presets.Settings(batch=3, learning_rate=0.1),
        "a-at-1e-05": presets.Settings(batch=3, learning_rate=1e-5),
    }
    more = {"start_from": "from", "on": "ray"}
    assert rounds == [
        ("tiny", ["chats"], dict.fromkeys(own, "objective"), own, {"seeds": [0], **more}),
        ("tiny", ["chats"], {"a-at-0.1": "objective"}, own, {"seeds": [], **more}),
    ]
    assert kept == {("start", 0): Path("from"), ("a", 0): tmp_path / "a-at-0.1" / "drafter"}
    assert tried.to_dict("list") == {
        "objective": ["a", "a"],
        "learning_rate": [0.1, 1e-5],
        "held_out_tau_chain": [2.0, 1.5],
        "chosen": [True, False],
    }


def test_curves_of_all_trainings_are_one_table(tmp_path):
    trained = {("start", 0): tmp_path / "start" / "drafter"}
    for name, seed, losses in (("a", 0, [3.0, 2.0]), ("b", 4, [1.0])):
        trained[name, seed] = tmp_path / f"{name}-{seed}" / "drafter"
        table = pd.DataFrame({"loss": losses, "step": range(len(losses)), "held_out_tau_chain": 1.5})
        runs.write_table(tmp_path / f"{name}-{seed}" / "drafter_training" / "loss.parquet", table)
    found = drafters.training_curves(trained)
    assert list(found) == ["drafter", "seed", "step", "loss", "held_out_tau_chain"]
    assert found.index.tolist() == [0, 1, 2] and found.values.tolist() == [
        ["a", 0, 0, 3.0, 1.5],
        ["a", 0, 1, 2.0, 1.5],
        ["b", 4, 0, 1.0, 1.5],
    ]


def test_gradients_of_several_batches_are_compared(monkeypatch):
    """Every objective on text and weights of its own; a weight that a loss does not reach has a gradient of zero."""
    asked, settings, budget = [], presets.Settings(batch=2), presets.Budget()
    of_batch = {("x", 0): [1.0, 0.0], ("x", 1): [0.0, 1.0], ("y", 0): [2.0, 2.0], ("y", 1): [3.0, 3.0]}

    class Run:
        def __init__(self, text):
            self.network, self.working, self.target, self.text = torch.nn.Linear(2, 1), "working", "target", text
            self.refreshed = False

        def refresh(self):
            self.refreshed = True

        def gradients(self, collected):
            assert self.refreshed
            self.network.weight.grad = torch.tensor([of_batch[collected]])

    def text(*given):
        asked.append(("text", *given[:2], given[2].conversations, *given[3:]))
        return types.SimpleNamespace(batch=lambda step: step)

    def run(model, tokenizer, text, objective, *given):
        asked.append(("run", model, tokenizer, objective.name, *given))
        return Run(text)

    class Objective:
        def __init__(self, name):
            self.name = name

        def collect(self, network, target, batch):
            assert (network, target) == ("working", "target")
            return self.name, batch

    monkeypatch.setattr(drafters, "load_target", lambda *given: asked.append(given) or ("model", "tokenizer"))
    monkeypatch.setattr(drafters, "training_text", text)
    monkeypatch.setattr(drafters, "prepared", run)
    objectives = {name: Objective(name) for name in "xy"}
    table = drafters.gradient_agreement("tiny", ["chat"], objectives, settings, Path("from"), 2)
    assert table[["objective", "batches"]].values.tolist() == [["x", 2], ["y", 2]]
    assert table["cosine"].tolist() == pytest.approx([0, 1], abs=1e-7)
    assert list(table) == ["objective", "batches", "cosine", "cosine_to_x", "cosine_to_y"]
    assert table[["cosine_to_x", "cosine_to_y"]].to_numpy().tolist() == [
        [pytest.approx(1), pytest.approx(float("nan"), nan_ok=True)],
        [pytest.approx(1), pytest.approx(1)],  # the mean of the axes lies where all of y's are
    ]
    assert asked[0] == ("tiny", budget.place())
    of_text = ("text", "model", "tokenizer", ["chat"], settings, Path(), budget, [])
    assert asked[1:] == [
        of_text,
        ("run", "model", "tokenizer", "x", settings, budget, Path("from")),
        of_text,
        ("run", "model", "tokenizer", "y", settings, budget, Path("from")),
    ]


def test_what_gradients_have_in_common_is_the_mean_over_pairs():
    """Three directions at 0, 60 and 120 degrees: cosines of a half, a half and minus a half."""
    thirds = [torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.75**0.5]) * 3, torch.tensor([-0.5, 0.75**0.5])]
    agree, direction = drafters.common_direction(thirds)
    assert agree == pytest.approx(1 / 6, abs=1e-7) and isinstance(agree, float)
    assert direction.tolist() == pytest.approx([0.5, 0.75**0.5], abs=1e-7)


def test_all_drafters_and_plain_decoding_take_turns_in_one_run(monkeypatch):
    asked = []
    pair = types.SimpleNamespace(target="target")
    prompts = {"method": ["start 0, tree", "plain", "ppow 3, tree", "ppow 3, chain"], "new_tok": [1, 2, 3, 4]}
    cycles = {"method": ["ppow 3, chain", "start 0, chain"], "cycle": [0, 1]}
    tables = {"prompts": pd.DataFrame(prompts), "cycles": pd.DataFrame(cycles)}

    def load_pair(**named):
        asked.append(named)
        return pair

    def evaluate(*given, **named):
        asked.append((given, named))
        return types.SimpleNamespace(read_table=tables.get)

    monkeypatch.setattr(drafters, "load_pair", load_pair)
    monkeypatch.setattr(drafters, "load_drafter", lambda folder, target: f"{folder} for {target}")
    monkeypatch.setattr(drafters.bench, "evaluate", evaluate)
    trained = {("start", 0): Path("a"), ("ppow", 3): Path("b")}
    ways = {"plain": "autoregressive", "tree": "T", "chain": "C"}
    rows, turns = drafters.decode_all("tiny", trained, ["toy/nq"], ways, limit=2, temperature=0.5)
    drafted = {
        f"{name}, {way}": methods.DraftedBy(f"{folder} for target", policy, name)
        for name, folder in (("start 0", "a"), ("ppow 3", "b"))
        for way, policy in (("tree", "T"), ("chain", "C"))
    }
    assert asked == [
        {"target": "tiny", "drafter": Path("a"), "dtype": "float32"},
        (({"plain": "autoregressive"} | drafted, ["toy/nq"], pair), {"limit": 2, "temperature": 0.5}),
    ]
    assert list(rows) == ["temperature", "seed", "drafter", "method", "new_tok"] and rows.values.tolist() == [
        [0.5, 0, "start", "tree", 1],
        [0.5, 0, "start", "plain", 2],
        [0.5, 3, "ppow", "tree", 3],
        [0.5, 3, "ppow", "chain", 4],
    ]
    assert turns.values.tolist() == [[0.5, 3, "ppow", "chain", 0], [0.5, 0, "start", "chain", 1]]
    assert (drafters.decode_all("tiny", trained, [], ways, dtype="bfloat16")[0]["temperature"] == 0).all()
    assert asked[2]["dtype"] == "bfloat16"


def test_chains_that_cannot_be_judged_are_left_out(tmp_path, monkeypatch):
    """The target writes greedily, once, into the folder; a text of a single token has no cycle. A drafter told twice says the
    same twice."""
    monkeypatch.setattr(drafters, "compute_dtype", lambda device: torch.float32)
    for module in (eagle3, networks):
        monkeypatch.setattr(module, "compute_dtype", lambda device: torch.float32)
    asked, items = [], gather({"mine": ["What is 2 + 3?", "Say nothing."]})

    def regenerate(model, tokenizer, chats, how, *, folder):
        asked.append((chats, how, folder))
        said = {"What is 2 + 3?": "2 + 3 = 5", "Say nothing.": ""}
        return [[chat[0], chat[1] | {"content": said[chat[0]["content"]]}] for chat in reversed(chats)]

    monkeypatch.setattr(drafters, "regenerate", regenerate)
    folder = shipped_folder("tiny") / "drafter"
    trained = {("start", 0): folder, ("again", 4): folder}
    rows = drafters.chain_rows("tiny", trained, items, folder=tmp_path, max_new_tokens=9)
    turns = [[{"role": "user", "content": item.turns[0]}, {"role": "assistant", "content": ""}] for item in items]
    assert asked == [(turns, Regeneration(greedy_frac=1.0, max_new_tokens=9), tmp_path)]
    first = rows.to_dict("records")[0]
    cycles, tokens = first.pop("cycles"), first.pop("cycle_tok")
    assert 0 < cycles <= tokens and first == {
        "temperature": 0.0,
        "seed": 0,
        "drafter": "start",
        "suite": "mine",
        "prompt": "mine/0",
        "method": "chain",
    }
    assert rows.to_dict("records")[1:] == [
        first | {"seed": 4, "drafter": "again", "cycles": cycles, "cycle_tok": tokens}
    ]


def test_rows_of_the_comparison_are_whole():
    """Two methods at two temperatures; the interval of a single seed by its own columns."""
    every = pd.concat([rows().assign(temperature=t, total_ms=rows()["total_ms"] * (1 + t)) for t in (0.0, 1.0)])
    table = compare_tau(every)
    assert list(table) == (
        "temperature method suite drafter prompts seeds tau over_baseline low high worst_seed best_seed speedup".split()
    )
    keys = [[t, "tree", suite, name] for suite in ("s", "all") for t in (0.0, 1.0) for name in ("start", "ppow")]
    assert table[["temperature", "method", "suite", "drafter"]].values.tolist() == keys
    one = compare_tau(rows()[rows()["seed"] == 0]).set_index(["suite", "drafter"]).loc[("all", "ppow")]
    columns = np.array([[24, 10, 24, 8], [24, 14, 24, 12]], dtype=float)
    found = stats.interval(columns, lambda means: means[..., 2] / means[..., 3] * means[..., 1] / means[..., 0])
    assert one[["prompts", "seeds", "tau"]].tolist() == [2, 1, pytest.approx(48 / 20)]
    assert one[["over_baseline", "low", "high"]].tolist() == pytest.approx([24 / 20, found.low, found.high])
    assert one["worst_seed"] == one["best_seed"] == pytest.approx(24 / 20)


def test_speed_is_of_all_prompts_and_seeds_together():
    timed = rows()
    timed.loc[(timed["drafter"] == "ppow") & (timed["seed"] == 1), "total_ms"] = 30.0
    table = compare_tau(timed).set_index(["suite", "drafter"])
    assert table.loc[("s", "ppow"), "speedup"] == pytest.approx((100 / 160) / (50 / 200))
    assert table.loc[("all", "start"), "speedup"] == 2


def test_only_the_chain_and_plain_decoding_count_for_an_accepted_length():
    plain = dict(method="autoregressive", decode_ms=20.0)
    prompts = pd.DataFrame(
        [plain | {"new_tok": 5}, plain | {"new_tok": 1}, dict(method="chain", decode_ms=9.0, new_tok=2)]
    )  # 40 ms for 4 tokens and for the one that a turn of the prefill's token alone counts as
    cycles = pd.DataFrame(
        {"method": ["chain"] * 3 + ["tree"], "accepted_tok": [1, 1, 0, 1], "total_ms": [6.0, 10.0, 2.0, 99.0]}
    )
    table = speed_by_accepted(prompts, cycles, "chain", window=2, gamma=0.25)
    assert table.fillna(-1.0).to_dict("list") == {
        "accepted_tok": [0, 1, 2],
        "cycles": [1, 2, 0],
        "cycle_ms": [2.0, 8.0, -1.0],
        "measured": [8 / 2, 2 * 8 / 8, 3 * 8 / 6],
        "cost_aware": [0.0, 1 / 1.25, 2 / 1.5],
    }


def test_windows_on_held_out_text_are_those_of_decoding(monkeypatch):
    pair, asked = specdec.load_pair("tiny", dtype="float32"), []
    monkeypatch.setattr(drafters, "load_pair", lambda **named: asked.append(named) or pair)

    def chat(question, answer, part="held-out"):
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer, "part": part}]

    asks = "Name a river.", "What is 2 + 3?"
    says = [specdec.autoregress(pair, [{"role": "user", "content": text}], 40).text for text in asks]
    chats = [
        chat("Learn this.", "Never measured.", "train"),
        chat(asks[0], says[0]),
        chat("Hi", ""),
        chat(asks[1], says[1]),
    ]
    folder, settings = shipped_folder("tiny") / "drafter", presets.Settings(held_out=9, length=60)
    trained = {("start", 0): folder, ("again", 2): folder}
    table = drafters.window_facts("tiny", trained, chats, settings, 2)
    assert asked == [{"target": "tiny"}]
    assert list(table) == ["drafter", "seed", "text", "slot", "accepted_tok", "nabla", "hard"]
    halves = [table[table["drafter"] == name].reset_index(drop=True) for name in ("start", "again")]
    assert len(halves[0]) + len(halves[1]) == len(table) and (halves[1]["seed"] == 2).all()
    pd.testing.assert_frame_equal(*(half.drop(columns=["drafter", "seed"]) for half in halves))
    assert set(table["text"]) == {0, 2} and table.index.tolist() == list(range(len(table)))
    assert table["hard"].tolist() == (table["accepted_tok"] < 2).tolist() and table["hard"].nunique() == 2
    for number, text in ((0, chats[1]), (2, chats[3])):
        document = conversation_document(pair.tokenizer, text)
        ids, own = document.ids[:60].tolist(), halves[0][halves[0]["text"] == number]
        written = (document.kind[:60] == ANSWER).tolist()
        starts = [slot for slot in range(len(ids) - 3) if all(written[slot + 1 : slot + 4])]
        assert own["slot"].tolist() == starts
        for slot, accepted in zip(own["slot"], own["accepted_tok"], strict=True):
            chain = specdec.decode(pair, ids[: slot + 1], specdec.Static(3, 1, 1), max_new_tokens=4, stop_tokens=())
            if chain.tokens[0] == ids[slot + 1]:  # decoding's own first token is the one that the window follows
                assert chain.rows[0].accepted_tok == accepted
    few = drafters.window_facts("tiny", {("start", 0): folder}, chats, settings, 2, most=9)
    step = round(len(halves[0][halves[0]["text"] == 0]) * 3 / 9)
    assert few[few["text"] == 0]["slot"].tolist() == halves[0][halves[0]["text"] == 0]["slot"].tolist()[::step]


def test_the_same_requests_are_served_with_and_without_learning(monkeypatch):
    asked = []

    def load_pair(**named):
        asked.append(named)
        return types.SimpleNamespace(ids_of=lambda prompt: [len(prompt)], tokenizer=None)

    def out(*cycles):
        made = [types.SimpleNamespace(new_tok=count) for count in cycles]
        return types.SimpleNamespace(new_tok=sum(cycles) - 1, rows=made, tau=sum(cycles) / len(cycles))

    def decode(pair, prompt, policy, **named):
        asked.append((prompt, policy, named))
        return out(2, 2)

    class Online:
        def __init__(self, pair, *, config):
            self.config = config

        def decode(self, prompt, policy, **named):
            asked.append((self.config, prompt, policy, named))
            return out(4, 3, 2)

    for name, stand_in in (("load_pair", load_pair), ("decode", decode), ("OnlineDrafter", Online)):
        monkeypatch.setattr(drafters, name, stand_in)
    learning, suites = OnlineConfig(every=3), {"mine": ["a", "bcd", "left out"]}
    table = drafters.serve("tiny", Path("from"), suites, "policy", learning, limit=2, seed=5, max_new_tokens=7)
    pair, settings = {"target": "tiny", "drafter": Path("from"), "dtype": "float32"}, {"max_new_tokens": 7}
    assert asked == [
        pair,
        ([1], "policy", settings),
        ([3], "policy", settings),
        pair,
        (learning, [1], "policy", settings),
        (learning, [3], "policy", settings),
    ]
    assert table.to_dict("list") == {
        "request": [0, 1, 0, 1],
        "suite": ["mine"] * 4,
        "prompt": ["mine/0", "mine/1"] * 2,
        "learning": [False, False, True, True],
        "new_tok": [3, 3, 8, 8],
        "cycles": [2, 2, 3, 3],
        "cycle_tok": [4, 4, 9, 9],
        "tau": [2.0, 2.0, 3.0, 3.0],
    }
    drafters.serve("tiny", Path("from"), suites, "policy", learning, dtype="bfloat16")
    assert asked[6] == pair | {"dtype": "bfloat16"} and asked[7] == ([1], "policy", {})
