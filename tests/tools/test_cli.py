"""The command line: instant help, one sentence for bad input, and the library's own results."""

import contextlib
import json
import signal
import subprocess
import sys

import pandas as pd
import pytest

from specdec import runs
from specdec.core.decode import decode
from specdec.core.policy import Static
from specdec.costs import profiles
from specdec.data import suites
from specdec.models import load, pairs
from specdec.parallel import PLACES, parallel
from specdec.tools import book, cli

FOURTEEN = """decode score audit evaluate record calibrate estimate doctor pairs items generate-data
train reproduce book""".split()
SMALL_RECORD = "record --pair tiny --suites toy/gsm8k --limit 2 --max-new-tokens 6 --depth 2"


def run(line: str, *more: str) -> int:
    return cli.main([*line.split(), *more])


HEAVY = {"torch", "transformers", "pandas", "numpy", "pyarrow"}
# what is refused before anything is imported, and the name that it is refused by
EARLY = {
    "decode x --pair tinny": "did you mean 'tiny'?",
    "decode x --drafter suffx": "'suffix'",
    "decode x --policy static:0,0,0": "total_tokens",
    "decode x --temperature -1": "temperature",
    "decode x --max-new-tokens 0": "max_new_tokens",
    "evaluate --methods eagle3 toy": "methods 'toy'",
    "evaluate --suites laptop/gsm9k": "'laptop/gsm8k'",
    "evaluate --on moon": "'local'",
    "record --top-ks 2 0": "top_ks",
    "score /nosuch.py": "/nosuch.py",
    "train ltd --trace nosuch": "nosuch",
    "decode": "prompt is empty",
}


def test_help_and_refusals_import_nothing_heavy_and_names_are_the_packages(tmp_path):
    code = "import sys\nfrom specdec.tools import cli\nfor line in sys.argv[1:]:\n"
    code += "    words = line.split()\n    assert cli.main(words + [''] * (len(words) == 1)) == 2\n"
    code += "try: cli.main(['--help'])\nfinally: print('imported', *sys.modules)"
    command = [sys.executable, "-c", code, *EARLY]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    text, _, imported = done.stdout.partition("imported ")
    assert done.returncode == 0, done.stderr
    for name in FOURTEEN:
        assert name in text
    assert not HEAVY & set(imported.split())
    for line, word, error in zip(EARLY, EARLY.values(), done.stderr.splitlines(), strict=True):
        assert error.startswith("specdec: ") and word in error, line
    names = cli.known_names()
    assert (names["pair"], names["drafter"]) == (pairs.names(), list(pairs.KINDS))
    gpus = cli.OPTIONS["gpu"][1]["choices"]
    assert set(names["suites"]) == {*suites.SUITES, "toy/mmlu"}
    assert set(cli.DTYPES) == {"auto", *load.DTYPES} and set(gpus) == set(profiles.GPUS)
    # folders, hub ids and a kind with its place are judged later
    for option, text in {"pair": "a/b", "drafter": "hydra:a/b", "target": str(tmp_path)}.items():
        cli.check_place(option, text, names[option])


def test_values_have_their_types_and_commands_their_own_defaults():
    assert {name.split()[0] for name in cli.COMMANDS} == set(FOURTEEN)
    parse = cli.parser().parse_args
    options = parse("record --top-ks 1 2 --family 3 8".split())
    assert (options.top_ks, options.limit, options.family) == ([1, 2], 40, [3, 8])
    options = parse("train radar --set a=1 --set b=2 c=3 --steps 7".split())
    assert options.set == ["a=1", "b=2", "c=3"] and options.steps == 7 and not options.restart
    assert (options.preset, parse(["train", "ltd"]).order) == ("ours", "6.1")
    options = parse("book run -p a 1 -p b true --only 2".split())
    assert options.p == [["a", "1"], ["b", "true"]] and options.only == ["2"]
    assert parse(["book", "run"]).p == [] and parse(["audit"]).temperature is None
    assert parse("train ppow --target t --out o".split()).preset is None
    assert parse("generate-data t --out o --tokens 2500".split()).tokens == 2500
    assert parse("generate-data t --out o".split()).tokens == 3_000_000
    for wrong in (
        "train medusa --target t",
        "generate-data t --out o --tokens many",
        "train radar --order 4",
        "book print",
    ):
        pytest.raises(SystemExit, parse, wrong.split())


