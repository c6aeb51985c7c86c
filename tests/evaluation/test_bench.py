"""The bench: what is counted, in which order, what survives a kill, what the summary says; on
random weights.
"""

import hashlib
import itertools
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from fakes.children import child, ended
from fakes.pairs import random_pair

from specdec import machine, runs
from specdec.core.decode import autoregress
from specdec.core.policy import Chain, Policy, RandomPolicy, Static
from specdec.core.records import CYCLE_COLUMNS, PLAN, Cycle, Generation
from specdec.core.tree_config import TreeConfig
from specdec.data import suites
from specdec.errors import SpecdecError
from specdec.evaluation import bench, methods, tuning
from specdec.evaluation.methods import DraftedBy
from specdec.models.fingerprint import describe_pair, fingerprint
from specdec.models.load import load_drafter, shipped_folder

PROMPTS = {"a": [[1, 2, 3], [4, 5, 6], [7, 8, 9]], "b": [[9, 8, 7, 6], [5, 4]]}
METHODS = {"plain": "autoregressive", "small": "static:4,1,2", "large": Static(9, 2, 3)}
QUIET = dict(max_new_tokens=6, progress=False, warmup=0)


def small_pair():
    return random_pair(hidden=16, layers=7)


@pytest.fixture(scope="module")
def pair():
    return small_pair()


def said(pair, ids, *policy, **options):
    return Generation([0] * 6, len(ids), prefill_ms=1.0, decode_ms=1.0)


@pytest.fixture
def quick(monkeypatch):
    """All methods say the same at once: for what is the same whatever they say."""
    monkeypatch.setattr(bench, "decode", said)
    monkeypatch.setattr(bench, "autoregress", said)


def test_rows_of_a_run(pair, home):
    run = bench.evaluate(METHODS, PROMPTS, pair, repeats=2, **QUIET)
    prompts = run.read_table("prompts")
    cycles = run.read_table("cycles")
    assert len(prompts) == 5 * 3 * 2 and not prompts.duplicated(bench.KEYS).any()
    assert (prompts["new_tok"] == 6).all() and prompts["same"].all()
    assert prompts.groupby(["suite", "prompt"])["text_hash"].nunique().eq(1).all()
    assert set(prompts["threads"]) == {torch.get_num_threads()}
    assert set(prompts["dtype"]) == {"float32"}
    assert (prompts["total_ms"] - prompts["prefill_ms"] - prompts["decode_ms"]).abs().max() < 1e-6
    sums = cycles.groupby(bench.KEYS)[["new_tok", "draft_calls", "accepted_tok"]].sum()
    told = prompts[prompts["method"] != "plain"].set_index(bench.KEYS).loc[sums.index]
    assert (sums["new_tok"] == told["cycle_tok"]).all()
    assert (sums["draft_calls"] == told["draft_calls"]).all()
    assert (told["tau"] - told["cycle_tok"] / told["cycles"]).abs().max() < 1e-9
    assert prompts.loc[prompts["method"] == "plain", ["cycles", "draft_calls"]].eq(0).all(axis=None)
    assert run.record()["finished"] and run.record()["results"]["texts_differing"] == 0


