"""environment.yml, pyproject.toml and the Makefile tell one story."""

import os
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from specdec.tools import cli

from workbook import book

ROOT = Path(__file__).resolve().parents[1]
NAMED_BY_THE_USER = {
    "jupyterlab",
    "torch",
    "transformers",
    "stable-baselines3",
    "matplotlib",
    "seaborn",
    "papermill",
    "ipywidgets",
}


def name_of(requirement: str) -> str:
    return requirement.split("=")[0].split(">")[0].split("<")[0].strip()


def pip_section() -> list[str]:
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    return next(entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict))


def test_environment_repeats_pyproject():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    repeated = [line for line in pip_section() if not line.startswith("-")]
    assert sorted(repeated) == sorted(dependencies)


def test_environment_installs_the_checkout_and_what_the_user_named():
    assert {"-e .", "-c .github/constraints.txt"} <= set(pip_section())
    assert NAMED_BY_THE_USER <= {name_of(line) for line in pip_section()}


def test_environment_takes_only_python_and_pip_from_conda():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    names = {name_of(entry) for entry in conda["dependencies"] if isinstance(entry, str)}
    assert names == {"python", "pip"}
    assert "conda-forge" in conda["channels"]


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@needs_make
def test_old_python_gets_one_sentence(tmp_path):
    """With only an old Python on the path, make stops with one sentence and leaves no .venv behind."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("python3.11", "python3", "python"):
        old = commands / name
        old.write_text('#!/bin/bash\n[ "$1" = -V ] && { echo "Python 3.9.2"; exit 0; }\nexit 1\n')
        old.chmod(0o755)
    for name in ("make", "bash", "touch"):
        (commands / name).symlink_to(shutil.which(name))
    done = subprocess.run(["make", "test"], cwd=tmp_path, env={"PATH": str(commands)}, capture_output=True, text=True)
    assert done.returncode != 0
    assert "specdec needs Python 3.11 or newer, and Python 3.9.2 was found" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".venv").exists()


@needs_make
@pytest.mark.parametrize("what", ["toy", "ppow", "data", "eagle3", "eagle1", "griffin", "medusa", "hydra"])
def test_make_train_names_commands_that_are_there(what, tmp_path):
    command = ["make", "-n", "--no-print-directory", "train", f"WHAT={what}", "-C", str(ROOT)]
    plan = subprocess.run(
        command, env={"PATH": os.environ["PATH"], "VIRTUAL_ENV": str(tmp_path)}, capture_output=True, text=True
    )
    module, *arguments = shlex.split(plan.stdout.strip().splitlines()[-1])[2:]
    if module == "specdec.book":
        names = [entry.name for entry in book.read_book()]
        assert set(arguments[arguments.index("--only") + 1 :]) & set(names)
    else:
        cli.parser().parse_args(arguments)


@needs_make
def test_make_train_of_nothing_is_told(tmp_path):
    command = ["make", "train", "WHAT=nothing", "-C", str(ROOT)]
    done = subprocess.run(
        command, env={"PATH": os.environ["PATH"], "VIRTUAL_ENV": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode != 0 and "make train knows no WHAT=nothing: toy, ppow" in done.stderr


@needs_make
def test_an_active_environment_is_used_as_it_is(tmp_path):
    """`make -n` names the active environment's python and makes no .venv; conda's base does not count as active."""
    command = ["make", "-n", "test", "-C", str(ROOT)]
    quiet = {"PATH": os.environ["PATH"]}

    def plan(**variables):
        return subprocess.run(command, env={**quiet, **variables}, capture_output=True, text=True).stdout

    assert f"{tmp_path}/bin/python" in plan(VIRTUAL_ENV=str(tmp_path))
    assert f"{tmp_path}/bin/python" in plan(CONDA_PREFIX=str(tmp_path), CONDA_DEFAULT_ENV="specdec")
    assert f"{ROOT}/.venv/bin/python" in plan(CONDA_PREFIX=str(tmp_path), CONDA_DEFAULT_ENV="base")
