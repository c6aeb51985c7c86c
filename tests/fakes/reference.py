"""Slow, obvious versions of what the fast code does, and the classical verification rules.

Oracles for tests and teaching: plain Python, every function follows its paper line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from specdec.core.cycle import run_cycle
from specdec.core.engine import LiveEngine
from specdec.core.verification import Picker


class ReferenceTree:
    """An EAGLE-2 tree grown node by node from a function that lists a path's children.

    children(path of tokens) -> [(token, log-probability)] in descending order.
    """

    def __init__(self, root: int, children: Callable, depth: int, top_k: int, beam=()):
        self.nodes = [{"token": root, "parent": -1, "score": 0.0, "depth": 0}]
        frontier, beam = [0], beam or (top_k,)
        for level in range(depth + 1):
            born = []
            for parent in frontier:
                for token, log_prob in children(self.path_tokens(parent))[:top_k]:
                    above = torch.tensor(self.nodes[parent]["score"])
                    score = float(above + torch.tensor(min(log_prob, 0.0)))
                    born.append(len(self.nodes))
                    node = {"token": token, "parent": parent, "score": score, "depth": level + 1}
                    self.nodes.append(node)
            frontier = self.ranked(born)[: beam[min(level, len(beam) - 1)]]

    def ranked(self, nodes) -> list[int]:
        return sorted(nodes, key=lambda node: (-self.nodes[node]["score"], node))

    def path_nodes(self, node: int) -> list[int]:
        path = []
        while node >= 0:
            path.append(node)
            node = self.nodes[node]["parent"]
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        return [self.nodes[n]["token"] for n in self.path_nodes(node)]

    def prune(self, verify_nodes: int) -> tuple[list[int], list[int], list[list[bool]]]:
        """(tokens, parents, ancestor mask) of the root and the best `verify_nodes` nodes."""
        kept = [0, *sorted(self.ranked(range(1, len(self.nodes)))[:verify_nodes])]
        tokens = [self.nodes[node]["token"] for node in kept]
        parents = [-1] + [kept.index(self.nodes[node]["parent"]) for node in kept[1:]]
        mask = [[other in self.path_nodes(node) for other in kept] for node in kept]
        return tokens, parents, mask


def children_of(parents: list[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


def assert_drafted(pair, prompt, policy, slow: Callable, nodes: range) -> list[tuple]:
    """Every expanded node's children are the best of the slow way, until so many are checked.

    slow(ids up to the root) -> (path of drafted tokens -> log-probabilities [Vd]). Returns
    (expansions, levels) of each cycle.
    """
    engine = LiveEngine(pair, torch.tensor(prompt), 12, policy.limits, Picker())
    checked, seen = 0, []
    with pair.inference():
        engine.prefill()
    while not engine.finished and checked < nodes.stop:
        after = slow(prompt + engine.tokens)
        with pair.inference():
            seen.append((run_cycle(engine, policy).expansions, engine.growing.level))
        pool, ids = engine.growing.whole(), pair.drafter.target_id
        for node in set(pool.parent[1:].tolist()):
            path = [n for n in pool.lineage()[node].tolist() if n > 0]
            best = after(pool.token[path].tolist()).topk(policy.limits.top_k)
            children = children_of(pool.parent.tolist(), node)
            tokens = best.indices if ids is None else ids[best.indices]
            assert pool.token[children].tolist() == tokens.tolist()
            steps = pool.score[children] - pool.score[node]
            torch.testing.assert_close(steps, best.values, atol=1e-4, rtol=1e-4)
            checked += 1
    assert checked >= nodes.start
    return seen


def sequential_rejection(
    tokens: list[int], parents: list[int], target_probs: Tensor, uniforms: Iterator[float]
) -> tuple[list[int], Tensor]:
    """EAGLE's rule for fixed children: accept x if u <= p(x), else strike x out and renormalise.

    target_probs [N, V] after each node. Returns (path nodes, the bonus token's distribution [V]).
    """
    node, path = 0, [0]
    while True:
        probs = target_probs[node].clone()
        for child in children_of(parents, node):
            if next(uniforms) <= probs[tokens[child]]:
                node = child
                path.append(child)
                break
            probs[tokens[child]] = 0.0
            probs /= probs.sum()
        else:
            return path, probs


def residual_rejection(
    drawn: list[int], target_probs: Tensor, draft_probs: Tensor, uniforms: Iterator[float]
) -> tuple[int | None, Tensor]:
    """The rule for children *drawn* without replacement, in draw order (EAGLE-1, Sequoia).

    Accept x if u <= r(x) / d(x), else r <- norm((r - d)+), d(x) <- 0, d <- norm(d). Returns (index
    of the accepted child or None, the distribution [V] of the bonus token if none was accepted).
    """
    residual, draft = target_probs.clone(), draft_probs.clone()
    for index, token in enumerate(drawn):
        if next(uniforms) * draft[token] <= residual[token]:
            return index, residual
        residual = (residual - draft).clamp(min=0.0)
        residual /= residual.sum()
        draft[token] = 0.0
        draft /= draft.sum()
    return None, residual


def paths_of(tree):
    """int64 [leaves, deepest + 1]: a row per leaf in node order, root first, padded with -1."""
    leaf = torch.ones_like(tree.token, dtype=torch.bool)
    leaf[tree.parent[1:]] = False
    return tree.lineage()[leaf, : int(tree.depth.max()) + 1]
