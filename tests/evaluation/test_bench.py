"""The bench: what is counted, in which order, what survives a kill, and the summary."""

import hashlib
import itertools
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from fakes.pairs import random_pair

from specdec import machine, runs
from specdec.core.decode import autoregress
from specdec.core.policy import Static
from specdec.core.records import CYCLE_COLUMNS, Cycle, Generation
from specdec.data import suites
from specdec.errors import SpecdecError
from specdec.evaluation import bench, methods
from specdec.evaluation.methods import DraftedBy
from specdec.models.load import load_drafter, shipped_folder
from specdec.models.pairs import describe_pair, fingerprint

PROMPTS = {"a": [[1, 2, 3], [4, 5, 6], [7, 8, 9]], "b": [[9, 8, 7, 6], [5, 4]]}
METHODS = {"plain": "autoregressive", "small": "static:4,1,2", "large": Static(9, 2, 3)}
QUIET = dict(max_new_tokens=6, progress=False, warmup=0)


def small_pair():
    return random_pair(hidden=16, layers=7)


@pytest.fixture(scope="module")
def pair():
    return small_pair()


def same_text(pair, ids, *policy, **options):
    return Generation([0] * 6, len(ids), prefill_ms=1.0, decode_ms=1.0)


@pytest.fixture
def quick(monkeypatch):
    """All methods write the same at once: for what does not depend on texts."""
    monkeypatch.setattr(bench, "decode", same_text)
    monkeypatch.setattr(bench, "autoregress", same_text)


def test_rows_of_a_run(pair, home):
    run = bench.evaluate(METHODS, PROMPTS, pair, repeats=2, **QUIET)
    prompts = run.read_table("prompts")
    cycles = run.read_table("cycles")
    assert len(prompts) == 5 * 3 * 2 and not prompts.duplicated(bench.KEYS).any()
    assert (prompts["new_tok"] == 6).all() and prompts["same"].all()
    sums = cycles.groupby(bench.KEYS)[["new_tok", "draft_calls", "accepted_tok"]].sum()
    drafted = prompts[prompts["method"] != "plain"].set_index(bench.KEYS).loc[sums.index]
    assert (sums["new_tok"] == drafted["cycle_tok"]).all()
    assert (sums["draft_calls"] == drafted["draft_calls"]).all()
    assert (drafted["tau"] - drafted["cycle_tok"] / drafted["cycles"]).abs().max() < 1e-9
    assert prompts.loc[prompts["method"] == "plain", "cycles"].eq(0).all()
    assert run.record()["finished"] and run.record()["results"]["texts_differing"] == 0


