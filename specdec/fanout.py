"""Sharded work on several processes or machines, chosen by one option. The engines schedule the shards; this module does not.

       local              processes of this machine
    ray                a Ray cluster of this machine's cores, started and stopped here
       ray://host:port    a running cluster (its client port)
    slurm              a job per shard, by submitit; partition, account and time come from sbatch's own SBATCH_... variables
    slurm:local        the same jobs as processes of this machine, without SLURM

A shard is a function of a module, its arguments, and `of`: what its result depends on. These and the code make its key, which
the worker computes from its own code; if the keys differ, it refuses. A function beside the notebooks is imported from the
worker's own checkout, or from the folder SPECDEC_NOTEBOOKS. Files that a shard leaves in the folder of runs stay, so that a
second call does less; all machines must see that folder. Shards that measure time have their machine to themselves. Knows
nothing about what shards compute.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import os
import pickle
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

from tqdm import std
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.errors import SpecdecError, check_integer, first_line, nearest_name_error

PLACES = ("local", "ray", "slurm", "slurm:local")  # and ray://host:port
ATTEMPTS = 3  # per shard
REACH_S = 5.0  # until an unresponsive cluster is given up
JOBS_ON_SLURM = 16  # at once, by default
MINUTES_ON_SLURM = 240  # per job, unless SBATCH_TIMELIMIT is set
ALONE = "specdec_timing"  # resource of a Ray node: one, so that one shard that measures time runs there
INSIDE = "SPECDEC_SHARD"  # set in a worker, whose nested shards must not wait for the machine it already holds


@dataclass(frozen=True)
class Shard:
    """A piece of work: call(*arguments), with a small result.

    name: for display. of: what the result depends on, as JSON. timed: measures time, so it runs alone.
    """

    name: str
    call: Callable
    arguments: tuple = ()
    of: dict = field(default_factory=dict)
    timed: bool = False

    def key(self, code: dict) -> str:
        """The content key of its result with this code."""
        return runs.content_key(call=f"{self.call.__module__}.{self.call.__qualname__}", of=self.of, code=code)


@dataclass(frozen=True)
class Failed:
    """Replaces a result after the last attempt."""

    reason: str


@functools.cache
def own_code() -> dict:
    """What results of this process depend on: the package, including shipped weights, and its libraries."""
    return {"code": machine.code_hash(), **machine.versions()}


def work(pickled: bytes, key: str, code: dict, settings: dict) -> dict:
    """{"result": the shard's result}, or {"failed": reason}: exceptions may differ between versions.

    pickled: a Shard; unpickled here, where functions beside the notebooks can be imported too.
    """
    os.environ.update(settings["environment"])
    std.tqdm.__init__ = functools.partialmethod(std.tqdm.__init__, disable=True)  # bars of several workers would mix
    try:
        machine.find_workbook()
        shard = pickle.loads(pickled)
        if shard.key(own_code()) != key:
            other = [name for name in sorted({*code, *own_code()}) if code.get(name) != own_code().get(name)]
            why = f"the worker on {platform.node()} has another {', another '.join(other)}"
            raise SpecdecError(f"{why}; install there what is here")
        with contextlib.suppress(OSError):  # given paths may be relative
            os.chdir(settings["folder"])
        torch = sys.modules.get("torch")  # if the shard's code imported it
        if torch is not None and settings["threads"]:
            torch.set_num_threads(settings["threads"])
        with _machine(shard.timed):
            return {"result": shard.call(*shard.arguments)}
    except SpecdecError as error:
        return {"failed": str(error).rstrip(".")}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {first_line(error)}"}


@contextlib.contextmanager
def _machine(alone: bool) -> Iterator[None]:
    """Inside, this machine's shards run together, or one that measures time alone."""
    if os.environ.get(INSIDE):  # the enclosing shard already holds the machine
        yield
        return
    with runs.locked(Path(tempfile.gettempdir()) / f"specdec-shards-{getattr(os, 'getuid', int)()}", shared=not alone):
        os.environ[INSIDE] = "1"
        try:
            yield
        finally:
            del os.environ[INSIDE]


def _end_with_parent() -> None:
    """End an orphaned worker, whose result would not be read."""

    def watch(sentinel):
        connection.wait([sentinel])
        os._exit(1)

    Thread(target=watch, args=(parent_process().sentinel,), daemon=True).start()


class _Engine:
    """Schedules and runs shards: submit(function, *arguments, timed) returns a task, which has done(), result() and cancel() like
    a future; close(running) ends running tasks and releases the engine's resources."""

    def wait(self, tasks: list, seconds: float) -> None:
        """Wait until one of the tasks is done, at most so long."""
        time.sleep(seconds)

    def offered(self, timed: bool) -> int | None:
        """How many shards it can hold at once; None: the caller decides."""
        return None


class _Local(_Engine):
    """One process per slot, so that one that dies affects no other shard."""

    def __init__(self):
        self._all: list[ProcessPoolExecutor] = []
        self._last: dict[ProcessPoolExecutor, Future] = {}  # the last or current task of each process

    def submit(self, function, *arguments, timed: bool) -> Future:
        ended = ((pool, task) for pool, task in self._last.items() if task.done())
        free = (pool for pool, task in ended if task.cancelled() or not isinstance(task.exception(), BrokenExecutor))
        if (pool := next(free, None)) is None:
            pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_end_with_parent)
            self._all.append(pool)
        self._last.pop(pool, None)  # a dead one is not used again
        self._last[pool] = pool.submit(function, *arguments)
        return self._last[pool]

    def wait(self, tasks: list[Future], seconds: float) -> None:
        futures.wait(tasks, seconds, futures.FIRST_COMPLETED)

    def close(self, running) -> None:
        for pool in self._all:
            for process in list((pool._processes or {}).values()) if running else ():
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)


