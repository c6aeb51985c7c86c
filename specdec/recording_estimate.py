"""How many positions, megabytes and minutes a recording will take, before it starts.

Bytes follow from shapes, how far they compress and how long they take from a few prompts recorded into nowhere.
Knows nothing about what a recording is for.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import recording, runs, trace
from specdec.config import SpecdecError, nearest_name_error, pool_size
from specdec.drafters.eagle import EagleDrafter
from specdec.hub import Pair
from specdec.methods import conversation

PROBE_POSITIONS = 24  # of a prompt, whose trees are grown in the probe


@dataclass(frozen=True)
class RecordEstimate:
    """What `record` will write. positions: expected, from the lengths of a few texts; most_positions: if none ended early.

    raw_bytes: of one position, uncompressed (shapes). megabytes: expected on disk; free_megabytes: what is free there.
    """

    pair: str
    dtype: str
    prompts: int
    turns: int
    positions: int
    most_positions: int
    raw_bytes: int
    megabytes: float
    free_megabytes: float
    minutes: float

    @property
    def fits(self) -> bool:
        return self.megabytes <= self.free_megabytes

    @property
    def sentence(self) -> str:
        free = "" if self.fits else f", but only {self.free_megabytes:.0f} MB are free: record fewer widths or prompts"
        time_needed = f"{60 * self.minutes:.0f} seconds" if self.minutes < 2 else f"{self.minutes:.0f} minutes"
        return (
            f"recording {self.prompts} prompts ({self.turns} turns) of {self.pair} in {self.dtype}: about {self.positions} "
            f"positions (at most {self.most_positions}), {self.megabytes:.0f} MB, {time_needed}{free}."
        )


def estimate_record(pair: Pair, prompts, *, samples: int = 9, **settings) -> RecordEstimate:
    """Positions, megabytes and minutes of `record(pair, prompts, **settings)`, called with the same arguments.

    samples: prompts that are decoded for it, spread over all; of a third of them a few trees are grown. Nothing is kept.
    Raises SpecdecError for what `record` would refuse.
    """
    if samples < 1:
        raise SpecdecError(f"samples must be at least 1, got {samples}.")
    given = _arguments(pair, prompts, settings)
    top_ks, trees = tuple(sorted({*given["top_ks"], *given["trees"]})), tuple(sorted(given["trees"]))
    recording._check(pair, given["depth"], top_ks, given["most_nodes"], given["lengths"])
    items = recording._items(prompts, given["limit"], given["folder"], given["seed"], given["part"])
    names = ("max_new_tokens", "depth", "most_nodes", "temperature", "seed", "features", "lengths")
    recorder = recording._Recorder(
        pair, None, {name: given[name] for name in names} | {"top_ks": top_ks, "trees": trees}
    )
    chosen = np.unique(np.linspace(0, len(items) - 1, min(samples, len(items))).round().astype(int))
    texts_s, kept, grown_s, grown, pieces = [], [], 0.0, 0, []
    for number, index in enumerate([chosen[0], *chosen]):  # the first one twice: it warms up
        prompt = pair.ids_of(conversation(pair, items[index][1], 0, []))
        begin = time.perf_counter()
        ids, kept_tok = recorder.continuation(prompt)
        texts_s.append(time.perf_counter() - begin)
        kept.append(kept_tok)
        if number % 3 <= 1 and kept_tok > 1:
            begin = time.perf_counter()
            found = recorder.positions(ids, len(prompt), min(kept_tok, PROBE_POSITIONS + 1))
            if number:
                grown_s, grown = grown_s + time.perf_counter() - begin, grown + len(found[0]["context_tok"])
                pieces.append(found)
    turns = sum(len(item.turns) for _, item in items)
    positions = turns * (np.mean(kept[1:]) - 1)
    per_position = bytes_per_position(pair, given["depth"], top_ks, trees, given["features"])
    ratio, piece_bytes = _written(pieces)
    lengths_bytes = (8 + 4 * 8 * 9) * min(given["lengths"], np.mean(kept[1:])) * turns
    seconds = turns * np.mean(texts_s[1:]) + positions * grown_s / max(1, grown)
    home = runs.runs_dir(given["scale"])
    return RecordEstimate(
        pair.name, str(pair.target.dtype).removeprefix("torch."), len(items), turns, round(positions),
        turns * (given["max_new_tokens"] - 1), per_position,
        float(positions * per_position * ratio + len(items) * piece_bytes + lengths_bytes) / 1e6,
        shutil.disk_usage(_existing(home)).free / 1e6, float(seconds) / 60,
    )  # fmt: skip


def bytes_per_position(pair: Pair, depth: int, top_ks, trees, features: bool) -> int:
    """Uncompressed bytes that one position takes: ranks of every width, whole trees of some, the root and features."""
    root = 4 + 2 + 4 * trace.ROOT_CANDIDATES  # context_tok, root_rank, root_scores
    ranks = len(top_ks) * 2 * (depth + 1) ** 2
    whole = sum((4 + 4) * pool_size(depth, top_k) + 2 * depth * top_k for top_k in trees)
    taps = len(pair.drafter.taps) if features else 0
    state = pair.drafter.config.hidden_size if features and isinstance(pair.drafter, EagleDrafter) else 0
    return root + ranks + whole + 2 * (taps * pair.target.hidden_size + state)


def _arguments(pair: Pair, prompts, settings: dict) -> dict:
    """All arguments of `record`, its defaults filled in."""
    known = inspect.signature(recording.record)
    for name in settings:
        if name not in known.parameters:
            raise nearest_name_error("setting of a recording", name, known.parameters)
    bound = known.bind(pair, prompts, **settings)
    bound.apply_defaults()
    return bound.arguments


def _written(pieces: list) -> tuple[float, float]:
    """How far columns of the probe compress (bytes on disk per byte), and the bytes of one prompt's row of turns."""
    with tempfile.TemporaryDirectory() as folder:
        row = {"suite": "suite", "prompt": "prompt", "turn": 0, "part": "part", "prompt_tok": 1, "kept_tok": 1}
        row |= {"positions": 0, "piece": 0}
        turn = runs.write_table(Path(folder) / "turns.parquet", pd.DataFrame([row])).stat().st_size
        raw = written = 0
        for place in (0, 1):
            columns = [piece[place] for piece in pieces if piece[place]]
            if columns:
                joined = {name: np.concatenate([one[name] for one in columns]) for name in columns[0]}
                path = trace.write_columns(Path(folder) / f"{place}.parquet", joined)
                raw, written = raw + sum(one.nbytes for one in joined.values()), written + path.stat().st_size
    return written / raw if raw else 1.0, turn


def _existing(folder: Path) -> Path:
    """The folder or the nearest one above it that is there."""
    return next(one for one in (folder.resolve(), *folder.resolve().parents) if one.exists())
