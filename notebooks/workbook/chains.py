"""Recordings by others: accepted lengths of chains, without scores, as recordings to replay.

SpecDecode-Bench publishes, for Llama-3.1-8B on an H100, how many tokens one step would have
yielded at every position of 1,410 answers (github.com/SpecDecode-Bench/simulator, with arXiv
2601.11580). The files have no licence: they are read from a folder and never copied.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import numpy as np
import pandas as pd

from specdec.costs.model import CostModel
from specdec.errors import SpecdecError
from specdec.replays.trace import NEVER, SCHEMA, Column, Trace, numbered

SETS = ("gsm8k", "sharegpt", "cnn", "instructcoder")
# Fitted by the data's authors on an H100, in seconds: fixed, per token in the forward, per cached
# token, of a step of the target and of drafting; and what else a step takes.
TARGET_S = (5.88590713e-3, 2.10103129e-5, 3.92645679e-8)
DRAFT_S = (2.13526175e-3, 8.41429603e-7, 2.37768493e-9)
REST_S = 1.20683946e-3
# Whether the fixed time of drafting is paid once a step or for every level is not published.
READINGS = ("draft once", "draft per level")


def find_folder(folder: str = "") -> Path | None:
    """The folder with the files: the given one, else specdecode_bench beside or in SPECDEC_DATA."""
    data = Path(os.environ.get("SPECDEC_DATA", ""))
    places = [data / "specdecode_bench", data.parent / "specdecode_bench"]
    for place in [Path(folder)] if folder else places:
        if (place / f"{SETS[0]}.jsonl").is_file():
            return place
    return None


def read(
    folder: Path, drafter: str = "eagle", limit: int | None = None, pair: str = "llama-3.1-8b"
) -> Trace:
    """Accepted lengths of "eagle" or "ngram" in SpecDecode-Bench's files, as a recording.

    limit: requests per set. The first half of each set is part "tune", the second "test".
    """
    rows, lengths = [], []
    for suite in SETS:
        path = Path(folder) / f"{suite}.jsonl"
        requests = []
        try:
            with path.open(encoding="utf-8") as lines:
                for line in itertools.islice(lines, limit):
                    record = json.loads(line)
                    accepted = record[f"acc_{drafter}"]["acc_len"]
                    requests.append((len(record["prompt_token_ids"]), accepted))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecdecError(f"{path} holds no lengths of SpecDecode-Bench: {error}.") from None
        for number, (prompt_tok, accepted) in enumerate(requests):
            part = "tune" if number < len(requests) // 2 else "test"
            rows.append((suite, f"{suite}/{number}", 0, part, prompt_tok))
            lengths.append(np.asarray(accepted))
    return trace_of(rows, lengths, pair)


def trace_of(rows: list[tuple], lengths: list[np.ndarray], pair: str) -> Trace:
    """A recording of chains. rows: suite, prompt, turn, part and prompt_tok of every turn.

    lengths: for every turn, int [positions], the tokens that a step yields at each position, at
    least 1. A length of n tokens means that the first n - 1 drafts are the target's.
    """
    all_lengths = np.concatenate(lengths).astype(int)
    assert all_lengths.min() >= 1, "a step yields the target's own token at least"
    depth = max(2, int(all_lengths.max()) - 1)
    # 1. node j is on the target's path if j < length - 1, and drafted after n >= j expansions
    level = np.arange(depth)
    accepted = level < all_lengths[:, None, None] - 1
    drafted = level <= level[:, None]
    ranks = np.where(accepted & drafted, level, NEVER).astype(np.int16)
    # 2. where each turn is in the columns
    turns = pd.DataFrame(rows, columns=["suite", "prompt", "turn", "part", "prompt_tok"])
    positions = np.array([len(one_turn) for one_turn in lengths])
    turns = numbered(turns.assign(kept_tok=positions + 1, positions=positions, piece=0))
    begins = (turns["prompt_tok"] - turns["first"]).to_numpy()
    context_tok = np.repeat(begins, positions) + np.arange(len(all_lengths))
    columns = {
        Column("ranks", 1): ranks,
        Column("context_tok"): context_tok.astype(np.int32),
        Column("root_rank"): np.where(all_lengths > 1, 0, NEVER).astype(np.int16),
    }
    header = {
        "schema": SCHEMA,
        "pair": pair,
        "dtype": "float16",
        "temperature": 0.0,
        "depth": depth - 1,
        "top_ks": [1],
        "trees": [],
        "most_nodes": depth,
        "family": [],
        "key": pair,
        "columns": {"positions": [column.stored for column in columns]},
    }
    return Trace(header, turns, columns)


def h100(texts: int, levels: int, reading: str = READINGS[0]) -> CostModel:
    """The published prices of a step shared by `texts` texts, for chains of at most `levels`."""
    target_ms, draft_ms = 1e3 * np.array(TARGET_S), 1e3 * np.array(DRAFT_S)
    each_ms = draft_ms[1] * texts
    level_ms = draft_ms[0] + each_ms if reading == READINGS[1] else each_ms
    nodes = np.arange(levels + 1)
    return CostModel(
        name=f"h100-llama-3.1-8b x{texts}, {reading}",
        kind="published",
        provenance=f"fitted by SpecDecode-Bench (arXiv 2601.11580); {reading}",
        widths=(1,),
        root=(draft_ms[0] + each_ms,),
        root_per_tok=(draft_ms[2] * texts,),
        expand=(level_ms,),
        expand_per_tok=(0.0,),
        nodes=tuple(nodes),
        verify=tuple(target_ms[0] + target_ms[1] * texts * (nodes + 1)),
        verify_per_tok=(target_ms[2] * texts,) * len(nodes),
        step=float(target_ms[0] + target_ms[1] * texts + 1e3 * REST_S),
        step_per_tok=float(target_ms[2] * texts),
        rest_ms=1e3 * REST_S,
        texts=texts,
    )


def lengths_of(trace: Trace) -> np.ndarray:
    """Tokens that a step yields at every position of a recording of chains."""
    return 1 + (trace.ranks[1][:, -1] < NEVER).sum(-1)
