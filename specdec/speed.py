"""How fast the engine itself is: cycle, plain decoding and transformers' `generate`, interleaved on one target.

Random weights of a stated shape, so that anyone can repeat it without downloads; there tau is 1 and only the cost of a
cycle counts. A small trained pair shows what is left of tau where the host's work dominates. All figures are ratios
inside a round, because a busy machine slows whatever runs next to each other alike. Knows nothing about suites.
"""

from __future__ import annotations

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
from specdec.clock import Clock
from specdec.config import SpecdecError, TreeConfig
from specdec.decoding import autoregress, decode
from specdec.drafters.eagle import EagleConfig, EagleDrafter, EagleNetwork
from specdec.hub import Pair, load_pair
from specdec.policy import Static
from specdec.target import Target

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
        shape.hidden_size, shape.intermediate_size, heads, heads, shape.vocab_size, shape.draft_vocab_size,
        shape.hidden_size,
    )  # fmt: skip
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
    name = str(dtype).removeprefix("torch.")
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
    return str(pair.target.dtype).removeprefix("torch.")


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
