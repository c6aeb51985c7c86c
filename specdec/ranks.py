"""The processes started by torchrun or accelerate launch: their ranks, and communication between them.

       torchrun --nproc-per-node 2 -m specdec ...   ──▶  rank 0 leads: it prints, writes files, and decides
                                                      rank 1 ... follow

A single process is rank 0 of 1: every function here returns its argument, and torch.distributed is not used.
Data is sent between our own processes only, never to or from a file. Knows nothing about models or training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta

from specdec.errors import SpecdecError, first_line
from specdec.later import Later

torch, distributed = Later("torch"), Later("torch.distributed")
PATIENCE = timedelta(hours=2)  # a rank may load or write for long while the others wait


class RankZeroFailed(SpecdecError):
    """Rank 0 failed and reported why."""


def world() -> int:
    """The number of processes."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """The rank of this process."""
    return int(os.environ.get("RANK") or 0) if world() > 1 else 0


def leads() -> bool:
    """Whether this is rank 0, which prints and writes files."""
    return rank() == 0


def first_here() -> bool:
    """Whether this is the first process on its machine, which reports errors before the ranks have joined."""
    return world() == 1 or int(os.environ.get("LOCAL_RANK") or 0) == 0


def join(device: str = "cpu") -> None:
    """Join the other processes, with gloo on a CPU and NCCL between GPUs. Does nothing for one process, or a second time.

    SpecdecError if PyTorch lacks the backend, a rank has no GPU of its own, or the others do not answer.
    """
    if world() == 1:
        return
    if not distributed.is_available():
        why = "this PyTorch has no torch.distributed"
        raise SpecdecError(f"{why}; install a build with gloo or NCCL, or run one process.")
    if distributed.is_initialized():
        return
    cuda = device == "cuda"
    if not (distributed.is_nccl_available() if cuda else distributed.is_gloo_available()):
        name = "NCCL" if cuda else "gloo"
        raise SpecdecError(f"this PyTorch has no {name} for {world()} processes; install a build with it.")
    if cuda:
        local, there = int(os.environ.get("LOCAL_RANK", rank())), torch.cuda.device_count()
        if int(os.environ.get("LOCAL_WORLD_SIZE", local + 1)) > there:
            why = f"not every process has a GPU of its own: there are {there} here"
            raise SpecdecError(f"{why}; start no more processes.")
        torch.cuda.set_device(local)
    try:
        distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        why = f"the {world()} processes do not find each other ({first_line(error)})"
        raise SpecdecError(f"{why}; start them with torchrun --nproc-per-node {world()} -m specdec ...") from error


def joined() -> bool:
    """Whether the processes have joined."""
    return world() > 1 and distributed.is_available() and distributed.is_initialized()


def leave() -> None:
    """Leave the group, at the end of a command."""
    if joined():
        distributed.destroy_process_group()


def barrier() -> None:
    """Wait for all processes."""
    gather(None)


def broadcast(value):
    """Rank 0's value, on all ranks."""
    return gather(value)[0]


def gather(value) -> list:
    """The values of all ranks, in their order."""
    if world() == 1:
        return [value]
    found = [None] * world()
    distributed.all_gather_object(found, value)
    return found


def on_rank_zero(function: Callable):
    """The result of `function` on rank 0, the only one to run it; if it raises, the others raise RankZeroFailed."""
    if world() == 1:
        return function()
    if not leads():
        value, failed = broadcast(None)
        if failed:
            raise RankZeroFailed("rank 0 failed; see its error above.")
        return value
    try:
        value = function()
    except BaseException:
        broadcast((None, True))
        raise
    return broadcast((value, False))[0]


def broadcast_tensor(tensor):
    """Rank 0's values of a tensor with the same shape on all ranks."""
    if world() == 1:
        return tensor
    tensor = tensor.contiguous().clone()
    distributed.broadcast(tensor, src=0)
    return tensor


def all_reduce(tensor, how: str = "SUM"):
    """The sum over all ranks of a tensor with the same shape on all; how: another of torch.distributed's ReduceOps."""
    if world() == 1:
        return tensor
    tensor = tensor.clone()
    distributed.all_reduce(tensor, getattr(distributed.ReduceOp, how))
    return tensor


def slowest(times: Sequence[float]) -> list[float]:
    """The maximum of every number over all ranks."""
    return all_reduce(torch.tensor(times, dtype=torch.float64), "MAX").tolist()


def mean(numbers: Sequence[float]) -> list[float]:
    """The mean of every number over all ranks."""
    return (all_reduce(torch.tensor(numbers, dtype=torch.float64)) / world()).tolist()


def average(tensors: Sequence) -> None:
    """Replace these tensors, which have the same shape on all ranks, by their mean, with one message."""
    if world() == 1 or not tensors:
        return
    flat = all_reduce(torch.cat([tensor.flatten() for tensor in tensors])) / world()
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def whole(tensor):
    """A sharded tensor gathered on all ranks; any other unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def share(items: Sequence) -> Sequence:
    """This rank's part of `items`, in consecutive parts of equal length. SpecdecError if they do not divide evenly."""
    if world() == 1:
        return items
    if len(items) % world():
        why = f"a batch of {len(items)} rows does not divide among {world()} processes"
        raise SpecdecError(f"{why}; make it a multiple, such as --set batch={world()}.")
    size = len(items) // world()
    return items[rank() * size : (rank() + 1) * size]