def test_processor_time_is_counted_where_it_is_asked_for(pair, home, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    ticks = itertools.count()
    monkeypatch.setattr("time.process_time", lambda: 1000.0 * next(ticks))
    run = bench.evaluate(METHODS, {"a": [[1, 2, 3]]}, pair, cpu_time=True, **QUIET)
    rows = run.read_table("prompts")
    cycles = run.read_table("cycles")
    assert set(rows["clock"]) == {"processor"} and (rows["decode_ms"] >= 1e6).all()
    assert (cycles["total_ms"] >= 1e6).all()
    run = bench.evaluate(METHODS, {"a": [[1, 2, 3]]}, pair, **QUIET)
    assert set(run.read_table("prompts")["clock"]) == {"wall"}
    assert (run.read_table("prompts")["decode_ms"] < 1e6).all()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    two = pytest.raises(
        SpecdecError, bench.evaluate, METHODS, PROMPTS, pair, cpu_time=True, **QUIET
    )
    two.match(r"torch\.set_num_threads\(1\)")


def test_order_is_random_and_seeded(pair, home, quick):
    orders = [
        _orders(bench.evaluate(METHODS, PROMPTS, pair, seed=seed, repeats=2, **QUIET))
        for seed in (0, 1)
    ]
    assert orders[0] != orders[1]
    for order in orders:
        assert all(sorted(one) == [0, 1, 2] for one in order)
        assert len({tuple(one) for one in order}) > 1
    assert orders[0] == _orders(
        bench.evaluate(METHODS, PROMPTS, pair, seed=0, repeats=2, force=True, **QUIET)
    )


def test_what_is_measured_between_the_prompts_comes_before_each(pair, home, quick):
    shares = []
    bench.evaluate(METHODS, PROMPTS, pair, repeats=2, between=shares.append, **QUIET)
    assert shares == [1 / (2 * 5)] * (2 * 5)
    elsewhere = {**QUIET, "name": "elsewhere", "on": "local", "between": shares.append}
    pytest.raises(SpecdecError, bench.evaluate, METHODS, PROMPTS, pair, **elsewhere).match(
        "needs a single process"
    )


def _orders(run) -> list[list[int]]:
    rows = run.read_table("prompts").sort_values(["repeat", "prompt", "method"])
    return rows.groupby(["repeat", "prompt"])["order"].apply(list).tolist()


def test_a_different_text_is_reported(pair, home, monkeypatch):
    monkeypatch.setattr(bench, "decode", said)
    with pytest.warns(UserWarning, match="this is a bug"):
        run = bench.evaluate(
            {"plain": "autoregressive", "wrong": Static(4, 1, 2)}, PROMPTS, pair, **QUIET
        )
    rows = run.read_table("prompts")
    assert rows.loc[rows["method"] == "plain", "same"].all()
    assert not rows.loc[rows["method"] == "wrong", "same"].any()
    assert run.record()["results"]["texts_differing"] == 5


def test_conversations_continue_with_the_baseline(tiny, home, monkeypatch):
    other = Mock(
        side_effect=lambda pair, ids, *_, **__: replace(said(pair, ids), text="something else")
    )
    monkeypatch.setattr(bench, "decode", other)
    talk = suites.Prompt("talk/0", "talk", ("Hello.", "And now?"))
    with pytest.warns(UserWarning):
        run = bench.evaluate(
            {"odd": Static(4, 1, 2), "plain": "autoregressive"}, [talk], tiny, **QUIET
        )
    rows = run.read_table("prompts")
    assert rows.groupby("turn")["prompt_tok"].nunique().eq(1).all()
    answer = autoregress(tiny, [{"role": "user", "content": "Hello."}], 6).text
    whole = [("user", "Hello."), ("assistant", answer), ("user", "And now?")]
    second = other.call_args_list[1].args[1]
    assert second == tiny.ids_of([{"role": role, "content": text} for role, text in whole])


def test_answers_are_checked_once_at_the_last_turn(tiny, home, monkeypatch):
    answer = autoregress(tiny, [{"role": "user", "content": "Hello."}], 6).text
    check = Mock(wraps=suites.check_answer)
    monkeypatch.setattr(suites, "check_answer", check)
    good = suites.Prompt("talk/0", "talk", ("Hello.",), check={"kind": "exact", "value": answer})
    bad = suites.Prompt(
        "talk/1", "talk", ("Hello there.",), check={"kind": "exact", "value": "never this"}
    )
    run = bench.evaluate(
        {"plain": "autoregressive", "tree": "static:4,1,2"}, [good, bad], tiny, **QUIET
    )
    verdicts = run.read_table("prompts").groupby("prompt")["correct"].apply(list)
    assert verdicts["talk/0"] == [True, True]
    assert verdicts["talk/1"] == [False, False]
    assert check.call_count == 2
    assert bench.summary(run)["accuracy_frac"].tolist() == [0.5, 0.5]


def count_decodes(monkeypatch, stop_after=None) -> list:
    done = []
    original = bench._Bench._decode

    def counted(self, method, ids, seed):
        if stop_after is not None and len(done) == stop_after:
            raise KeyboardInterrupt
        done.append(method)
        return original(self, method, ids, seed)

    monkeypatch.setattr(bench._Bench, "_decode", counted)
    return done


def test_it_continues_after_an_interruption_and_reuses_a_finished_run(
    pair, home, quick, monkeypatch
):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        count_decodes(patch, stop_after=7)  # inside the third prompt
        bench.evaluate(METHODS, PROMPTS, pair, **QUIET)
    done = count_decodes(monkeypatch)
    first = bench.evaluate(METHODS, PROMPTS, pair, **QUIET)
    assert len(done) == (5 - 2) * 3 and len(first.read_table("prompts")) == 15
    done.clear()
    assert bench.evaluate(METHODS, PROMPTS, pair, **QUIET).directory == first.directory and not done
    bench.evaluate(METHODS, PROMPTS, pair, force=True, **QUIET)
    assert len(done) == 15
    other = bench.evaluate({**METHODS, "large": Static(9, 2, 4)}, PROMPTS, pair, **QUIET)
    changed = small_pair()
    changed.target.model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    third = bench.evaluate(METHODS, PROMPTS, changed, **QUIET)
    assert len({run.directory for run in (first, other, third)}) == 3


class Grows(Policy):
    """Its trees change with every cycle that it has seen; `reset` forgets nothing, and nothing says
    so.
    """

    asks = frozenset({PLAN})
    seen = 0
    limits = TreeConfig(6, 4, 1)

    def answer(self, question):
        return TreeConfig(2 + self.seen % 4, self.seen % 4, 1)

    def observe(self, cycle):
        self.seen += 1


def slow_evaluation(pause_s: float) -> None:
    """Evaluate with a pause before every text, in a process that needs the bench no more."""
    decode_one = bench._Bench._decode
    bench._Bench._decode = lambda *arguments: time.sleep(pause_s) or decode_one(*arguments)
    bench.evaluate(METHODS, PROMPTS, small_pair(), **QUIET)


def test_it_survives_kill_9(home):
    started = child(slow_evaluation, 0.2)
    deadline = time.monotonic() + 120
    while not (pieces := sorted(home.glob("runs/laptop/evaluate-*/prompts/part-*.parquet"))):
        assert os.waitpid(started, os.WNOHANG) == (0, 0) and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(started, signal.SIGKILL)
    assert ended(started) == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in pieces}
    run = bench.evaluate(METHODS, PROMPTS, small_pair(), **QUIET)
    assert run.directory == pieces[0].parents[1], "another process finds the same run"
    assert all(path.stat().st_mtime_ns == moment for path, moment in before.items()), (
        "finished pieces stay"
    )
    rows = run.read_table("prompts")
    assert len(rows) == 15 and not rows.duplicated(bench.KEYS).any() and rows["same"].all()


