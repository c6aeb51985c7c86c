"""All trees up to a number of children and beam widths in one recording, without growing each.

    recorded    6 children; up to (6, 4, 3, 2, 1, ...) nodes expanded per level
    a member    4 children; 2 nodes of the first level, then 1: the tree that live decoding drafts

A node is expanded in some member only if few others beat it in every member. u is expanded wherever
v is if u and its ancestors score, level by level, at least as high as v and its ancestors, and u
needs no more children. So v can be dropped if more such u exist than any beam holds: the rest is
small, and contains every member's tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.core.tree_config import TreeConfig


@dataclass(frozen=True)
class Family:
    """top_k: the most children. beams: the most nodes expanded on each level, the last for all
    below.
    """

    top_k: int
    beams: tuple[int, ...]

    def most_at(self, level: int) -> int:
        """The most nodes of a level that a member expands."""
        return self.beams[min(level, len(self.beams) - 1)]

    def depth_of(self, top_k: int, beam: tuple[int, ...], depth: int) -> int:
        """Recorded expansions, up to `depth`, of such a tree; -1 for none."""
        if top_k > self.top_k:
            return -1
        shape = TreeConfig(1, depth, top_k, beam=beam)
        for level in range(depth):
            if shape.beam_at(level) > self.most_at(level):
                return level
        return depth


class Choosing:
    """The candidates that some member expands, level by level: call it with each level's scores."""

    def __init__(self, family: Family):
        self.family = family
        self.level = 0
        self.beam: Tensor | None = None
        self.children: Tensor
        # of each candidate's ancestors and itself, in order of their level's scores
        self.places: list[Tensor] = []

    def __call__(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [P, n], -inf for absent -> candidates to expand [P, W], and which are absent."""
        top_k = self.family.top_k
        count, width = scores.shape
        real = scores > float("-inf")
        numbers = torch.arange(width, device=scores.device)
        # 1. each candidate's place by score, and the most children that it or an ancestor needs
        order = scores.sort(dim=1, descending=True, stable=True).indices
        place = torch.empty_like(order).scatter_(1, order, numbers.expand(count, -1))
        child = (numbers % top_k).expand(count, -1)
        if self.beam is not None:
            above = [part.gather(1, self.beam) for part in (*self.places, self.children)]
            *self.places, children = (part.repeat_interleave(top_k, 1) for part in above)
            child = torch.maximum(children, child)
        self.places.append(place)
        self.children = child
        # 2. how many candidates are ahead of each in every member, itself included
        ahead = (child[:, None] <= child[:, :, None]) & real[:, None]
        for places in self.places:
            ahead &= places[:, None] <= places[:, :, None]
        # 3. those that fit into the widest beam of this level
        fits = (ahead.sum(-1) <= self.family.most_at(self.level)) & real
        chosen = place.masked_fill(~fits, width).sort(dim=1, stable=True).indices
        self.beam = chosen[:, : int(fits.sum(1).max())]
        self.level += 1
        return self.beam, ~fits.gather(1, self.beam)


def path_places(
    tokens: Sequence[np.ndarray], beams: Sequence[np.ndarray], path: np.ndarray, top_k: int
) -> np.ndarray:
    """int64 [R, levels]: the place of each path node among its level's candidates, -1 from the
    first missing one. tokens [R, n] of each level; beams [R, W] of each expansion: places expanded.
    """
    rows = np.arange(len(path))
    places = np.full(path.shape, -1, dtype=np.int64)
    row = np.zeros(len(path), dtype=np.int64)
    alive = np.ones(len(path), dtype=bool)
    for level, candidates in enumerate(tokens):
        children = row[:, None] * top_k + np.arange(top_k)
        hit = np.take_along_axis(candidates, children, 1) == path[:, level, None]
        alive &= hit.any(1)
        node = children[rows, hit.argmax(1)]
        places[alive, level] = node[alive]
        # the node's place in the beam of the next expansion
        if level < len(beams):
            inside = beams[level] == node[:, None]
            alive &= inside.any(1)
            row = inside.argmax(1)
    return places


def member(
    column: Callable[..., np.ndarray], family: Family, top_k: int, beam: tuple[int, ...], depth: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pool scores float32 [R, C] of one member in creation order, and the path's nodes in it, int
    [R, depth + 1], -1 for missing ones. column: `Trace.column` of the recording.
    """
    path = column("family_path")
    shape = TreeConfig(1, depth, top_k, beam=beam)
    pools = []
    nodes = []
    start = 0
    candidates = np.broadcast_to(np.arange(top_k), (len(path), top_k))
    for level in range(depth + 1):
        # 1. the member's candidates of this level, and the path's node among them
        scores = np.take_along_axis(column("family_scores", level=level), candidates, 1)
        hit = candidates == path[:, level, None]
        nodes.append(np.where(hit.any(1), start + hit.argmax(1), -1))
        pools.append(scores)
        start += candidates.shape[1]
        # 2. the children of the best of them are the next level
        if level < depth:
            frontier = np.argsort(-scores, axis=1, kind="stable")[:, : shape.beam_at(level)]
            expanded = np.take_along_axis(candidates, frontier, 1)
            inside = column("family_beam", level=level)[:, None] == expanded[..., None]
            assert inside.any(-1).all(), "a member's node was not recorded"
            rows = inside.argmax(-1)[..., None] * family.top_k + np.arange(top_k)
            candidates = rows.reshape(len(path), -1)
    path_nodes = np.stack(nodes, axis=1)
    alive = np.minimum.accumulate(path_nodes >= 0, axis=1)
    return np.concatenate(pools, axis=1), np.where(alive, path_nodes, -1)
