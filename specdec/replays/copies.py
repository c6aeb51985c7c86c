"""Recorded columns of candidates copied from the text. They are exact, since they depend on the text alone.

       copied_ranks      the target's path in the trie alone, for plans of CopiedTree and drafters that only copy
    copied_scores     the trie's nodes, best first
       ranks of k        the path in trie and drafted tree merged, replacing its ranks in the tree alone
    candidates of k   nodes of both after each expansion

Knows nothing about files, policies or costs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from specdec import runs
from specdec.core.protocols import Drafter
from specdec.core.tree import Merged, Pool, Trie
from specdec.core.tree_config import pool_size
from specdec.errors import SpecdecError
from specdec.models.eagle_drafter import TreeBatch
from specdec.models.ngrams import CopyOdds, Evidence, NgramConfig, NgramSession, fit_scale, outcomes
from specdec.replays.columns import Column, Columns, keyed, stacked
from specdec.replays.trace import NEVER, Trace


def tries_of(drafter: Drafter, tokens: Tensor, contexts: Tensor) -> list[Trie]:
    """The drafter's copies at each context, ascending. tokens int64 [T]: the text."""
    session = getattr(drafter, "copies", drafter).session(0, 0)
    return [session.copied(tokens[: context + 1]) for context in contexts.tolist()]


def trie_columns(tries: list[Trie], path: Tensor) -> dict[str, np.ndarray]:
    """copied_ranks int16 [R, J] and copied_scores float32 [R, N], filled with -inf. path int64 [R, J]."""
    ranks = np.stack([_ranks(Merged(Pool([-1], [0.0]), trie), p) for trie, p in zip(tries, path.tolist(), strict=True)])
    scores = np.full((len(tries), max(1, *map(len, tries))), -np.inf, dtype=np.float32)
    for row, trie in enumerate(tries):
        scores[row, : len(trie)] = sorted(trie.scores, reverse=True)
    return {"copied_ranks": ranks, "copied_scores": scores}


def merged_columns(batch: TreeBatch, tries: list[Trie], path: Tensor, top_k: int) -> Columns:
    """ranks int16 [R, J, J] and candidates int16 [R, J] of one k, of whole trees (a `TreeBatch`) merged with tries."""
    ranks, candidates = [], []
    for row, (trie, own_path) in enumerate(zip(tries, path.tolist(), strict=True)):
        merged = [Merged(pool, trie) for pool in _pools(batch, row, top_k)]
        ranks.append(np.stack([_ranks(one, own_path) for one in merged]))
        candidates.append([len(one) - 1 for one in merged])
    counts = np.array(candidates, dtype=np.int16)
    return {Column("ranks", top_k): np.stack(ranks), Column("candidates", top_k): counts}


def _pools(batch: TreeBatch, row: int, top_k: int) -> Iterator[Pool]:
    """The pool of one tree after 0, 1, ... expansions."""
    tokens, scores = [-1, *batch.tokens[row].tolist()], [0.0, *batch.scores[row].tolist()]
    expanded, start = [0], 1
    for level, beam in enumerate([*batch.beams[row].tolist(), []]):
        size = 1 + pool_size(level, top_k)
        yield Pool(tokens[:size], scores[:size], expanded, top_k)
        expanded, start = [*expanded, *(start + node for node in beam)], size


def _ranks(merged: Merged, path: list[int]) -> np.ndarray:
    """int16 [J]: rank of each node on the path among all candidates, NEVER from the first missing one."""
    place, node = {node: rank for rank, node in enumerate(merged.ranked())}, 0
    ranks = np.full(len(path), NEVER, dtype=np.int16)
    for level, token in enumerate(path):
        if (child := merged.child(node, token)) is None:
            break
        node, ranks[level] = child, place[child]
    return ranks


