"""Run directories: keys, atomic files, provenance, and what survives a kill, a full disk or a read-only folder."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from fakes.children import child, ended

from specdec import machine, runs
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError

Settings = dataclasses.make_dataclass(
    "Settings", [("seed", int, 0), ("limit", int, 4)], frozen=True
)
ROWS = pd.DataFrame({"prompt": ["a", "b"], "new_tok": [3, 5], "wall_s": [0.25, 0.5]})


def test_home_follows_the_variable_and_settings_come_by_name_or_as_one_object(home):
    assert runs.home() == home.resolve()
    for scale in ("laptop", "paper"):
        assert runs.runs_dir(scale) == home.resolve() / "runs" / scale
        assert (
            runs.figure_path("ltd", "fig3", scale)
            == runs.runs_dir(scale) / "figures" / "ltd" / "fig3"
        )
    pytest.raises(SpecdecError, runs.runs_dir, "labtop").match("laptop")
    for bad in ("../secrets", "a/b", "", ".hidden", "a b"):
        pytest.raises(SpecdecError, runs.figure_path, "ltd", bad, "laptop").match(
            "cannot name a file"
        )
        pytest.raises(SpecdecError, runs.start, bad, {}).match("cannot name a file")
    assert runs.configured(None, Settings, {}) == Settings()
    assert runs.configured(Settings(limit=2), Settings, {"seed": 1}) == Settings(1, 2)
    with pytest.raises(SpecdecError, match="unknown setting 'sede'; did you mean 'seed'"):
        runs.configured(None, Settings, {"sede": 1})
    pytest.raises(SpecdecError, runs.configured, 3, Settings, {}).match("as one Settings")
    pytest.raises(SpecdecError, runs.configured, Settings(limit="x"), Settings, {}).match("limit")


def test_the_same_content_finds_the_same_key_and_directory(home, monkeypatch):
    assert runs.content_key(a=1, b=[1, 2]) == runs.content_key(b=(1, 2), a=np.int64(1))
    assert runs.content_key(a=1) != runs.content_key(a=2)
    assert runs.content_key(a=1) != runs.content_key(b=1)
    assert runs.content_key(a="1") != runs.content_key(a=1)
    assert runs.content_key(tree=TreeConfig()) == runs.content_key(tree=TreeConfig(60, 7, 10))
    assert runs.content_key(tree=TreeConfig()) != runs.content_key(tree=TreeConfig(60, 5, 10))
    assert runs.content_key(names={"b", "a"}) == runs.content_key(names={"a", "b"})
    one, two = (dataclasses.make_dataclass(name, [("k", int)])(1) for name in ("One", "Two"))
    assert runs.content_key(x=one) != runs.content_key(x=two), "classes with equal fields"
    code = "from specdec import runs; print(runs.content_key(a=1.5, names={'x', 'y'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == runs.content_key(a=1.5, names={"x", "y"}), "another process"
    pytest.raises(SpecdecError, runs.content_key, f=full_disk).match("function cannot be recorded")
    first = runs.start("evaluate", {"seed": 0, "tree": TreeConfig()})
    again = runs.start("evaluate", {"seed": 0, "tree": TreeConfig()})
    other = runs.start("evaluate", {"seed": 1, "tree": TreeConfig()})
    assert first == again and first.directory != other.directory
    record = again.record()
    assert len(record["sessions"]) == 2
    tree = {
        "class": "TreeConfig",
        "total_tokens": 60,
        "depth": 7,
        "top_k": 10,
        "flat_nodes": 0,
        "beam": [],
    }
    assert record["config"] == {"seed": 0, "tree": tree}
    before = runs.start("evaluate", {"seed": 0})
    free = runs.start("train", {"seed": 0}, tie_to_code=False)
    monkeypatch.setattr(machine, "code_hash", lambda: "another source")
    assert runs.start("evaluate", {"seed": 0}).directory != before.directory
    assert runs.start("train", {"seed": 0}, tie_to_code=False).directory == free.directory
    monkeypatch.setattr(machine, "hardware", lambda: {"cpu": "another"})
    assert runs.start("train", {"seed": 0}, tie_to_code=False).directory != free.directory


def test_records_and_shards_say_where_a_result_comes_from_and_damaged_files_are_named(home):
    import torch

    session = runs.start("evaluate", {"seed": 7}).record()["sessions"][-1]
    assert torch.__version__.startswith(
        session["versions"]["torch"]
    )  # which may leave out the build: 2.13.0+cpu
    assert session["threads"] == torch.get_num_threads()
    assert session["cores"] >= 1 and session["cpu"]
    assert set(session["cpu_flags"]) <= set(machine.CPU_FLAGS)
    assert {"commit", "dirty", "gpu", "python", "started", "code"} <= set(session)
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=machine.checkout(), capture_output=True, text=True
    )
    assert session["commit"] == (done.stdout.strip() if done.returncode == 0 else None)
    run = runs.start("evaluate", {"seed": 0})
    path = run.write_table("prompts", ROWS)
    pd.testing.assert_frame_equal(run.read_table("prompts"), ROWS)
    assert json.loads(pq.read_schema(path).metadata[b"specdec"]) == run.label()
    run = runs.start("evaluate", {})
    shards = run.shards("prompts")
    pytest.raises(SpecdecError, shards.merge).match("no rows yet")
    for number in (12, 3, 100):
        shards.write(number, pd.DataFrame({"number": [number]}))
    assert shards.done() == [3, 12, 100]
    assert shards.merge()["number"].tolist() == [3, 12, 100]
    assert run.read_table("prompts")["number"].tolist() == [3, 12, 100]
    shards.drop(12)
    assert shards.done() == [3] and shards.read()["number"].tolist() == [3]
    run = runs.start("evaluate", {"seed": 1})
    pytest.raises(SpecdecError, run.read_table, "prompts").match(
        "there is no file .*prompts.parquet"
    )
    run.write_table("prompts", ROWS).write_bytes(b"PAR1 and then nothing")
    with pytest.raises(
        SpecdecError, match="prompts.parquet cannot be read.*delete it and run again"
    ):
        run.read_table("prompts")
    run.path("run.json").write_text("{")
    pytest.raises(SpecdecError, runs.start, "evaluate", {"seed": 1}).match(
        "run.json cannot be read"
    )


def test_find_lists_finished_runs_newest_first(home, monkeypatch):
    times = iter(f"2026-01-01T00:00:0{second}+00:00" for second in range(9))
    monkeypatch.setattr(runs, "_now", lambda: next(times))
    old, new, unfinished = (runs.start("evaluate", {"seed": seed}) for seed in range(3))
    runs.start("evaluate-other", {}).finish()
    old.finish()
    new.finish(tau=3.5)
    assert [one for one in runs.find("evaluate") if one.directory.is_relative_to(home)] == [
        new,
        old,
    ]
    assert new.record()["results"] == {"tau": 3.5}
    states = repr(unfinished), repr(new)
    names = [run.directory.name for run in (unfinished, new)]
    assert states == (
        f"run {names[0]} (laptop): not finished",
        f"run {names[1]} (laptop): finished, tau 3.5",
    )


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def denied(*_, **__):
    raise PermissionError(errno.EACCES, "denied")


@pytest.mark.parametrize("step", ["write_table", "fsync"])
def test_full_disk_keeps_what_was_there(home, monkeypatch, step):
    run = runs.start("evaluate", {})
    run.write_table("prompts", ROWS)
    with monkeypatch.context() as broken:
        broken.setattr(pq if step == "write_table" else os, step, full_disk)
        with pytest.raises(
            SpecdecError, match="cannot write .*No space left on device; free the disk"
        ):
            run.write_table("prompts", ROWS.iloc[:1])
    pd.testing.assert_frame_equal(run.read_table("prompts"), ROWS)
    assert not list(run.directory.glob(".*"))


def test_a_read_only_home_and_what_the_clean_up_meets_do_not_hide_what_went_wrong(
    home, monkeypatch
):
    with monkeypatch.context() as broken:
        broken.setattr(Path, "mkdir", denied)  # planted, since root may write anywhere
        pytest.raises(SpecdecError, runs.start, "evaluate", {}).match("denied.*set SPECDEC_HOME")
    (home / "runs").write_text("a file where a folder should be")
    pytest.raises(SpecdecError, runs.start, "evaluate", {}).match("cannot write")
    monkeypatch.setattr(Path, "unlink", denied)
    with pytest.raises(SpecdecError, match="No space left on device"):
        with runs.atomic(home / "file") as temporary, open("/dev/full", "w") as full:
            temporary.write_text("half")
            full.write("x")


def test_leftovers_of_a_killed_process_are_swept_and_no_session_is_lost(home):
    run = runs.start("evaluate", {})
    old, young = run.path(".old.parquet.1.tmp"), run.path(".young.parquet.2.tmp")
    for path in (old, young):
        path.write_text("half a file")
    os.utime(old, (0, 0))
    runs.start("evaluate", {})
    assert not old.exists() and young.exists()
    processes = [child(start_often, number) for number in range(3)]
    assert [ended(process) for process in processes] == [0, 0, 0]
    record = runs.find("shared")[0].record()
    assert len(record["sessions"]) == 12 and record["finished"]


def collect(by: str, pause_s: float, resumed: Path) -> None:
    """Forty shards, of which those are written that are not there yet; how many were is noted."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell may have told its jobs to ignore Ctrl-C
    run = runs.start("collect", {"seed": 0})
    shards = run.shards("prompts")
    resumed.write_text(str(len(shards.done())))
    for number in range(40):
        if number not in shards.done():
            shards.write(number, pd.DataFrame({"number": [number] * 1000, "by": by}))
            time.sleep(pause_s)
    run.finish(rows=len(shards.merge()))


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_run_continues(home, stop):
    first = child(collect, "first", 0.01, home / "first")
    deadline = time.time() + 60
    while time.time() < deadline and len(list(home.rglob("part-*.parquet"))) < 5:
        time.sleep(0.005)
    os.kill(first, stop)
    assert ended(first) != 0
    kept = len(list(home.rglob("part-*.parquet")))
    assert 5 <= kept < 40
    assert runs.find("collect") == []
    assert ended(child(collect, "second", 0, home / "second")) == 0
    assert (home / "second").read_text() == str(kept)
    rows = runs.find("collect")[0].read_table("prompts")
    assert rows["number"].tolist() == [number for number in range(40) for _ in range(1000)]
    assert (rows["by"] == "first").sum() == kept * 1000


