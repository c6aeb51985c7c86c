"""The numbers of a draft tree, the values in the papers' code, and checks against memory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.errors import SpecdecError, check_integer

if TYPE_CHECKING:
    import torch

GIB = 1 << 30
Beam = tuple[int, ...]  # nodes to expand per level


class Plan:
    """An answer to PLAN: the common base of TreeConfig, StaticShape and CopiedTree."""

    total_tokens: int  # of the verified tree, the root included
    depth: int = 0  # expansion forwards after the root pass
    top_k: int = 0  # children per node
    flat_nodes: int = 0
    beam: Beam = ()

    @property
    def verify_nodes(self) -> int:
        """Drafted nodes sent to verification, root excluded (LTD's V)."""
        return self.total_tokens - 1

    @property
    def drafted(self) -> bool:
        """Whether the drafter's forwards are used."""
        return self.total_tokens > 1

    def beam_at(self, level: int) -> int:
        """Nodes to expand after `level` expansions."""
        if not self.beam:
            return self.top_k
        return self.beam[min(level, len(self.beam) - 1)]

    @property
    def limits(self) -> TreeConfig:
        """A TreeConfig large enough for it."""
        raise NotImplementedError


@dataclass(frozen=True)
class TreeConfig(Plan):
    """The numbers of an EAGLE draft tree.

    total_tokens: verified tree size *including* the root (EAGLE's `total_token`); 1 is a plain
    step without drafting. The pool must offer total_tokens - 1 nodes.
    depth: expansion forwards after the root pass (EAGLE's `depth`); draft calls are depth + 1.
    top_k: children per node, and the number of nodes expanded per level if `beam` is ().
    beam: nodes expanded per level, first level first; the last holds for all levels below.
    flat_nodes: if drafting stops after the root pass, this many of the root's best children are
    used in place of top_k (RADAR section 4: its tree after one draft call holds 59); 0: top_k.

    >>> tree = TreeConfig(total_tokens=60, depth=7, top_k=10)
    >>> tree.verify_nodes, tree.pool_size
    (59, 710)
    >>> TreeConfig(total_tokens=16, depth=5, top_k=4, beam=(2, 1)).pool_size
    28
    """

    total_tokens: int = 60
    depth: int = 7
    top_k: int = 10
    flat_nodes: int = 0
    beam: Beam = ()

    def __post_init__(self) -> None:
        for name, lowest in (("total_tokens", 1), ("depth", 0), ("top_k", 1), ("flat_nodes", 0)):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), lowest))
        object.__setattr__(self, "beam", plain_beam(self.top_k, self.beam))
        if self.flat_nodes and not self.top_k <= self.flat_nodes <= self.verify_nodes:
            allowed = f"between top_k={self.top_k} and the {self.verify_nodes} verified nodes"
            raise SpecdecError(f"flat_nodes={self.flat_nodes} must be 0 or {allowed}.")
        if self.verify_nodes > self.pool_size:
            offer = f"depth={self.depth}, top_k={self.top_k}, beam={self.beam} offer"
            why = f"{self} needs {self.verify_nodes} candidates, but {offer} {self.pool_size}"
            raise SpecdecError(f"{why}; lower total_tokens or widen the tree.")

    @property
    def limits(self) -> TreeConfig:
        return self

    @property
    def pool_size(self) -> int:
        return pool_size(self.depth, self.top_k, self.beam)

    @property
    def widest(self) -> int:
        """The most nodes that one expansion takes."""
        return max(self.beam, default=self.top_k)

    @property
    def text(self) -> str:
        """total_tokens,depth,top_k and, if set, the beam; `tree_from` reads it."""
        return ",".join(map(str, (self.total_tokens, self.depth, self.top_k, *self.beam)))


