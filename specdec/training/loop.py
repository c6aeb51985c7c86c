"""A training run on disk: plan, checkpoint and curve. It can be stopped and resumes exactly.

The owner provides the trained parts, and a function that does one step. A step's randomness must
depend only on its number. Then weights, optimiser state and the number are the whole state.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import time
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager, suppress
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
from specdec.errors import SpecdecError, unreadable

DECAY_FRAC = 0.35  # last fraction of a run, over which the learning rate falls to zero
FORMAT = "3"  # of checkpoints
DIVERGED = "the training diverged: its numbers are not finite any more; lower the learning rate."


def rate_factor(step: int, last_step: int | None, warmup_steps: int, linear_end=None) -> float:
    """The learning rate as a fraction of its peak.

    Linear warm-up, then constant, then linear to zero over the last DECAY_FRAC of the run (constant
    while its end is unknown). linear_end: linear from the warm-up to zero at that step (EAGLE).
    """
    ahead = 1.0
    if linear_end is not None:
        ahead = max(0.0, (linear_end - step) / max(1, linear_end - warmup_steps))
    elif last_step is not None:
        ahead = (last_step - step) / max(1.0, DECAY_FRAC * last_step)
    return min(1.0, (step + 1) / max(1, warmup_steps)) * min(1.0, ahead)


class Best:
    """The weights that scored highest so far; a part of a checkpoint.

    network: its weights are used until something has scored. misses: consecutive networks without
    improvement. dtype: the precision of stored scores.
    """

    def __init__(self, network: torch.nn.Module | None = None, dtype: torch.dtype = torch.float64):
        self.weights = {} if network is None else copy.deepcopy(network.state_dict())
        self.score = -math.inf
        self.step = -1
        self.misses = 0
        self.dtype = dtype

    def consider(self, weights: dict[str, Tensor], score: float | None, step: int = -1) -> None:
        """Keep a copy of `weights` if they score higher than all before; without a score always."""
        if score is not None and not math.isfinite(score):
            raise SpecdecError(DIVERGED)
        if score is not None and not score > self.score:
            self.misses += 1
            return
        self.weights = copy.deepcopy(weights)
        self.step = step
        self.misses = 0
        self.score = float(torch.tensor(-math.inf if score is None else score, dtype=self.dtype))

    def load_into(self, network: torch.nn.Module) -> torch.nn.Module:
        """The network, with the best weights."""
        network.load_state_dict(self.weights)
        return network

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"network.{name}": value for name, value in self.weights.items()}
        state["score"] = torch.tensor(self.score, dtype=torch.float64)
        state["step"] = torch.tensor(self.step)
        state["misses"] = torch.tensor(self.misses)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weights = copy.deepcopy(below(state, "network."))
        self.score = float(state["score"])
        self.step = int(state["step"])
        self.misses = int(state["misses"])


class TrainingRun:
    """One training in `out_dir`: plan.json, checkpoint.safetensors and <curve>.parquet.

    settings: everything that the result depends on. settings["steps"] is the last step; if None,
    the run ends after settings["minutes"]. SpecdecError if the folder holds another run.
    """

    def __init__(self, out_dir: Path, settings: dict, resume: bool = True, curve: str = "loss"):
        out_dir = Path(out_dir)
        self.plan_path = out_dir / "plan.json"
        self.checkpoint = out_dir / "checkpoint.safetensors"
        self.curve = out_dir / f"{curve}.parquet"
        self.rows: list[dict] = []  # of the curve
        self.parts: dict = {}
        self.optimizers: list = []
        self.step = 0
        self.elapsed_s = 0.0
        if not resume:
            for path in (self.plan_path, self.checkpoint, self.curve):
                path.unlink(missing_ok=True)
        settings = runs.plain(settings)
        self.plan = {"settings": settings, "last_step": settings["steps"], "finished": False}
        if self.plan_path.is_file():
            self.plan = runs.read_json(self.plan_path)
        else:
            runs.write_json(self.plan_path, self.plan)
        if self.plan["settings"] != settings:
            why = f"{out_dir} holds a run with other settings; repeat them"
            raise SpecdecError(f"{why}, choose another folder, or pass resume=False to start over.")

    def table(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows)

    def track(self, parts: dict, optimizers=()) -> None:
        """Define the parts of a checkpoint, and load the checkpoint if there is one.

        parts: name -> anything with `state_dict` and `load_state_dict` of tensors. optimizers:
        their groups have "peak", the highest rate, if `run` is to set rates.
        """
        self.parts = parts
        self.optimizers = list(optimizers)
        if not self.checkpoint.is_file():
            return
        note, tensors = read_checkpoint(self.checkpoint)
        restore(tensors, self.parts, self.optimizers)
        self.step = int(note["step"])
        self.elapsed_s = float(note["elapsed_s"])
        # a run that was killed between the two writes has rows beyond its checkpoint
        count = int(note["rows"])
        if count:
            self.rows = runs.read_table(self.curve).head(count).to_dict("records")

    def end_at(self, step: int | None) -> None:
        """Fix the last step if neither steps nor minutes did so."""
        settings = self.plan["settings"]
        if settings["steps"] is None and settings.get("minutes") is None:
            self.plan["last_step"] = step
            runs.write_json(self.plan_path, self.plan)

    def run(
        self, step, label: str, factor=None, *, all_or_nothing=False, save_s=120.0, progress=True
    ) -> None:
        """Call step(number, rate factor) to the planned end. A returned row is added to the curve.

        factor(step, last step): the learning rate as a fraction of its peak. all_or_nothing: a
        checkpoint follows each step, otherwise every `save_s` seconds, and Ctrl-C.
        """
        if self.plan["finished"]:
            return
        self._began_s = time.perf_counter() - self.elapsed_s
        saved_s = time.perf_counter()
        with tqdm(initial=self.step, desc=label, mininterval=2.0, disable=not progress) as bar:
            try:
                while not self._ended():
                    # 1. the learning rate of this step
                    share = 1.0
                    if factor is not None:
                        share = factor(self.step, self.plan["last_step"])
                        groups = [optimizer.param_groups for optimizer in self.optimizers]
                        for group in itertools.chain.from_iterable(groups):
                            group["lr"] = share * group["peak"]
                    # 2. the step
                    row = step(self.step, share)
                    if row is not None:
                        self.add({"step": self.step, **row})
                    self.step += 1
                    self.elapsed_s = time.perf_counter() - self._began_s
                    # 3. a checkpoint
                    if all_or_nothing or time.perf_counter() - saved_s >= save_s:
                        self.save()
                        saved_s = time.perf_counter()
                    bar.total = self.plan["last_step"]
                    bar.update()
            except BaseException:
                # half a step of a resumable run is done again from the last checkpoint
                if not all_or_nothing:
                    self.save()
                raise
        self.save()

    def add(self, row: dict) -> None:
        """Add a row to the curve, with elapsed_s. Steps that make several rows call it."""
        self.rows.append({**row, "elapsed_s": time.perf_counter() - self._began_s})

    def _ended(self) -> bool:
        """Whether the last step is done."""
        # the end of a run on time is fixed when its constant part has used its share
        minutes = self.plan["settings"].get("minutes")
        if self.plan["last_step"] is None and self.elapsed_s >= (1 - DECAY_FRAC) * minutes * 60:
            self.plan["last_step"] = max(self.step + 1, round(self.step / (1 - DECAY_FRAC)))
            self.save()  # the plan must not run ahead of the weights
            runs.write_json(self.plan_path, self.plan)
        last_step = self.plan["last_step"]
        return last_step is not None and self.step >= last_step

    def save(self) -> None:
        """Write the curve, then checkpoint.safetensors; nothing if weights are not finite."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                check_finite(group["params"])
        if self.rows:
            runs.write_table(self.curve, self.table())
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
        note["rows"] = str(len(self.rows))
        with runs.atomic(self.checkpoint) as temporary:
            save_file(tensors, temporary, metadata=note)

    def finish(self, **results) -> None:
        """Mark the plan as finished and store `results` in it."""
        if not self.plan["finished"]:
            self.plan |= {"finished": True, "steps_done": self.step, "elapsed_s": self.elapsed_s}
            self.plan["results"] = results
            runs.write_json(self.plan_path, self.plan)


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
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors[name] for name in names}


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
    """torch's generators (and numpy's global one) seeded inside the block, restored after it."""
    before = np.random.get_state()  # noqa: NPY002
    gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    with torch.random.fork_rng(devices=range(gpus)):
        torch.manual_seed(torch_seed)
        if numpy_seed is not None:
            np.random.seed(numpy_seed)  # noqa: NPY002
        try:
            yield
        finally:
            np.random.set_state(before)  # noqa: NPY002


