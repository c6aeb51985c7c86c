"""A wheel, unpacked into an empty folder: the library works there without the checkout."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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
sizes = dict(max_new_tokens=16, depth=8, top_ks=(3, 10), trees=(4, 10), most_nodes=60, limit=8)
trace = specdec.record(pair, ["toy/gsm8k"], progress=False, **sizes)
costs = profile("roofline-a100-llama-8b-eager")
folder = runs.runs_dir() / "policies" / "ours"
controllers.train_system("ours", trace, costs, steps=20, out_dir=folder)
learned = specdec.load_policy(folder / "policy")
replayed = [specdec.replay(trace, one, costs).table["plain_ms"].sum() for one in (tree, learned)]
explorer = specdec.explore()
explorer.step(1)
print(json.dumps({
    "package": specdec.__file__, "home": str(runs.home()), "commit": machine.commit()["commit"],
    "texts": [plain.tokens, out.tokens], "replayed": list(map(float, replayed)),
    "explorer": type(explorer.picture()).__name__,
}))
"""


def test_the_library_needs_no_checkout(tmp_path):
    # 1. a wheel of the files that git tracks
    source, site, folder = (tmp_path / name for name in ("source", "site", "folder"))
    folder.mkdir()
    command = ["git", "ls-files", "specdec"]
    listed = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if (TOP / name).is_file()]
    for name in (*names, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TOP / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*build, "-w", tmp_path, source], check=True, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as packed:
        packed.extractall(site)
    missing = [name for name in names if not (site / name).is_file()]
    assert all(name.endswith("README.md") for name in missing)
    # 2. used there
    environment = {name: one for name, one in os.environ.items() if name[:8] != "SPECDEC_"}
    environment |= {"PYTHONPATH": str(site), "SPECDEC_CACHE": str(folder / "cache")}

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    done = run("-c", USE)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert Path(facts["package"]).is_relative_to(site)
    assert facts["home"] == str(folder) and facts["commit"] is None
    assert facts["texts"][0] == facts["texts"][1] and len(facts["texts"][0]) > 1
    assert facts["replayed"][0] == facts["replayed"][1] > 0, "the same tokens, plainly"
    assert facts["explorer"] == "Figure"
    # 3. the book needs the notebooks
    done = run("-m", "specdec", "items")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "needs the notebooks of a checkout" in done.stderr