def with_copies(trace: Trace, odds: CopyOdds, config: NgramConfig | None = None) -> Trace:
    """The recording that the same drafter merged with copies of the text (`hybrid`) would give: of every width whose whole trees
    were recorded. Exact and without models, as copies depend on the text alone.

    config: which copies; at most as many levels as the recording's texts continue beyond a position (depth + 1), the default.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> small = dict(depth=3, top_ks=(3,), trees=(3,), max_new_tokens=8, progress=False)
    >>> trace = specdec.record(pair, {"mine": ["one two three one two"]}, **small)
    >>> with_copies(trace, CopyOdds()).copies
    {'levels': 4, 'forwards': True}
    """
    config = config or NgramConfig(levels=trace.depth + 1)
    if config.levels > trace.depth + 1:
        raise SpecdecError(f"this recording can judge copies of {trace.depth + 1} tokens, not of {config.levels}.")
    if not (top_ks := tuple(trace.header["trees"])) or "ids" not in trace.turns or trace.copies:
        why = "copies are merged into a recording of texts and whole trees without copies"
        raise SpecdecError(f"{why}; record again with trees=(4,), for example.")
    path, parts = torch.from_numpy(trace.text[:, 1:].astype(np.int64)), []
    for turn in trace.turns.itertuples():
        rows = slice(turn.first, turn.first + turn.positions)
        session, ids = NgramSession(config, odds), torch.tensor(list(turn.ids))
        tries = [session.copied(ids[: turn.prompt_tok + place + 1]) for place in range(turn.positions)]
        parts.append(keyed(trie_columns(tries, path[rows])))
        for top_k in top_ks:
            tree = [torch.from_numpy(getattr(trace.trees(top_k), name)[rows]) for name in ("scores", "tokens", "beams")]
            parts[-1] |= merged_columns(TreeBatch(*tree, *tree[:2]), tries, path[rows], top_k)
    columns = {column: stacked([part[column] for part in parts]) for column in parts[0]}
    key = runs.content_key(of=trace.header["key"], odds=odds.key, config=config)
    header = {**trace.header, "top_ks": top_ks, "key": key, "copies": {"levels": config.levels, "forwards": True}}
    header.pop("family", None)
    kept = {column: trace.column(*column) for column in [Column("context_tok"), Column("text"), Column("root_rank")]}
    return Trace(
        header, trace.turns, {**kept, **columns}, lambda one: None if one.kind == "ranks" else trace.column(*one)
    )


def copy_odds_of(
    trace: Trace, config: NgramConfig | None = None, learned_from: str = "", rows: np.ndarray | None = None
) -> CopyOdds:
    """How often copies were right on recorded texts, and the scale of the drafter's scores if whole trees were recorded.

    trace: a recording of the training part, such as trace.select(part="train"). rows: the positions, ascending, from which
    copies are counted; default those where cycles of copies begin, since over all positions copies are right more often.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> small = dict(depth=3, top_ks=(3,), trees=(3,), max_new_tokens=8, progress=False)
    >>> odds = copy_odds_of(specdec.record(pair, {"mine": ["one two three one two"]}, **small))
    >>> odds.scale > 0, len(odds.table)
    (True, 28)
    """
    if "ids" not in trace.turns:
        raise SpecdecError("this recording is of a version that kept no texts; record again to count copies.")
    found: list[tuple[Evidence, bool]] = []
    for turn in trace.turns.itertuples():
        ends = None
        if rows is not None:
            inside = (rows >= turn.first) & (rows < turn.first + turn.positions)
            ends = (turn.prompt_tok + 1 + rows[inside] - turn.first).tolist()
        found += outcomes(torch.tensor(list(turn.ids)), turn.prompt_tok, config or NgramConfig(), ends)
    return CopyOdds.from_outcomes(found, _scale(trace), learned_from)


def _scale(trace: Trace) -> float:
    """`fit_scale` of all recorded candidates of the narrowest whole trees; 1 without any."""
    trees = [k for k in trace.header.get("trees", ()) if k in trace.top_ks]
    if not trees or trace.header.get("copies"):
        return 1.0
    scores = trace.trees(min(trees)).scores
    order = np.argsort(-scores, axis=1, kind="stable")
    ranks = trace.ranks[min(trees)][:, -1]
    right = np.zeros(scores.shape, dtype=bool)
    row, level = np.nonzero(ranks < scores.shape[1])
    right[row, order[row, ranks[row, level]]] = True
    return fit_scale(scores.ravel(), right.ravel())
