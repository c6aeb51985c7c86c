"""A wheel, unpacked into an empty folder: the library does its work there without the checkout, and the book says what it needs."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specdec import machine

TOP = machine.checkout()
USE = """
import json
import specdec
from specdec import machine, runs
from specdec.costs.profiles import profile
from specdec.training import controllers

pair = specdec.load_pair("tiny", dtype="float32", device="cpu")
tree, text = specdec.Static(8, 3, 3), "What is 2 + 3?"
plain = specdec.autoregress(pair, text, max_new_tokens=12)
out = specdec.decode(pair, text, tree, max_new_tokens=12)
options = dict(max_new_tokens=16, depth=8, top_ks=(3, 10), trees=(4, 10), most_nodes=60, limit=8, progress=False)
trace = specdec.record(pair, ["toy/gsm8k"], **options)
costs = profile("roofline-a100-llama-8b-eager")
folder = runs.runs_dir() / "policies" / "ours"
controllers.train_system("ours", trace, costs, steps=20, out_dir=folder)
learned = specdec.load_policy(folder / "policy")
replayed = [specdec.replay(trace, policy, costs).table["plain_ms"].sum() for policy in (tree, learned)]
explorer = specdec.explore()
explorer.step(1)
print(json.dumps({
    "package": specdec.__file__, "home": str(runs.home()), "commit": machine.commit()["commit"],
    "texts": [plain.tokens, out.tokens], "replayed": list(map(float, replayed)),
    "lanes": len(explorer.shown), "explorer": type(explorer.picture()).__name__,
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of an unpacked wheel of the files that git tracks, and an empty one to work in."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    listed = subprocess.run(
        ["git", "ls-files", "specdec"], cwd=TOP, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.splitlines() if (TOP / name).is_file()]
    for name in (*names, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TOP / name, source / name)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        wheels,
        source,
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    return names, site


def run_there(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    keep = {name: value for name, value in os.environ.items() if not name.startswith("SPECDEC_")}
    environment = {**keep, "PYTHONPATH": str(site), "SPECDEC_CACHE": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_every_file_is_in_the_wheel_the_library_needs_no_checkout_and_what_does_says_so(
    installed, tmp_path
):
    names, site = installed
    assert not [
        name for name in names if not name.endswith("README.md") and not (site / name).is_file()
    ]
    assert not (site / "notebooks").exists() and not (site / "workbook").exists()
    done = run_there(installed[1], tmp_path, "-c", USE)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert Path(facts["package"]).is_relative_to(installed[1])
    assert facts["home"] == str(tmp_path) and facts["commit"] is None
    assert facts["texts"][0] == facts["texts"][1] and len(facts["texts"][0]) > 1
    assert facts["replayed"][0] == facts["replayed"][1] > 0, "the same tokens, plainly"
    assert facts["lanes"] == 1 and facts["explorer"] == "Figure"
    for command in ["items", "reproduce", "book contents"]:
        done = run_there(installed[1], tmp_path, "-m", "specdec", *command.split())
        assert done.returncode in (1, 2) and done.stderr.count("\n") == 1
        assert (
            "needs the notebooks of a checkout" in done.stderr
            and "--notebooks FOLDER" in done.stderr
        )
