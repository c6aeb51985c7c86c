"""Can trees be as fast here as they should be, and if not, what stands in the way: a short probe and a sentence.

A probe of seconds, not a benchmark: it says what a cycle is made of, in steps of plain decoding, and compares that with
what tau allows. Knows nothing about intervals (bench.py measures those) or about why a drafter drafts well.

How fast the engine itself is: cycle, plain decoding and transformers' `generate`, interleaved on one target.

Random weights of a stated shape, so that anyone can repeat it without downloads; there tau is 1 and only the cost of a
cycle counts. A small trained pair shows what is left of tau where the host's work dominates. All figures are ratios
inside a round, because a busy machine slows whatever runs next to each other alike. Knows nothing about suites.

What this machine has, what is missing or slow, and why: facts first, then sentences.

Collecting facts and judging them are separate, so that the judgements can be tested on machines that are not here.
Nothing is changed and nothing is downloaded. Knows nothing about suites' contents or notebooks.
"""

from __future__ import annotations

import importlib.util
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.core.clock import Clock
from specdec.core.decode import autoregress, decode
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.data import suites
from specdec.data.prompts import conversation, gather
from specdec.errors import SpecdecError
from specdec.models.eagle.drafter import EagleDrafter
from specdec.models.eagle.network import EagleConfig, EagleNetwork
from specdec.models.load import SHIPPED, load_pair
from specdec.models.prepacked import prepacked_linear
from specdec.models.target import Target
from specdec.tools.estimate import free_memory_gib

SPEED_AIMS = {"bfloat16": 2.2, "float32": 1.4}  # a tuned tree, times as fast as plain decoding on a CPU
TREES = (TreeConfig(8, 3, 3), TreeConfig(16, 5, 3), TreeConfig(24, 5, 6))
SUITES = ("laptop/mt_bench", "laptop/humaneval", "laptop/gsm8k", "laptop/xsum", "laptop/wmt14")
FREE_SHARE = 1.25  # rows this much dearer than one still count as read along for free
HOST_SHARE = 0.1  # of a cycle; `specdec doctor --bench` asks for half of it


@dataclass(frozen=True)
class Reach:
    """The fastest of the probed trees on one pair, dtype and machine. *_steps: its mean cycle in plain steps.

    speed: tokens per second over those of plain decoding, prefill included, on the few probed prompts. rows_cost: the
    target's matrices times `rows` rows, as many as the largest probed tree verifies, over the same with one row: what
    the hardware asks for more tau. prefill_frac: the prompts' own forwards, of the tree's whole time. cpu_flags: of
    machine.hardware().
    """

    pair: str
    dtype: str
    tree: tuple[int, int, int]
    tau: float
    speed: float
    step_ms: float
    draft_steps: float
    verify_steps: float
    rest_steps: float
    rows: int
    rows_cost: float
    prefill_frac: float
    cpu_flags: tuple[str, ...]

    @property
    def cycle_steps(self) -> float:
        return self.draft_steps + self.verify_steps + self.rest_steps