def synthetic_run() -> runs.Run:
    """Two suites; `fast` is exactly 2 and 4 times as fast; a cycle is 1/10 draft ...

    as written below.
    """
    rows = []
    cycles = []
    for suite, factor in (("x", 2.0), ("y", 4.0)):
        for prompt in range(4):
            for method, speed in (("plain", 1.0), ("fast", factor), ("again", factor)):
                counted = 0 if method == "plain" else 10
                total = 100.0 / speed
                row = dict(
                    suite=suite,
                    prompt=f"{suite}/{prompt}",
                    turn=0,
                    method=method,
                    repeat=0,
                    new_tok=40,
                )
                row |= dict(
                    cycles=counted,
                    cycle_tok=4 * counted,
                    draft_calls=3 * counted,
                    prefill_ms=total / 5,
                )
                same = method != "again" or prompt > 0
                correct = prompt % 2 == 0
                rows.append(row | dict(total_ms=total, same=same, correct=correct))
                times = dict(
                    draft_ms=1.0,
                    policy_ms=2.0,
                    verify_ms=4.0,
                    commit_ms=0.5,
                    host_ms=2.5,
                    total_ms=10.0,
                )
                cycles += [{"suite": suite, "method": method, **times}] * counted
    kinds = {"plain": None, "fast": {"tree": 1}, "again": {"tree": 1}}
    run = runs.start("synthetic", {"methods": kinds, "baseline": "plain"})
    run.write_table("prompts", pd.DataFrame(rows).astype({"correct": "boolean"}))
    run.write_table("cycles", pd.DataFrame(cycles))
    return run