@dataclass(frozen=True)
class CopiedTree(Plan):
    """A tree of copied candidates only, which need no forward (n-grams of the text).

    total_tokens: the most rows to verify, root included; fewer if the text offers less.

    >>> CopiedTree(12).verify_nodes
    11
    """

    total_tokens: int = 12

    def __post_init__(self) -> None:
        total_tokens = check_integer("total_tokens", self.total_tokens, 1)
        object.__setattr__(self, "total_tokens", total_tokens)

    @property
    def drafted(self) -> bool:
        return False

    @property
    def limits(self) -> TreeConfig:
        return TreeConfig(self.total_tokens, 0, max(1, self.verify_nodes))

    @property
    def text(self) -> str:
        return f"copied:{self.total_tokens}"


def plain_beam(top_k: int, beam: Beam) -> Beam:
    """`beam` without repeats and values that a level cannot offer; () if that leaves top_k."""
    beam = tuple(check_integer("each number of the beam", width, 1) for width in beam)
    if not beam:
        return ()
    # 1. no level expands more nodes than the level above offers; the last width is reached in time
    plain: list[int] = []
    width = offered = top_k
    while len(plain) < len(beam) or (plain[-1] < width and top_k > 1):
        width = beam[min(len(plain), len(beam) - 1)]
        plain.append(min(width, offered))
        offered = plain[-1] * top_k
    # 2. the last width holds for all levels below
    while len(plain) > 1 and plain[-1] == plain[-2]:
        plain.pop()
    return () if plain == [top_k] else tuple(plain)


def pool_size(depth: int, top_k: int, beam: Beam = ()) -> int:
    """Candidates after n = `depth` expansions of k = `top_k`: k + n * k**2 (EAGLE-2, section 4).

    beam: as in a TreeConfig; then k + k * (the nodes expanded).
    """
    if not beam:
        return top_k + depth * top_k * top_k
    return top_k * (1 + sum(beam[:depth]) + beam[-1] * max(0, depth - len(beam)))


def tree_from(text: str) -> TreeConfig:
    """The tree of "total_tokens,depth,top_k" or "total_tokens,depth,top_k,beam,..."."""
    try:
        total_tokens, depth, top_k, *beam = map(int, text.split(","))
    except ValueError:
        form = "static:total_tokens,depth,top_k[,beam,...]"
        raise SpecdecError(f"{text!r} is not a static tree; write {form}.") from None
    return TreeConfig(total_tokens, depth, top_k, beam=tuple(beam))


def check_memory(what: str, size: int, device: torch.device | str = "cpu") -> None:
    """SpecdecError if `size` bytes for `what` exceed the free memory of `device`."""
    free = free_bytes(device)
    if free is not None and size > free:
        sizes = f"{size / GIB:,.1f} GiB and {free / GIB:,.1f} GiB are free"
        advice = "lower max_new_tokens, shorten the prompt or use a smaller tree"
        raise SpecdecError(f"{what} takes {sizes}; {advice}.")


def free_bytes(device: torch.device | str = "cpu") -> int | None:
    """Memory that can be taken without swapping; None if the system does not report it."""
    if str(device).startswith("cuda"):
        import torch  # so that names of trees are known without it

        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, size = line.partition(":")
            if name == "MemAvailable":
                return int(size.split()[0]) << 10
    return None


CPU_TREE = TreeConfig(6, 2, 3)  # tuned for SmolLM2 on two cores, where every node costs time
TREES = {
    "eagle3": TreeConfig(60, 7, 10),  # EaModel.from_pretrained's defaults
    # the evaluation scripts for Llama-3, Vicuna, DeepSeek; Re-SpS compares with it
    "eagle3-scripts": TreeConfig(60, 5, 10),
    "eagle3-qwen3": TreeConfig(32, 8, 4),  # the evaluation script for Qwen3
    "ltd": TreeConfig(60, 8, 10),  # what LTD compares with
    "ltd-vicuna-13b": TreeConfig(50, 8, 10),  # the same on Vicuna-13B
}
# The static tree that each paper calls EAGLE-3.
PAPER_TREES = {"resps": TREES["eagle3-scripts"], "ltd": TREES["ltd"], "radar": TREES["eagle3"]}
