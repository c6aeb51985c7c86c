"""RADAR's offline dataset: what the controller would have seen after each draft call, and what stopping there would yield.

One row per position: the states s_1..s_8 and, for each number of expansions, the distribution of the acceptance length
(sheet section 3). Arrays only; knows nothing about networks, models or how the rows were recorded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np

from specdec import runs
from specdec.core.tree_config import pool_size
from specdec.errors import SpecdecError, nearest_name_error
from specdec.policies.radar import DECISIONS, STATE, best_scores
from specdec.replays.trace import Trace

SCHEMA = 1
STOPS = DECISIONS + 1  # expansions when drafting stops: 0 to 7
LENGTHS = STOPS + 1  # accepted draft tokens: 0 to 8
VERIFY_NODES = 59
_ARRAYS = {"scores": np.float32, "distributions": np.float32, "prompts": np.int32, "context_tok": np.int32}


@dataclasses.dataclass(frozen=True)
class RadarData:
    """Q positions. scores float32 [Q, 8, 10]: s_1..s_8, each descending cumulative log-probabilities.

    distributions float32 [Q, 8, 9]: (a, j) is P(j draft tokens are accepted | a expansions). prompts int32 [Q]: which
    prompt a row comes from, for splits. context_tok int32 [Q]: committed tokens before the root. header: where the rows
    come from, as JSON types. Raises SpecdecError for other shapes, for what is no distribution, and for lengths that a
    tree of a + 1 levels cannot have. Roundings of half precision are mended: negatives clipped, sums made 1.
    """

    scores: np.ndarray
    distributions: np.ndarray
    prompts: np.ndarray
    context_tok: np.ndarray
    header: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, dtype in _ARRAYS.items():
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=dtype))
        count = len(self.scores)
        shapes = {"scores": (count, STOPS, STATE), "distributions": (count, STOPS, LENGTHS)}
        for name in _ARRAYS:
            expected, found = shapes.get(name, (count,)), getattr(self, name).shape
            if found != expected or not count:
                raise SpecdecError(f"RADAR's {name} must have shape {expected} with at least one row, not {found}.")
        if not np.isfinite(self.scores).all() or (np.diff(self.scores, axis=-1) > 0).any():
            raise SpecdecError("RADAR's scores must be finite and descending in every state; sort the recorded ones.")
        self._mend()

    def _mend(self) -> None:
        sums = self.distributions.sum(-1)
        if not np.isfinite(sums).all() or self.distributions.min() < -0.01 or np.abs(sums - 1).max() > 0.02:
            raise SpecdecError("RADAR's distributions must be at least 0 and sum to 1 in every row; record them again.")
        beyond = np.arange(LENGTHS) > np.arange(STOPS)[:, None] + 1
        if (np.abs(self.distributions[:, beyond]) > 0.01).any():
            raise SpecdecError("a tree of a expansions accepts at most a + 1 tokens; order the distributions by a.")
        clipped = np.where(beyond, 0, self.distributions.clip(min=0))
        object.__setattr__(self, "distributions", clipped / clipped.sum(-1, keepdims=True))

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def expected(self) -> np.ndarray:
        """float32 [Q, 8]: the expected number of accepted draft tokens, bonus token not counted."""
        return self.distributions @ np.arange(LENGTHS, dtype=np.float32)

    @property
    def key(self) -> str:
        """A hash of every number: two data sets with one key are equal."""
        digest = hashlib.sha256()
        for name in _ARRAYS:
            digest.update(getattr(self, name).tobytes())
        return digest.hexdigest()

    def select(self, rows) -> RadarData:
        """Only these rows (int or bool array)."""
        return RadarData(*(getattr(self, name)[rows] for name in _ARRAYS), self.header)

    def split(self, held_out_frac: float = 0.2, by: str = "prompt", seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers for training and held out. by="prompt" keeps a prompt's rows together, "cycle" does not (RADAR)."""
        if by not in ("prompt", "cycle"):
            raise nearest_name_error("way to split", by, ("prompt", "cycle"))
        unit = self.prompts if by == "prompt" else np.arange(len(self))
        known = np.unique(unit)
        count = round(held_out_frac * len(known))
        if not 0 < held_out_frac < 1 or not 0 < count < len(known):
            raise SpecdecError(
                f"holding out {held_out_frac} of {len(known)} {by}s leaves one side empty; record more prompts or change "
                "held_out_frac."
            )
        held = np.isin(unit, np.random.default_rng(seed).permutation(known)[:count])
        return np.flatnonzero(~held), np.flatnonzero(held)

    def save(self, path: Path) -> Path:
        """Write one safetensors file; returns the path."""
        from safetensors.numpy import save_file

        note = {"schema": str(SCHEMA), "header": json.dumps(runs.plain(self.header))}
        with runs.atomic(Path(path)) as temporary:
            save_file({name: getattr(self, name) for name in _ARRAYS}, temporary, metadata=note)
        return Path(path)

    @classmethod
    def load(cls, path: Path) -> RadarData:
        """What `save` wrote. Raises SpecdecError for a missing, damaged or foreign file."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "np") as stored:
                note, arrays = stored.metadata() or {}, {name: stored.get_tensor(name) for name in stored.keys()}
        except (OSError, SafetensorError) as error:
            raise SpecdecError(f"{path} cannot be read as RADAR's data ({error}); record it again.") from error
        if note.get("schema") != str(SCHEMA) or set(arrays) != set(_ARRAYS):
            raise SpecdecError(f"{path} is not RADAR's data of schema {SCHEMA}; record it again.")
        return cls(**arrays, header=json.loads(note["header"]))


# --- from trees and recordings ----------------------------------------------------------------------------------------


def exact_lengths(parents, probs) -> np.ndarray:
    """P(j draft tokens are accepted), float64 [deepest + 1], of a tree with fixed children (Eqs. 8-10).

    parents int [N]: each node's parent, parents first, -1 for the root at 0. probs [N]: the target's probability of the
    node's token after its parent; the root's is not read. `sampling.acceptance_distribution` is the same from whole
    target distributions.
    """
    parents, probs = np.asarray(parents), np.array(probs, dtype=np.float64)
    if parents.ndim != 1 or parents.shape != probs.shape or not len(parents) or parents[0] != -1:
        raise SpecdecError(
            "exact_lengths needs one parent and one probability per node, the root first with parent -1."
        )
    if (parents[1:] < 0).any() or (parents[1:] >= np.arange(1, len(parents))).any():
        raise SpecdecError("exact_lengths needs every parent before its children; order the tree by level.")
    depth, probs[0] = np.zeros(len(parents), dtype=int), 1.0
    for node in range(1, len(parents)):  # P(v): the product of the path's probabilities
        depth[node] = depth[parents[node]] + 1
        probs[node] *= probs[parents[node]]
    left = np.bincount(parents[1:], probs[1:], minlength=len(parents))  # what goes on to the children
    return np.bincount(depth, np.maximum(probs - left, 0.0))


def from_trace(trace: Trace, *, rows=None, exact: bool | None = None, flat_nodes: int | None = None) -> RadarData:
    """The data set of a recording with whole trees of k = 10 and depth >= 7.

    exact=True: the positions with recorded distributions (`trace.acceptance_distributions`, T = 1). False: every position,
    and in place of the distribution the length that was accepted: at T = 0 all there is, at T > 0 a draw from it. None
    takes the distributions where there are any. rows: only these positions.
    flat_nodes: 59 as in RADAR, where a single draft call yields a flat tree of so many tokens, or None for the engine's
    10 children. The recorded distributions know the flat tree; for 10 children the largest first-token mass of
    the deeper trees stands in, which is exact when one of them keeps all ten.
    """
    if trace.depth < DECISIONS or flat_nodes not in (None, VERIFY_NODES):
        raise SpecdecError(
            f"RADAR's data needs trees of depth {DECISIONS} (recorded: {trace.depth}) and flat_nodes None or {VERIFY_NODES}."
        )
    recorded = trace.acceptance_distributions
    exact = recorded is not None if exact is None else exact
    if exact and recorded is None:
        raise SpecdecError("this recording holds no distributions; record with lengths=... or pass exact=False.")
    known = np.asarray(recorded[0]) if exact else np.arange(len(trace))
    rows = known if rows is None else np.asarray(rows)
    if not np.isin(rows, known).all():
        raise SpecdecError(
            "some rows hold no recorded distribution; take rows of trace.acceptance_distributions or record more of them."
        )
    order = np.argsort(known)
    if exact:
        stored = recorded[1][order[np.searchsorted(known, rows, sorter=order)]]
        distributions = stored if flat_nodes else _ten_children(stored)
    else:
        distributions = point_masses(_accepted(trace, rows, flat_nodes))
    turns = trace.turns
    prompt = turns.groupby(["suite", "prompt"], sort=False).ngroup().to_numpy()
    prompts = np.repeat(prompt, turns["positions"].to_numpy())[rows]
    names = ("key", "pair", "pair_key", "dtype", "temperature", "seed")
    header = {name: trace.header.get(name) for name in names} | {"flat_nodes": flat_nodes, "exact": exact}
    return RadarData(_states(trace, rows), distributions, prompts, trace.context_tok[rows], header)


def _states(trace: Trace, rows: np.ndarray) -> np.ndarray:
    """float32 [Q, 8, 10]: the best scores of each level."""
    scores = trace.trees(STATE).scores
    ends = [0, *(pool_size(n, STATE) for n in range(STOPS))]
    return np.stack([best_scores(scores[rows, start:end]) for start, end in zip(ends, ends[1:], strict=False)], axis=1)


def _accepted(trace: Trace, rows: np.ndarray, flat_nodes: int | None) -> np.ndarray:
    """int [Q, 8]: accepted tokens when drafting stops after a expansions and 59 nodes (or all there are) are verified."""
    found = [trace.accepted_tok(rows, STATE, a, min(VERIFY_NODES, pool_size(a, STATE))) for a in range(STOPS)]
    if flat_nodes:
        found[0] = trace.root_rank[rows] < flat_nodes
    return np.stack(found, axis=1).astype(np.int64)


def point_masses(accepted: np.ndarray) -> np.ndarray:
    """Accepted lengths int [Q, 8] as distributions float32 [Q, 8, 9]."""
    return (accepted[..., None] == np.arange(LENGTHS)).astype(np.float32)


def _ten_children(distributions: np.ndarray) -> np.ndarray:
    """Replace the flat tree's row by that of the root's ten children, read off the deeper trees."""
    found = distributions.copy()
    inside = 1 - distributions[:, 1:, 0].min(-1)
    found[:, 0] = 0
    found[:, 0, 0], found[:, 0, 1] = 1 - inside, inside
    return found