def probe(
    pair: Pair, trees=TREES, *, suites=SUITES, max_new_tokens: int = 24, seed: int = 0, progress: bool = False
) -> Reach:
    """Decode one tuning prompt of each suite plainly and with each tree, in turns; what the fastest tree costs.

    trees: TreeConfigs. Seconds on an idle core for a small pair; with one CPU thread in processor time, so that a busy
    machine gives the same answer later. SpecdecError for a pair without a drafter or no trees.
    """
    if pair.drafter is None:
        raise SpecdecError(f"{pair.name} has no drafter, so there is no cycle to probe; load a pair with one.")
    if not trees:
        raise SpecdecError("there are no trees to probe; give at least one TreeConfig.")
    now = _counter(pair)
    ways = {
        "prefill": lambda ids: autoregress(pair, ids, 1),
        "plain": lambda ids: autoregress(pair, ids, max_new_tokens),
    }
    for tree in trees:
        policy, clock = Static.of(tree), Clock(pair.target.device)
        clock.now = now
        ways[tree] = lambda ids, policy=policy, clock=clock: decode(pair, ids, policy, max_new_tokens, clock=clock)
    items = gather(list(suites), part="tune", limit=1, seed=seed)
    prompts = [pair.ids_of(conversation(pair, item, 0, [])) for item in items]
    for way in ways.values():
        way(prompts[0])
    found, spent_s = {name: [] for name in ways}, dict.fromkeys(ways, 0.0)
    for ids in tqdm(prompts, desc=f"probe {pair.name}", unit="prompt", disable=not progress):
        for name, way in ways.items():
            begin = now()
            found[name].append(way(ids))
            spent_s[name] += now() - begin
    tokens = {name: sum(out.new_tok for out in outs) for name, outs in found.items()}
    best = max(trees, key=lambda tree: tokens[tree] / spent_s[tree])
    # What a token costs once the prompt is read: the whole answer less its first token.
    step_ms = 1e3 * (spent_s["plain"] - spent_s["prefill"]) / max(1, tokens["plain"] - tokens["prefill"])
    speed = tokens[best] / spent_s[best] * spent_s["plain"] / tokens["plain"]
    most_rows = max(tree.total_tokens for tree in trees)
    return _reach(pair, best, found[best], step_ms, speed, spent_s["prefill"] / spent_s[best], most_rows)


def _counter(pair: Pair):
    """Processor time, which leaves the neighbours out, where one CPU thread does all the work; else the wall clock."""
    alone = torch.get_num_threads() == 1 and pair.target.device.type == "cpu"
    return time.process_time if alone else time.perf_counter


def _reach(pair: Pair, tree: TreeConfig, outs: list, step_ms: float, speed: float, prefill: float, rows: int) -> Reach:
    cycles = [row for out in outs for row in out.rows]
    if not cycles or step_ms <= 0:
        raise SpecdecError(f"{pair.name} answered the probe with too few tokens; allow more of them.")
    mean = {
        part: sum(getattr(row, f"{part}_ms") for row in cycles) / len(cycles) for part in ("draft", "verify", "total")
    }
    return Reach(
        pair=pair.name,
        dtype=dtype_name(pair.target.dtype),
        tree=(tree.total_tokens, tree.depth, tree.top_k),
        tau=sum(row.new_tok for row in cycles) / len(cycles),
        speed=speed,
        step_ms=step_ms,
        draft_steps=mean["draft"] / step_ms,
        verify_steps=mean["verify"] / step_ms,
        rest_steps=(mean["total"] - mean["draft"] - mean["verify"]) / step_ms,
        rows=rows,
        rows_cost=rows_cost(pair, rows),
        prefill_frac=min(1.0, prefill),
        cpu_flags=tuple(machine.hardware()["cpu_flags"]),
    )


def rows_cost(pair: Pair, rows: int, repeats: int = 25) -> float:
    """The target's matrices times `rows` rows, over the same with one row: best of `repeats`, packed as decoding has them.

    About 1 where a forward only waits for its weights, `rows` where nothing but the arithmetic counts.
    """
    weights = [one.weight for one in pair.target.model.modules() if type(one) is torch.nn.Linear]
    clock, best = Clock(pair.target.device), {1: float("inf"), rows: float("inf")}
    clock.now = _counter(pair)
    with torch.inference_mode():
        products = [prepacked_linear(weight) for weight in weights]
        inputs = {count: [torch.zeros(count, w.shape[1]).to(w) for w in weights] for count in best}
        for _ in range(repeats):
            for count, given in inputs.items():
                clock.start()
                for product, x in zip(products, given, strict=True):
                    product(x)
                clock.lap("verify")
                best[count] = min(best[count], clock.seconds["verify"])
    return best[rows] / best[1]


def reaches(found: Reach) -> bool:
    """Whether the probe is at least as fast as what is asked of its dtype (dtypes without a goal always are)."""
    return found.speed >= SPEED_AIMS.get(found.dtype, 0.0)


