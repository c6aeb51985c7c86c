"""kill -9 at random moments: what continues equals what was never interrupted, and nothing is lost.

Each job runs in a process of its own, is killed, and is run again until it ends by itself.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Imports once what takes seconds, then forks a process for every order it reads: a line of JSON with code, home and output.
NURSERY = """
import sys, json, os, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
import specdec
from specdec import machine, runs
from specdec.core.policy import Static
machine.find_workbook()
from fakes.pairs import random_pair
from fakes.traces import round_costs, synthetic_trace
from fakes.chats import CHATS, chat_target
from fakes.notebooks import notebook
from workbook import book
from workbook import toy_pretrain as pretrain
from specdec.training import env, loop, ppo
from specdec.training.drafter import eagle3, presets
import papermill, pyarrow.dataset, pyarrow.parquet, pydantic, stable_baselines3, torch._dynamo
import transformers.convert_slow_tokenizer
specdec.evaluate, specdec.record


def learned(folder):
    from safetensors.torch import load_file

    return {name: float(value.double().sum()) for name, value in load_file(folder / "model.safetensors").items()}


def curve(folder):
    return runs.read_table(folder / "loss.parquet").drop(columns="elapsed_s").to_json()


print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if "wait" in order:
        print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
        continue
    child = os.fork()
    if not child:
        status = 1
        try:
            os.environ["SPECDEC_HOME"] = order["home"]
            sys.stdout = open(order["output"], "w")
            exec(order["code"], dict(globals()))
            sys.stdout.close()
            status = 0
        finally:
            os._exit(status)
    print(child, flush=True)
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
found = [trace.turns.to_dict("records"), trace.ranks[2], trace.column("scores", 2)]
print(json.dumps(found, default=lambda array: array.tolist()))
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
    "drafter": """
loop.TrainingRun.run.__kwdefaults__["save_s"] = 0.0  # two minutes otherwise
settings = presets.Settings(48, steps=16, batch=2, length=48, warmup_steps=2, learning_rate=0.01)
folder = eagle3.train_drafter(chat_target(), CHATS, out_dir=runs.home() / "training", settings=settings)
print(json.dumps([learned(folder), curve(folder.parent / "drafter_training")]))
""",
    "pre-training": """
loop.TrainingRun.run.__kwdefaults__["save_s"] = 0.0
shape = pretrain.Preset(
    320, 32, 2, 2, 48, batch=2, length=64, steps=16, warmup_steps=2, tokenizer_examples=60, library_frac=0.0
)
folder = pretrain.train_target(shape, runs.home() / "training")
print(json.dumps([learned(folder), curve(folder.parent)]))
""",
    "book": """
folder, entries = runs.home() / "notebooks", []
for name, reads in (("00_first", []), ("10_second", ["runs/{scale}/00_first.txt"])):
    write = f"from specdec import runs; runs.write_text(runs.runs_dir() / '{name}.txt', 'here')"
    runs.write_text(folder / f"{name}.ipynb", notebook(name, write))
    entries.append({"name": name, "main": True, "reads": reads, "writes": [f"runs/{{scale}}/{name}.txt"]})
runs.write_text(folder / "book.yml", json.dumps(entries))  # is YAML, too
states = {*book.run(book.Book("laptop", folder))["state"]}
made = sorted(path.name for path in runs.runs_dir().rglob("*") if path.suffix in (".txt", ".ipynb"))
print(json.dumps([states <= {"done", "fresh"}, made]))
""",
}
TESTS = str(Path(__file__).parent)


class Nursery:
    """Where the processes are born that are killed here."""

    def __init__(self):
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = subprocess.Popen([sys.executable, "-c", NURSERY, TESTS], **pipes)
        assert self.process.stdout.readline() == "ready\n"  # a job's usual time has no imports in it

    def asked(self, **order) -> int:
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    def start(self, job: str, home: Path) -> tuple[int, Path]:
        """The number of a new process that does the job, and where it says what it found."""
        home.mkdir(parents=True, exist_ok=True)
        output = home / f"{job}-{time.monotonic_ns()}.json"
        return self.asked(code=JOBS[job], home=str(home), output=str(output)), output

    def found(self, child: int, output: Path) -> list:
        assert self.asked(wait=child) == 0, output.name
        return json.loads(output.read_text().splitlines()[-1])

    def kill(self, child: int) -> int:
        os.kill(child, signal.SIGKILL)
        return self.asked(wait=child)


@pytest.fixture(scope="module")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.process.stdin.close()
    nursery.process.wait()


def crash(nursery: Nursery, job: str, tmp_path: Path, kills: int) -> None:
    """Kill a job at random moments, over as many starts as it takes, then let it end: it finds what an uninterrupted one does."""
    begin = time.monotonic()
    expected = nursery.found(*nursery.start(job, tmp_path / "whole"))
    usual_s, draw, ends = time.monotonic() - begin, random.Random(kills), []
    for _ in range(kills):
        child, _ = nursery.start(job, tmp_path / "killed")
        time.sleep(draw.uniform(0, usual_s))
        ends.append(nursery.kill(child))
    assert set(ends) <= {-signal.SIGKILL, 0}, ends  # one that had ended already cannot be killed
    assert nursery.found(*nursery.start(job, tmp_path / "killed")) == expected
    left = [path for path in (tmp_path / "killed").rglob(".*.tmp") if path.stat().st_mtime < time.time() - 3600]
    assert not left


@pytest.mark.parametrize("job", sorted(JOBS))
def test_two_kills(nursery, tmp_path, job):
    crash(nursery, job, tmp_path, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("job", sorted(JOBS))
def test_fifty_kills(nursery, tmp_path, job):
    for part in range(5):  # a run that has ended cannot be killed any more: ten moments in each of five
        crash(nursery, job, tmp_path / str(part), 10)


@pytest.mark.nightly
def test_three_processes_in_one_run_lose_no_row(nursery, tmp_path):
    expected = nursery.found(*nursery.start("evaluate", tmp_path / "one"))
    children = [nursery.start("evaluate", tmp_path / "three") for _ in range(3)]
    assert [nursery.found(*child) for child in children] == [expected] * 3
