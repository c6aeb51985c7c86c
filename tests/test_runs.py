"""Run directories: keys, atomic files, provenance, and what survives a kill or a full disk."""

import dataclasses
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from fakes.children import child, ended
from fakes.refusals import refusal
from safetensors.numpy import save_file

from specdec import machine, runs
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError

ROWS = pd.DataFrame({"prompt": ["a", "b"], "new_tok": [3, 5], "wall_s": [0.25, 0.5]})


@dataclasses.dataclass(frozen=True)
class Settings:
    seed: int = 0
    limit: int = 4
    names: tuple = dataclasses.field(default_factory=lambda: ("a",))


def test_settings_come_by_name_or_as_one_object():
    assert runs.configured(None, Settings, {}) == Settings()
    assert runs.configured(Settings(limit=2), Settings, {"seed": 1}) == Settings(1, 2)
    assert "did you mean 'seed'" in refusal(runs.configured, None, Settings, {"sede": 1})
    assert "Settings" in refusal(runs.configured, 3, Settings, {})
    assert "limit" in refusal(runs.configured, None, Settings, {"limit": "x"})


def test_home_follows_the_variable_and_names_are_safe(home):
    assert runs.home() == home.resolve()
    folder = home.resolve() / "runs" / "paper"
    assert runs.figure_path("ltd", "fig3", "paper") == folder / "figures" / "ltd" / "fig3"
    assert "laptop" in refusal(runs.runs_dir, "labtop")
    for name in ("../secrets", "a/b", "", ".hidden", "a b"):
        assert "cannot name a file" in refusal(runs.start, name, {})


