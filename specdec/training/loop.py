"""A training run that can be stopped at any moment: plan, progress bar, curve, checkpoints, exact resume.

Knows nothing about models, data or losses: its owner gives modules, optimisers and one function that does a step. Rows
of data must be a function of the step, so that (weights, optimiser state, step) is all there is to remember.

Training of small networks by epochs: `loop.Loop` with an epoch as its step, so that a killed run resumes exactly.

All randomness of an epoch comes from (seed, epoch); an epoch that is interrupted leaves the weights it began with.

How trainings went: their curves and results as tables, for the notebooks that train. Reads files; trains nothing.
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.errors import SpecdecError

DECAY_FRAC = 0.35  # last part of a run, over which the learning rate falls to zero
_CHECKPOINT_S = 120.0


def rate_factor(step: int, last_step: int | None, warmup_steps: int, linear_end: int | None = None) -> float:
    """The learning rate as a fraction of its peak.

    Linear warm-up, then constant, then linear to zero over the last DECAY_FRAC of the run (constant while its end is
    unknown). `linear_end`: instead fall linearly from the end of the warm-up to zero at that step (EAGLE's schedule).
    """
    factor = min(1.0, (step + 1) / max(1, warmup_steps))
    if linear_end is not None:
        return factor * max(0.0, min(1.0, (linear_end - step) / max(1, linear_end - warmup_steps)))
    if last_step is None:
        return factor
    return factor * min(1.0, (last_step - step) / max(1.0, DECAY_FRAC * last_step))


def open_plan(out_dir: Path, settings: dict, resume: bool) -> dict:
    """plan.json of an earlier start with the same settings, or a new one; `last_step` is None until it is known.

    settings["steps"] fixes the end in steps; where it is None, settings["minutes"] does in time. Raises SpecdecError
    where the folder holds a run with other settings and `resume` is true.
    """
    path = Path(out_dir) / "plan.json"
    settings = runs.plain(settings)
    if not resume:
        for name in ("plan.json", "checkpoint.safetensors"):
            (Path(out_dir) / name).unlink(missing_ok=True)
    if path.is_file():
        plan = runs.read_json(path)
        if plan["settings"] != settings:
            raise SpecdecError(
                f"{out_dir} holds a run with other settings; repeat them, choose another folder, or pass resume=False "
                "to start over."
            )
        return plan
    plan = {"settings": settings, "last_step": settings["steps"], "finished": False, "sessions": []}
    runs.write_json(path, plan)
    return plan


class Loop:
    """Runs `step(number, rate_factor) -> dict` to the planned end; the dicts become the rows of loss.parquet.

    modules: name -> nn.Module, all of whose state is kept. optimizers: their groups carry "peak", the highest rate.
    factor(step, last_step) is the rate as a fraction of the peak. A finished plan runs nothing.
    """

    def __init__(self, out_dir: Path, plan: dict, modules: dict, optimizers: list, factor: Callable, label: str):
        self.out_dir, self.plan, self.modules, self.optimizers = Path(out_dir), plan, modules, optimizers
        self.factor, self.label = factor, label
        self.step, self.elapsed_s, self.curve = 0, 0.0, []
        if self.checkpoint.is_file():
            self._load()
        self.plan["sessions"].append({"step": self.step, **machine.fingerprint()})
        runs.write_json(self.out_dir / "plan.json", self.plan)

    @property
    def checkpoint(self) -> Path:
        return self.out_dir / "checkpoint.safetensors"

    @property
    def table(self) -> pd.DataFrame:
        """The curve so far: one row per step, with elapsed_s."""
        return pd.DataFrame(self.curve)

    def run(self, step: Callable[[int, float], dict]) -> None:
        """Train to the end; Ctrl-C saves a checkpoint on its way out."""
        before_s, started_s = self.elapsed_s, time.perf_counter()
        saved_s = started_s
        bar = tqdm(initial=self.step, total=self.plan["last_step"], desc=self.label, unit="step", mininterval=2.0)
        try:
            while not self._ended():
                factor = self.factor(self.step, self.plan["last_step"])
                for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                    group["lr"] = factor * group["peak"]
                row = step(self.step, factor)
                self.elapsed_s = before_s + time.perf_counter() - started_s
                self.curve.append({"step": self.step, **row, "elapsed_s": self.elapsed_s})
                self.step += 1
                self._show(bar)
                if time.perf_counter() - saved_s > _CHECKPOINT_S:
                    self.save()
                    saved_s = time.perf_counter()
        finally:
            bar.close()
            self.save()

    def finish(self, **results) -> None:
        """Mark the plan finished and note `results` in it."""
        self.plan |= {"finished": True, "steps_done": self.step, "elapsed_s": self.elapsed_s, "results": results}
        runs.write_json(self.out_dir / "plan.json", self.plan)

    def _ended(self) -> bool:
        """True when the last step is done. Fixes the end of a run on time when its constant part has used its share."""
        minutes = self.plan["settings"]["minutes"]
        if self.plan["last_step"] is None and self.elapsed_s >= (1 - DECAY_FRAC) * minutes * 60:
            self.plan["last_step"] = max(self.step + 1, round(self.step / (1 - DECAY_FRAC)))
            self.save()  # the plan must not run ahead of the weights
            runs.write_json(self.out_dir / "plan.json", self.plan)
        return self.plan["last_step"] is not None and self.step >= self.plan["last_step"]

    def _show(self, bar) -> None:
        recent = self.curve[-50:]
        means = pd.DataFrame(recent).mean() if self.step % 10 == 0 else None
        if means is not None:
            span_s = recent[-1]["elapsed_s"] - recent[0]["elapsed_s"]
            rate = sum(row["batch_tok"] for row in recent[1:]) / max(1e-9, span_s)
            shown = {
                name: f"{value:.3f}" for name, value in means.items() if name in ("loss", "accuracy_0", "accuracy_3")
            }
            bar.set_postfix(tok_per_s=f"{rate:.0f}", **shown, refresh=False)
        bar.total = self.plan["last_step"]
        bar.update()

    def save(self) -> None:
        """Write checkpoint.safetensors and loss.parquet, atomically."""
        from safetensors.torch import save_file

        tensors = {}
        for name, module in self.modules.items():
            tensors |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{number}.{index}.{key}": torch.as_tensor(value) for key, value in state.items()}
        note = {"step": str(self.step), "elapsed_s": repr(self.elapsed_s), "curve": json.dumps(self.curve)}
        with runs.atomic(self.checkpoint) as temporary:
            save_file({name: value.contiguous() for name, value in tensors.items()}, temporary, metadata=note)
        if self.curve:
            runs.write_table(self.out_dir / "loss.parquet", self.table)

    def _load(self) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.checkpoint, "pt") as stored:
                note, tensors = stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}
        except (OSError, SafetensorError) as error:
            raise SpecdecError(f"{self.checkpoint} is damaged ({error}); pass resume=False to start over.") from error
        for name, module in self.modules.items():
            module.load_state_dict(_below(tensors, f"{name}."))
        for number, optimizer in enumerate(self.optimizers):
            state: dict = {}
            for key, value in _below(tensors, f"optimizer.{number}.").items():
                index, field = key.split(".", 1)
                state.setdefault(int(index), {})[field] = value
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        self.step, self.elapsed_s = int(note["step"]), float(note["elapsed_s"])
        self.curve = json.loads(note["curve"])


def _below(tensors: dict, prefix: str) -> dict:
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


# ---- from train.epochs ----------------------------------------


class Epochs(Loop):
    """`run(epoch(number, rate_factor) -> dict)`: the dicts become the rows of loss.parquet, one per epoch."""

    def __init__(self, *arguments, seed: int, shown: tuple[str, ...] = ("loss",), **named):
        self.seed, self.shown = seed, shown
        super().__init__(*arguments, **named)

    def run(self, step: Callable[[int, float], dict]) -> None:
        """Train to the end; Ctrl-C saves the state after the last whole epoch."""

        def whole(number: int, factor: float) -> dict:
            before = [copy.deepcopy(one.state_dict()) for one in (*self.modules.values(), *self.optimizers)]
            try:
                with seeded(self.seed, number):
                    return step(number, factor)
            except BaseException:
                for one, state in zip((*self.modules.values(), *self.optimizers), before, strict=True):
                    one.load_state_dict(state)
                raise

        super().run(whole)

    def _show(self, bar) -> None:
        row = self.curve[-1]
        bar.unit, bar.total = "epoch", self.plan["last_step"]
        bar.set_postfix({name: f"{row[name]:.4g}" for name in self.shown if pd.notna(row.get(name))}, refresh=False)
        bar.update()


@contextmanager
def seeded(seed: int, number: int):
    """torch's CPU generator set from (seed, number) inside the block, and as it was afterwards."""
    digest = hashlib.blake2b(struct.pack("<qq", seed, number), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield


def batches(rows: int, size: int) -> Iterator[Tensor]:
    """All row numbers in random order, `size` at a time."""
    yield from torch.randperm(rows).split(size)


# ---- from train.curves ----------------------------------------


def training_curves(
    folders: dict[str, Path], columns=("reward", "entropy", "tok_per_ms"), points: int = 60
) -> pd.DataFrame:
    """The curves of several runs in long form: run, steps, what, value; means over blocks, about `points` per run."""
    found = []
    for name, folder in folders.items():
        curve = runs.read_table(Path(folder) / "curve.parquet")[["steps", *columns]]
        block = curve.index // max(1, len(curve) // points)
        mean = curve.groupby(block).mean().assign(steps=curve["steps"].groupby(block).max())
        found.append(mean.melt("steps", var_name="what", value_name="value").assign(run=name))
    return pd.concat(found, ignore_index=True)[["run", "steps", "what", "value"]]


def training_results(folders: dict[str, Path]) -> pd.DataFrame:
    """One row per run: steps, minutes, steps_per_s, the greedy policy's commonest answer on training text and its share."""
    rows = []
    for name, folder in folders.items():
        found = runs.read_json(Path(folder) / "plan.json")["results"]
        common = "/".join(map(str, found["most_common"]))
        rows.append(
            {
                "run": name,
                "steps": found["steps"],
                "minutes": found["elapsed_s"] / 60,
                "steps_per_s": found["steps"] / max(1e-9, found["elapsed_s"]),
                "answers": found["answers"],
                "commonest": common,
                "commonest_frac": found["most_common_frac"],
            }
        )
    return pd.DataFrame(rows)


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU or CPU that multiplies it natively, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    native = {"amx_bf16", "avx512_bf16", "bf16"} & set(machine.hardware()["cpu_flags"])
    return torch.bfloat16 if native else torch.float32