class _Ray(_Engine):
    """Ray, in its own local cluster or as the client of another."""

    def __init__(self, place: str, slots: int, threads: int, gpus: int):
        self.ray, self.needs = _extra("ray", "ray"), {"num_cpus": threads, "num_gpus": gpus}
        self._ours = not self.ray.is_initialized()
        quiet = dict(log_to_driver=False, logging_level="ERROR")
        if self._ours and place == "ray":
            size = dict(num_cpus=slots * threads, resources={ALONE: 1}, include_dashboard=False)
            os.environ.setdefault("RAY_agent_register_timeout_ms", "300000")  # for busy machines
            try:
                self.ray.init("local", **quiet, **size)
            except Exception as error:
                why = f"Ray did not start here ({first_line(error)})"
                raise SpecdecError(f"{why}; try again, or --on local.") from error
        elif self._ours:
            host, _, port = place.removeprefix("ray://").rpartition(":")
            try:
                socket.create_connection((host, int(port)), timeout=REACH_S).close()
                self.ray.init(place, **quiet)
            except (OSError, ValueError, RuntimeError) as error:
                advice = (
                    "start one there with `ray start --head --ray-client-server-port=PORT`, or leave the address out"
                )
                raise SpecdecError(f"no Ray cluster answers at {place} ({first_line(error)}); {advice}.") from None

    def offered(self, timed: bool) -> int:
        """Number of shards that the cluster can hold at once. SpecdecError if none."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        wanted = {"CPU": self.needs["num_cpus"], "GPU": self.needs["num_gpus"], ALONE: int(timed)}
        fits = [min(int(node.get(name, 0) // count) for name, count in wanted.items() if count) for node in nodes]
        if not sum(fits):
            need = ", ".join(f"{name} {count}" for name, count in wanted.items() if count)
            why = f"no node of the Ray cluster offers {need}, which a shard needs"
            raise SpecdecError(f"{why}; start its nodes with --resources='{{\"{ALONE}\": 1}}', or use fewer threads.")
        return sum(fits)

    def submit(self, function, *arguments, timed: bool) -> _RayTask:
        options = dict(max_retries=0, resources={ALONE: 1} if timed else None, **self.needs)
        return _RayTask(self.ray, self.ray.remote(function).options(**options).remote(*arguments))

    def wait(self, tasks: list[_RayTask], seconds: float) -> None:
        try:
            self.ray.wait([task.reference for task in tasks], timeout=seconds)
        except Exception:  # the cluster is gone: `result` reports it
            time.sleep(seconds)

    def close(self, running) -> None:
        for task in running:
            task.cancel()
        if self._ours:
            self.ray.shutdown()


@dataclass(frozen=True)
class _RayTask:
    ray: Any
    reference: Any

    def done(self) -> bool:
        return bool(self.ray.wait([self.reference], timeout=0)[0])

    def result(self):
        return self.ray.get(self.reference)

    def cancel(self) -> None:
        with contextlib.suppress(Exception):  # task and cluster may be gone
            self.ray.cancel(self.reference, force=True)


class _Slurm(_Engine):
    """submitit: one job per shard."""

    def __init__(self, cluster: str, threads: int, gpus: int):
        submitit = _extra("submitit", "slurm")
        if cluster == "slurm":
            try:
                subprocess.run(["scontrol", "ping"], capture_output=True, timeout=REACH_S, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                why = "there is no scontrol" if isinstance(error, FileNotFoundError) else first_line(error)
                why = f"SLURM cannot be reached from here ({why})"
                raise SpecdecError(f"{why}; log in to a machine that has sbatch, or run with --on local.") from None
        self.folder = runs.home() / "runs" / "jobs" / f"{time.time_ns()}-{os.getpid()}"
        self.executor = submitit.AutoExecutor(folder=self.folder, cluster=cluster)
        needs = dict(timeout_min=MINUTES_ON_SLURM, cpus_per_task=threads, gpus_per_node=gpus)
        self.executor.update_parameters(name="specdec", **needs)

    def submit(self, function, *arguments, timed: bool):
        self.executor.update_parameters(slurm_exclusive=timed)
        return self.executor.submit(function, *arguments)

    def close(self, running) -> None:
        for job in running:
            job.cancel()
        if not running:
            shutil.rmtree(self.folder, ignore_errors=True)


def _extra(package: str, extra: str):
    try:
        return importlib.import_module(package)
    except ImportError as error:
        why = f"--on {extra} needs the package {package}, which is not installed"
        raise SpecdecError(f"{why}; pip install 'specdec[{extra}]'.") from error


def checked_place(on: str | None, jobs: int | None = None) -> str | None:
    """`on` if it is one of PLACES, ray://host:port or None (this process); "local" if only jobs is given."""
    if on is None:
        return None if jobs is None else "local"
    if on not in PLACES and not on.startswith("ray://"):
        raise nearest_name_error("place to run on", on, [*PLACES, "ray://host:port"])
    return on


