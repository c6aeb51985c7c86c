"""A training run on disk: plan, checkpoint and curve. It can be stopped and resumes exactly.

The owner provides the trained parts, and a function that does one step. A step's randomness must
depend only on its number. Then weights, optimiser state and the number are the whole state.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.core.verification import mixed_seed
from specdec.errors import SpecdecError, unreadable, warn
from specdec.policies.base import COLLAPSED_FRAC

DECAY_FRAC = 0.35  # last fraction of a run, over which the learning rate falls to zero
FORMAT = "3"  # of checkpoints


def rate_factor(
    step: int, last_step: int | None, warmup_steps: int, linear_end: int | None = None
) -> float:
    """The learning rate as a fraction of its peak.

    Linear warm-up, then constant, then linear to zero over the last DECAY_FRAC of the run (constant
    while its end is unknown). linear_end: fall linearly from the end of the warm-up to zero at that
    step (EAGLE's schedule).
    """
    factor = min(1.0, (step + 1) / max(1, warmup_steps))
    if linear_end is not None:
        ahead = (linear_end - step) / max(1, linear_end - warmup_steps)
        return factor * max(0.0, min(1.0, ahead))
    if last_step is None:
        return factor
    return factor * min(1.0, (last_step - step) / max(1.0, DECAY_FRAC * last_step))


class Curve:
    """Rows of a training: the newest in memory, others in <folder>/part-<first row>.parquet.

    Saving writes only new rows, so that its cost does not grow.
    """

    def __init__(self, folder: Path):
        self.shards = runs.Shards(Path(folder))
        self.rows = 0
        self.new: list[dict] = []

    def add(self, row: dict) -> None:
        self.new.append(row)
        self.rows += 1

    def save(self) -> None:
        if self.new:
            self.shards.write(self.rows - len(self.new), pd.DataFrame(self.new))
        self.new = []

    def cut(self, rows: int) -> None:
        """Drop all rows after the first `rows`; they must end at a shard's end, or in memory."""
        saved = self.rows - len(self.new)
        self.new = self.new[: max(0, rows - saved)]
        self.shards.drop(rows)
        self.rows = rows

    def table(self) -> pd.DataFrame:
        """All rows, including those in memory."""
        parts = []
        if self.shards.done():
            parts.append(self.shards.read())
        if self.new or not parts:
            parts.append(pd.DataFrame(self.new))
        return pd.concat(parts, ignore_index=True)


class Best:
    """The weights that scored highest so far; a part of a checkpoint.

    network: its weights are used until something has scored. step: the step of the best weights, -1
    before any. misses: number of consecutive networks without improvement. dtype: the precision of
    stored scores.
    """

    def __init__(self, network: torch.nn.Module | None = None, dtype: torch.dtype = torch.float64):
        self.weights = {} if network is None else copy.deepcopy(network.state_dict())
        self.score = -math.inf
        self.step = -1
        self.misses = 0
        self.dtype = dtype

    def consider(self, weights: dict[str, Tensor], score: float | None, step: int = -1) -> None:
        """Keep a copy of `weights` if they score higher than all before; without a score always."""
        if score is not None and not score > self.score:
            self.misses += 1
            return
        self.weights = copy.deepcopy(weights)
        self.step = step
        self.misses = 0
        self.score = -math.inf
        if score is not None:
            self.score = float(torch.tensor(score, dtype=self.dtype))

    def load_into(self, network: torch.nn.Module) -> torch.nn.Module:
        """The network, with the best weights."""
        network.load_state_dict(self.weights)
        return network

    def state_dict(self) -> dict[str, Tensor]:
        state = {
            "score": torch.tensor(self.score, dtype=torch.float64),
            "step": torch.tensor(self.step),
            "misses": torch.tensor(self.misses),
        }
        for name, value in self.weights.items():
            state[f"network.{name}"] = value
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weights = copy.deepcopy(below(state, "network."))
        self.score = float(state["score"])
        self.step = int(state["step"])
        self.misses = int(state["misses"])


class TrainingRun:
    """One training in `out_dir`: plan.json, checkpoint.safetensors and <curve>.parquet.

    settings: everything that the result depends on. settings["steps"] is the last step; if None,
    the run ends after settings["minutes"]. The same settings find the same run again. SpecdecError
    if the folder holds another run.
    """

    def __init__(self, out_dir: Path, settings: dict, resume: bool = True, curve: str = "loss"):
        out_dir = Path(out_dir)
        self.plan_path = out_dir / "plan.json"
        self.checkpoint = out_dir / "checkpoint.safetensors"
        self.curve = Curve(out_dir / curve)
        self.parts: dict = {}
        self.optimizers: list = []
        # whether to end before the last step
        self.stopped: Callable[[], bool] = lambda: False
        self.step = 0
        self.elapsed_s = 0.0
        self._saved_step = -1
        # 1. a new plan
        if not resume:
            self.curve.cut(0)
            self.plan_path.unlink(missing_ok=True)
            self.checkpoint.unlink(missing_ok=True)
        settings = runs.plain(settings)
        self.plan = {"settings": settings, "last_step": settings["steps"], "finished": False}
        self.plan["sessions"] = []
        if not self.plan_path.is_file():
            self._write_plan()
        # 2. or the one that is there
        self.plan = runs.read_json(self.plan_path)
        if self.plan["settings"] != settings:
            why = f"{out_dir} holds a run with other settings; repeat them"
            raise SpecdecError(f"{why}, choose another folder, or pass resume=False to start over.")

    def _write_plan(self) -> None:
        runs.write_json(self.plan_path, self.plan)

    @property
    def finished(self) -> bool:
        return self.plan["finished"]

    def table(self) -> pd.DataFrame:
        """The curve so far."""
        if not self.finished:
            return self.curve.table()
        folder = self.curve.shards.folder
        return runs.read_table(folder.with_name(f"{folder.name}.parquet"))

    def track(self, parts: dict, optimizers=()) -> None:
        """Define the parts of a checkpoint, and load the checkpoint if there is one.

        parts: name -> a module, or anything else with `state_dict` and `load_state_dict` of
        tensors. optimizers: their groups have "peak", the highest rate, if `run` is to set rates.
        """
        self.parts = parts
        self.optimizers = list(optimizers)
        rows = 0
        if self.checkpoint.is_file():
            note, tensors = read_checkpoint(self.checkpoint)
            restore(tensors, self.parts, self.optimizers)
            self.step = int(note["step"])
            self.elapsed_s = float(note["elapsed_s"])
            rows = int(note["rows"])
        if not self.finished:
            self.curve.cut(rows)
            self.plan["sessions"].append({"step": self.step, **machine.fingerprint()})
            self._write_plan()

    def end_at(self, step: int | None) -> None:
        """Fix the last step if neither steps nor minutes did so."""
        settings = self.plan["settings"]
        if settings["steps"] is None and settings.get("minutes") is None:
            self.plan["last_step"] = step
            self._write_plan()

    def run(
        self,
        step: Callable[[int, float], dict | None],
        label: str,
        factor: Callable[[int, int | None], float] | None = None,
        *,
        all_or_nothing: bool = False,
        save_s: float = 120.0,
        shown: tuple[str, ...] = ("loss", "accuracy_0", "accuracy_3"),
        progress: bool = True,
        leave: bool = True,
    ) -> None:
        """Call step(number, rate factor) to the planned end. A returned row is added to the curve.

        factor(step, last step): the learning rate as a fraction of its peak. all_or_nothing: an
        interrupted step leaves nothing behind, such as an epoch. save_s: seconds between two
        checkpoints; 0: after every step. Ctrl-C saves too. leave: whether the progress bar stays
        when the run ends.
        """
        if self.finished:
            return
        self._began_s = time.perf_counter() - self.elapsed_s
        saved_s = time.perf_counter()
        bar = dict(desc=label, mininterval=2.0, disable=not progress, leave=leave)
        self._bar = tqdm(initial=self.step, total=self.plan["last_step"], **bar)
        self._columns = shown
        try:
            while not self._ended():
                if all_or_nothing:
                    row = self._all_or_nothing(step, factor)
                else:
                    row = self._step(step, factor)
                if row is not None:
                    self.add({"step": self.step, **row})
                self.step += 1
                self.elapsed_s = time.perf_counter() - self._began_s
                self._bar.total = self.plan["last_step"]
                self._bar.update()
                if time.perf_counter() - saved_s >= save_s:
                    self.save()
                    saved_s = time.perf_counter()
        finally:
            self._bar.close()
            self.save()
            if self.curve.rows:
                self.curve.shards.merge()

    def _step(self, step: Callable, factor: Callable | None) -> dict | None:
        if factor is None:
            return step(self.step, 1.0)
        share = factor(self.step, self.plan["last_step"])
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * group["peak"]
        return step(self.step, share)

    def _all_or_nothing(self, step: Callable, factor: Callable | None) -> dict | None:
        tracked = [*self.parts.values(), *self.optimizers]
        rows = self.curve.rows
        before = [copy.deepcopy(part.state_dict()) for part in tracked]
        try:
            return self._step(step, factor)
        except BaseException:
            for part, state in zip(tracked, before, strict=True):
                part.load_state_dict(state)
            self.curve.cut(rows)
            raise

    def add(self, row: dict) -> None:
        """Add a row to the curve, with elapsed_s. Steps that make several rows call it."""
        row = {**row, "elapsed_s": time.perf_counter() - self._began_s}
        self.curve.add(row)
        numbers = {name: f"{row[name]:.4g}" for name in self._columns if pd.notna(row.get(name))}
        self._bar.set_postfix(numbers, refresh=False)

    def _ended(self) -> bool:
        """True when the last step is done.

        The end of a run on time is fixed when its constant part has used its share.
        """
        minutes = self.plan["settings"].get("minutes")
        if self.plan["last_step"] is None and self.elapsed_s >= (1 - DECAY_FRAC) * minutes * 60:
            self.plan["last_step"] = max(self.step + 1, round(self.step / (1 - DECAY_FRAC)))
            self.save()  # the plan must not run ahead of the weights
            self._write_plan()
        last_step = self.plan["last_step"]
        return self.stopped() or (last_step is not None and self.step >= last_step)

    def save(self) -> None:
        """Write the newest rows, then checkpoint.safetensors.

        If it is killed in between, a run drops the extra rows.
        """
        if self._saved_step == self.step:
            return
        self.curve.save()
        tensors = {}
        for name, part in self.parts.items():
            for key, tensor in part.state_dict().items():
                tensors[f"{name}.{key}"] = tensor.contiguous()
        for number, optimizer in enumerate(self.optimizers):
            for index, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    tensor = torch.as_tensor(value).contiguous()
                    tensors[f"optimizer.{number}.{index}.{key}"] = tensor
        note = {"format": FORMAT, "step": str(self.step), "elapsed_s": str(self.elapsed_s)}
        note["rows"] = str(self.curve.rows)
        with runs.atomic(self.checkpoint) as temporary:
            save_file(tensors, temporary, metadata=note)
        self._saved_step = self.step

    def finish(self, **results) -> None:
        """Mark the plan as finished, store `results` in it, and leave one table of the curve."""
        if self.finished:
            return
        self.plan["finished"] = True
        self.plan["steps_done"] = self.step
        self.plan["elapsed_s"] = self.elapsed_s
        self.plan["results"] = results
        self._write_plan()
        self.curve.shards.drop(0)


def read_checkpoint(path: Path) -> tuple[dict, dict]:
    """(note, tensors) of a checkpoint. SpecdecError if it is damaged or of another format."""
    try:
        with safe_open(path, "pt") as stored:
            note = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
    except (OSError, SafetensorError) as error:
        raise unreadable(path, error, "a checkpoint", "pass resume=False to start over") from error
    if note.get("format") != FORMAT:
        why = f"{path} was written by another version of specdec"
        raise SpecdecError(f"{why}; pass resume=False to start over.")
    return note, tensors


def below(tensors: dict, prefix: str) -> dict:
    """The entries whose names begin with `prefix`, without it."""
    entries = {}
    for name, value in tensors.items():
        if name.startswith(prefix):
            entries[name.removeprefix(prefix)] = value
    return entries


def restore(tensors: dict, parts: dict, optimizers=()) -> None:
    """Load these parts and optimisers from what `TrainingRun.save` wrote."""
    for name, part in parts.items():
        part.load_state_dict(below(tensors, f"{name}."))
    for number, optimizer in enumerate(optimizers):
        state: dict = {}
        for key, value in below(tensors, f"optimizer.{number}.").items():
            index, field = key.split(".", 1)
            state.setdefault(int(index), {})[field] = value
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


@contextmanager
def generators(torch_seed: int, numpy_seed: int | None = None):
    """torch's CPU generator (and numpy's global one) seeded inside the block, restored after it."""
    before = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed)
        if numpy_seed is not None:
            np.random.seed(numpy_seed)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(before)  # noqa: NPY002


def seeded(seed: int, number: int):
    """Inside the block torch is seeded with (seed, number)."""
    return generators(mixed_seed(seed, number))


def descend(
    optimizer: torch.optim.Optimizer, loss: Tensor, clip_norm: float | None = None
) -> float:
    """One optimiser step on `loss`, whose value is returned. clip_norm: the gradient's limit."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if clip_norm is not None:
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimizer.step()
    return float(loss.detach())


def batches(rows: int, size: int) -> Iterator[Tensor]:
    """All row numbers in random order, `size` at a time."""
    yield from torch.randperm(rows).split(size)


def warn_of_a_constant(what: str, frac: float) -> None:
    """Warn if one answer makes up `frac` of a trained policy's cycles and that is nearly all."""
    if frac >= COLLAPSED_FRAC:
        text = f"{what} in {frac:.1%} of cycles: it collapsed to a constant"
        warn(f"{text}; try another seed or longer exploration.")


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU or CPU that multiplies it natively, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if machine.multiplies_bfloat16() else torch.float32


# shim: goes when tests/training/test_drafter_runs.py no longer imports it
def in_use(settings):
    """The settings as they are."""
    return settings