def test_summary_of_rows_with_known_answers_also_beside_another_baseline(home):
    table = bench.summary(synthetic_run()).set_index(["suite", "method"])
    assert table.index.tolist() == [
        (s, m) for s in ("x", "y", "all") for m in ("plain", "fast", "again")
    ]
    fast = table.xs("fast", level="method")
    # 200 + 200 ms over 100 + 50: a ratio of sums
    assert fast["speedup"].tolist() == pytest.approx([2, 4, 8 / 3])
    assert fast["mean_speedup"].tolist() == pytest.approx([2, 4, 3])
    assert fast["tau"].eq(4).all() and fast["calls"].tolist() == [120, 120, 240]
    shares = [f"{part}_frac" for part in bench.SHARES]
    assert fast.loc["all", shares].tolist() == pytest.approx([0.1, 0.2, 0.4, 0.05, 0.25])
    assert table["prefill_frac"].tolist() == pytest.approx([0.2] * 9)
    assert table["accuracy_frac"].eq(0.5).all()
    assert table.xs("again", level="method")["same_frac"].eq(0.75).all()
    assert fast["same_frac"].eq(1).all()
    assert table.xs("plain", level="method")["draft_frac"].isna().all()
    # the twin is no hypothesis
    assert table.loc["all", "p_holm"].notna().tolist() == [False, True, False]
    run = synthetic_run()
    narrow = bench.summary(run, level=0.5).set_index(["suite", "method"])
    wide = bench.summary(run).set_index(["suite", "method"])
    assert narrow.loc[("all", "fast"), "speedup_high"] < wide.loc[("all", "fast"), "speedup_high"]
    assert wide.loc[("all", "fast"), ["new_tok", "cycles", "calls", "checked"]].tolist() == [
        320,
        80,
        240,
        8,
    ]
    other = bench.summary(run, "fast").set_index(["suite", "method"])
    assert other.loc[("x", "plain"), "speedup"] == pytest.approx(0.5)
    assert other.loc[("x", "fast"), "speedup"] == 1
    found = bench.noise_check(run, level=0.5)
    assert list(found)[:3] == ["first", "second", "speedup"]
    assert list(found.values())[:3] == ["fast", "again", 1.0]
    assert found["prompts"] == 8 and found["quiet"]
    alone = runs.start("alone", {"methods": {"plain": None, "fast": 1}, "baseline": "plain"})
    pytest.raises(SpecdecError, bench.noise_check, alone).match("under two names")


def test_bad_input_gets_one_sentence(pair, home):
    for changes, message in (
        ({"methods": {}}, "dict of names and policies"),
        ({"methods": {"x": 3}}, "method 'x' is a int"),
        ({"suites": ["toy/gsm9k"]}, "did you mean 'toy/gsm8k'"),
        ({"suites": {"a": []}}, "no prompts"),
        ({"suites": {"a": [3.5]}}, "neither a suites.Prompt nor text"),
        ({"repeats": 0}, "repeats must be an integer of at least 1"),
        ({"repeats": 10**12}, "repeats must be at most 10,000"),
        ({"warmup": 10_001}, "warmup must be at most 10,000, got 10,001"),
        ({"warmup": -1}, "warmup must be"),
        ({"part": "tests"}, "did you mean 'test'"),
        ({"max_new_tokens": 0}, "max_new_tokens must be"),
        ({"repeat": 2}, "unknown setting 'repeat'; did you mean 'repeats'"),
    ):
        given = {"methods": METHODS, "suites": PROMPTS, **QUIET, **changes}
        first = [given.pop(name) for name in ("methods", "suites")]
        pytest.raises(SpecdecError, bench.evaluate, *first, pair, **given).match(message)
        assert not list(home.glob("runs/laptop/*")), "nothing was begun"


def test_parts_follow_the_split():
    prompts = suites.load_suite("toy/gsm8k")
    parts = {
        part: {item.id for item in suites.gather("toy/gsm8k", part=part)} for part in suites.PARTS
    }
    assert parts == {part: {one.id for one in some} for part, some in suites.split(prompts).items()}
    assert len(suites.gather(["toy/gsm8k"], part="test", limit=3)) == 3


def test_fingerprints_tell_policies_apart():
    trees = [
        Static(8, 3, 2),
        Static(8, 3, 3),
        Chain(Static(8, 3, 2)),
        RandomPolicy(TreeConfig(8, 3, 2)),
    ]
    assert len({runs.canonical(fingerprint(tree)) for tree in trees}) == 4
    assert fingerprint(Static(8, 3, 2)) == fingerprint(trees[0])
    tensors = torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.bfloat16)
    assert len({runs.canonical(fingerprint(tensor)) for tensor in tensors}) == 3


