"""The command line: instant help, one sentence for whatever is wrong, and the same results as the library."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

import specdec
from specdec import runs
from specdec.core.decode import decode
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.data import suites
from specdec.errors import SpecdecError
from specdec.evaluation import bench, lossless, tuning
from specdec.models.load import load_pair, shipped_folder
from specdec.tools import cli, doctor, estimate, places
from specdec.training.drafter import chats, eagle3, presets
from specdec.training.drafter.ppow import Ppow
from specdec.training.drafter.presets import CacheConfig

from workbook import book, items, toy_pretrain

SMALL, HYDRA = (str(shipped_folder("small") / name) for name in ("drafter", "hydra"))
MEDUSA = [*"train medusa --target small --preset tiny --out nowhere --start-from".split()]


def run(*arguments: str) -> int:
    return cli.main(list(arguments))


def test_help_is_instant_and_complete():
    ended = "finally: print('imported', *sys.modules)"
    code = f"import sys\nfrom specdec.tools import cli\ntry: cli.main(['--help'])\n{ended}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    text, _, imported = done.stdout.partition("imported ")
    assert done.returncode == 0 and all(name in text for name in cli.COMMANDS)
    imported = set(imported.split())
    assert "specdec.tools.cli" in imported and not {"torch", "transformers", "pandas", "numpy"} & imported


def told(capsys, *arguments) -> str:
    """What a command that leaves with 0 prints, in one line."""
    with pytest.raises(SystemExit) as leaving:
        run(*arguments)
    assert leaving.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_is_in_four_groups_that_hold_every_command(capsys):
    text = told(capsys, "help")
    assert list(cli.GROUPS) == ["look", "measure", "train", "ship"] and all(f" {name}: " in text for name in cli.GROUPS)
    assert all(text.count(f" {name} {what}") == 1 for name, (what, *_) in cli.COMMANDS.items())
    assert told(capsys, "--version") == f"specdec {specdec.__version__}"


def parsers(of, name=()):
    """Every command and its parser, those of `book` and `train` as well."""
    for action in of._actions:
        for sub, parser in (action.choices or {}).items() if action.nargs == argparse.PARSER else ():
            yield (*name, sub), parser
            yield from parsers(parser, (*name, sub))


def test_every_command_is_said_and_every_option_has_a_word_and_a_default(capsys):
    everything = dict(parsers(cli.parser()))
    assert len(everything) == len(cli.COMMANDS) + len(cli.BOOK) + len(cli.TRAININGS)
    for name, parser in everything.items():
        assert parser.description in told(capsys, "help", *name) == told(capsys, *name, "--help")
        assert len(name) == 1 or parser.description in told(capsys, "help", name[0])
        for option in parser._actions:
            said = option.help if option.nargs == argparse.PARSER else parser._get_formatter()._expand_help(option)
            mute = option.nargs in (0, argparse.PARSER) or not option.option_strings
            silent = mute or option.help == argparse.SUPPRESS
            assert option.nargs == argparse.PARSER or len(said) > 5, (name, option)
            assert silent or re.search(r"\(.*default.*\)|\(required\)$", said), (name, said)
    assert all(f"({options})" in told(capsys, "help", "book") for _, _, options, *_ in cli.BOOK.values())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["decode", "Hello", "--pair", "tinny"], "unknown preset 'tinny'; did you mean 'tiny'"),
        (["decode", "Hello", "--pair", "tiny", "--policy", "static:1"], "write static:total_tokens,depth,top_k"),
        (["decode", "Hello", "--pair", "tiny", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["decode", "Hello", "--pair", "tiny", "--temperature", "nan"], "temperature must be a finite number"),
        (["evaluate", "--pair", "tiny", "--suites", "gsm9k"], "unknown suite 'gsm9k'"),
        (["evaluate", "--pair", "tiny", "--methods", "eagle9"], "unknown method 'eagle9'"),
        (["evaluate", "--pair", "tiny", "--limit", "-1"], "--limit must be at least 0"),
        (["evaluate", "--pair", "tiny", "--suites", "gsm8k", "--folder", "nowhere"], "needs the file gsm8k.jsonl"),
        (["estimate", "--pair", "tiny", "--repeats", "0"], "--repeats must be at least 1"),
        (["doctor", "--rounds", "0"], "--rounds must be at least 1"),
        (["train", "target", "--preset", "huge", "--out", "nowhere"], "unknown target preset 'huge'"),
        (["train", "eagle3", "--target", "nowhere", "--data", "nowhere.jsonl", "--out", "nowhere"], "nowhere.jsonl"),
        ([*MEDUSA, HYDRA], "of kind 'hydra'"),
        ([*MEDUSA, "nowhere"], "there is no drafter"),
        # places: whose target, drafter, policy, recording and prices
        (["decode", "Hello", "--pair", "tiny", "--target", "nowhere"], "give --pair (a preset) or --target"),
        (["decode", "Hello", "--target", "nobody/nothing"], "or give a local folder"),
        (["decode", "Hello", "--pair", "tiny", "--drafter", "nobody/nothing"], "cannot be fetched from the hub"),
        (["decode", "Hello", "--drafter", SMALL], "does not name its target"),
        (["decode", "Hello", "--target", "tiny", "--policy", "static:4,2,1"], "has no drafter"),
        (["decode", "Hello", "--pair", "tiny", "--policy", "no/where"], "there is no policy no/where"),
        (["decode", "Hello", "--pair", "tiny", "--policy", "."], "holds no policy.json and no rounds of LTD"),
        (["decode", "Hello", "--pair", "tiny", "--policy", "small/ours-float32"], "but the pair gives 128"),
        (["train", "ours", "--pair", "tiny"], "nothing was recorded with tiny yet; run `specdec record`"),
        (["train", "ours", "--trace", "nowhere"], "there is no finished recording in nowhere"),
        (["estimate", "--pair", "tiny", "--gpu", "a1000"], "unknown GPU 'a1000'; did you mean 'a100'"),
        (["export", "vllm", "--pair", "tiny", "--tree", "16,4,4", "--out", "nowhere"], "vllm drafts chains"),
        (["export", "llama.cpp", "--pair", "tiny", "--tree", "5,3,1", "--out", "nowhere"], "file with --gguf"),
        (["export", "vllm", "--pair", "llama-3.1-8b", "--out", "nowhere"], "no EAGLE-3 drafter to export"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(arguments, sentence, home, capsys):
    assert run(*arguments) == 2
    told = capsys.readouterr()
    line = told.err.strip().splitlines()[-1]
    assert line.startswith("specdec: ") and sentence in line
    assert "Traceback" not in told.err and told.out == ""


@pytest.mark.parametrize("arguments", [["--debug", "decode"], ["decode", "--debug"]])
def test_debug_shows_where(arguments):
    pytest.raises(SpecdecError, run, *arguments, "Hello", "--pair", "tinny").match("tinny")


@pytest.mark.parametrize(("state", "status"), [(doctor.NOTE, 0), (doctor.FAULT, 1)])
def test_doctor_prints_both_tables_and_fails_with_a_fault(state, status, monkeypatch, capsys):
    asked = []
    checks = pd.DataFrame({"fact": ["load"], "value": ["9.0"], "state": [state], "hint": ["busy"]})
    monkeypatch.setattr(doctor, "facts", dict)
    monkeypatch.setattr(doctor, "checks", lambda facts: checks)
    times = pd.DataFrame({"pair": ["small"], "speed": [1.5]})
    monkeypatch.setattr(doctor, "benchmark", lambda dtypes, **options: asked.append((dtypes, options)) or times)
    assert run("doctor", "--dtype", "bfloat16") == run("doctor", "--bench", "--rounds", "2", "--cpu-time") == status
    printed = capsys.readouterr().out
    assert printed.count("| load   | 9.0     |") == printed.count("| small  | 1.50    |") == 2
    (few, quick), (dtypes, bench) = asked
    assert few == ("bfloat16",) and quick == {"threads": None, "cpu_time": False}
    assert dtypes == ("float32", "bfloat16") and bench["reference"] and bench["rounds"] == 2 and bench["cpu_time"]


def test_a_policy_of_another_pair_is_told():
    """The text stays right, so it is a warning, and on the command line one sentence without a line of code."""
    with pytest.warns(UserWarning, match="this DepthPolicy was trained for pair 'smollm2' and runs with 'tiny'"):
        assert run("decode", "Hello", "--pair", "tiny", "--policy", "smollm2/ltd-float32", "--max-new-tokens", "4") == 0
    assert cli._as_sentence("so it is", UserWarning, "cli.py", 1) == "specdec: so it is\n"


def test_target_and_drafter_are_found_by_folder(tmp_path, home, capsys):
    """A preset's two folders, named apart, are the preset; prices and policies go where the next command looks."""

    parts = ["--target", str(shipped_folder("tiny") / "target"), "--drafter", str(shipped_folder("tiny") / "drafter")]
    options = ["--policy", "static:8,3,2", "--max-new-tokens", "8", "--dtype", "float32"]
    said = []
    for pair in (["--pair", "tiny"], parts, ["--pair", "tiny", "--drafter", "suffix"]):
        assert run("decode", "Hello", *pair, *options) == 0
        said.append(capsys.readouterr().out)
    assert said[0] and said[0] == said[1] == said[2]
    assert places.name_of(parts[1]) == "tiny" and places.name_of("org/Model-7B") == "Model-7B"
    for typed, name in (
        (["--pair", "tiny"], "tiny"),
        (parts, "tiny"),
        (["--pair", "tiny", "--drafter", "suffix"], "tiny+suffix"),
        (["--pair", "tiny", "--drafter", "eagle3"], "tiny"),
        (["--target", "org/Model-7B", "--drafter", "you/Head"], "Model-7B+Head"),
        (["--target", "org/Model-7B", "--drafter", "hybrid:you/Head"], "Model-7B+hybrid+Head"),
        ([], "small"),
    ):
        args = cli.parser().parse_args(["calibrate", *typed])
        assert places.which(args.pair, args.target, args.drafter).name == name
    assert places.name_of("a/model.gguf") == "model" and runs.safe_name("..a b") == "a-b"
    assert places.costs_file("tiny", "float32") == home / "runs" / "laptop" / "recorded" / "tiny" / "costs-float32.json"
    unpriced = pytest.raises(SpecdecError, places.costs, None, "tiny", "float32")
    unpriced.match("there are no costs of tiny in float32 yet; run `specdec calibrate`")