@contextmanager
def undisturbed():
    """A training's surroundings: gradients, float32, the CPU, and generators that may be reseeded.

    What the caller has set, and their random numbers, are as before after the block.
    """
    with ExitStack() as stack:
        # stable-baselines3 seeds Python's generator too
        stack.callback(random.setstate, random.getstate())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        # torch refuses to mix this with its newer setting, which is left alone
        with suppress(RuntimeError):
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        # a device of one's own slows every call down, so only against another one
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for device in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
            stack.enter_context(torch.autocast(device, enabled=False))
        for surrounding in (generators(0), torch.inference_mode(False), torch.enable_grad()):
            stack.enter_context(surrounding)
        yield


def check_finite(tensors: Iterable[Tensor]) -> None:
    """SpecdecError if losses, outputs or weights of a training are not finite any more."""
    for tensor in tensors:
        if not tensor.isfinite().all():
            raise SpecdecError(DIVERGED)


def seeded(seed: int, number: int):
    """Inside the block torch is seeded with (seed, number)."""
    return generators(mixed_seed(seed, number))


def descend(optimizer, loss: Tensor, clip_norm: float | None = None) -> float:
    """One optimiser step on `loss`, whose value is returned. clip_norm: the gradient's limit."""
    check_finite([loss])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if clip_norm is not None:
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
    optimizer.step()
    return float(loss.detach())


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU or CPU that multiplies it natively, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if machine.multiplies_bfloat16() else torch.float32
