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
NAMED_BY_THE_USER = set(
    "jupyterlab torch transformers stable-baselines3 matplotlib seaborn papermill ipywidgets".split()
)


def name_of(requirement: str) -> str:
    return requirement.split("=")[0].split(">")[0].split("<")[0].strip()


def test_environment_repeats_pyproject_and_ci_runs_make_test():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict))
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(line for line in pip if not line.startswith("-")) == sorted(dependencies)
    assert {"-e .", "-c .github/constraints.txt"} <= set(pip) and NAMED_BY_THE_USER <= {name_of(line) for line in pip}
    assert {name_of(entry) for entry in conda["dependencies"] if isinstance(entry, str)} == {"python", "pip"}
    assert "conda-forge" in conda["channels"]
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


def make(*words, **variables) -> subprocess.CompletedProcess:
    """make in the checkout, with these variables and the path alone."""
    environment = {"PATH": os.environ["PATH"], **{name: str(value) for name, value in variables.items()}}
    return subprocess.run(["make", *words, "-C", str(ROOT)], env=environment, capture_output=True, text=True)


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
    plan = make("-n", "--no-print-directory", "train", f"WHAT={what}", VIRTUAL_ENV=tmp_path)
    module, *arguments = shlex.split(plan.stdout.strip().splitlines()[-1])[2:]
    if module == "specdec.book":
        names = [entry.name for entry in book.read_book()]
        assert set(arguments[arguments.index("--only") + 1 :]) & set(names)
    else:
        cli.parser().parse_args(arguments)


@needs_make
def test_an_active_environment_is_used_as_it_is_and_a_train_of_nothing_told(tmp_path):
    done = make("train", "WHAT=nothing", VIRTUAL_ENV=tmp_path)
    assert done.returncode != 0 and "make train knows no WHAT=nothing: toy, ppow" in done.stderr
    for python, variables in (
        (tmp_path / "bin", dict(VIRTUAL_ENV=tmp_path)),
        (tmp_path / "bin", dict(CONDA_PREFIX=tmp_path, CONDA_DEFAULT_ENV="specdec")),
        (ROOT / ".venv" / "bin", dict(CONDA_PREFIX=tmp_path, CONDA_DEFAULT_ENV="base")),
    ):
        assert f"{python}/python" in make("-n", "test", **variables).stdout