def test_processor_time_is_counted_if_requested(pair, home, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    ticks = itertools.count()
    monkeypatch.setattr("time.process_time", lambda: 1000.0 * next(ticks))
    for cpu_time, clock in ((True, "processor"), (False, "wall")):
        run = bench.evaluate(METHODS, {"a": [[1, 2, 3]]}, pair, cpu_time=cpu_time, **QUIET)
        rows = run.read_table("prompts")
        assert set(rows["clock"]) == {clock}
        assert ((rows["decode_ms"] >= 1e6) == cpu_time).all()
        assert ((run.read_table("cycles")["total_ms"] >= 1e6) == cpu_time).all()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(SpecdecError, match=r"torch\.set_num_threads\(1\)"):
        bench.evaluate(METHODS, PROMPTS, pair, cpu_time=True, **QUIET)


def test_order_is_random_and_seeded(pair, home, quick):
    orders = []
    for seed, force in ((0, False), (1, False), (0, True)):
        run = bench.evaluate(METHODS, PROMPTS, pair, seed=seed, force=force, repeats=2, **QUIET)
        rows = run.read_table("prompts").sort_values(["repeat", "prompt", "method"])
        orders.append(rows.groupby(["repeat", "prompt"])["order"].apply(tuple).tolist())
    assert orders[0] == orders[2] != orders[1]
    for order in orders:
        assert {tuple(sorted(places)) for places in order} == {(0, 1, 2)} and len(set(order)) > 1


def test_a_different_text_is_reported(pair, home, monkeypatch):
    monkeypatch.setattr(bench, "decode", same_text)
    methods = {"plain": "autoregressive", "wrong": Static(4, 1, 2)}
    with pytest.warns(UserWarning, match="this is a bug"):
        run = bench.evaluate(methods, PROMPTS, pair, **QUIET)
    rows = run.read_table("prompts")
    assert (rows["same"] == (rows["method"] == "plain")).all()
    assert run.record()["results"]["texts_differing"] == 5


def test_conversations_continue_with_the_baseline(tiny, home, monkeypatch):
    def answer(pair, ids, *policy, **options):
        return replace(same_text(pair, ids), text="something else")

    odd = Mock(side_effect=answer)
    monkeypatch.setattr(bench, "decode", odd)
    talk = suites.Prompt("talk/0", "talk", ("Hello.", "And now?"))
    with pytest.warns(UserWarning):
        bench.evaluate({"odd": Static(4, 1, 2), "plain": "autoregressive"}, [talk], tiny, **QUIET)
    first = {"role": "user", "content": "Hello."}
    plain = {"role": "assistant", "content": autoregress(tiny, [first], 6).text}
    second = {"role": "user", "content": "And now?"}
    assert odd.call_args_list[1].args[1] == tiny.ids_of([first, plain, second])


def test_answers_are_checked_once_at_the_last_turn(tiny, home, monkeypatch):
    answer = autoregress(tiny, [{"role": "user", "content": "Hello."}], 6).text
    check = Mock(wraps=suites.check_answer)
    monkeypatch.setattr(bench, "check_answer", check)
    good = suites.Prompt("t/0", "t", ("Hello.",), check={"kind": "exact", "value": answer})
    bad = suites.Prompt("t/1", "t", ("Hello there.",), check={"kind": "exact", "value": "never"})
    methods = {"plain": "autoregressive", "tree": "static:4,1,2"}
    run = bench.evaluate(methods, [good, bad], tiny, **QUIET)
    verdicts = run.read_table("prompts").groupby("prompt")["correct"].apply(list)
    assert verdicts["t/0"] == [True, True] and verdicts["t/1"] == [False, False]
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


def synthetic_run() -> runs.Run:
    """Two suites; `fast` is exactly 2 and 4 times as fast as `plain`, and so is `again`."""
    rows = []
    for suite, factor in (("x", 2.0), ("y", 4.0)):
        for prompt, method in itertools.product(range(4), ("plain", "fast", "again")):
            counted = 0 if method == "plain" else 10
            total = 100.0 if method == "plain" else 100.0 / factor
            row = dict(suite=suite, prompt=f"{suite}/{prompt}", turn=0, method=method, repeat=0)
            row.update(new_tok=40, cycles=counted, cycle_tok=4 * counted, draft_calls=3 * counted)
            row.update(prefill_ms=total / 5, total_ms=total, clock="wall", neighbours=0.0)
            row.update(same=method != "again" or prompt > 0, correct=prompt % 2 == 0)
            rows.append(row)
    kinds = {"plain": None, "fast": {"tree": 1}, "again": {"tree": 1}}
    run = runs.start("synthetic", {"methods": kinds, "baseline": "plain"})
    run.write_table("prompts", pd.DataFrame(rows).astype({"correct": "boolean"}))
    return run


def test_summary_of_rows_with_known_answers(home):
    run = synthetic_run()
    table = bench.summary(run).set_index(["suite", "method"])
    assert table.index.tolist() == list(
        itertools.product("x y all".split(), "plain fast again".split())
    )
    fast = table.xs("fast", level="method")
    # 200 + 200 ms over 100 + 50: a ratio of sums
    assert fast["speedup"].tolist() == pytest.approx([2, 4, 8 / 3])
    counts = ["tau", "new_tok", "cycles", "calls", "checked", "same_frac"]
    assert fast.loc["all", counts].tolist() == [4, 320, 80, 240, 8, 1.0]
    assert table["prefill_frac"].tolist() == pytest.approx([0.2] * 9)
    assert table["accuracy_frac"].eq(0.5).all()
    assert table.xs("again", level="method")["same_frac"].eq(0.75).all()
    # the twin is no hypothesis
    assert table.loc["all", "p_holm"].notna().tolist() == [False, True, False]
    other = bench.summary(run, "fast").set_index(["suite", "method"])
    assert other.loc[("x", "plain"), "speedup"] == pytest.approx(0.5)


def test_a_tuned_tree_is_not_judged_on_its_own_prompts(pair, home):
    tuned = Static(6, 2, 2)
    tuned.tuned_on = {suites.gather({"b": [[4, 5, 6]]})[0].digest}
    with pytest.raises(SpecdecError, match="was tuned on prompt 'b/1'"):
        bench.evaluate({"tuned": tuned}, {"b": [[9, 9], [4, 5, 6]]}, pair, **QUIET)
    bench.evaluate({"tuned": tuned}, {"b": [[9, 9]]}, pair, **QUIET)


def test_methods_may_bring_their_own_drafter(tiny, home):
    other = load_drafter(f"eagle3:{shipped_folder('tiny') / 'drafter'}", tiny.target)
    again = DraftedBy(other, Static(8, 3, 2))
    ways = {"plain": "autoregressive", "tree": Static(8, 3, 2), "again": again}
    rows = bench.evaluate(ways, {"mine": ["What is 2 + 3?"]}, tiny, **QUIET).read_table("prompts")
    assert rows["same"].all()
    assert rows.set_index("method").loc[["tree", "again"], "accepted_tok"].nunique() == 1
    with pytest.raises(SpecdecError, match="in memory"):
        bench.evaluate(ways, PROMPTS, tiny, on="local", **QUIET)


def test_the_identity_of_a_run_is_all_that_its_rows_depend_on(pair, home, quick, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    settings = dict(temperature=0.5, top_k=3, seed=4, repeats=2, limit=1, **QUIET)
    run = bench.evaluate(METHODS, PROMPTS, pair, scale="paper", name="mine", **settings)
    named = methods.named_methods(METHODS)
    identity = {
        "methods": {name: fingerprint(method) for name, method in named.items()},
        "baseline": "plain",
        "items": suites.describe_items(suites.gather(PROMPTS, limit=1)),
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
    counts = {"texts": 2 * 2 * 3, "texts_differing": 0, "cycles": 0, "crowded": False}
    assert run.record()["results"] == counts
    timed = bench.evaluate(METHODS, PROMPTS, pair, cpu_time=True, **settings)
    assert timed.record()["config"] == {**runs.plain(identity), "clock": "processor"}


@pytest.mark.parametrize(
    "busy, cpu_time, crowded", [(0.5, False, True), (0.3, False, False), (0.5, True, False)]
)
def test_ratios_measured_beside_others_are_no_result(
    pair, home, quick, monkeypatch, recwarn, busy, cpu_time, crowded
):
    monkeypatch.setattr(machine, "ENOUGH_CORES", 0.8)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(machine, "Neighbours", lambda: SimpleNamespace(kept_away=lambda: busy))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    run = bench.evaluate(METHODS, {"a": [[1, 2, 3]]}, pair, cpu_time=cpu_time, **QUIET)
    assert any("are no result" in str(warning.message) for warning in recwarn) == crowded
    assert run.record()["results"]["crowded"] is crowded
    assert set(bench.summary(run)["crowded"]) == {crowded}


def test_a_row_of_each_table_is_whole(pair, home, monkeypatch):
    numbers = {**dict.fromkeys(CYCLE_COLUMNS, 0), "draft_calls": 3, "verified_tok": 8}
    first = Cycle(**{**numbers, "cycle": 0, "new_tok": 2, "accepted_tok": 1})
    last = Cycle(**{**numbers, "cycle": 1, "new_tok": 1})
    tree = Mock(return_value=Generation([7, 8, 9], 2, [first, last], "seven", 1.0, 3.0, "stop"))
    plain = Mock(return_value=Generation([7, 8, 9], 2, [], None, 1.0, 6.0, "length"))
    monkeypatch.setattr(bench, "decode", tree)
    monkeypatch.setattr(bench, "autoregress", plain)
    monkeypatch.setattr(bench.machine, "Neighbours", lambda: SimpleNamespace(kept_away=lambda: 0.5))
    ways = {"plain": "autoregressive", "tree": Static(4, 1, 2)}
    run = bench.evaluate(ways, {"a": [[5, 6]]}, pair, top_p=0.5, **QUIET)
    options = dict(seed=tree.call_args.kwargs["seed"], max_new_tokens=6, temperature=0.0, top_p=0.5)
    tree.assert_called_once_with(pair, [5, 6], ways["tree"], **options)
    plain.assert_called_once_with(pair, [5, 6], **options)
    shared = {"suite": "a", "prompt": "a/0", "turn": 0, "repeat": 0, "prompt_tok": 2, "new_tok": 3}
    shared.update(prefill_ms=1.0, same=True, neighbours=0.5, pair="random", dtype="float32")
    shared.update(device="cpu", clock="wall", threads=torch.get_num_threads())
    shared.update(machine=runs.content_key(**machine.hardware())[:8])
    names = "method cycles cycle_tok draft_calls accepted_tok verified_tok decode_ms total_ms"
    names = [*names.split(), "finish_reason"]
    rows = run.read_table("prompts").to_dict("records")
    assert sorted(row.pop("order") for row in rows) == [0, 1]
    assert [row.pop("tau") for row in rows][1] == 1.5
    assert all(pd.isna(row.pop("correct")) for row in rows)
    for row, values in zip(
        rows,
        [
            ["plain", 0, 0, 0, 0, 0, 6.0, 7.0, "length", "7 8 9"],
            ["tree", 2, 3, 6, 1, 16, 3.0, 4.0, "stop", "seven"],
        ],
        strict=True,
    ):
        text_hash = hashlib.sha256(values.pop().encode()).hexdigest()[:16]
        assert row == {**shared, **dict(zip(names, values, strict=True)), "text_hash": text_hash}
    cycles = run.read_table("cycles")
    assert list(cycles) == [*bench.KEYS, *CYCLE_COLUMNS]
    assert cycles[["method", "cycle", "new_tok"]].values.tolist() == [
        ["tree", 0, 2],
        ["tree", 1, 1],
    ]


def test_workers_measure_what_is_missing_in_the_same_run(tiny, home):
    settings = {**QUIET, "max_new_tokens": 4}
    methods = {"plain": None, "tree": Static(4, 2, 2)}
    prompts = {"mine": ["Hello.", "What is 2 + 3?"]}
    run = bench.evaluate(methods, prompts, tiny, on="local", jobs=1, **settings)
    torch.set_num_threads(1)  # a task in this process sets its own
    rows = run.read_table("prompts")
    assert sorted(rows["prompt"].unique()) == ["mine/0", "mine/1"] and rows["same"].all()
    assert bench.evaluate(methods, prompts, tiny, **settings).key == run.key
