"""kill -9 at random moments: what continues equals what was never interrupted, and nothing is lost.

Each job runs in a process of its own, is killed, and is run again until it ends by itself.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAD = """
import sys, json, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
import specdec
from specdec import runs
from specdec.core.policy import Static
from fakes.pairs import random_pair
from fakes.traces import round_costs, synthetic_trace
print("ready", flush=True)
"""
# Each prints what it found as one line of JSON; a killed one prints nothing.
JOBS = {
    "evaluate": """
pair, prompts = random_pair(), {"mine": [[1, 2, number] for number in range(3, 15)]}
methods = {"plain": "autoregressive", "tree": Static(8, 2, 3)}
run = specdec.evaluate(methods, prompts, pair, max_new_tokens=24, warmup=0, progress=False)
rows, cycles = run.read_table("prompts"), run.read_table("cycles")
rows = rows.sort_values(["prompt", "method"])[["prompt", "method", "new_tok", "cycles", "text_hash"]]
keys = [f"{one.prompt} {one.method} {one.cycle}" for one in cycles.sort_values(["prompt", "method", "cycle"]).itertuples()]
print(json.dumps([rows.to_dict("records"), keys]))
""",
    "record": """
pair, prompts = random_pair(), {"mine": [[1, 2, number] for number in range(3, 15)]}
trace = specdec.record(pair, prompts, depth=3, top_ks=(2,), trees=(2,), max_new_tokens=16, progress=False)
print(json.dumps([trace.turns.to_dict("records"), trace.ranks[2].tolist(), trace.column("scores_2").tolist()]))
""",
    "PPO": """
from specdec.policies.base import PPOConfig
from specdec.policies.ltd import DepthPolicy
from specdec.training.env import ReplaySource
from specdec.training.ppo import RunOptions, Task, train_policy
learner = DepthPolicy(depth=4, top_k=3, total_tokens=12, stride=1)
task = Task(ReplaySource(synthetic_trace(turns=4, positions=20), round_costs()))
config = PPOConfig(n_steps=64, batch_size=32, n_epochs=2, total_steps=640, pi=(8,), vf=(8,), activation="relu")
policy = train_policy(learner, task, config, RunOptions(runs.home() / "ppo", segment_steps=64, progress=False))
print(json.dumps([array.tolist() for array in policy.network.weights]))
""",
}
TESTS = str(Path(__file__).parent)


def started(job: str, home: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", HEAD + JOBS[job], TESTS]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"SPECDEC_HOME": str(home)})


def finished(job: str, home: Path) -> tuple[list, float]:
    """What an uninterrupted run finds, and how long it works once it is ready."""
    process = started(job, home)
    process.stdout.readline()
    begin = time.monotonic()
    said = process.stdout.read()
    assert process.wait() == 0, job
    return json.loads(said.splitlines()[-1]), time.monotonic() - begin


def killed_and_continued(job: str, home: Path, kills: int, seed: int, usual_s: float) -> list:
    """The result of a job that is killed at `kills` random moments, over as many homes as it needs."""
    draw, done = random.Random(seed), 0
    while True:
        process = started(job, home)
        process.stdout.readline()
        if done < kills:
            time.sleep(draw.uniform(0, usual_s))
            process.kill()
            process.wait()
            done += 1
            continue
        said = process.stdout.read()
        assert process.wait() == 0, job
        return json.loads(said.splitlines()[-1])


def crash(job: str, tmp_path: Path, kills: int) -> None:
    expected, usual_s = finished(job, tmp_path / "whole")
    assert killed_and_continued(job, tmp_path / "killed", kills, seed=kills, usual_s=usual_s) == expected
    left = [path for path in (tmp_path / "killed").rglob(".*.tmp") if path.stat().st_mtime < time.time() - 3600]
    assert not left


@pytest.mark.parametrize("job", ["evaluate"])
def test_two_kills(tmp_path, job):
    crash(job, tmp_path, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("job", sorted(JOBS))
def test_fifty_kills(tmp_path, job):
    for part in range(5):  # a run that has ended cannot be killed any more: ten moments in each of five
        crash(job, tmp_path / str(part), 10)


@pytest.mark.nightly
def test_three_processes_in_one_run_lose_no_row(tmp_path):
    expected, _ = finished("evaluate", tmp_path / "one")
    processes = [started("evaluate", tmp_path / "three") for _ in range(3)]
    found = [json.loads(process.stdout.read().splitlines()[-1]) for process in processes]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert found == [expected] * 3