class Workers:
    """A pool of workers; a context. on: None is this process, one shard after the other.

    jobs: shards at once; default this machine's cores, a cluster's capacity, or JOBS_ON_SLURM. timed: whether the shards
    measure time. gpus: per shard. On one machine the workers share torch's threads.
    """

    def __init__(self, on: str | None = None, jobs: int | None = None, *, timed: bool = False, gpus: int = 0):
        self.on, self.timed, self.gpus = checked_place(on, jobs), timed, gpus
        here, self._most = self.on in (None, "local", "ray", "slurm:local"), jobs
        usual = machine.usable_cores() if here else JOBS_ON_SLURM
        wanted = check_integer("jobs", usual if jobs is None else jobs, 1)
        self.slots = 1 if self.on is None or (timed and here) else wanted
        threads = machine.torch_state()["threads"]
        self.threads = threads and (max(1, threads // self.slots) if here else threads)
        self._waiting: deque[Shard] = deque()
        self._running: dict[Any, Shard] = {}
        self._failures: Counter[str] = Counter()
        self._settled: list[tuple[Shard, Any]] = []
        self._order: dict[str, int] = {}  # order of submission
        self.failed: dict[str, str] = {}

    def __enter__(self) -> Workers:
        threads = self.threads or 1
        self.engine: _Engine
        if self.on in (None, "local"):
            self.engine = _Local()
        elif self.on.startswith("slurm"):
            self.engine = _Slurm("local" if self.on.endswith("local") else "slurm", threads, self.gpus)
        else:
            self.engine = _Ray(self.on, self.slots, threads, self.gpus)
        offered = self.engine.offered(self.timed)
        self.slots = self.slots if offered is None else min(offered, self._most or offered)
        names = [name for name in ("SPECDEC_DATA", machine.NOTEBOOKS_VARIABLE) if name in os.environ]
        environment = {"SPECDEC_HOME": str(runs.home()), **{name: os.environ[name] for name in names}}
        self.settings = {"environment": environment, "threads": self.threads, "folder": os.getcwd()}
        return self

    def __exit__(self, *_) -> None:
        self.engine.close(list(self._running))

    def portions(self, items: Sequence, per_worker: int = 4, dealt: bool = True) -> list[list]:
        """`items` in pieces, dealt like cards since neighbours are similar: single items in this process, one piece per worker on
        SLURM, a few per worker elsewhere, so that a slow one causes no delay. per_worker: how many; use more if each piece opens
        little. dealt: False keeps neighbours together.
        """
        if self.on is None:
            return [[item] for item in items]
        per_worker = 1 if self.on.startswith("slurm") else per_worker
        count = min(len(items), self.slots * per_worker)
        if dealt:
            return [list(items[number::count]) for number in range(count)]
        ends = [number * len(items) // max(1, count) for number in range(count + 1)]
        return [list(items[begin:end]) for begin, end in itertools.pairwise(ends)]

    def submit(self, shard: Shard) -> None:
        self._order.setdefault(shard.name, len(self._order))
        self._waiting.append(shard)

    def settled(self) -> list[tuple[Shard, Any]]:
        """(shard, result) of at least one shard, or Failed after the last attempt; [] if none is running."""
        pause = 0.01
        while True:
            self._fill()
            for task in [task for task in self._running if self._is_done(task)]:
                self._take(task, self._running.pop(task))
            if self._settled or not (self._running or self._waiting):
                settled, self._settled = self._settled, []
                return settled
            self.engine.wait(list(self._running), pause)
            pause = min(0.5, 1.3 * pause)

    def gather(self, shards: Iterable[Shard], desc: str, progress: bool = True) -> Iterator[tuple[Shard, Any]]:
        """(shard, result) as each finishes. SpecdecError at the end that names the failed ones."""
        total, coming = len(shards) if hasattr(shards, "__len__") else None, iter(shards)
        with tqdm(total=total, desc=desc, unit="shard", disable=not progress) as bar:
            while True:
                while len(self._waiting) + len(self._running) < self.slots and (shard := next(coming, None)):
                    self.submit(shard)
                if not (settled := self.settled()):
                    break
                for shard, result in settled:
                    bar.update()
                    if not isinstance(result, Failed):
                        yield shard, result
        if self.failed:
            told = "; ".join(f"{name} ({self.failed[name]})" for name in self._order if name in self.failed)
            why = f"{len(self.failed)} of the shards failed {ATTEMPTS} times: {told}"
            raise SpecdecError(f"{why}; the others are kept, and the same call tries these again.")

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.slots:
            shard = self._waiting.popleft()
            if self.on is None:
                self._settled.append((shard, shard.call(*shard.arguments)))
                return  # report finished shards before the next begins
            why = "pickle cannot send it"
            try:
                job = pickle.dumps(shard), shard.key(own_code()), own_code(), self.settings
                why = "its worker was lost"
                self._running[self.engine.submit(work, *job, timed=shard.timed)] = shard
            except Exception as error:
                self._lost(shard, error, why)

    def _is_done(self, task) -> bool:
        try:
            return task.done()
        except Exception:  # `result` reports it
            return True

    def _take(self, task, shard: Shard) -> None:
        try:
            answer = task.result()
        except Exception as error:
            self._lost(shard, error)
            return
        if "failed" in answer:
            self._failed(shard, answer["failed"])
        else:
            self._settled.append((shard, answer["result"]))

    def _lost(self, shard: Shard, error: Exception, why: str = "its worker was lost") -> None:
        self._failed(shard, f"{why}, {type(error).__name__}: {first_line(error)}")

    def _failed(self, shard: Shard, reason: str) -> None:
        self._failures[shard.name] += 1
        if self._failures[shard.name] < ATTEMPTS:
            self._waiting.append(shard)
            return
        self.failed[shard.name] = reason
        self._settled.append((shard, Failed(reason)))


def run_on(workers: Workers, shards: Iterable[Shard], desc: str, progress: bool = True) -> list:
    """The results of all shards, in order, from unopened workers."""
    shards = list(shards)
    with workers:
        results = {done.name: result for done, result in workers.gather(shards, desc, progress)}
    return [results[shard.name] for shard in shards]
