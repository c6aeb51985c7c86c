"""Many tasks at once: on this machine's cores or on a Ray cluster, through joblib.

Tasks keep what they finish in files of the folder of runs, so a call that was stopped does less
the second time. On a cluster all machines must see that folder; SLURM users start Ray there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.errors import SpecdecError, check_integer, first_line, nearest_name_error

PLACES = ("local", "ray")  # and ray://host:port
_interrupts: list[int] = []


def parallel(tasks, on=None, jobs=None, timed=False, desc="tasks", progress=True) -> list[Any]:
    """The results of all tasks, in their order.

    tasks: calls without arguments that pickle can send. on: None runs them here one after the
    other, "local" on this machine's cores, "ray" or "ray://host:port" on a cluster. jobs: how many
    at once (default: all). timed: they measure time, so each has its machine to itself. Every task
    is tried; SpecdecError at the end names the first that failed.
    """
    tasks = list(tasks)
    place = checked_place(on, jobs)
    if _interrupts:
        raise KeyboardInterrupt
    if place is None:
        return [task() for task in tqdm(tasks, desc, disable=not progress)]
    import joblib

    # 1. where: a pool of processes here, or Ray's scheduler
    cores = machine.usable_cores()
    workers = check_integer("jobs", jobs or cores, 1)
    options: dict[str, Any] = {"backend": "loky", "n_jobs": 1 if timed else workers}
    if place != "local":
        _connect_to_ray(place)
        each = {"num_cpus": cores if timed else 1}
        options = {"backend": "ray", "n_jobs": jobs or -1, "ray_remote_args": each}
    # 2. the same folders as here; an exception comes back as a value, so that others finish
    environment = {name: value for name, value in os.environ.items() if name.startswith("SPECDEC_")}
    environment["SPECDEC_HOME"] = str(runs.home())
    # a task that measures time has the threads of this process
    threads = None if timed else max(1, cores // workers)
    calls = [joblib.delayed(_attempt)(task, environment, os.getcwd(), threads) for task in tasks]
    with joblib.parallel_config(**options):
        running = joblib.Parallel(return_as="generator")(calls)
        results = list(tqdm(running, desc, total=len(tasks), disable=not progress))
    # 3. one sentence for what failed
    failed = [result for result in results if isinstance(result, _Failure)]
    if failed:
        why = f"{len(failed)} of {len(tasks)} {desc} failed, the first with: {failed[0]}"
        raise SpecdecError(f"{why}; the others are kept, and the same call tries these again.")
    return results


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, no task begins after Ctrl-C, even if a library swallowed the KeyboardInterrupt."""

    def stop(number: int, _: Any) -> None:
        _interrupts.append(number)
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        _interrupts.clear()


class _Failure(str):
    """Why a task has no result."""


def _attempt(task: Callable[[], Any], environment: dict, folder: str, threads: int | None) -> Any:
    """The task's result in a worker, or the reason why there is none."""
    import torch

    os.environ.update(environment)
    if os.path.isdir(folder):
        os.chdir(folder)  # paths that were given may be relative
    machine.find_workbook()  # functions beside the notebooks can be imported
    # a single job runs in the caller's process, which keeps its threads
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(threads or usual)
        return task()
    except Exception as error:
        return _Failure(first_line(error).rstrip("."))
    finally:
        torch.set_num_threads(usual)


def checked_place(on: str | None, jobs: int | None = None) -> str | None:
    """`on` if there is such a place; "local" if only `jobs` is given; None for this process."""
    if on is None:
        return None if jobs is None else "local"
    if on not in PLACES and not on.startswith("ray://"):
        raise nearest_name_error("place to run on", on, [*PLACES, "ray://host:port"])
    return on


def _connect_to_ray(place: str) -> None:
    """Make Ray's scheduler a backend of joblib; SpecdecError if no cluster answers."""
    try:
        import ray
        from ray.util.joblib import register_ray
    except ImportError:
        raise SpecdecError("on='ray' needs the package ray; pip install 'specdec[ray]'.") from None
    try:
        ray.init(None if place == "ray" else place, ignore_reinit_error=True, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        why = f"no Ray cluster answers at {place} ({first_line(error)})"
        raise SpecdecError(f"{why}; start one there with `ray start --head`.") from None
    register_ray()