def test_parameters_of_notebooks_are_numbers_constants_lists_or_text(monkeypatch):
    values = {"010": 10, "1:30": "1:30", "1e-3": 0.001, "1e3": 1000.0, "-7": -7, "": ""}
    values.update({"true": True, "False": False, "null": None, "2024-01-02": "2024-01-02"})
    values.update(
        {"@tiny": "@tiny", "[1, 2": "[1, 2", "a: b: c": "a: b: c", "laptop/gsm8k": "laptop/gsm8k"}
    )
    values["{'ours, shipped': [a/b, 08, [x, null]]}"] = {"ours, shipped": ["a/b", 8, ["x", None]]}
    for text, value in values.items():
        assert (cli.value_of(text), type(cli.value_of(text))) == (value, type(value)), text
    passed = {}

    def run_book(opened, only, parameters, **_):
        passed.update(parameters, only=only)
        return pd.DataFrame({"state": ["done"]})

    monkeypatch.setattr(book, "run", run_book)
    assert run("book run --only 02 -p x 010 -p pair a:b") == 0
    assert passed == {"x": 10, "pair": "a:b", "only": ["02"]}


REFUSED = {
    "decode x --pair tiny --target small": "--target",
    "evaluate --pair tiny --tuned --part train": "--part",
    "estimate --pair llama-3.1-8b --gpu t4": "are free; take bfloat16",
    "train radar --pair tiny": "record",
    "train radar --trace . --data .": "--trace",
}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_is_one_sentence(line, home, capsys):
    assert run(line) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("specdec: ") and REFUSED[line] in error


def test_no_notebook_begins_after_an_interrupt_that_a_library_swallowed(monkeypatch, capsys):
    begun = []

    def notebook():
        begun.append(len(begun))
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    def run_book(*_, **settings):
        parallel([notebook])
        parallel([notebook])

    usual = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(book, "run", run_book)
    assert run("book run --only 02") == 130 and begun == [0]
    assert "specdec: stopped" in capsys.readouterr().err
    assert parallel([lambda: 5]) == [5] and signal.getsignal(signal.SIGINT) is usual


def test_decode_prints_what_the_library_decodes(tiny, capsys):
    line = "decode --pair tiny --dtype float32 --max-new-tokens 6 --policy"
    assert run(line, "static:8,3,2", "Add 2 and 3.") == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == decode(tiny, "Add 2 and 3.", Static(8, 3, 2), 6).text.strip()
    assert "tau" in printed.err
    assert run(line, "autoregressive", "Add 2 and 3.") == 0
    assert "tau" not in capsys.readouterr().err


def test_pairs_audit_and_estimate(capsys):
    assert run("pairs") == 0 and "tiny" in capsys.readouterr().out
    suite = "--pair tiny --dtype float32 --suites toy/gsm8k --limit 1"
    assert run(f"audit {suite} --max-new-tokens 4 --temperature 0") == 0
    assert "policies" in capsys.readouterr().out
    assert run(f"estimate {suite}") == 0
    assert "1 turns take up to" in capsys.readouterr().err


def test_a_recording_is_found_by_other_commands(home, capsys):
    assert run(f"{SMALL_RECORD} --top-ks 1 2 --trees --estimate") == 0
    assert not runs.find("record")
    assert run(f"{SMALL_RECORD} --top-ks 1 2 --trees") == 0
    pointer = json.loads((runs.recorded("tiny") / "recording.json").read_text())
    assert (home / pointer["folder"]).is_dir()
    assert cli.find_recording(None, "tiny").header["key"] == pointer["key"]


def test_names_of_pairs():
    assert cli.Models().name == "small"
    models = cli.Models("tiny", drafter="suffix")
    assert (models.name, models.base) == ("tiny+suffix", "tiny")
    elsewhere = cli.Models(target="here/mine", drafter="hydra:there/second")
    assert elsewhere.name == "mine+hydra+second"
    assert cli.Models(target="mine", drafter="mine").name == "mine"


def test_names_that_are_checked_first_are_those_of_the_package():
    names = cli.known_names()
    assert set(names["drafter"]) == set(pairs.KINDS)
    assert set(names["pair"]) == {*pairs.SHIPPED, *pairs.PRESETS}
    assert names["on"] == PLACES