def test_decode_prints_what_the_library_returns(capsys):
    options = ["--pair", "tiny", "--max-new-tokens", "12", "--policy", "static:8,3,2"]
    out = decode(load_pair("tiny"), [{"role": "user", "content": "Hello"}], Static(8, 3, 2), 12)
    assert run("decode", "Hello", *options) == 0
    told = capsys.readouterr()
    assert told.out.strip() == out.text.strip()
    assert f"Static(8, 3, 2): {out.new_tok} tokens, tau {out.tau:.2f} in {len(out.rows)} cycles" in told.err
    assert run("decode", "Hello", *options[:4], "--policy", "autoregressive") == 0
    plain = capsys.readouterr()
    assert plain.out == told.out and "tau" not in plain.err


def test_evaluate_estimates_measures_and_reuses(home, capsys):
    arguments = ["--pair", "tiny", "--suites", "toy/gsm8k", "toy/nq", "--limit", "1", "--max-new-tokens", "8"]
    arguments += ["--methods", "autoregressive", "static:4,2,1", "--dtype", "float32"]
    assert run("evaluate", *arguments) == 0
    told = capsys.readouterr()
    assert "tiny in float32 on cpu needs about" in told.err
    (found,) = (one for one in runs.find("evaluate") if one.directory.is_relative_to(home))
    table = bench.summary(found)
    assert len(table) == 6 and table["same_frac"].eq(1).all()
    assert told.out.count("static:4,2,1") == 3 and str(found.directory) in told.out
    assert "accuracy_frac" in told.out and table["checked"].tolist() == [1, 1, 1, 1, 2, 2]
    pieces = {path: path.stat().st_mtime_ns for path in found.path("prompts").iterdir()}
    assert run("evaluate", *arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in found.path("prompts").iterdir()} == pieces


