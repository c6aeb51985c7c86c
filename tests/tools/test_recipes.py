"""The page of recipes: what it says to type is typed here, word for word; every command on it is one; its estimates are right."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import gguf
import pytest
from fakes.gguf_files import write_tokens

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


def test_the_recipes_of_a_model_and_of_serving_run_as_written(worked):
    by_name = [(line.split()[1], text) for line, text in worked.items()]
    decoded = [text.splitlines()[-2] for name, text in by_name if name == "decode"]
    assert len(decoded) == 2 and decoded[0] == decoded[1], (
        "a tree and a policy leave the text as it is"
    )
    evaluated = next(text for name, text in by_name if name == "evaluate")
    assert "policies/mine/ours-float32" in evaluated and "static:8,3,2" in evaluated
    policy = load_controller("runs/laptop/policies/mine/ours-float32")
    assert policy.trained_for["pair"] == "mine" and policy.trained_for["costs"].startswith(
        "mine-float32@"
    )
    moved = load_controller("runs/repriced")
    assert moved.priced_for == policy.priced_for and Path("runs/repriced/costs.json").is_file()
    write_tokens(Path("model.gguf"), load_pair("tiny").target.vocab_size)
    with pytest.warns(
        UserWarning, match="is the fastest by the costs 'mine-float32@"
    ):  # so the tree was tuned
        said = [typed(line) for line in commands(section("Serving what was trained"))]
    assert [
        "vllm serve" in said[0],
        "sglang.launch_server" in said[1],
        "llama-server" in said[2],
    ] == [True] * 3
    assert Path("served/llama.cpp/drafter.gguf").is_file()
    assert (
        gguf.GGUFReader("served/llama.cpp/drafter.gguf").fields["general.architecture"].contents()
        == "eagle3"
    )


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
        typed(
            f"specdec decode Hello --target mine --drafter mine --policy {folder} --max-new-tokens 6"
        )
        assert load_controller(folder).limits.total_tokens > 1
    assert pair.name == "mine"


def test_one_command_goes_from_ones_own_prompts_to_a_controller(worked, monkeypatch, capsys):
    for option, short in (("--seconds", 1.0), ("--max-new-tokens", 10)):
        monkeypatch.setitem(cli.OPTIONS[option], "default", short)
    asked = [f"Add {number} and {number + 3}.\\nWrite the sum." for number in range(20)]
    Path("asked.txt").write_text("\n".join(asked))
    line = "specdec train ours --target mine --drafter mine --data asked.txt --steps 20 --set 'sees=[\"copies\"]' --out own"
    told = typed(line).splitlines()
    policy, recorded = load_controller(told[-1]), open_trace(runs.recorded("mine"))
    assert policy.trained_for["pair"] == "mine" and policy.trained_for["costs"].startswith(
        "mine-float32@"
    )
    assert policy.sees == ("copies",)
    parts = recorded.turns.groupby("part")["prompt"].nunique()
    assert (
        set(recorded.turns["suite"]) == {"asked"}
        and parts.sum() == 20
        and parts.min() > 0
        and len(parts) == 3
    )
    assert (
        cli.main(shlex.split(f"{line} --trace t")[1:]) == 2
        and "not both" in capsys.readouterr().err
    )
    Path("asked.txt").write_text(asked[0])
    assert (
        cli.main(shlex.split(line)[1:]) == 2
        and "of 1 prompts none falls into" in capsys.readouterr().err
    )


def test_every_command_on_the_page_is_one_and_its_estimates_are_given():
    lines = [line for line in PAGE.read_text().splitlines() if re.match(r"!?specdec ", line)]
    inline = re.findall(r"`(specdec [^`]+)`", PAGE.read_text())
    assert len(lines) > 25
    for line in lines + inline:
        cli.parser().parse_args(shlex.split(line)[1:])
    text = section("Llama-3.1-8B on one GPU")
    said = [typed(line).strip() for line in commands(text) if "--gpu" in line]
    assert (
        said
        == next(code for language, code in BLOCK.findall(text) if language == "text").splitlines()
    )
    assert cli.main("estimate --pair llama-3.1-8b --gpu t4".split()) == 2, (
        "too small, as the page says"
    )
    assert "engines themselves were not run here" in section("Serving what was trained").lower()
    assert "This section\nis untested, because no GPU was available." in section(
        "Llama-3.1-8B on one GPU"
    )
    assert "These four are untested." in section("Installing elsewhere")