def test_the_same_content_finds_the_same_key_and_directory(home, monkeypatch):
    assert runs.content_key(a=1, b=[1, 2]) == runs.content_key(b=(1, 2), a=np.int64(1))
    keys = [runs.content_key(**one) for one in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"})]
    assert len(set(keys)) == 4
    assert runs.content_key(tree=TreeConfig()) == runs.content_key(tree=TreeConfig(60, 7, 10))
    assert runs.content_key(tree=TreeConfig()) != runs.content_key(tree=TreeConfig(60, 5, 10))
    one, two = (dataclasses.make_dataclass(name, [("k", int)])(1) for name in ("One", "Two"))
    assert runs.content_key(x=one) != runs.content_key(x=two), "classes with equal fields"
    code = "from specdec import runs; print(runs.content_key(a=1.5, names={'x', 'y'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == runs.content_key(a=1.5, names={"x", "y"}), "another process"
    first = runs.start("evaluate", {"seed": 0})
    again = runs.start("evaluate", {"seed": 0})
    assert first == again and len(again.record()["sessions"]) == 2
    assert first.directory != runs.start("evaluate", {"seed": 1}).directory
    free = runs.start("train", {"seed": 0}, tie_to_code=False)
    monkeypatch.setattr(machine, "code_hash", lambda: "another source")
    assert runs.start("evaluate", {"seed": 0}).directory != first.directory
    assert runs.start("train", {"seed": 0}, tie_to_code=False).directory == free.directory
    monkeypatch.setattr(machine, "hardware", lambda: {"cpu": "another"})
    assert runs.start("train", {"seed": 0}, tie_to_code=False).directory != free.directory


def test_a_run_holds_its_provenance_and_its_rows(home):
    run = runs.start("evaluate", {"seed": 7})
    session = run.record()["sessions"][-1]
    # a build such as +cpu may be left out
    assert torch.__version__.startswith(session["versions"]["torch"])
    assert session["threads"] == torch.get_num_threads() and session["cores"] >= 1
    assert {"commit", "dirty", "gpu", "python", "started", "code"} <= set(session)
    path = run.write_table("prompts", ROWS)
    pd.testing.assert_frame_equal(run.read_table("prompts"), ROWS)
    path.write_bytes(b"PAR1 and then nothing")
    assert "prompts.parquet cannot be read" in refusal(run.read_table, "prompts")
    run.path("run.json").write_text("{")
    assert "run.json cannot be read" in refusal(runs.start, "evaluate", {"seed": 7})


def test_shards_are_kept_apart_and_merged_in_order(home):
    run = runs.start("evaluate", {})
    shards = run.shards("prompts")
    assert "no rows yet" in refusal(shards.merge)
    for number in (12, 3, 100):
        shards.write(number, pd.DataFrame({"number": [number]}))
    assert shards.done() == [3, 12, 100]
    assert shards.merge()["number"].tolist() == [3, 12, 100]
    assert run.read_table("prompts")["number"].tolist() == [3, 12, 100]


def test_find_lists_finished_runs_newest_first(home, monkeypatch):
    times = iter(f"2026-01-01T00:00:0{second}+00:00" for second in range(9))
    monkeypatch.setattr(runs, "_now", lambda: next(times))
    old, new, _ = (runs.start("evaluate", {"seed": seed}) for seed in range(3))
    runs.start("evaluate-other", {}).finish()
    old.finish()
    new.finish(tau=3.5)
    ours = [run for run in runs.find("evaluate") if run.directory.is_relative_to(home)]
    assert ours == [new, old]
    assert new.record()["results"] == {"tau": 3.5}


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("step", ["write_table", "fsync"])
def test_full_disk_keeps_what_was_written(home, monkeypatch, step):
    run = runs.start("evaluate", {})
    run.write_table("prompts", ROWS)
    with monkeypatch.context() as broken:
        broken.setattr(pq if step == "write_table" else os, step, full_disk)
        assert "free the disk" in refusal(run.write_table, "prompts", ROWS.iloc[:1])
    pd.testing.assert_frame_equal(run.read_table("prompts"), ROWS)
    assert not list(run.directory.glob(".*"))


@pytest.mark.parametrize("library", ["safetensors", "torch", "parquet", "text"])
def test_a_disk_that_is_full_for_a_library(home, library):
    numbers = np.random.default_rng(0).random(100_000)
    writers = {
        "safetensors": lambda file: save_file({"a": numbers}, file),
        "torch": lambda file: torch.save(torch.from_numpy(numbers), file),
        "parquet": lambda file: pd.DataFrame({"a": numbers}).to_parquet(file),
        "text": lambda file: file.write_text("x" * 100_000),
    }
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(SpecdecError, match="free the disk"):
            with runs.atomic(home / "file") as temporary:
                writers[library](temporary)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not (home / "file").exists()


def test_a_folder_is_replaced_in_one_step(tmp_path):
    place = tmp_path / "folder"
    for name in ("a", "b"):
        with runs.atomic(place, folder=True) as fresh:
            (fresh / name).write_text(name)
        assert [path.read_text() for path in place.iterdir()] == [name]
    with pytest.raises(KeyError):
        with runs.atomic(place, folder=True) as fresh:
            (fresh / "c").write_text("half a folder")
            raise KeyError
    assert [path.name for path in place.iterdir()] == ["b"] and not list(tmp_path.glob(".*"))


def start_often(number: int) -> None:
    for _ in range(4):
        runs.start("shared", {}).finish(number=number)


def test_no_session_is_lost(home):
    processes = [child(start_often, number) for number in range(3)]
    assert [ended(process) for process in processes] == [0, 0, 0]
    record = runs.find("shared")[0].record()
    assert len(record["sessions"]) == 12 and record["finished"]


def collect(by: str, pause_s: float, resumed: Path) -> None:
    """Forty shards, of which those are written that are missing."""
    # a shell may have told its jobs to ignore Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    written = len(list(home.rglob("part-*.parquet")))
    assert 5 <= written < 40 and runs.find("collect") == []
    assert ended(child(collect, "second", 0, home / "second")) == 0
    assert (home / "second").read_text() == str(written)
    rows = runs.find("collect")[0].read_table("prompts")
    assert rows["number"].tolist() == [number for number in range(40) for _ in range(1000)]
    assert (rows["by"] == "first").sum() == written * 1000


def test_the_code_hash_follows_every_byte_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "machine.py"))
    module = tmp_path / "module.py"
    weights = tmp_path / "model.safetensors"
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
    assert len(set(hashes)) == 3
    # what editors and a running Python leave
    for name in (".ipynb_checkpoints/a.py", "__pycache__/a.pyc.123", ".DS_Store", "a.py~"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert machine.code_hash() == hashes[-1]


def test_one_flipped_bit_of_a_table_is_noticed(tmp_path):
    path = runs.write_table(tmp_path / "rows.parquet", ROWS)
    content = path.read_bytes()
    for at in range(0, len(content), 7):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        try:
            pd.testing.assert_frame_equal(runs.read_table(path), ROWS)
        except SpecdecError as error:
            assert "rows.parquet cannot be read" in str(error)
    # tables of earlier versions and of other programs have no digest
    ROWS.to_parquet(path)
    pd.testing.assert_frame_equal(runs.read_table(path), ROWS)


def git(folder, *words) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=b", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_that_of_the_checkout_alone(tmp_path, monkeypatch):
    inner = tmp_path / "inner"
    (inner / "specdec").mkdir(parents=True)
    (inner / "pyproject.toml").touch()
    monkeypatch.setattr(machine, "__file__", str(inner / "specdec" / "machine.py"))
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "outer")
    assert machine.commit() == {"commit": None, "dirty": None}
    git(inner, "init", "-q")
    git(inner, "add", ".")
    git(inner, "commit", "-q", "-m", "inner")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    head = (inner / ".git" / "HEAD").read_text().split()[1]
    expected = (inner / ".git" / head).read_text().strip()
    assert machine.commit() == {"commit": expected, "dirty": False}


def test_packages_of_the_user_do_not_hide_those_beside_the_notebooks(tmp_path):
    for name in ("workbook", "experiments"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    code = "from specdec import runs; print(runs.workbook_module('diagrams', 'experiments'))"
    for before, expected in (("", "notebooks"), ("import workbook; ", "of yours is")):
        command = [sys.executable, "-c", before + code]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert expected in done.stdout + done.stderr
