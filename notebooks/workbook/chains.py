"""Recordings of others without scores: accepted lengths of chains, read as recordings that rules by history can be judged on.

SpecDecode-Bench publishes, for Llama-3.1-8B on an H100, how many tokens one step would have yielded at every position of 1,410
answers (github.com/SpecDecode-Bench/simulator, with arXiv 2601.11580). The files have no licence: they are read from a folder and
never copied. A length of n tokens means a chain whose first n - 1 drafts are the target's. Knows nothing about notebooks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, unreadable
from specdec.policies import engines
from specdec.replays.form import trace_of
from specdec.replays.oracle import clairvoyant, headroom
from specdec.replays.replay import replay
from specdec.replays.static_trees import static_grid
from specdec.replays.trace import NEVER, Trace

SETS = ("gsm8k", "sharegpt", "cnn", "instructcoder")
HOME = "github.com/SpecDecode-Bench/simulator, data/llama3.1-8B"
# Fitted by the data's authors on an H100, in seconds: a step of the target; drafting; what else a step takes.
TARGET_S = (5.88590713e-3, 2.10103129e-5, 3.92645679e-8)  # fixed, per token in the forward, per cached token
DRAFT_S = (2.13526175e-3, 8.41429603e-7, 2.37768493e-9)
REST_S = 1.20683946e-3
READINGS = ("draft once", "draft per level")  # the fixed time of drafting is paid once a step, or for every level
BY_HISTORY = (
    "sglang_ema",
    "sglang_throughput",
    "vllm_adaptive_k",
    "hf_heuristic",
    "trtllm_gate",
    "ucb",
    "exp3",
    "hedge",
)


def found_in(folder: str = "") -> Path | None:
    """The folder with the files: the given one, else specdecode_bench beside or in SPECDEC_DATA; None if nowhere."""
    data = Path(os.environ.get("SPECDEC_DATA", ""))
    places = [Path(folder)] if folder else [data / "specdecode_bench", data.parent / "specdecode_bench"]
    return next((place for place in places if (place / f"{SETS[0]}.jsonl").is_file()), None)


def read(folder: Path, drafter: str = "eagle", limit: int | None = None, pair: str = "llama-3.1-8b") -> Trace:
    """The accepted lengths of a drafter ("eagle" or "ngram") in a folder of SpecDecode-Bench's files, as a recording of chains.

    limit: requests per set, the first ones. The first half of each set is the part "tune", the second half "test".
    """
    rows, lengths = [], []
    for name in SETS:
        requests = list(_requests(Path(folder) / f"{name}.jsonl", f"acc_{drafter}", limit))
        for number, (prompt_tok, accepted) in enumerate(requests):
            part = "tune" if number < len(requests) // 2 else "test"
            rows.append(
                {"suite": name, "prompt": f"{name}/{number}", "turn": 0, "part": part, "prompt_tok": prompt_tok}
            )
            lengths.append(np.asarray(accepted))
    return trace_of(pd.DataFrame(rows), lengths, pair)


def _requests(path: Path, key: str, limit: int | None) -> Iterator[tuple[int, list[int]]]:
    try:
        with path.open() as lines:
            for _, line in zip(range(limit or 1 << 30), lines, strict=False):
                record = json.loads(line)
                yield len(record["prompt_token_ids"]), record[key]["acc_len"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unreadable(path, error, "SpecDecode-Bench's lengths", f"take it from {HOME}") from error


def made_up(seed: int = 0, requests: int = 4) -> Trace:
    """Lengths at random, for trials without the data."""
    draw = np.random.default_rng(seed)
    rows = [{"suite": name, "prompt": f"{name}/{n}", "turn": 0, "part": ("tune", "test")[n % 2], "prompt_tok": 60}
            for name in SETS for n in range(requests)]  # fmt: skip
    return trace_of(pd.DataFrame(rows), [np.minimum(draw.geometric(0.35, 40), 6) for _ in rows], "made up")


def h100(texts: int, levels: int, reading: str = READINGS[0]) -> CostModel:
    """The published prices of a step shared by so many texts, for chains of so many levels at most."""
    if reading not in READINGS:
        raise SpecdecError(f"the reading of the drafting price is one of {', '.join(READINGS)}, not {reading!r}.")
    target, draft = (1e3 * np.array(seconds) for seconds in (TARGET_S, DRAFT_S))
    each = draft[1] * texts
    expand = each + (draft[0] if reading == READINGS[1] else 0.0)
    nodes = np.arange(levels + 1)
    return CostModel(
        name=f"h100-llama-3.1-8b x{texts}, {reading}",
        kind="published",
        provenance=f"fitted by SpecDecode-Bench ({HOME}); {reading}",
        widths=(1,),
        root=(draft[0] + each,),
        root_per_tok=(draft[2] * texts,),
        expand=(expand,),
        expand_per_tok=(0.0,),
        nodes=tuple(nodes),
        verify=tuple(target[0] + target[1] * texts * (nodes + 1)),
        verify_per_tok=(target[2] * texts,) * len(nodes),
        step=float(target[0] + target[1] * texts + 1e3 * REST_S),
        step_per_tok=float(target[2] * texts),
        rest_ms=1e3 * REST_S,
        texts=texts,
    )


def judge(trace: Trace, texts: int, reading: str, rules: tuple[str, ...] = BY_HISTORY) -> pd.DataFrame:
    """Rules by history, the best chain of the part "tune", and the exact bound, on the part "test", by set ("all": together).

    Columns texts, reading, suite, method, levels (of the chain), speedup over plain decoding, headroom_frac.
    """
    costs, levels = h100(texts, trace.most_nodes, reading), trace.most_nodes
    grid = static_grid(trace.select(part="tune"), costs, top_ks=[1], total_tokens=range(1, levels + 2))
    grid = grid[(grid["total_tokens"] == grid["depth"] + 2) | (grid["total_tokens"] == 1)]
    best = grid.loc[grid["time_ms"].idxmin()]
    chain = TreeConfig(int(best["total_tokens"]), int(best["depth"]), 1)
    test = trace.select(part="test")
    found = {"best chain": replay(test, Static.of(chain), costs).table, "bound": clairvoyant(test, costs).turns}
    for name in rules:
        found[name] = replay(test, engines.shipped(name, levels, costs), costs).table
    rows = []
    for suite in ("all", *dict.fromkeys(test.turns["suite"])):
        own = {name: table[(table["suite"] == suite) | (suite == "all")] for name, table in found.items()}
        ms = {name: table["time_ms"].sum() / table["new_tok"].sum() for name, table in own.items()}
        for name, table in own.items():
            share = headroom(ms[name], ms["best chain"], ms["bound"])
            speedup = float(table["plain_ms"].sum() / table["time_ms"].sum())
            rows.append((texts, reading, suite, name, chain.verify_nodes, speedup, share))
    return pd.DataFrame(rows, columns=["texts", "reading", "suite", "method", "levels", "speedup", "headroom_frac"])


def carried_on(trace: Trace) -> pd.DataFrame:
    """Are lengths inside an accepted block carried on? One row per set.

    A block is a step with the longest chain. follows_frac: positions inside blocks whose length is one less than the one before.
    expected_frac: the same if lengths were independent, by the set's own frequencies. mean_all, mean_visited: tokens per step
    over all positions, and over those where steps begin.
    """
    lengths = _lengths(trace)
    rows = []
    for suite, turns in trace.turns.groupby("suite", sort=False):
        pairs, visited = [], []
        for first, count in zip(turns["first"], turns["positions"], strict=True):
            own, at = lengths[first : first + count], 0
            while at < count:
                visited.append(own[at])
                block = own[at : at + own[at]]
                pairs.append(np.stack([block[:-1], block[1:]]))
                at += own[at]
        before, after = np.concatenate(pairs, axis=1)
        every = np.concatenate([lengths[f : f + n] for f, n in zip(turns["first"], turns["positions"], strict=True)])
        share = np.bincount(every, minlength=every.max() + 2) / len(every)
        rows.append(
            (
                suite,
                len(before),
                float((after == before - 1).mean()),
                float(share[before - 1].mean()),
                every.mean(),
                np.mean(visited),
            )
        )
    columns = ["suite", "positions", "follows_frac", "expected_frac", "mean_all", "mean_visited"]
    return pd.DataFrame(rows, columns=columns)


def _lengths(trace: Trace) -> np.ndarray:
    """Tokens that a step with the longest chain yields at every position."""
    return 1 + (trace.ranks[1][:, -1] < NEVER).sum(-1)


def drawn_anew(trace: Trace, seed: int = 0) -> Trace:
    """The same recording with every length inside a block drawn from those of the set's positions where blocks begin.

    The other extreme: what was carried on says nothing. Block starts keep their lengths.
    """
    lengths, draw = _lengths(trace).copy(), np.random.default_rng(seed)
    for _, turns in trace.turns.groupby("suite", sort=False):
        starts, inside = [], []
        for first, count in zip(turns["first"], turns["positions"], strict=True):
            at = first
            while at < first + count:
                starts.append(at)
                inside += range(at + 1, min(at + lengths[at], first + count))
                at += lengths[at]
        lengths[inside] = draw.choice(lengths[starts], len(inside))
    parts = [
        lengths[first : first + n] for first, n in zip(trace.turns["first"], trace.turns["positions"], strict=True)
    ]
    columns = ["suite", "prompt", "turn", "part", "prompt_tok"]
    return trace_of(trace.turns[columns].copy(), parts, trace.header["pair"])