@pytest.mark.parametrize("library", ["safetensors", "torch", "parquet", "text"])
def test_a_disk_that_is_full_for_a_library(home, library):
    import resource

    import torch
    from safetensors.numpy import save_file

    numbers = np.random.default_rng(0).random(100_000)

    def write():
        if library == "parquet":
            return runs.write_table(home / "file", pd.DataFrame({"a": numbers}))
        with runs.atomic(home / "file") as temporary:
            if library == "safetensors":
                save_file({"a": numbers}, temporary)
            elif library == "torch":
                torch.save(torch.from_numpy(numbers), temporary)
            else:
                temporary.write_text("x" * 100_000)

    before, ignored = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        pytest.raises(SpecdecError, write).match("cannot write .*free the disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not (home / "file").exists()


def start_often(by: int) -> None:
    for _ in range(4):
        runs.start("shared", {}).finish(by=by)


def test_the_code_hash_follows_every_byte_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    module, weights = tmp_path / "module.py", tmp_path / "weights" / "model.safetensors"
    weights.parent.mkdir()
    module.write_text("one = 1\n")
    weights.write_bytes(b"a" * 64)
    hashes = [machine.code_hash()]
    assert machine.code_hash() == hashes[0]
    before = weights.stat()
    weights.write_bytes(b"b" * 64)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    hashes.append(machine.code_hash())
    module.rename(tmp_path / "renamed.py")
    hashes.append(machine.code_hash())
    weights.unlink()
    hashes.append(machine.code_hash())
    assert len(set(hashes)) == 4