def test_without_suites_a_command_takes_the_embedded_ones_of_its_pair():
    def named(command, pair):
        return cli._suites(SimpleNamespace(suites=None, command=command, which=SimpleNamespace(name=pair)))

    assert named(command="evaluate", pair="tiny") == [f"toy/{name}" for name in suites.DEFAULT_NAMES]
    assert named(command="audit", pair="llama-3.1-8b") == [f"laptop/{name}" for name in suites.DEFAULT_NAMES]
    assert named(command="record", pair="small") == suites.TOY and named(command="record", pair="own") == suites.LAPTOP


def test_the_tuned_tree_is_judged_on_other_prompts(home, monkeypatch, capsys):
    few = [TreeConfig(3, 1, 1), TreeConfig(4, 2, 1)]
    monkeypatch.setattr(tuning, "default_grid", lambda: few)
    options = ["--pair", "tiny", "--suites", "toy/nq", "--limit", "1", "--max-new-tokens", "4", "--tuned"]
    original = tuning.tune_static
    monkeypatch.setattr(tuning, "tune_static", lambda *a, **o: original(*a, first=1, most=2, **o))
    assert run("evaluate", *options, "--methods", "autoregressive") == 0
    assert "The fastest static tree on the tuning prompts is Static(" in capsys.readouterr().err
    judged = set(runs.find("evaluate")[0].read_table("prompts")["prompt"])
    assert judged <= {prompt.id for prompt in suites.split(suites.load_suite("toy/nq"))["test"]} and judged
    assert run("evaluate", *options, "--part", "tune") == 2


