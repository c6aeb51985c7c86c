"""Jobs that are killed and run again (test_crashes.py); each returns its result."""

import json
import os
from pathlib import Path

# What the work below imports only when it needs it: a process that is forked later has it already.
import papermill  # noqa: F401
import pyarrow.dataset  # noqa: F401
import pydantic  # noqa: F401
import stable_baselines3  # noqa: F401
import torch
import torch._dynamo
import transformers.convert_slow_tokenizer  # noqa: F401
from fakes.chats import CHATS, chat_target
from fakes.notebooks import notebook
from fakes.pairs import random_pair
from fakes.traces import round_costs, synthetic_trace
from safetensors.torch import load_file

from specdec import runs
from specdec.core.policy import Static
from specdec.evaluation.bench import evaluate
from specdec.policies.base import PPOConfig
from specdec.policies.ltd import DepthPolicy
from specdec.replays.record import record
from specdec.training import loop
from specdec.training.drafter import eagle3, presets
from specdec.training.env import ReplaySource
from specdec.training.ppo import RunOptions, Task, train_policy

from workbook import book

PROMPTS = {"mine": [[1, 2, number] for number in range(3, 15)]}


def evaluated():
    methods = {"plain": "autoregressive", "tree": Static(8, 2, 3)}
    run = evaluate(methods, PROMPTS, random_pair(), max_new_tokens=24, warmup=0, progress=False)
    rows, cycles = (
        run.read_table(name).sort_values(["prompt", "method"]) for name in ("prompts", "cycles")
    )
    rows = rows[["prompt", "method", "new_tok", "cycles", "text_hash"]].to_dict("records")
    return rows, sorted(f"{one.prompt} {one.method} {one.cycle}" for one in cycles.itertuples())


def recorded():
    settings = dict(depth=3, top_ks=(2,), trees=(2,), max_new_tokens=16, progress=False)
    trace = record(random_pair(), PROMPTS, **settings)
    return trace.turns.to_dict("records"), trace.ranks[2], trace.column("scores", 2)


def ppo():
    learner = DepthPolicy(depth=4, top_k=3, total_tokens=12, stride=1)
    task = Task(ReplaySource(synthetic_trace(turns=4, positions=20), round_costs()))
    sizes = dict(n_steps=64, batch_size=32, n_epochs=2, total_steps=640, pi=(8,), vf=(8,))
    options = RunOptions(runs.home() / "ppo", segment_steps=64, progress=False)
    return train_policy(
        learner, task, PPOConfig(activation="relu", **sizes), options
    ).network.weights


def learned(weights: Path, curve: Path):
    sums = {
        name: float(value.double().sum())
        for name, value in load_file(weights / "model.safetensors").items()
    }
    return sums, runs.read_table(curve / "loss.parquet").drop(columns="elapsed_s").to_json()


def drafter():
    loop.TrainingRun.run.__kwdefaults__["save_s"] = 0.0  # two minutes otherwise
    settings = presets.Settings(
        48, steps=16, batch=2, length=48, warmup_steps=2, learning_rate=0.01
    )
    folder = eagle3.train_drafter(
        chat_target(), CHATS, out_dir=runs.home() / "training", settings=settings
    )
    return learned(folder, folder.parent / "drafter_training")


def book_run():
    folder, entries = runs.home() / "notebooks", []
    for name, reads in (("00_first", {}), ("10_second", {"first": "runs/{scale}/00_first.txt"})):
        write = f"from specdec import runs; runs.write_text(runs.runs_dir() / '{name}.txt', 'here')"
        runs.write_text(folder / f"{name}.ipynb", notebook(name, write))
        entries.append(
            {"name": name, "main": True, "reads": reads, "writes": [f"runs/{{scale}}/{name}.txt"]}
        )
    runs.write_text(folder / "book.yml", json.dumps(entries))  # is YAML, too
    states = {*book.run(book.Book("laptop", folder))["state"]}
    made = sorted(
        path.name for path in runs.runs_dir().rglob("*") if path.suffix in (".txt", ".ipynb")
    )
    return states <= {"done", "fresh"}, made


JOBS = {job.__name__: job for job in (evaluated, recorded, ppo, drafter, book_run)}


def do(job: str, home: Path, output: Path) -> None:
    """The job with results below `home`; what it found goes into `output`."""
    os.environ["SPECDEC_HOME"] = str(home)
    torch.set_num_threads(1)
    output.write_text(json.dumps(JOBS[job](), default=lambda array: array.tolist()))
