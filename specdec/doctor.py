"""What this machine has, what is missing or slow, and why: facts first, then sentences.

Collecting facts and judging them are separate, so that the judgements can be tested on machines that are not here.
Nothing is changed and nothing is downloaded. Knows nothing about suites' contents or notebooks.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

import pandas as pd
import torch

from specdec import goals, machine, runs, tasks
from specdec.config import SpecdecError
from specdec.estimate import free_memory_gib
from specdec.hub import SHIPPED, load_pair
from specdec.packing import packed_linear

FINE, NOTE, FAULT = "ok", "note", "fault"
ROWS = 32  # as a tree of 32 nodes multiplies


def facts(pairs=SHIPPED, probed: str | None = "small") -> dict:
    """What is here: fingerprint of the machine, threads, load, free memory, bfloat16's speed, pairs, folders.

    probed: the pair on which trees are timed for a few seconds in every dtype of goals.ASKED, where it is among the
    `pairs` that load; None times nothing.
    """
    known = {name: _try_pair(name) for name in pairs}
    return {
        **machine.fingerprint(),
        "load": _load(),
        "free_gib": free_memory_gib(),
        "bfloat16_share": bfloat16_share(),
        "pairs": known,
        "reach": _reach(probed) if probed in known and known[probed] is None else [],
        "data_folder": os.environ.get(tasks.DATA_VARIABLE),
        "data_files": _data_files(os.environ.get(tasks.DATA_VARIABLE)),
        "datasets": importlib.util.find_spec("datasets") is not None,
        "home": str(runs.home()),
        "home_writable": os.access(_existing(runs.home()), os.W_OK),
    }


def findings(found: dict) -> list[tuple[str, str]]:
    """(kind, sentence) for each thing worth saying about `facts`: FINE, NOTE (slower or less than could be), FAULT."""
    return [
        *_about_processor(found),
        *_about_reach(found),
        *_about_threads(found),
        *_about_memory(found),
        *_about_pairs(found),
        *_about_data(found),
        *_about_home(found),
    ]


def report(found: dict | None = None) -> str:
    """The text of `specdec doctor`: a table of facts and the findings, faults first."""
    found = found or facts()
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in found["versions"].items())
    lines = [
        f"machine   {found['cpu']}, {found['cores']} usable cores, {found['system']}",
        f"flags     {', '.join(found['cpu_flags']) or 'none that matter here'}",
        f"memory    {found['memory_gib']} GiB, {found['free_gib'] or float('nan'):.1f} GiB free",
        f"GPU       {found['gpu'] or 'none'}",
        f"threads   {found['threads']} (OMP_NUM_THREADS={found['omp_num_threads'] or 'not set'})",
        f"versions  Python {found['python']}, {versions}",
        f"results   {found['home']}",
        f"commit    {found['commit'] or 'none'}{' with local changes' if found['dirty'] else ''}",
        "",
    ]
    told = sorted(findings(found), key=lambda one: (FAULT, NOTE, FINE).index(one[0]))
    return "\n".join([*lines, *(f"[{kind}] {sentence}" for kind, sentence in told)])


# --- judgements -------------------------------------------------------------------------------------------------------


def _about_processor(found: dict):
    if found["gpu"]:
        yield FINE, f"A GPU is here ({found['gpu']}); pairs load onto it in their own dtype unless told otherwise."
        return
    share, flags = found["bfloat16_share"], set(found["cpu_flags"])
    units = flags & {"amx_bf16", "avx512_bf16", "bf16"}
    speed = f"a product of {ROWS} rows takes {share:.2f} of its float32 time"
    if not units:
        yield NOTE, f"This CPU has no bfloat16 units, so bfloat16 is no gain here ({speed}): load pairs in float32."
    elif share > 0.9:
        yield NOTE, f"This CPU names {', '.join(sorted(units))}, yet bfloat16 is hardly faster ({speed}): use float32."
    else:
        yield FINE, f"bfloat16 has its own units ({', '.join(sorted(units))}): {speed}; trees cost least in bfloat16."
    if not flags & {"avx512f", "asimd", "sve"}:
        yield NOTE, "Without AVX-512 a verified node costs more of a forward, so small trees will be the fast ones."


def _about_reach(found: dict):
    for one in found["reach"]:
        yield (FINE if goals.reaches(one) else NOTE), goals.sentence(one, found["bfloat16_share"])


def _about_threads(found: dict):
    threads, cores, load = found["threads"], found["cores"], found["load"]
    if threads and threads > cores:
        yield NOTE, f"{threads} threads share {cores} cores and wait for each other: set OMP_NUM_THREADS={cores}."
    if load is not None and load > cores + 0.5:
        yield (
            NOTE,
            (
                f"The machine is busy (load {load:.1f} on {cores} cores): ratios stay usable because methods are "
                "interleaved, but intervals will be wide."
            ),
        )


def _about_memory(found: dict):
    free = found["free_gib"]
    if free is not None and free < 2:
        yield NOTE, f"Only {free:.1f} GiB of memory are free; `specdec estimate` says what fits before a run."


def _about_pairs(found: dict):
    loaded = [name for name, fault in found["pairs"].items() if fault is None]
    if loaded:
        yield FINE, f"The shipped pairs load: {', '.join(loaded)}."
    for name, fault in found["pairs"].items():
        if fault is not None:
            yield (NOTE if loaded else FAULT), f"The pair {name} does not load: {fault}"


def _about_data(found: dict):
    wanted = sorted({suite.file for suite in tasks.SUITES.values() if suite.file})
    here, folder = found["data_files"], found["data_folder"]
    if folder is None:
        other = "the hub" if found["datasets"] else "the hub (pip install 'specdec[hub]')"
        yield (
            NOTE,
            (
                f"No folder of benchmarks is named in {tasks.DATA_VARIABLE}: the embedded suites (laptop/...) work as "
                f"they are, the real ones need that folder or {other}."
            ),
        )
    elif not here:
        yield (
            FAULT,
            f"{tasks.DATA_VARIABLE} names {folder}, which holds none of {', '.join(wanted)}; correct or unset it.",
        )
    else:
        missing = sorted(set(wanted) - set(here))
        lacking = f"; {', '.join(missing)} are not there" if missing else ""
        yield FINE, f"Benchmarks found in {folder}: {', '.join(sorted(here))}{lacking}."


def _about_home(found: dict):
    if not found["home_writable"]:
        yield FAULT, f"Results cannot be written to {found['home']}; set SPECDEC_HOME to a folder that can be."


# --- facts ------------------------------------------------------------------------------------------------------------


def bfloat16_share(width: int = 512, repeats: int = 15) -> float:
    """Time of a [ROWS, width] x [width, 4 width] product in bfloat16 over float32's, packed as decoding packs it."""
    products, times = {}, {}
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            weight, x = torch.zeros(4 * width, width, dtype=dtype), torch.zeros(ROWS, width, dtype=dtype)
            products[dtype], times[dtype] = (packed_linear(weight), x), []
        for _ in range(repeats):
            for dtype, (product, x) in products.items():
                begin = time.perf_counter()
                product(x)
                times[dtype].append(time.perf_counter() - begin)
    return min(times[torch.bfloat16]) / min(times[torch.float32])


