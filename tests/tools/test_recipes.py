"""The page of recipes: what it says to type is typed here, word for word."""

import contextlib
import functools
import io
import re
import shlex
from pathlib import Path

import pytest

from specdec import runs
from specdec.evaluation.methods import load_controller
from specdec.models.load import load_pair
from specdec.policies import ltd, resps
from specdec.policies.base import changed
from specdec.replays.trace import open_trace
from specdec.tools import cli

PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "recipes.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    """The text below one heading of the page."""
    found = re.search(
        rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert found, f"the page has no section {title!r}"
    return found[1]


def commands(text: str) -> list[str]:
    """The lines of its shell blocks."""
    return [
        line
        for language, code in BLOCK.findall(text)
        if language == "sh"
        for line in code.splitlines()
    ]


def typed(line: str) -> str:
    """Run one command of the page; what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = cli.main(shlex.split(line)[1:])
    assert status == 0, f"{line}\n{said.getvalue()[-2000:]}"
    return said.getvalue()


@pytest.fixture(scope="module")
def worked(tmp_path_factory):
    """A folder in which the first recipe was followed to its end, and what each command said."""
    folder = tmp_path_factory.mktemp("recipes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(folder))
        patch.setenv("SPECDEC_CONFIG", str(folder / "config"))
        patch.chdir(folder)
        said = {}
        for language, code in BLOCK.findall(section("Your own model, from start to end")):
            if language == "python":
                exec(code, {})
            else:
                said |= {line: typed(line) for line in code.splitlines()}
        yield said


def test_the_recipes_of_a_model_run_as_written(worked):
    by_name = [(line.split()[1], text) for line, text in worked.items()]
    decoded = [text.splitlines()[-2] for name, text in by_name if name == "decode"]
    assert len(decoded) == 2
    assert decoded[0] == decoded[1], "a tree and a policy leave the text as it is"
    evaluated = next(text for name, text in by_name if name == "evaluate")
    assert "policies/" in evaluated and "static:8,3,2" in evaluated


def test_every_trainer_accepts_what_record_writes(worked, monkeypatch):
    quick = {"n_steps": 64, "batch_size": 32, "n_epochs": 1, "pi": (8,), "vf": (8,)}
    few = {
        f"{part}.ppo.{name}": value for part in ("depth", "size") for name, value in quick.items()
    }
    learner = changed(ltd.LAPTOP["ours"], few | {"rounds": ltd.ROUNDS[:2]})
    monkeypatch.setitem(ltd.LAPTOP, "ours", learner)
    monkeypatch.setitem(
        resps.CONFIGS, "ours", changed(resps.OURS, {f"ppo.{name}": v for name, v in quick.items()})
    )
    pair = load_pair(target="mine", drafter="mine", dtype="float32")
    for system, steps in (("resps", 64), ("ltd", 64), ("radar", 1)):
        folder = typed(f"specdec train {system} --target mine --steps {steps}").splitlines()[-1]
        assert Path(folder) == runs.runs_dir() / "policies" / "mine" / f"{system}-float32"
        decoded = f"--drafter mine --policy {folder} --max-new-tokens 6"
        typed(f"specdec decode Hello --target mine {decoded}")
        assert load_controller(folder).limits.total_tokens > 1
    assert pair.name == "mine"


def test_one_command_goes_from_ones_own_prompts_to_a_controller(worked, monkeypatch, capsys):
    monkeypatch.setattr(cli, "calibrate", functools.partial(cli.calibrate, seconds=1.0))
    monkeypatch.setattr(cli, "record", functools.partial(cli.record, max_new_tokens=10))
    prompts = [f"Add {number} and {number + 3}.\\nWrite the sum." for number in range(20)]
    Path("asked.txt").write_text("\n".join(prompts))
    line = "specdec train ours --target mine --drafter mine --data asked.txt --steps 20 --out own"
    policy = load_controller(typed(line).splitlines()[-1])
    assert policy.trained_for["pair"] == "mine"
    assert policy.trained_for["costs"].startswith("mine-float32@")
    turns = open_trace(runs.recorded("mine")).turns
    parts = turns.groupby("part")["prompt"].nunique()
    assert set(turns["suite"]) == {"asked"}
    assert parts.sum() == 20 and parts.min() > 0 and len(parts) == 3
    assert cli.main(shlex.split(f"{line} --trace t")[1:]) == 2
    assert "not both" in capsys.readouterr().err
    Path("asked.txt").write_text(prompts[0])
    assert cli.main(shlex.split(line)[1:]) == 2
    assert "1 prompts leave a part empty" in capsys.readouterr().err


def test_every_command_on_the_page_is_one_and_its_estimates_are_given():
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"!?specdec ", line)]
    inline = re.findall(r"`(specdec [^`]+)`", PAGE.read_text())
    assert len(lines) > 20
    for line in lines + inline:
        cli.parser().parse_args(shlex.split(line)[1:])
    text = section("Llama-3.1-8B on one GPU")
    printed = [typed(line).strip() for line in commands(text) if "--gpu" in line]
    blocks = [code for language, code in BLOCK.findall(text) if language == "text"]
    assert printed == blocks[0].splitlines()
    too_small = "estimate --pair llama-3.1-8b --gpu t4".split()
    assert cli.main(too_small) == 2
    assert "untested" in text and "untested" in section("Installing elsewhere")
