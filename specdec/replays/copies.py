"""Recorded columns of candidates copied from the text; exact, as they depend on the text alone.

copied_ranks      the target's path in the trie alone, for CopiedTree and pure copiers
copied_scores     the trie's nodes, best first
ranks of k        the path in trie and drafted tree merged, replacing the tree's own ranks
candidates of k   nodes of both after each expansion
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec import runs
from specdec.core.protocols import Drafter
from specdec.core.tree import Merged, Trie
from specdec.core.tree_config import pool_size
from specdec.errors import SpecdecError
from specdec.models.eagle_drafter import TreeBatch
from specdec.models.ngrams import CopyOdds, Evidence, NgramConfig, NgramSession, fit_scale, outcomes
from specdec.replays.trace import NEVER, Column, Columns, Trace, keyed, stacked_columns


def tries_of(drafter: Drafter, tokens: Tensor, contexts: Tensor) -> list[Trie]:
    """The drafter's copies at each context, ascending. tokens int64 [T]: the text."""
    session = getattr(drafter, "copies", drafter).session(0, 0)
    return [session.copied(tokens[: context + 1]) for context in contexts.tolist()]


def trie_columns(tries: list[Trie], path: Tensor) -> dict[str, np.ndarray]:
    """copied_ranks int16 [R, J] and copied_scores float32 [R, N], filled with -inf.

    path int64 [R, J]: the target's next tokens.
    """
    ranks = []
    scores = np.full((len(tries), max(1, *map(len, tries))), -np.inf, dtype=np.float32)
    for row, (trie, following) in enumerate(zip(tries, path.tolist(), strict=True)):
        ranks.append(_ranks(Merged([-1], [-1], [0.0], trie), following))
        scores[row, : len(trie)] = sorted(trie.scores, reverse=True)
    return {"copied_ranks": np.stack(ranks), "copied_scores": scores}


def merged_columns(batch: TreeBatch, tries: list[Trie], path: Tensor, top_k: int) -> Columns:
    """ranks int16 [R, J, J] and candidates int16 [R, J] of whole trees merged with tries."""
    depth = batch.beams.shape[1]
    ranks = np.zeros((len(tries), depth + 1, path.shape[1]), dtype=np.int16)
    candidates = np.zeros((len(tries), depth + 1), dtype=np.int16)
    for row, (trie, following) in enumerate(zip(tries, path.tolist(), strict=True)):
        tokens = [-1, *batch.tokens[row].tolist()]
        scores = [0.0, *batch.scores[row].tolist()]
        beams = batch.beams[row].tolist()
        expanded = [0]
        start = 1
        for level in range(depth + 1):
            # 1. the pool after so many expansions, and the path in it
            size = 1 + pool_size(level, top_k)
            parents = [-1, *np.repeat(expanded, top_k).tolist()]
            merged = Merged(tokens[:size], parents, scores[:size], trie)
            ranks[row, level] = _ranks(merged, following)
            candidates[row, level] = len(merged) - 1
            # 2. the nodes that the next expansion expands
            if level < depth:
                expanded = [*expanded, *(start + node for node in beams[level])]
                start = size
    return {Column("ranks", top_k): ranks, Column("candidates", top_k): candidates}


def _ranks(merged: Merged, path: list[int]) -> np.ndarray:
    """int16 [J]: rank of each path node among all candidates, NEVER from the first missing one."""
    place = {node: rank for rank, node in enumerate(merged.ranked())}
    ranks = np.full(len(path), NEVER, dtype=np.int16)
    node = 0
    for level, token in enumerate(path):
        child = merged.child(node, token)
        if child is None:
            break
        ranks[level] = place[child]
        node = child
    return ranks


def with_copies(trace: Trace, odds: CopyOdds, config: NgramConfig) -> Trace:
    """The recording that the same drafter merged with copies of the text (`hybrid`) would give, of
    every width whose whole trees were recorded.
    """
    assert config.levels <= trace.depth + 1, "copies are no longer than what the recording knows"
    assert not trace.copies, "copies are merged once"
    top_ks = tuple(trace.header["trees"])
    # 1. the same columns as `record` computes, turn by turn
    path = torch.from_numpy(trace.text[:, 1:].astype(np.int64))
    parts = []
    for turn in trace.turns.itertuples():
        rows = slice(turn.first, turn.first + turn.positions)
        session = NgramSession(config, odds)
        ids = torch.tensor(list(turn.ids))
        ends = range(turn.prompt_tok + 1, turn.prompt_tok + 1 + turn.positions)
        tries = [session.copied(ids[:end]) for end in ends]
        part = keyed(trie_columns(tries, path[rows]))
        for top_k in top_ks:
            trees = [torch.from_numpy(array[rows]) for array in trace.trees(top_k)]
            batch = TreeBatch(*trees, *trees[:2])
            part.update(merged_columns(batch, tries, path[rows], top_k))
        parts.append(part)
    # 2. a header of its own, without the family, whose trees hold no copies
    key = runs.content_key(of=trace.header["key"], odds=odds.key, config=config)
    copies = {"levels": config.levels, "forwards": True}
    header = {**trace.header, "family": (), "top_ks": top_ks, "key": key, "copies": copies}

    def load(column: Column) -> np.ndarray | None:
        return None if column.kind == "ranks" else trace.get(column)

    made = with_copies, (trace, odds, config)
    return Trace(header, trace.turns, stacked_columns(parts), load, None, made)


def copy_odds_of(trace: Trace, config: NgramConfig, learned_from: str = "") -> CopyOdds:
    """How often copies were right on recorded texts (of the training part), and the scale of the
    drafter's scores, 1 if no whole trees were recorded. Copies are counted where cycles of copies
    begin, since over all positions they are right more often.
    """
    if "ids" not in trace.turns:
        raise SpecdecError("this recording holds no texts; record again to count copies.")
    evidence: list[tuple[Evidence, bool]] = []
    for turn in trace.turns.itertuples():
        evidence += outcomes(torch.tensor(list(turn.ids)), turn.prompt_tok, config)
    return CopyOdds.from_outcomes(evidence, _scale(trace), learned_from)


def _scale(trace: Trace) -> float:
    """`fit_scale` of all recorded candidates of the narrowest whole trees; 1 without any."""
    widths = [top_k for top_k in trace.header.get("trees", ()) if top_k in trace.top_ks]
    if not widths or trace.copies:
        return 1.0
    scores = trace.trees(min(widths)).scores
    ranks = trace.ranks[min(widths)][:, -1]
    # the path's nodes, found by their ranks
    order = np.argsort(-scores, axis=1, kind="stable")
    right = np.zeros(scores.shape, dtype=bool)
    row, level = np.nonzero(ranks < scores.shape[1])
    right[row, order[row, ranks[row, level]]] = True
    return fit_scale(scores.ravel(), right.ravel())