def _reach(name: str) -> list[goals.Reach]:
    """What trees bring on this CPU, one probe per dtype; a GPU has its own notebooks."""
    return [goals.probe(load_pair(name, dtype=dtype, device="cpu")) for dtype in goals.ASKED]


def _try_pair(name: str) -> str | None:
    """None when the pair loads, else the sentence that says why not."""
    try:
        load_pair(name)
    except SpecdecError as error:
        return str(error)
    return None


def _data_files(folder: str | None) -> list[str]:
    known = {suite.file for suite in tasks.SUITES.values() if suite.file}
    place = Path(folder).expanduser() if folder else None
    return sorted(path.name for path in place.iterdir() if path.name in known) if place and place.is_dir() else []


def _existing(path: Path) -> Path:
    return path if path.exists() or path == path.parent else _existing(path.parent)


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


# --- the bench --------------------------------------------------------------------------------------------------------

MEANING = {
    "cycle_steps": "a cycle, in one-token steps of transformers' generate",
    "outside_frac": "share of a cycle outside the forwards",
    "autoregress_speed": "autoregress, times as fast as generate",
    "decode_speed": "decode, times as fast as generate",
    "tau": "new tokens per cycle",
}


def figures(table: pd.DataFrame) -> pd.DataFrame:
    """speed.benchmark's rows as people read them: median [smallest, largest] over rounds, beside what was asked."""
    shares = table["figure"].str.endswith("_frac")

    def shown(column):
        texts = [
            f"{100 * value:.1f} %" if share else f"{value:.2f}" for value, share in zip(column, shares, strict=True)
        ]
        return [text if pd.notna(value) else "" for text, value in zip(texts, column, strict=True)]

    at_most = table["figure"].isin(["cycle_steps", "outside_frac"])
    goals = [
        f"{'<=' if most else '>='} {text}" if text else ""
        for most, text in zip(at_most, shown(table["asked"]), strict=True)
    ]
    spread = [f"{low} .. {high}" for low, high in zip(shown(table["low"]), shown(table["high"]), strict=True)]
    return pd.DataFrame({
        "pair": table["pair"], "dtype": table["dtype"], "figure": table["figure"].map(MEANING),
        "median": shown(table["median"]), "rounds": spread, "asked": goals, "official engine": shown(table["official"]),
    })  # fmt: skip
