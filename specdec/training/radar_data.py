"""RADAR's offline dataset: the controller's input after each draft call, and the result of stopping there.

One row per position: the states s_1..s_8 and, for each number of expansions, the distribution of the acceptance length
(sheet section 3). Arrays only; knows nothing about networks, models or how the rows were recorded.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from specdec.core.tree_config import TREES, TreeConfig, pool_size
from specdec.errors import SpecdecError, nearest_name_error, warn
from specdec.policies.radar import DECISIONS, STATE, best_scores
from specdec.replays.trace import Trace

STOPS = DECISIONS + 1  # expansions when drafting stops: 0 to 7
LENGTHS = STOPS + 1  # accepted draft tokens: 0 to 8
VERIFY_NODES = 59
TREE = TREES["eagle3"]  # RADAR's
_ARRAYS = {"scores": np.float32, "distributions": np.float32, "prompts": np.int32, "context_tok": np.int32}


@dataclasses.dataclass(frozen=True)
class RadarData:
    """Q positions.

    scores float32 [Q, 8, 10]: s_1..s_8, each descending cumulative log-probabilities.
    distributions float32 [Q, 8, 9]: (a, j) is P(j draft tokens are accepted | a expansions). Rounding errors of half
    precision are corrected: negatives clipped, sums made 1.
    prompts int32 [Q]: each row's prompt, for splits. context_tok int32 [Q]: committed tokens before the root.
    header: the source of the rows, as JSON types.
    """

    scores: np.ndarray
    distributions: np.ndarray
    prompts: np.ndarray
    context_tok: np.ndarray
    header: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name, dtype in _ARRAYS.items():
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=dtype))
        scores, distributions, count = self.scores, self.distributions, len(self.scores)
        assert count and scores.shape == (count, STOPS, STATE) and distributions.shape == (count, STOPS, LENGTHS), (
            "shape"
        )
        assert self.prompts.shape == self.context_tok.shape == (count,), "shape"
        assert np.isfinite(scores).all() and (np.diff(scores, axis=-1) <= 0).all(), "scores are finite and descending"
        assert distributions.min() >= -0.01 and np.abs(distributions.sum(-1) - 1).max() <= 0.02, "rows sum to 1"
        beyond = np.arange(LENGTHS) > np.arange(STOPS)[:, None] + 1
        assert np.abs(distributions[:, beyond]).max() <= 0.01, "a tree of a expansions accepts at most a + 1 tokens"
        clipped = np.where(beyond, 0, distributions.clip(min=0))
        object.__setattr__(self, "distributions", clipped / clipped.sum(-1, keepdims=True))

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def expected(self) -> np.ndarray:
        """float32 [Q, 8]: the expected number of accepted draft tokens, bonus token not counted."""
        return self.distributions @ np.arange(LENGTHS, dtype=np.float32)

    @property
    def key(self) -> str:
        """A hash of every number: two data sets with the same key are equal."""
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
        units = np.unique(unit)
        count = round(held_out_frac * len(units))
        if not 0 < held_out_frac < 1 or not 0 < count < len(units):
            raise SpecdecError(
                f"holding out {held_out_frac} of {len(units)} {by}s leaves one side empty; record more prompts or change "
                "held_out_frac."
            )
        held = np.isin(unit, np.random.default_rng(seed).permutation(units)[:count])
        return np.flatnonzero(~held), np.flatnonzero(held)


def training_turns(trace: Trace, prompts: tuple[str, ...]) -> Trace:
    """Part "train" of the suites called `prompts` in any form (laptop/gsm8k is gsm8k); () for all suites.

    If none of them was recorded, all are used, with a warning.
    """
    train = trace.select(part="train")
    meant = train.turns["suite"].str.rpartition("/")[2].isin(prompts).to_numpy()
    if prompts and not meant.any():
        warn(f"no training prompt of {prompts} was recorded, so all recorded suites are learned from.")
    return train.select(meant) if meant.any() else train


def from_trace(
    trace: Trace, *, exact: bool | None = None, flat_nodes: int | None = None, tree: TreeConfig = TREE
) -> RadarData:
    """The data set of a recording with whole trees of k = 10 and depth >= 7, or trees that contain `tree`.

    exact=True: the positions with recorded distributions (`trace.acceptance_distributions`, T = 1). False: every position,
    with the accepted length in place of the distribution: complete at T = 0, a sample from it at T > 0. None
    uses distributions if there are any.
    flat_nodes: 59 as in RADAR, where a single draft call yields a flat tree of so many tokens, or None for the engine's
    10 children. The recorded distributions contain the flat tree; for 10 children the largest first-token mass of
    the deeper trees is used, which is exact if one of them keeps all ten.
    """
    depth = trace.depth_of(tree.top_k, tree.beam)
    if depth < DECISIONS or flat_nodes not in (None, VERIFY_NODES):
        raise SpecdecError(
            f"RADAR's data needs trees of depth {DECISIONS} (recorded: {depth}) and flat_nodes None or {VERIFY_NODES}."
        )
    recorded = distributions_of(trace, exact, tree)
    exact = recorded is not None
    if recorded is not None:
        rows, distributions = np.asarray(recorded[0]), recorded[1] if flat_nodes else _ten_children(recorded[1])
    else:
        rows = np.arange(len(trace))
        distributions = point_masses(_accepted(trace, rows, flat_nodes, tree))
    turns = trace.turns
    prompt = turns.groupby(["suite", "prompt"], sort=False).ngroup().to_numpy()
    prompts = np.repeat(prompt, turns["positions"].to_numpy())[rows]
    names = ("key", "pair", "pair_key", "dtype", "temperature", "seed")
    header = {name: trace.header.get(name) for name in names} | {"flat_nodes": flat_nodes, "exact": exact}
    return RadarData(_states(trace, rows, tree), distributions, prompts, trace.context_tok[rows], header)


def distributions_of(trace: Trace, exact: bool | None = None, tree: TreeConfig = TREE):
    """`trace.acceptance_distributions`, or None if `exact` (of `from_trace`) or the recording requires it."""
    recorded = trace.acceptance_distributions
    if exact and tree != TREE:
        raise SpecdecError(f"distributions are recorded of {TREE} alone; pass exact=False for other trees.")
    if exact and recorded is None:
        raise SpecdecError("this recording holds no distributions; record with lengths=... or pass exact=False.")
    usable = exact is not False and recorded is not None and len(recorded[0]) and tree == TREE
    return recorded if usable else None


def _states(trace: Trace, rows: np.ndarray, tree: TreeConfig) -> np.ndarray:
    """float32 [Q, 8, 10]: the best scores of each level."""
    scores = trace.column("scores", tree.top_k, tree.beam)
    ends = [0, *(pool_size(n, tree.top_k, tree.beam) for n in range(STOPS))]
    levels = [scores[rows, start:end] for start, end in zip(ends, ends[1:], strict=False)]
    return np.stack([best_scores(level, tree=tree) for level in levels], axis=1)


def _accepted(trace: Trace, rows: np.ndarray, flat_nodes: int | None, tree: TreeConfig) -> np.ndarray:
    """int [Q, 8]: accepted tokens when drafting stops after a expansions and 59 nodes (or all there are) are verified."""
    shape = tree.top_k, tree.beam
    nodes = [min(tree.verify_nodes, pool_size(a, *shape)) for a in range(STOPS)]
    accepted = [trace.accepted_tok(rows, tree.top_k, a, nodes[a], tree.beam) for a in range(STOPS)]
    if flat_nodes:
        accepted[0] = trace.root_rank[rows] < flat_nodes
    return np.stack(accepted, axis=1).astype(np.int64)


def point_masses(accepted: np.ndarray) -> np.ndarray:
    """Accepted lengths int [Q, 8] as distributions float32 [Q, 8, 9]."""
    return (accepted[..., None] == np.arange(LENGTHS)).astype(np.float32)


def _ten_children(distributions: np.ndarray) -> np.ndarray:
    """Replace the flat tree's row by that of the root's ten children, derived from the deeper trees."""
    changed = distributions.copy()
    inside = 1 - distributions[:, 1:, 0].min(-1)
    changed[:, 0] = 0
    changed[:, 0, 0], changed[:, 0, 1] = 1 - inside, inside
    return changed
