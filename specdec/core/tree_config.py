"""The three numbers of a draft tree, and the values that the papers' code uses.

Knows nothing about models, devices or files.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.errors import SpecdecError


@dataclass(frozen=True)
class TreeConfig:
    """The three numbers of an EAGLE draft tree.

    total_tokens: verified tree size *including* the root (EAGLE's `total_token`).
    depth: expansion forwards after the root pass (EAGLE's `depth`); draft calls are depth + 1.
    top_k: beam width and children per node.
    flat_nodes: where drafting stops after the root pass, the root's so many best children take the place of its top_k
    (RADAR section 4: its tree after one draft call holds 59); 0 for none.
    The candidate pool must offer total_tokens - 1 nodes.

    >>> tree = TreeConfig(total_tokens=60, depth=7, top_k=10)
    >>> tree.verify_nodes, tree.pool_size
    (59, 710)
    """

    total_tokens: int = 60
    depth: int = 7
    top_k: int = 10
    flat_nodes: int = 0

    def __post_init__(self):
        for name, low in (("total_tokens", 1), ("depth", 0), ("top_k", 1), ("flat_nodes", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise SpecdecError(f"{name} must be an integer of at least {low}, got {value!r}.")
        if self.flat_nodes and not self.top_k <= self.flat_nodes <= self.verify_nodes:
            raise SpecdecError(
                f"flat_nodes={self.flat_nodes} must lie between top_k={self.top_k} and the {self.verify_nodes} nodes that "
                "are verified; choose it so, or 0 for none."
            )
        if self.verify_nodes > self.pool_size:
            raise SpecdecError(
                f"a tree of total_tokens={self.total_tokens} needs {self.verify_nodes} candidates, but "
                f"depth={self.depth} and top_k={self.top_k} offer {self.pool_size}; lower total_tokens or widen the tree."
            )

    @property
    def verify_nodes(self) -> int:
        """Drafted nodes sent to verification, root excluded (LTD's V)."""
        return self.total_tokens - 1

    @property
    def pool_size(self) -> int:
        """Candidates the drafter offers."""
        return pool_size(self.depth, self.top_k)


def pool_size(depth: int, top_k: int) -> int:
    """Candidates after n = `depth` expansions of a beam of k = `top_k`: k + n * k**2 (EAGLE-2, section 4)."""
    return top_k + depth * top_k * top_k


TREES = {
    "eagle3": TreeConfig(60, 7, 10),  # EaModel.from_pretrained's defaults
    "eagle3-scripts": TreeConfig(60, 5, 10),  # the evaluation scripts for Llama-3, Vicuna, DeepSeek
    "eagle3-qwen3": TreeConfig(32, 8, 4),  # the evaluation script for Qwen3
}