def test_estimate_prints_one_sentence_and_what_does_not_fit_is_refused_before_loading(home, monkeypatch, capsys):
    assert run("estimate", "--pair", "tiny", "--limit", "1", "--suites", "toy/nq", "--max-new-tokens", "16") == 0
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "1 turns take at most" in told
    monkeypatch.setattr(estimate, "free_memory_gib", lambda device: 4.0)
    monkeypatch.setattr(places, "load_pair", lambda *a, **o: pytest.fail("nothing may be loaded"))
    assert run("evaluate", "--pair", "llama-3.3-70b", "--device", "cpu", "--suites", "laptop/gsm8k") == 2
    assert "4.0 GiB are free" in capsys.readouterr().err


@pytest.mark.parametrize("passed", [True, False])
def test_audit_reports_and_fails(passed, home, monkeypatch, capsys):
    called, original, few = [], lossless.audit, {"tree": Static(4, 2, 1)}
    audit = lambda pair, prompts, **o: called.append(o) or original(pair, prompts, few, **o)  # noqa: E731
    monkeypatch.setattr(lossless, "audit", audit)
    monkeypatch.setattr(lossless.Audit, "passed", property(lambda self: passed))
    options = ["--pair", "tiny", "--suites", "toy/nq", "--limit", "2", "--max-new-tokens", "4", "--dtype", "float32"]
    assert run("audit", *options) == int(not passed)
    printed = capsys.readouterr().out
    assert "accepted_tok" in printed and ("Not lossless" in printed) != passed
    assert run("audit", *options, "--temperature", "0.5") == int(not passed)
    assert [one["temperatures"] for one in called] == [(0.0, 1.0), (0.5,)]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], [(["00_start_here", "30_evaluate"], {})]),
        (["--full"], [(["00_start_here"], {}), (["30_evaluate"], {"limit": 0})]),
    ],
)
def test_reproduce_runs_the_book(flags, expected, monkeypatch):
    called, states, pages = [], ["done"], []

    def record(scale, names, force, parameters, on, jobs):
        assert not force and on is None and jobs is None
        called.append((names, parameters))
        report = pd.DataFrame({"state": states})
        report.attrs["headlines"] = names
        return report

    entries = [SimpleNamespace(name=name) for name in ("00_start_here", "30_evaluate")]
    monkeypatch.setattr(book.Book, "choose", lambda self, only, everything: entries)
    monkeypatch.setattr(book, "run", record)
    monkeypatch.setattr(book, "write_page", lambda opened, headlines: pages.append(headlines))
    assert run("reproduce", *flags) == 0 and called == expected
    assert pages == [["00_start_here", "30_evaluate"]], "one page of all that ran"
    states.append("failed")
    assert run("reproduce", *flags) == 1


