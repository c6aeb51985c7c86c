"""The page of recipes: what it says to type is typed here, word for word."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from specdec import runs
from specdec.policies import ltd, resps
from specdec.policies.base import changed, load_policy
from specdec.replays.trace import open_trace
from specdec.tools import cli

PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "recipes.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    """The text below one heading of the page."""
    pattern = rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)"
    return re.search(pattern, PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]


def typed(line: str) -> str:
    """Run one command of the page; its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = cli.main(shlex.split(line)[1:])
    assert status == 0, f"{line}\n{output.getvalue()[-2000:]}"
    return output.getvalue()


@pytest.fixture(scope="module")
def worked(tmp_path_factory):
    """A folder in which the first recipe was followed to its end, and each command's output."""
    folder = tmp_path_factory.mktemp("recipes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_HOME", str(folder))
        patch.chdir(folder)
        outputs = {}
        for language, code in BLOCK.findall(section("Your own model, from start to end")):
            if language == "python":
                exec(code, {})
            else:
                outputs.update({line: typed(line) for line in code.splitlines()})
        yield outputs


def test_the_recipes_of_a_model_run_as_written(worked):
    decoded = [text.splitlines()[-2] for line, text in worked.items() if "c decode" in line]
    assert len(decoded) == 2
    assert decoded[0] == decoded[1], "a tree and a policy leave the text as it is"
    evaluated = next(text for line, text in worked.items() if "c evaluate" in line)
    assert "policies/" in evaluated and "static:8,3,2" in evaluated


def test_every_trainer_accepts_what_record_writes(worked, monkeypatch):
    quick = {"n_steps": 64, "batch_size": 32, "n_epochs": 1, "pi": (8,), "vf": (8,)}
    few = {"rounds": ltd.ROUNDS[:2]}
    for part in ("depth", "size"):
        few.update({f"{part}.ppo.{name}": value for name, value in quick.items()})
    monkeypatch.setitem(ltd.LAPTOP, "ours", changed(ltd.LAPTOP["ours"], few))
    own = changed(resps.OURS, {f"ppo.{name}": value for name, value in quick.items()})
    monkeypatch.setitem(resps.CONFIGS, "ours", own)
    for system, steps in (("resps", 64), ("ltd", 64), ("radar", 1)):
        folder = typed(f"specdec train {system} --target mine --steps {steps}").splitlines()[-1]
        assert Path(folder) == runs.runs_dir() / "policies" / "mine" / f"{system}-float32"
        decoded = f"--drafter mine --policy {folder} --max-new-tokens 6"
        typed(f"specdec decode Hello --target mine {decoded}")
        assert load_policy(folder).limits.total_tokens > 1


def test_one_command_goes_from_prompts_to_a_controller(worked, monkeypatch, capsys):
    monkeypatch.setitem(cli.OPTIONS, "seconds", ("", {"type": float, "default": 1.0}))
    monkeypatch.setitem(cli.OPTIONS, "max_new_tokens", ("", {"type": int, "default": 10}))
    prompts = [f"Add {number} and {number + 3}.\\nWrite the sum." for number in range(20)]
    Path("asked.txt").write_text("\n".join(prompts))
    line = "specdec train ours --target mine --drafter mine --data asked.txt --steps 20 --out own"
    policy = load_policy(typed(line).splitlines()[-1])
    assert policy.trained_for["pair"] == "mine"
    assert policy.trained_for["costs"].startswith("mine-float32@")
    turns = open_trace(runs.recorded("mine")).turns
    parts = turns.groupby("part")["prompt"].nunique()
    assert set(turns["suite"]) == {"asked"}
    assert parts.sum() == 20 and parts.min() > 0 and len(parts) == 3
    Path("asked.txt").write_text(prompts[0])
    assert cli.main(shlex.split(line)[1:]) == 2
    assert "1 prompts leave a part empty" in capsys.readouterr().err


def test_every_command_on_the_page_is_one_and_its_estimates_are_given():
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"!?specdec ", line)]
    lines += re.findall(r"`(specdec [^`]+)`", PAGE.read_text())
    assert len(lines) > 20
    for line in lines:
        cli.parser().parse_args(shlex.split(line)[1:])
    blocks = BLOCK.findall(section("Llama-3.1-8B on one GPU"))
    (estimates,) = [code.splitlines() for language, code in blocks if language == "text"]
    asked = [line for _, code in blocks for line in code.splitlines() if "--gpu" in line]
    assert [typed(line).strip() for line in asked] == estimates
    assert cli.main("estimate --pair llama-3.1-8b --gpu t4".split()) == 2