def sentence(found: Reach, bfloat16_share: float | None = None) -> str:
    """What the probe says: the speed beside what is asked, and, where it falls short, what the cycle pays for.

    bfloat16_share: doctor.bfloat16_share(), quoted where the processor has no matrix units.
    """
    tree, asked = "/".join(map(str, found.tree)), SPEED_AIMS.get(found.dtype)
    text = f"{found.pair} in {found.dtype}: the tree {tree} decodes about {found.speed:.2f} times as fast as plain decoding"
    if asked is None:
        return f"{text}."
    if reaches(found):
        return f"{text} ({asked:g} was the aim)."
    text = f"{text}, where {asked:g} was the aim"
    paid = f"drafting {found.draft_steps:.1f}, verifying {found.verify_steps:.1f}, the rest {found.rest_steps:.1f}"
    if found.tau / found.cycle_steps >= asked:
        text += (
            f": its cycles alone are {found.tau / found.cycle_steps:.2f} times as fast ({found.cycle_steps:.1f} plain steps: "
            f"{paid}), but the prompts' own forwards, which no draft shortens, take {found.prefill_frac:.0%} of the time."
        )
    else:
        text += (
            f": at its tau of {found.tau:.1f} a cycle may cost {found.tau / asked:.1f} plain steps, and it costs "
            f"{found.cycle_steps:.1f} ({paid})."
        )
    return f"{text} {_reason(found, bfloat16_share)}"


def _reason(found: Reach, bfloat16_share: float | None) -> str:
    """Which part of the cycle is to blame, and what of the machine."""
    reasons = []
    if found.rows_cost > FREE_SHARE:
        reasons.append(
            f"trees with more tau do not pay, because the target's matrices alone cost {found.rows_cost:.1f} times as much "
            f"for {found.rows} rows as for one: {_why_rows_cost(found, bfloat16_share)}"
        )
    if found.draft_steps > found.verify_steps / 3:
        calls = found.tree[1] + 1
        reasons.append(f"{calls} draft forwards in a row cost {found.draft_steps / calls:.2f} of a plain step each")
    if found.rest_steps > HOST_SHARE * found.cycle_steps:
        reasons.append(f"the host takes {found.rest_steps / found.cycle_steps:.0%} of a cycle, as on a busy machine")
    if not reasons:
        return "No part of the cycle is dear here: what falls short is the drafter's tau."
    text = "; ".join(reasons)
    return f"{text[0].upper()}{text[1:]}."


def _why_rows_cost(found: Reach, bfloat16_share: float | None) -> str:
    waits = "a forward waits for arithmetic here, not only for its weights"
    if found.dtype != "bfloat16":
        return waits
    share = "" if bfloat16_share is None else f", and products in bfloat16 take {bfloat16_share:.2f} of float32's time"
    units = set(found.cpu_flags) & {"avx512_bf16", "bf16"}
    if "amx_bf16" in found.cpu_flags:
        return f"{waits}, in spite of its AMX units{share}"
    vector = f"only vector units ({', '.join(sorted(units))})" if units else "no units at all"
    return f"{waits}; this processor has no AMX but {vector} for bfloat16{share}"


# ---- from speed ----------------------------------------


SHARED_VARIABLE = "SPECDEC_SHARED"
NODES = (2, 8, 16, 32, 60, 90, 120, 180, 240)
CONTEXTS = (64, 512, 1536)
PLAIN_PER_ROUND = 3


@dataclass(frozen=True)
class Reference:
    """The reference shape: Llama with random weights and an EAGLE-3 drafter, the tree, and what is decoded."""

    hidden_size: int = 512
    intermediate_size: int = 1408
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    vocab_size: int = 4096
    draft_vocab_size: int = 1024
    tree: TreeConfig = TreeConfig(60, 5, 10)
    prompt_tok: int = 64
    new_tok: int = 128


# What the official engine reached on this shape (one pinned core), and what was asked of this one.
OFFICIAL = {"float32": 4.5, "bfloat16": 2.7, "golden": 0.81}
ASKED = {"float32": 4.0, "bfloat16": 2.2, "outside": 0.05, "autoregress": 1.15, "golden": 1.2}