def test_full_names_a_parameter_of_the_notebook():
    """`reproduce --full` sets limit=0 in 30_evaluate; the notebook must have that parameter."""
    whole = book.Book()
    for entry in whole.choose(["30_evaluate"]):
        assert whole.parameters(entry, {"limit": 0})["limit"] == 0


def test_train_passes_its_options_on(monkeypatch, capsys, tmp_path):
    called = []
    monkeypatch.setattr(toy_pretrain, "train_target", lambda *a, **o: called.append((a, o)) or "there")
    monkeypatch.setattr(eagle3, "train_drafter", lambda *a, **o: called.append((a, o)) or "there")
    monkeypatch.setattr(chats, "load_conversations", lambda path: [path])
    assert run("train", "target", "--preset", "tiny", "--out", "o", "--minutes", "2", "--restart") == 0
    assert run("train", "eagle3", "--target", "t", "--out", "o", "--data", "d.jsonl", "--steps", "5") == 0
    assert called[0] == (("tiny", "o", presets.Budget(minutes=2.0)), {"resume": False})
    settings, objective = presets.PRESETS["small"]
    usual = dict(out_dir="o", settings=settings, objective=objective, budget=presets.Budget(steps=5), resume=True)
    assert called[1] == (("t", ["d.jsonl"]), usual | {"start_from": None})
    assert capsys.readouterr().out.split() == ["there", "there"]
    changes = ["--set", "passes=2", "fc_norm=each", "steps=null", "--unroll", "3", "--features-gb", "1"]
    assert run("train", "eagle3", "--target", "t", "--out", "o", "--features", "f", "--start-from", "d", *changes) == 0
    assert called[2][1]["settings"] == replace(settings, passes=2, fc_norm="each", steps=None)
    assert called[2][1]["objective"].rules == replace(objective.rules, steps=3)
    assert (called[2][1]["budget"].features, called[2][1]["start_from"]) == (CacheConfig(Path("f"), 1.0), Path("d"))
    for wrong in ("passes", "passes=two", "pases=2", "fc_norm=eech"):
        assert run("train", "eagle3", "--target", "t", "--out", "o", "--set", wrong) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "--set takes name=value" in errors[0] and "--set" in errors[1] and "did you mean 'passes'" in errors[2]
    assert "unknown fc_norm 'eech'; did you mean 'each'" in errors[3]


