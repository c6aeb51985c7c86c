"""What is made of shards gives the same rows elsewhere as in one process; what is there is not made again."""

import pickle
from concurrent.futures import Future
from dataclasses import replace

import pytest
from fakes.traces import COSTS, synthetic_trace
from test_fanout import CLUSTERS, importable  # noqa: F401  workers find the package
from tqdm import std

import specdec
from specdec import fanout
from specdec.core.policy import RandomPolicy
from specdec.core.records import SIZE
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import bench, compare
from specdec.policies import engines
from specdec.replays.trace import open_trace
from specdec.tools import cli
from specdec.training import controllers
from specdec.training.drafter import generate_data
from specdec.training.drafter.generate_data import ChatConfig, generate_chats

GATE = engines.rule("trtllm_gate", window=4, threshold=0.9)  # it closes in the midst of a text and stays closed
METHODS = {"plain": "autoregressive", "tree": specdec.Static(6, 2, 2), "rule": "static:4,1,2", "gate": GATE}
PROMPTS = {"mine": ["What is 2 + 3?", "Name a colour.", "Good morning."]}
DECODED = ["suite", "prompt", "turn", "method", "repeat", "new_tok", "cycles", "cycle_tok", "text_hash", "accepted_tok"]
# A worker takes long to import torch.
EVERYWHERE = ["sent", pytest.param("local", marks=pytest.mark.nightly), *CLUSTERS]
SMALL = dict(max_new_tokens=8, depth=3, top_ks=(2, 3), trees=(3,), progress=False)


class _Sent(fanout._Engine):  # in place of processes: work is pickled, and done when it is unpickled
    def submit(self, function, *arguments, timed: bool) -> Future:
        function, arguments = pickle.loads(pickle.dumps((function, arguments)))
        done = Future()
        done.set_result(function(*arguments))
        return done

    def wait(self, tasks, seconds: float) -> None:
        assert not tasks

    def close(self, running) -> None:
        assert not running


@pytest.fixture
def place(request, monkeypatch):
    if request.param != "sent":
        return request.param
    monkeypatch.setattr(fanout, "_Local", _Sent)
    monkeypatch.setattr(std.tqdm, "__init__", std.tqdm.__init__)  # workers show no bars
    return "local"


everywhere = pytest.mark.parametrize("place", EVERYWHERE, indirect=True)


def same(one, other) -> bool:
    return one.sort_values(bench.KEYS, ignore_index=True).equals(other.sort_values(bench.KEYS, ignore_index=True))


@everywhere
def test_evaluate_and_record(place, tiny, home, monkeypatch):
    options = dict(max_new_tokens=8, progress=False, warmup=0)
    here = bench.evaluate(METHODS, PROMPTS, tiny, name="here", **options).read_table("prompts")
    run = bench.evaluate(METHODS, PROMPTS, tiny, name="there", on=place, jobs=2, **options)
    there = run.read_table("prompts")
    assert same(here[DECODED], there[DECODED]) and not there.duplicated(bench.KEYS).any()
    assert there["machine"].nunique() == 1 and (there["neighbours"] >= 0).all()
    one = specdec.record(tiny, PROMPTS, name="one", **SMALL)
    two = specdec.record(tiny, PROMPTS, name="two", on=place, jobs=2, **SMALL)
    assert one.turns.drop(columns="ids", errors="ignore").equals(two.turns.drop(columns="ids", errors="ignore"))
    for column in (("ranks", 2), ("ranks", 3), ("scores", 3), ("features",), ("text",), ("context_tok",)):
        assert (one.column(*column) == two.column(*column)).all(), column
    monkeypatch.setattr(fanout.Workers, "__enter__", lambda _: pytest.fail("everything was there"))
    assert same(bench.evaluate(METHODS, PROMPTS, tiny, name="there", on=place, **options).read_table("prompts"), there)
    specdec.record(tiny, PROMPTS, name="two", on=place, **SMALL)


def test_other_weights_and_a_pair_in_memory_are_refused(tiny, home):
    from specdec.models import load

    source = load.source_of(tiny)
    weight = next(tiny.target.model.parameters()).data
    kept = weight.clone()
    weight.add_(1.0)
    try:
        other = load.source_of(tiny)
    finally:
        weight.copy_(kept)
    assert load.load_again(**source).name == "tiny"
    with pytest.raises(SpecdecError, match="the pair 'tiny' with different weights; copy the same files"):
        load.load_again(**other)
    own = specdec.load_pair(target=tiny.target.model, tokenizer=tiny.tokenizer)
    own.drafter = tiny.drafter
    with pytest.raises(SpecdecError, match="was made in memory, so no other process can load it"):
        specdec.record(own, PROMPTS, on="local", depth=2, top_ks=(2,), trees=(), max_new_tokens=4, progress=False)


@pytest.fixture(scope="module")
def trace():
    made = synthetic_trace(turns=8, positions=40, depth=5, top_ks=(8,), most_nodes=70, features=9)
    made.turns.loc[[1, 4], "part"] = "tune"
    return made