def reference_pair(dtype: torch.dtype = torch.float32, shape: Reference | None = None, seed: int = 0) -> Pair:
    """A pair of the reference shape with random weights; nothing in it ends a text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = shape or Reference()
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    sizes = {name: getattr(shape, name) for name in names}
    heads = shape.num_attention_heads
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=None)
    config = LlamaConfig(**sizes, num_key_value_heads=heads, max_position_embeddings=4096, **ends)
    drafting = EagleConfig(
        shape.hidden_size,
        shape.intermediate_size,
        heads,
        heads,
        shape.vocab_size,
        shape.draft_vocab_size,
        shape.hidden_size,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype).eval()
        network = EagleNetwork(drafting)
    target = Target(model)
    drafter = EagleDrafter(network, target)
    target.taps = drafter.taps
    return Pair(target, drafter, None, "reference shape")


def host_bound_pair(dtype: torch.dtype = torch.float32) -> tuple[Pair, list[list[int]]]:
    """A trained pair so small that the host's work dominates, and prompts for it as token ids.

    The golden pair where $SPECDEC_SHARED (or ../shared beside the checkout) holds one, else the shipped tiny pair.
    """
    name = dtype_name(dtype)
    folder = golden_folder()
    if folder is not None:
        places = {part: str(folder / part) for part in ("target", "drafter")}
        pair = load_pair(**places, dtype=name, device="cpu")
        pair.name = "golden pair"
        recorded = runs.read_json(folder / "golden.json")["prompts"]
        return pair, [prompt for prompt in recorded if prompt]
    pair = load_pair("tiny", dtype=name, device="cpu")
    chats = getattr(pair.tokenizer, "chat_template", None)
    asked = "Write a short story about a fox."
    return pair, [pair.ids_of([{"role": "user", "content": asked}] if chats else asked)]


def golden_folder() -> Path | None:
    """Where the golden pair lies, or None."""
    place = os.environ.get(SHARED_VARIABLE)
    folder = (Path(place) if place else machine.checkout().parent / "shared") / "golden"
    return folder if (folder / "golden.json").is_file() else None


# --- rounds -----------------------------------------------------------------------------------------------------------


def rounds(
    pair: Pair,
    prompts: list[list[int]],
    tree: TreeConfig,
    *,
    new_tok: int = 128,
    count: int = 5,
    cpu_time: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """One row per round, after a warm-up: `decode` of all prompts once, `generate` and `autoregress` PLAIN_PER_ROUND
    times each (the median counts; they are short, and whatever else runs on the machine comes and goes), in random order.

    Columns: generate_ms, autoregress_ms, decode_ms (per new token, prefill included), cycle_ms (median), draft_frac,
    verify_frac, outside_frac (policy, commit and host, of the cycle; medians), tau. cpu_time: count processor time of
    this process instead of the wall clock, for a machine that others use as well (one thread only).
    """
    if cpu_time and torch.get_num_threads() != 1:
        raise SpecdecError("processor time adds up over threads; use one thread (--threads 1) or the wall clock.")
    now = time.process_time if cpu_time else time.perf_counter
    ways = {"generate": _generate, "autoregress": _autoregress, "decode": _decode}
    draw, found = random.Random(seed), []
    turns = ["generate", "autoregress"] * PLAIN_PER_ROUND + ["decode"]
    for number in tqdm(range(-1, count), desc=f"{pair.name}, {_name(pair)}", unit="round", disable=not progress):
        row, times = {"round": number}, {way: [] for way in ways}
        for way in draw.sample(turns, len(turns)):
            begin = now()
            tokens, more = ways[way](pair, prompts, tree, new_tok, now)
            times[way].append(1e3 * (now() - begin) / tokens)
            row |= more
        if number >= 0:
            found.append(row | {f"{way}_ms": float(np.median(some)) for way, some in times.items()})
    return pd.DataFrame(found)


def _name(pair: Pair) -> str:
    return dtype_name(pair.target.dtype)


def _generate(pair, prompts, tree, new_tok, now):
    tokens, model = 0, pair.target.model
    for prompt in prompts:
        ids = torch.tensor([prompt], device=pair.target.device)
        settings = dict(max_new_tokens=new_tok, do_sample=False, attention_mask=torch.ones_like(ids))
        tokens += model.generate(ids, pad_token_id=0, **settings).shape[1] - len(prompt)
    return tokens, {}


def _autoregress(pair, prompts, tree, new_tok, now):
    return sum(autoregress(pair, prompt, new_tok).new_tok for prompt in prompts), {}


def _decode(pair, prompts, tree, new_tok, now):
    policy, rows, tokens = Static.of(tree), [], 0
    clock = Clock(pair.target.device)
    clock.now = now
    for prompt in prompts:
        out = decode(pair, prompt, policy, new_tok, clock=clock)
        rows, tokens = rows + out.rows, tokens + out.new_tok
    table = pd.DataFrame([row.row() for row in rows])
    shares = {part: table[f"{part}_ms"] / table["total_ms"] for part in ("draft", "verify")}
    outside = 1 - shares["draft"] - shares["verify"]
    return tokens, {
        "cycle_ms": table["total_ms"].median(),
        **{f"{part}_frac": share.median() for part, share in shares.items()},
        "outside_frac": outside.median(),
        "tau": table["new_tok"].mean(),
    }


def ratios(table: pd.DataFrame) -> dict[str, tuple[float, float, float]]:
    """Medians over the rounds of ratios within a round, each (median, smallest, largest).

    cycle_steps: a cycle in one-token steps of `generate`, which is also the tau that breaks even; outside_frac;
    autoregress_speed and decode_speed: tokens per second over those of `generate`.
    """
    columns = {
        "cycle_steps": table["cycle_ms"] / table["generate_ms"],
        "outside_frac": table["outside_frac"],
        "autoregress_speed": table["generate_ms"] / table["autoregress_ms"],
        "decode_speed": table["generate_ms"] / table["decode_ms"],
        "tau": table["tau"],
    }
    return {name: tuple(float(f(values)) for f in (np.median, np.min, np.max)) for name, values in columns.items()}


def benchmark(
    dtypes=("float32", "bfloat16"), *, count: int = 5, threads: int | None = None, cpu_time=False, progress=True
) -> pd.DataFrame:
    """The figures of `specdec doctor --bench`: one row per pair, dtype and figure, with what was asked of it.

    Columns: pair, dtype, figure, median, low, high (over rounds), asked, official.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    options, rows = dict(count=count, cpu_time=cpu_time, progress=progress), []
    try:
        small, prompts = host_bound_pair()  # first, so that whatever is wrong with it shows at once
        for dtype in dtypes:
            shape = Reference()
            pair = reference_pair(getattr(torch, dtype), shape)
            prompt = torch.randint(
                0, shape.vocab_size, (shape.prompt_tok,), generator=torch.Generator().manual_seed(1)
            ).tolist()
            found = ratios(rounds(pair, [prompt], shape.tree, new_tok=shape.new_tok, **options))
            goals = {"cycle_steps": (ASKED[dtype], OFFICIAL[dtype]) if dtype in ASKED else ()}
            goals |= {"outside_frac": (ASKED["outside"],), "autoregress_speed": (ASKED["autoregress"],)}
            rows += _figures(pair, found, goals, ("cycle_steps", "outside_frac", "autoregress_speed"))
        found = ratios(rounds(small, prompts, TreeConfig(60, 7, 10), **options))
        goals = {"decode_speed": (ASKED["golden"], OFFICIAL["golden"])} if small.name == "golden pair" else {}
        rows += _figures(small, found, goals, ("decode_speed", "tau", "autoregress_speed", "outside_frac"))
    finally:
        torch.set_num_threads(before)
    return pd.DataFrame(rows)


