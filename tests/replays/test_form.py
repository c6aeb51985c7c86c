"""The form of a recording: what records writes has it, the checker sees what does not, and lengths alone make a recording."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import specdec
from specdec import runs
from specdec.errors import SpecdecError
from specdec.models import ngrams
from specdec.replays import form, record
from specdec.replays.columns import Column, read_columns, write_columns
from specdec.replays.form import check_recording, trace_of
from specdec.replays.trace import NEVER, TURNS, open_trace, save_trace
from specdec.tools import cli

BEFORE = Path(__file__).parent / "recorded_before"
CHAIN = pd.DataFrame([{"suite": "s", "prompt": "s/0", "turn": 0, "part": "test", "prompt_tok": 10}])


@pytest.fixture
def folder(tmp_path):
    """A copy of a recording without checksums, so that its content may be spoiled."""
    shutil.copytree(BEFORE, tmp_path / "recording")
    edit(tmp_path / "recording", lambda header: [header.pop("checksum", None), header.pop("files", None)])
    return tmp_path / "recording"


def edit(folder, change):
    header = json.loads((folder / "trace.json").read_text())
    change(header)
    (folder / "trace.json").write_text(json.dumps(header))


def edit_turns(folder, **columns):
    path = folder / "turns.parquet"
    runs.write_table(path, pd.read_parquet(path).assign(**columns))


def edit_column(folder, column, change, table="positions"):
    for path in sorted((folder / table).glob("*.parquet")):
        columns = read_columns(path)
        columns[column] = change(columns[column].copy())
        write_columns(path, columns)


def put(place, value):
    def change(array):
        array[place] = value
        return array

    return change


FAULTS = {
    "another schema": (lambda at: edit(at, lambda header: header.update(schema=2)), "written with schema 2"),
    "no file": (lambda at: next((at / "positions").iterdir()).unlink(), "there is no file"),
    "no column of turns": (lambda at: runs.write_table(at / "turns.parquet", pd.DataFrame({"suite": ["x"]})), "has no column"),
    "part": (lambda at: edit_turns(at, part="exam"), "'exam' is no part; the parts are train, tune, test"),
    "type of turns": (lambda at: edit_turns(at, turn=0.5), "turn holds float64, not integer"),
    "kept": (lambda at: edit_turns(at, kept_tok=9), "positions is 5 in row 0 and must be 8"),
    "first": (lambda at: edit_turns(at, first=0), "first is 0 in row 1 and must be 5"),
    "rows": (lambda at: edit_turns(at, positions=4, kept_tok=5, first=[0, 4]), "holds 10 rows of context_tok for 8"),
    "unlisted": (lambda at: edit(at, lambda header: header.update(top_ks=[2, 3, 4])), "promises the column ranks_4"),
    "unknown": (lambda at: edit(at, lambda h: h["columns"]["trees"].append({"kind": "mood"})), "mood"),
    "type": (lambda at: edit_column(at, Column("ranks", 2), lambda array: array.astype(np.int32)), "ranks_2 holds int32"),
    "shape": (lambda at: edit(at, lambda header: header.update(depth=4)), r"must hold int16 \[D\+1, D\+1\] with D = 4"),
    "context": (lambda at: edit_column(at, Column("context_tok"), put(1, 3)), "context_tok, row 1"),
    "order": (lambda at: edit_column(at, Column("ranks", 2), put((3, -1), [5, 4, 3, 2])), "ranks of k = 2, row 3"),
    "beyond": (lambda at: edit_column(at, Column("ranks", 3), put((0, 0), [0, 1, NEVER, NEVER])), "ranks of k = 3, row 0"),
    "root": (lambda at: edit_column(at, Column("root_rank"), lambda array: (array + 1) % 2), "ranks of k = 2, row "),
    "scores": (lambda at: edit_column(at, Column("scores", 3), lambda array: array[:, ::-1], "trees"), "ranks of k = 3, row "),
    "text": (lambda at: edit_column(at, Column("text"), lambda array: array + 1), "ranks of k = 3, row "),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_a_sentence(folder, fault, capsys):
    assert check_recording(folder)[1] == []
    spoil, sentence = FAULTS[fault]
    spoil(folder)
    faults = check_recording(folder)[1]
    assert any(re.search(sentence, one) for one in faults) and all(one.endswith(".") for one in faults), faults
    assert cli.main(["check-recording", str(folder)]) == 1
    assert capsys.readouterr().out.splitlines() == faults


def test_changed_and_missing_recordings_are_named(tmp_path):
    shutil.copytree(BEFORE, tmp_path / "recording")
    edit_column(tmp_path / "recording", Column("context_tok"), put(0, 1))
    assert "its sha256 is another" in check_recording(tmp_path / "recording")[1][0]
    none, faults = check_recording(tmp_path)
    assert none is None and "no finished recording" in faults[0]


@pytest.mark.parametrize("drafter", ["", "suffix", "hybrid"])
def test_the_form_lists_every_column_that_is_recorded(drafter, capsys):
    chosen = {"drafter": drafter} if drafter else {}
    pair, family = specdec.load_pair("tiny", dtype="float32", **chosen), {} if drafter else {"family": (3, 2)}
    levels = ngrams.NgramConfig().levels
    options = dict(depth=levels, top_ks=(1, 10), trees=(3,), max_new_tokens=8, progress=False, name="form", **family)
    trace = record.record(pair, {"mine": ["one two three one two"]}, **options)
    listed = form.form("column")
    for table, columns in trace.header["columns"].items():
        assert {column["kind"] for column in columns} <= set(listed.index[listed["table"] == table])
    place = next(run.directory for run in runs.find("form") if run.key == trace.header["key"])
    assert check_recording(place)[1] == [] and sorted(form.form("of a turn").index) == sorted(TURNS)
    assert cli.main(["check-recording", str(place)]) == 0 and "context_tok" in capsys.readouterr().out


def test_lengths_alone_make_a_recording_as_the_form_says(tmp_path):
    example = (Path(form.__file__).parent / "FORMAT.md").read_text().split("```python")[1].split("```")[0]
    exec(example.replace("runs/mine", str(tmp_path / "mine")), {"np": np, "pd": pd})
    trace, faults = check_recording(tmp_path / "mine")
    assert faults == [] and (trace.top_ks, trace.depth) == ((1,), 2)
    accepted = [trace.accepted_tok(np.arange(6), 1, n, n + 1).tolist() for n in range(3)]
    assert accepted == [[1, 0, 1, 1, 1, 0], [2, 0, 2, 2, 1, 0], [2, 0, 3, 2, 1, 0]]
    short = save_trace(trace_of(CHAIN, [np.array([1, 2])], "p"), tmp_path / "short")
    assert check_recording(short)[1] == [] and open_trace(short).depth == 1
    with pytest.raises(SpecdecError, match="one token at least"):
        trace_of(CHAIN, [np.array([1, 0])], "p")
