"""All trees up to a number of children and beam widths in one recording, without growing each of them.

    recorded    6 children; up to (6, 4, 3, 2, 1, ...) nodes expanded per level
    a member    4 children; 2 nodes of the first level, then 1:  exactly the tree that live decoding drafts

A node is expanded in some member only if few others beat it in every member. u is expanded wherever v is if u and its
ancestors score, level by level, at least as high as v and its ancestors, and u needs no more children. So v can be dropped if
more such u exist than any beam holds: the rest is small, and contains every member's tree.

Knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.core.tree_config import TreeConfig, pool_size
from specdec.replays.columns import Column, Columns

AT_ONCE = 24  # roots grown in one batch: comparing all candidates of a level with each other takes memory


@dataclass(frozen=True)
class Family:
    """top_k: the most children. beams: the most nodes expanded on each level, the last number for all below."""

    top_k: int
    beams: tuple[int, ...]

    def depth_of(self, top_k: int, beam: tuple[int, ...], depth: int) -> int:
        """Recorded expansions, up to `depth`, of such a tree; -1 for none."""
        if top_k > self.top_k:
            return -1
        shape = TreeConfig(1, depth, top_k, beam=beam)
        most = TreeConfig(1, depth, 1 << 20, beam=self.beams)
        within = [shape.beam_at(level) <= most.beam_at(level) for level in range(depth)]
        return within.index(False) if False in within else depth


class Choosing:
    """The candidates that some member of a family expands, level by level: call it with each level's scores."""

    def __init__(self, family: Family):
        self.family, self.level = family, 0
        self.beam: Tensor | None = None
        self.children: Tensor
        self.places: list[Tensor] = []  # of each candidate's ancestors and itself, in order of their level's scores

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [P, n], -inf for absent -> candidates to expand int64 [P, W] by score, and which of them are absent."""
        family, (count, width) = self.family, scores.shape
        real, numbers = scores > float("-inf"), torch.arange(width, device=scores.device)
        order = scores.sort(dim=1, descending=True, stable=True).indices
        place = torch.empty_like(order).scatter_(1, order, numbers.expand(count, -1))
        child = (numbers % family.top_k).expand(count, -1)
        if self.beam is not None:
            above = [part.gather(1, self.beam) for part in (*self.places, self.children)]
            *self.places, children = (part.repeat_interleave(family.top_k, 1) for part in above)
            child = torch.maximum(children, child)
        self.places.append(place)
        self.children = child
        ahead = (child[:, None] <= child[:, :, None]) & real[:, None]
        for places in self.places:
            ahead &= places[:, None] <= places[:, :, None]
        wanted = (ahead.sum(-1) <= family.beams[min(self.level, len(family.beams) - 1)]) & real
        chosen = place.masked_fill(~wanted, width).sort(dim=1, stable=True).indices[:, : int(wanted.sum(1).max())]
        self.level, self.beam = self.level + 1, chosen
        return chosen, ~wanted.gather(1, chosen)


def columns_of(scores: list[Tensor], tokens: list[Tensor], beams: list[Tensor], path: Tensor, top_k: int) -> Columns:
    """The stored arrays of grown trees: family_scores and family_beam of each level, and family_path.

    path int64 [P, depth + 1]: the target's next tokens. family_path int16 [P, depth + 1]: each one's index among its level's
    candidates, -1 from the first missing one.
    """
    columns = {Column("family_scores", level=level): part.float().cpu().numpy() for level, part in enumerate(scores)}
    drafted, expanded = ([part.cpu().numpy() for part in parts] for parts in (tokens, beams))
    small = {Column("family_beam", level=level): beam for level, beam in enumerate(expanded)}
    small[Column("family_path")] = path_places(drafted, expanded, path.cpu().numpy(), top_k)
    return columns | {column: part.astype(np.int16) for column, part in small.items()}


def path_places(tokens: Sequence[np.ndarray], beams: Sequence[np.ndarray], path: np.ndarray, top_k: int) -> np.ndarray:
    """int64 [R, levels]: the place of each node on the target's path among its level's candidates, -1 from the first missing one.

    tokens: of each level's candidates, [R, n]. beams: of each expansion, the places [R, W] of the nodes that it expands.
    path int [R, levels]: the target's next tokens.
    """
    rows, found = np.arange(len(path)), np.full(path.shape, -1, dtype=np.int64)
    row, alive = np.zeros(len(path), dtype=np.int64), np.ones(len(path), dtype=bool)
    for level, candidates in enumerate(tokens):
        children = row[:, None] * top_k + np.arange(top_k)
        hit = np.take_along_axis(candidates, children, 1) == path[:, level, None]
        alive &= hit.any(1)
        node = children[rows, hit.argmax(1)]
        found[alive, level] = node[alive]
        if level < len(beams):  # the node's place in the beam of the next expansion
            inside = beams[level] == node[:, None]
            alive &= inside.any(1)
            row = inside.argmax(1)
    return found


def member(
    column: Callable[..., np.ndarray], family: Family, top_k: int, beam: tuple[int, ...], depth: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pool scores float32 [R, C] of one member in creation order, and the pool nodes of the target's path [R, depth + 1].

    column: function that returns stored arrays, see `Trace.column`. C = pool_size(depth, top_k, beam). -1 for missing nodes.
    """
    path, shape = column("family_path"), TreeConfig(1, depth, top_k, beam=beam)
    pools, nodes, start = [], [], 0
    candidates = np.broadcast_to(np.arange(top_k), (len(path), top_k))
    for level in range(depth + 1):
        scores = np.take_along_axis(column("family_scores", level=level), candidates, 1)
        hit = candidates == path[:, level, None]
        nodes.append(np.where(hit.any(1), start + hit.argmax(1), -1))
        pools.append(scores)
        start += candidates.shape[1]
        if level < depth:
            frontier = np.argsort(-scores, axis=1, kind="stable")[:, : shape.beam_at(level)]
            expanded = np.take_along_axis(candidates, frontier, 1)
            inside = column("family_beam", level=level)[:, None] == expanded[..., None]  # [R, b, W]
            assert inside.any(-1).all(), "a member's node was not recorded"
            rows = inside.argmax(-1)[..., None] * family.top_k + np.arange(top_k)
            candidates = rows.reshape(len(path), -1)
    pool, path_nodes = np.concatenate(pools, axis=1), np.stack(nodes, axis=1)
    assert pool.shape[1] == pool_size(depth, top_k, beam)
    return pool, np.where(np.minimum.accumulate(path_nodes >= 0, axis=1), path_nodes, -1)