def _figures(pair: Pair, found: dict, goals: dict, names) -> list[dict]:
    rows = []
    for name in names:
        asked, official = (*goals.get(name, ()), None, None)[:2]
        values = dict(zip(("median", "low", "high"), found[name], strict=True))
        rows.append(
            {"pair": pair.name, "dtype": _name(pair), "figure": name, **values, "asked": asked, "official": official}
        )
    return rows


# --- cycle time against nodes and context -----------------------------------------------------------------------------


def curve(
    pair: Pair | None = None,
    *,
    nodes=NODES,
    contexts=CONTEXTS,
    cycles: int = 6,
    cpu_time: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> pd.DataFrame:
    """Cycles of static trees that verify `nodes` drafted nodes after `contexts` tokens: columns of `Cycle` and context.

    Depth 5 and top_k 10 throughout, so that drafting costs the same and only verification grows. Sizes run in random
    order, behind one prompt per context; `tables.node_curve(rows, by="context")` has the medians.
    """
    pair = pair or reference_pair()
    clock = Clock(pair.target.device)
    clock.now = time.process_time if cpu_time else time.perf_counter
    draw, found = random.Random(seed), []
    jobs = [(context, size) for context in contexts for size in draw.sample(list(nodes), len(nodes))]
    for context, size in tqdm(jobs, desc="cycle curve", disable=not progress):
        prompt = [draw.randrange(pair.target.vocab_size) for _ in range(context)]
        out = decode(pair, prompt, Static(size + 1, 5, 10), 3 + cycles, stop_tokens=(), clock=clock)
        rows = [row.row() for row in out.rows[1:]]  # the first cycle of a size pays for its first use
        found += [{"context": context, **row} for row in rows]
    return pd.DataFrame(found)


# ---- from doctor ----------------------------------------


FINE, NOTE, FAULT = "ok", "note", "fault"
ROWS = 32  # as a tree of 32 nodes multiplies


def facts(pairs=SHIPPED, probed: str | None = "small") -> dict:
    """What is here: fingerprint of the machine, threads, load, free memory, bfloat16's speed, pairs, folders.

    probed: the pair on which trees are timed for a few seconds in every dtype of goals.SPEED_AIMS, where it is among the
    `pairs` that load; None times nothing.
    """
    known = {name: _try_pair(name) for name in pairs}
    return {
        **machine.fingerprint(),
        "load": _load(),
        "free_gib": free_memory_gib(),
        "bfloat16_share": bfloat16_share(),
        "pairs": known,
        "reach": _probed_reach(probed) if probed in known and known[probed] is None else [],
        "data_folder": os.environ.get(suites.DATA_VARIABLE),
        "data_files": _data_files(os.environ.get(suites.DATA_VARIABLE)),
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
        yield (FINE if reaches(one) else NOTE), sentence(one, found["bfloat16_share"])


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
    wanted = sorted({suite.file for suite in suites.SUITES.values() if suite.file})
    here, folder = found["data_files"], found["data_folder"]
    if folder is None:
        other = "the hub" if found["datasets"] else "the hub (pip install 'specdec[hub]')"
        yield (
            NOTE,
            (
                f"No folder of benchmarks is named in {suites.DATA_VARIABLE}: the embedded suites (laptop/...) work as "
                f"they are, the real ones need that folder or {other}."
            ),
        )
    elif not here:
        yield (
            FAULT,
            f"{suites.DATA_VARIABLE} names {folder}, which holds none of {', '.join(wanted)}; correct or unset it.",
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
            products[dtype], times[dtype] = (prepacked_linear(weight), x), []
        for _ in range(repeats):
            for dtype, (product, x) in products.items():
                begin = time.perf_counter()
                product(x)
                times[dtype].append(time.perf_counter() - begin)
    return min(times[torch.bfloat16]) / min(times[torch.float32])


def _probed_reach(name: str) -> list[Reach]:
    """What trees bring on this CPU, one probe per dtype; a GPU has its own notebooks."""
    return [probe(load_pair(name, dtype=dtype, device="cpu")) for dtype in SPEED_AIMS]


def _try_pair(name: str) -> str | None:
    """None when the pair loads, else the sentence that says why not."""
    try:
        load_pair(name)
    except SpecdecError as error:
        return str(error)
    return None


def _data_files(folder: str | None) -> list[str]:
    known = {suite.file for suite in suites.SUITES.values() if suite.file}
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
    return pd.DataFrame(
        {
            "pair": table["pair"],
            "dtype": table["dtype"],
            "figure": table["figure"].map(MEANING),
            "median": shown(table["median"]),
            "rounds": spread,
            "asked": goals,
            "official engine": shown(table["official"]),
        }
    )