def test_a_tuned_tree_is_not_judged_on_its_own_prompts(pair, home):
    grid = [TreeConfig(3, 1, 1), TreeConfig(6, 2, 2)]
    found = tuning.tune_static(
        pair, [[1, 2, 3], [4, 5, 6]], grid, first=1, max_new_tokens=4, progress=False
    )
    assert found.policy.plan in grid and len(found.table) == 2
    tuned = {"tuned": found.policy}
    seen = pytest.raises(
        SpecdecError, bench.evaluate, tuned, {"b": [[9, 9], [4, 5, 6]]}, pair, **QUIET
    )
    seen.match("was tuned on prompt 'b/1'")
    bench.evaluate(tuned, {"b": [[9, 9]]}, pair, **QUIET)
    pytest.raises(SpecdecError, tuning.tune_static, pair, [[1]], []).match("grid of trees is empty")


def test_methods_may_bring_their_own_drafter(tiny, home):
    other = load_drafter(f"eagle3:{shipped_folder('tiny') / 'drafter'}", tiny.target)
    again = methods.DraftedBy(other, Static(8, 3, 2))
    assert fingerprint(again) != fingerprint(methods.DraftedBy(other, Static(8, 3, 3)))
    ways = {"plain": "autoregressive", "tree": Static(8, 3, 2), "again": again}
    rows = bench.evaluate(ways, {"mine": ["What is 2 + 3?"]}, tiny, **QUIET).read_table("prompts")
    assert rows["same"].all()
    assert rows.set_index("method").loc[["tree", "again"], "accepted_tok"].nunique() == 1


def test_the_identity_of_a_run_is_all_that_its_rows_depend_on(pair, home, quick, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    settings = dict(
        temperature=0.5, top_k=3, seed=4, repeats=2, limit=1, scale="paper", name="mine", **QUIET
    )
    run = bench.evaluate(METHODS, PROMPTS, pair, **settings)
    items = suites.gather(PROMPTS, limit=1)
    described = {
        name: fingerprint(method) for name, method in methods.named_methods(METHODS).items()
    }
    identity = {
        "methods": described,
        "baseline": "plain",
        "items": suites.describe_items(items),
        "prompts": 2,
        "pair": describe_pair(pair),
        "threads": 1,
        "repeats": 2,
        "max_new_tokens": 6,
        "temperature": 0.5,
        "seed": 4,
        "sampling": {"top_k": 3},
    }
    assert (run.name, run.scale) == ("mine", "paper")
    assert run.record()["config"] == runs.plain(identity)
    cycles = len(run.read_table("cycles"))
    assert run.record()["results"] == {
        "texts": 2 * 2 * 3,
        "texts_differing": 0,
        "cycles": cycles,
        "crowded": False,
    }
    timed = bench.evaluate(METHODS, PROMPTS, pair, cpu_time=True, **settings)
    assert timed.record()["config"] == runs.plain(identity) | {"clock": "processor"}
    tree = bench.evaluate(
        {"a": "static:4,1,2", "b": "static:9,2,3"}, {"a": [[1, 2]]}, pair, **QUIET
    )
    assert tree.record()["config"]["baseline"] == "a", "the first where nothing decodes plainly"


@pytest.mark.parametrize(
    "busy, cpu_time, crowded", [(0.5, False, True), (0.3, False, False), (0.5, True, False)]
)
def test_ratios_measured_beside_others_are_no_result(
    pair, home, quick, monkeypatch, recwarn, busy, cpu_time, crowded
):
    monkeypatch.setattr(machine, "ENOUGH_CORES", 0.8)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(machine, "Neighbours", lambda: SimpleNamespace(cpus=lambda: busy))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    run = bench.evaluate(METHODS, {"a": [[1, 2, 3]]}, pair, cpu_time=cpu_time, **QUIET)
    assert any("these ratios are no result" in str(one.message) for one in recwarn) == crowded
    assert run.record()["results"]["crowded"] is crowded
    assert set(bench.summary(run)["crowded"]) == {crowded}


def test_a_row_of_each_table_is_whole(pair, home, monkeypatch):
    numbers = dict.fromkeys(CYCLE_COLUMNS, 0) | {"draft_calls": 3, "verified_tok": 8}
    cycles = [
        Cycle(**numbers | {"cycle": 1 - more, "new_tok": 1 + more, "accepted_tok": more})
        for more in (1, 0)
    ]
    tree = Mock(return_value=Generation([7, 8, 9], 2, cycles, "seven", 1.0, 3.0, "stop"))
    plain = Mock(return_value=Generation([7, 8, 9], 2, [], None, 1.0, 6.0, "length"))
    monkeypatch.setattr(bench, "decode", tree)
    monkeypatch.setattr(bench, "autoregress", plain)
    monkeypatch.setattr(bench.machine, "Neighbours", lambda: SimpleNamespace(cpus=lambda: 0.5))
    ways = {"plain": "autoregressive", "tree": Static(4, 1, 2)}
    run = bench.evaluate(ways, {"a": [[5, 6]]}, pair, top_p=0.5, **QUIET)
    options = dict(seed=tree.call_args.kwargs["seed"], max_new_tokens=6, temperature=0.0, top_p=0.5)
    tree.assert_called_once_with(pair, [5, 6], ways["tree"], **options)
    plain.assert_called_once_with(pair, [5, 6], **options)
    rows = run.read_table("prompts").to_dict("records")
    orders = [row.pop("order") for row in rows]
    shared = {
        "suite": "a",
        "prompt": "a/0",
        "turn": 0,
        "repeat": 0,
        "prompt_tok": 2,
        "new_tok": 3,
        "prefill_ms": 1.0,
    }
    shared |= {
        "same": True,
        "neighbours": 0.5,
        "pair": "random",
        "dtype": "float32",
        "device": "cpu",
        "clock": "wall",
    }
    shared |= {
        "threads": torch.get_num_threads(),
        "machine": runs.content_key(**machine.hardware())[:8],
    }
    told = [(row.pop("tau"), row.pop("correct")) for row in rows]
    assert sorted(orders) == [0, 1]
    assert told[1][0] == 1.5
    assert pd.isna([told[0][0], told[0][1], told[1][1]]).all()
    names = (
        "method cycles cycle_tok draft_calls accepted_tok verified_tok "
        "decode_ms total_ms finish_reason text_hash"
    )
    hashes = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in ("7 8 9", "seven")]
    own = [("plain", 0, 0, 0, 0, 0, 6.0, 7.0, "length"), ("tree", 2, 3, 6, 1, 16, 3.0, 4.0, "stop")]
    for row, values, text_hash in zip(rows, own, hashes, strict=True):
        assert row == shared | dict(zip(names.split(), (*values, text_hash), strict=True))
    cycles = run.read_table("cycles")
    assert list(cycles) == ["suite", "prompt", "turn", "method", "repeat", *CYCLE_COLUMNS]
    assert cycles[[*bench.KEYS, "cycle", "new_tok"]].values.tolist() == [
        ["a", "a/0", 0, "tree", 0, 0, 2],
        ["a", "a/0", 0, "tree", 0, 1, 1],
    ]