def test_train_ppow_goes_on_from_a_drafter_with_any_objective(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(eagle3, "train_drafter", lambda *a, **o: called.append((a, o)) or "there")
    monkeypatch.setattr(chats, "load_conversations", lambda path: [path])
    common = ("train", "ppow", "--target", "small", "--out", "o", "--set", "held_out=0")
    assert run(*common, "--fields", "beta=0.1", "reward=raw", "window=4", "--seed", "3") == 0
    wanted = called[0][1]
    assert isinstance(wanted["objective"], Ppow) and wanted["settings"].regenerate_chats == 600
    fields = ("beta", "reward", "window", "seed")
    assert [getattr(wanted["objective"], name) for name in fields] == [0.1, "raw", 4, 3]
    assert (wanted["start_from"] / "config.json").is_file() and wanted["start_from"].parent.name == "small"
    assert run(*common, "--data", "d.jsonl", "--objective", "eagle1") == 0
    assert called[1][1]["start_from"] is None and not called[1][1]["settings"].regenerate_chats
    assert run("train", "griffin", "--target", "small", "--out", "o", "--data", "d.jsonl", "--fields", "noise=0") == 0
    fresh = called[2][1]
    assert (fresh["objective"].network, fresh["objective"].noise, fresh["start_from"]) == ("griffin", 0, None)
    for wrong in (["--objective", "ppo"], ["--fields", "beta"], ["--start-from", "nowhere"]):
        assert run(*common, *wrong) == 2
    errors, said = capsys.readouterr().err.splitlines(), ("unknown objective 'ppo'", "--fields takes", "in nowhere")
    assert all(words in error for words, error in zip(said, errors, strict=True))


def test_training_in_passes_ends_with_its_curve(capsys, tmp_path):
    """From JSONL with sampled ids to a drafter, the measurements and what a doubling would bring."""
    asked = [[{"role": "user", "content": f"Say {n}."}] for n in range(90)]
    told = [dict(temperature=0.0, answer_ids=[5 + n % 9] * 12 + [2]) for n in range(90)]
    rows = [dict(messages=messages, **answer) for messages, answer in zip(asked, told, strict=True)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = load_pair("tiny").target.model.config._name_or_path
    options = ["--target", target, "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--features", str(tmp_path)]
    options += ["--preset", "pretrained", "--steps", "100", "--unroll", "1", "--device", "cpu"]
    smaller = ["muon=false", "draft_vocab_size=64", "length=64", "held_out=4", "held_out_frac=0.1"]
    assert run("train", "eagle3", *options, "--set", *smaller) == 0
    out = capsys.readouterr().out
    assert "held_out_tau_chain" in out and "| 91 " in out.replace("  ", " ") and "per_doubling" in out
    pair = load_pair(target=target, drafter=tmp_path / "out" / "drafter")
    assert pair.drafter.config.draft_vocab_size == 64 and pair.drafter.config.fc_norm == "each"
    text = pair.tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False, add_generation_prompt=True)
    assert decode(pair, text, Static(8, 3, 3), 12).new_tok > 0


def _hear_ctrl_c():
    """A test run started in the background ignores SIGINT, and what it starts inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_in_a_real_run(home):
    """SIGINT while measuring: status 130, no traceback, and the pieces so far stay."""
    command = [sys.executable, "-m", "specdec.tools.cli", "evaluate", "--pair", "tiny", "--suites", "toy/nq"]
    command += ["--limit", "0", "--max-new-tokens", "24"]
    environment = {**os.environ, "SPECDEC_HOME": str(home)}
    pipes = dict(stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, env=environment, preexec_fn=_hear_ctrl_c, **pipes)
    deadline = time.monotonic() + 120
    while not list(home.glob("runs/laptop/evaluate-*/prompts/part-*.parquet")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in told and "specdec: stopped; what was written is kept" in told
    assert not list(home.glob("**/.*.tmp"))


def test_items_are_listed_and_published(home, capsys):
    assert run("items", "--publish") == 0 and "hold no item" in capsys.readouterr().out
    items.save("ltd/table3", pd.DataFrame({"method": ["LTD"]}))
    assert run("items") == 0
    assert "46 not measured, 1 diagram or settings, of 47." in capsys.readouterr().out
    assert run("items", "--publish") == 0 and (home / "figures" / "ltd" / "table3.md").is_file()
    items.save("ltd/table1", pd.DataFrame({"method": ["LTD"]}))[0].unlink()
    assert run("items", "--publish") == 1 and "table1.md is not there" in capsys.readouterr().out


@pytest.mark.parametrize("amount", ["inf", "nan", "-5", "0", "1e400", "x", ""])
def test_amounts_of_tokens(amount):
    pytest.raises(SpecdecError, cli._amount, amount).match("--tokens")


@pytest.mark.parametrize("jobs", [0, -1, 1.5])
def test_notebooks_at_once(jobs):
    pytest.raises(SpecdecError, book.run, book.Book("laptop"), jobs=jobs).match("jobs")