def weights(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("policy.safetensors")}


@everywhere
def test_sweeps_are_equal_to_the_bit(place, trace, monkeypatch, tmp_path):
    options = dict(steps=64, seeds=(0, 1))
    here = controllers.train_sweep(["resps"], trace, COSTS, out_dir=tmp_path / "here", **options)
    there = controllers.train_sweep(["resps"], trace, COSTS, out_dir=tmp_path / "there", on=place, jobs=2, **options)
    for table in (here, there):
        assert table[["system", "seed"]].values.tolist() == [["resps", 0], ["resps", 1]]
    files = weights(tmp_path / "here")
    assert len(files) == 2 and len(set(files.values())) == 2 and files == weights(tmp_path / "there")
    monkeypatch.setattr(controllers, "train_system", lambda *_, **__: pytest.fail("both were there"))
    assert controllers.train_sweep(["resps"], trace, COSTS, out_dir=tmp_path / "here", **options).equals(here)


@everywhere
def test_replays_are_equal_to_the_bit(place, trace):
    policies = {"drawn": [RandomPolicy(TreeConfig(20, 3, 8), seed, asks=(SIZE,)) for seed in range(2)]}
    grid = dict(total_tokens=(8, 16), depths=(2, 4), top_ks=(8,))
    baselines = compare.Baselines.choose(trace, COSTS, defaults=(TreeConfig(16, 4, 8), TreeConfig(8, 2, 8)), **grid)
    options = dict(baselines=baselines, policy_ms={"drawn": 0.1}, progress=False)
    here = compare.compare_replay(trace, COSTS, policies, **options)
    there = compare.compare_replay(trace, COSTS, policies, on=place, jobs=2, **options)
    assert here.turns.equals(there.turns) and here.cycles.equals(there.cycles)


def test_a_recording_is_opened_again_where_it_is_needed(tiny, home):
    recorded = specdec.record(tiny, PROMPTS, name="sent", part="train", **SMALL)
    some = recorded.select(recorded.turns["prompt"] != recorded.turns["prompt"][0]).restrict({"expansions": (0, 2)})
    sent = pickle.dumps(some)
    again = pickle.loads(sent)
    assert len(sent) < 4000 and again.turns.equals(some.turns) and again.depth == some.depth == 2
    assert (again.column("ranks", 3) == some.column("ranks", 3)).all()
    opened = [pickle.loads(pickle.dumps(recorded)) for _ in range(2)]
    assert opened[0] is opened[1], "a worker reads it once for all shards"
    first = recorded.turns["prompt"] == recorded.turns["prompt"][0]
    assert len(pickle.loads(pickle.dumps(recorded.select(first))).turns) == first.sum()
    folder = some._made[1][0]._made[1][0]._made[1][0]
    other = open_trace(folder)
    other._made = other._made[0], (folder, "another key")
    with pytest.raises(SpecdecError, match="holds another recording here; let all machines see the same folder"):
        pickle.loads(pickle.dumps(other))


@everywhere
def test_chats(place, tiny, home, monkeypatch, tmp_path):
    monkeypatch.setattr(generate_data, "SHARD", 3)
    (tmp_path / "given.txt").write_text("What is 3 plus 4?\nSay hello.\n")
    config = ChatConfig(seed=5, rows=3, prompt_tok=40, answer_tok=12, prompts=tmp_path / "given.txt")
    generate_chats(tiny, config, tmp_path / "here", tokens=60, progress=False)
    elsewhere = replace(config, on=place, jobs=2)
    for tokens in (20, 60):
        files = generate_chats(tiny, elsewhere, tmp_path / "there", tokens=tokens, progress=False)
        assert files.answer_tok >= tokens
    names = sorted(path.name for path in (tmp_path / "here").glob("chats-*"))
    assert names and names == sorted(path.name for path in (tmp_path / "there").glob("chats-*"))
    for name in names:
        assert (tmp_path / "here" / name).read_text() == (tmp_path / "there" / name).read_text()


@pytest.mark.parametrize("place", ["sent"], indirect=True)
def test_the_command_line(place, home, capsys):
    words = "record --pair tiny --dtype float32 --suites toy/gsm8k --limit 3 --max-new-tokens 4".split()
    words += "--depth 2 --top-ks 2 --trees 3".split()
    assert cli.main([*words, "--jobs", "2", "--name", "two"]) == 0
    assert cli.main([*words, "--name", "one"]) == 0
    two, one = (open_trace(path) for path in sorted(home.glob("runs/*/*/"), key=lambda p: p.name, reverse=True)[:2])
    assert one.turns["prompt_tok"].equals(two.turns["prompt_tok"])
    assert (one.column("ranks", 3) == two.column("ranks", 3)).all()
    assert cli.main([*words, "--on", "locl"]) == 2
    assert "unknown place to run on 'locl'; did you mean 'local'" in capsys.readouterr().err