def test_warming_up_is_not_counted_and_takes_the_first_prompts_in_turn(
    pair, home, quick, monkeypatch
):
    decode_all = Mock(side_effect=bench._Bench.decode_all)
    monkeypatch.setattr(
        bench._Bench, "decode_all", lambda *given, **named: decode_all(*given, **named)
    )
    for warmup in (7, 1):
        run = bench.evaluate(
            METHODS, PROMPTS, pair, **QUIET | {"warmup": warmup, "name": f"after_{warmup}"}
        )
        seen = [one.args[1].id for one in decode_all.call_args_list[-5 - warmup :]]
        assert len(run.read_table("prompts")) == 15
        assert seen[:warmup] == (seen[warmup:] * 2)[:warmup]
        assert seen[warmup:] != sorted(seen[warmup:]), "suites are mixed"
    assert decode_all.call_count == 5 + 7 + 5 + 1


def test_workers_measure_what_is_missing_in_the_same_run(tiny, home):
    settings = QUIET | {"max_new_tokens": 4, "warmup": 0}
    methods = {"plain": None, "tree": Static(4, 2, 2)}
    prompts = {"mine": ["Hello.", "What is 2 + 3?"]}
    run = bench.evaluate(methods, prompts, tiny, on="local", jobs=1, **settings)
    torch.set_num_threads(1)  # a task in this process sets its own
    rows = run.read_table("prompts")
    assert sorted(rows["prompt"].unique()) == ["mine/0", "mine/1"] and rows["same"].all()
    assert bench.evaluate(methods, prompts, tiny, **settings).key == run.key


def test_a_drafter_in_memory_cannot_be_measured_elsewhere(tiny, home):
    methods = {"own": DraftedBy(tiny.drafter, Static(4, 2, 2))}
    with pytest.raises(SpecdecError, match="in memory"):
        bench.evaluate(methods, PROMPTS, tiny, on="local", **QUIET)
