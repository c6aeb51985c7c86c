"""What a result depends on besides its inputs: the machine, package versions, the commit, the code.

It never imports torch: torch's threads and GPU are reported if torch is imported already.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from specdec.errors import SpecdecError

# CPU flags that matter for matrix products, above all in half precision.
CPU_FLAGS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd", "bf16", "sve")
# Facts that determine the machine's speed; cores and memory differ between containers.
DECISIVE = ("system", "cpu", "cpu_flags", "threads", "gpu")
ENOUGH_CORES = 0.8  # share of the cores needed for meaningful times
SHORTEST_LOOK_S = 0.3  # the system counts in hundredths of a second
NOTEBOOKS_VARIABLE = "SPECDEC_NOTEBOOKS"
# Files that decide results; others, such as what editors leave, do not change the hash of the code.
CONTENT = (".py", ".yml", ".json", ".jsonl", ".txt", ".xz", ".safetensors", ".parquet")
BESIDE_NOTEBOOKS = ("experiments", "workbook")
PACKAGES = """specdec torch transformers stable-baselines3 gymnasium numpy pandas pyarrow""".split()


def checkout() -> Path | None:
    """The source tree of this package (pyproject.toml beside specdec/); None if installed."""
    above = Path(__file__).resolve().parents[1]
    return above if (above / "pyproject.toml").is_file() else None


def notebooks_folder() -> Path | None:
    """The folder of the notebooks: SPECDEC_NOTEBOOKS, or the checkout's; None without both."""
    if os.environ.get(NOTEBOOKS_VARIABLE):
        return Path(os.environ[NOTEBOOKS_VARIABLE]).expanduser().resolve()
    above = checkout()
    return None if above is None else above / "notebooks"


def find_workbook() -> None:
    """Make `workbook` and `experiments`, beside the notebooks, importable before others."""
    folder = notebooks_folder()
    if folder is None:
        return
    sys.path[:] = [str(folder), *(place for place in sys.path if place != str(folder))]
    for name in BESIDE_NOTEBOOKS:
        imported = getattr(sys.modules.get(name), "__file__", None)
        if imported and not Path(imported).resolve().is_relative_to(folder):
            why = f"a package {name} of yours is imported already ({imported})"
            raise SpecdecError(f"{why}; rename it, or call specdec's book in another process.")


def cache_folder() -> Path:
    """The cache of unpacked downloads and fitted models: SPECDEC_CACHE, or the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "specdec"
    return Path(os.environ.get("SPECDEC_CACHE") or default).expanduser()


def hardware() -> dict:
    """What is constant on this machine between processes: CPU model and flags, cores, memory."""
    model, flags = _cpu()
    memory_gib = None
    if hasattr(os, "sysconf"):  # not on Windows
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory_gib = round(memory / 2**30, 1)
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": model,
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "cores": usable_cores(),
        "memory_gib": memory_gib,
    }


def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for products of bfloat16."""
    return bool({"amx_bf16", "avx512_bf16", "bf16"} & set(hardware()["cpu_flags"]))


def usable_cores() -> int:
    """CPU cores available to this process, which a container or taskset can limit."""
    if hasattr(os, "sched_getaffinity"):  # Linux only
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def speed_facts() -> dict:
    """Facts that determine how fast models run here; threads and gpu are None without torch."""
    facts = {**hardware(), **torch_state()}
    return {name: facts[name] for name in DECISIVE}


def short_name(facts: dict) -> str:
    """Six letters and digits for the machine's speed facts; part of the names of its costs."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:6]


def fingerprint() -> dict:
    """Hardware, threads, GPU, Python and package versions, and the commit, as run.json has them."""
    return {
        **hardware(),
        **torch_state(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        "versions": versions(),
        **commit(),
        "code": code_hash(),
    }


def versions() -> dict:
    """Installed version of each package that results depend on; None if not installed."""
    installed: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def commit() -> dict:
    """{"commit": hash, "dirty": whether tracked files differ from it}; None outside a checkout."""
    head = _git("rev-parse", "HEAD")
    dirty = None if head is None else bool(_git("status", "--porcelain", "--untracked-files=no"))
    return {"commit": head, "dirty": dirty}


def code_hash() -> str:
    """sha256 over code, weights and texts of the package, and over the notebooks' modules."""
    folders = [Path(__file__).resolve().parent]
    notebooks = notebooks_folder()
    if notebooks is not None:
        folders += [notebooks / name for name in (*BESIDE_NOTEBOOKS, "rules")]
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            name = str(path.relative_to(folder))
            # a dot begins what editors leave, such as .ipynb_checkpoints
            if path.suffix in CONTENT and "/." not in f"/{name}":
                line = f"{name}\0{_hash_since(path, path.stat().st_ctime_ns)}\n"
                digest.update(line.encode())
    return digest.hexdigest()


@functools.lru_cache(maxsize=4096)
def _hash_since(path: Path, changed_ns: int) -> str:
    return file_hash(path)  # cached, since every run asks for 60 MB of weights


def file_hash(path: Path) -> str:
    """sha256 (hex) of one file's bytes."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def is_crowded(busy_cpus: float) -> bool:
    """Whether others keep so many CPUs busy that this process has less than 80 % of its cores."""
    return busy_cpus > (1 - ENOUGH_CORES) * usable_cores()


class Neighbours:
    """How busy other processes keep this machine, counted since construction."""

    def __init__(self):
        self.begin = _spent()

    def cpus(self) -> float:
        """CPUs kept busy by others since then, on average; NaN if the system does not report it."""
        everyone, me, clock = self._since()
        return max(0.0, everyone - me) / clock if clock else float("nan")

    def kept_away(self) -> float:
        """CPUs that this process did not get, if it computes all the time: a pause counts too."""
        _, me, clock = self._since()
        return self.cpus() + max(0.0, 1 - me / clock) * usable_cores()

    def _since(self) -> tuple[float, ...]:
        return tuple(now - then for now, then in zip(_spent(), self.begin, strict=True))

    def crowded(self) -> str:
        """A warning if others left this process less than 80 % of its cores; '' otherwise."""
        busy = self.cpus()
        if _spent()[2] - self.begin[2] < SHORTEST_LOOK_S or not is_crowded(busy):
            return ""
        why = f"other processes keep {busy:.1f} of {usable_cores()} cores busy"
        return f"{why}: decoding is slower now, and speed-ups measured now are no result."


def _spent() -> tuple[float, float, float]:
    """Seconds spent by all processes on all CPUs, by this one, and of the clock."""
    me = (time.process_time(), time.perf_counter())
    try:
        ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return float("nan"), *me
    # idle time and waiting for disks are not spent
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, ticks)
    spent = user + nice + system + interrupts + soft_interrupts + stolen
    return spent / os.sysconf("SC_CLK_TCK"), *me


def _git(*arguments: str) -> str | None:
    """Output of one git command in the checkout; None without git, or for an installed package."""
    root = checkout()
    if root is None:
        return None
    # its own repository, not a parent folder's or that of GIT_DIR; another user may own its files
    command = ["git", f"--git-dir={root / '.git'}", f"--work-tree={root}", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, env=clean)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def _cpu() -> tuple[str, frozenset[str]]:
    """(model name, feature flags) from the operating system."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    model = fields.get("model name") or fields.get("CPU part") or platform.machine()
    return model, frozenset((fields.get("flags") or fields.get("Features") or "").split())


def torch_state() -> dict:
    """Threads and GPU of an already imported torch; does not initialise an unused device."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):  # absent, or partially imported
        return {"threads": None, "gpu": None}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"threads": torch.get_num_threads(), "gpu": gpu}
