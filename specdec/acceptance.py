"""RADAR's data: for each number of draft calls, the exact distribution of the acceptance length of EAGLE's tree at T = 1.

One target forward over the union of the eight trees of a position gives all of them (RADAR section 4, equations 8-10).
Knows nothing about policies or files.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec.config import pool_size
from specdec.sampling import acceptance_distribution
from specdec.target import Target
from specdec.tree import DraftTree

DRAFT_CALLS, NODES, TOP_K = 8, 59, 10


def tree_lengths(target: Target, cache, tokens: Tensor, contexts: Tensor, forest, chosen: np.ndarray) -> np.ndarray:
    """float32 [Q, 8, 9]: entry (q, a, j) is P(accepted_tok = j) of the tree after a + 1 draft calls at position chosen[q].

    tokens int64 [T]: the text, all of it in `cache`, with which the forest of `contexts` (k = 10, depth >= 7) was grown.
    The tree after one call is flat: the root's 59 best children. The cache is cut down from the end as it goes.
    """
    found = np.zeros((len(chosen), DRAFT_CALLS, DRAFT_CALLS + 1), dtype=np.float32)
    for index in range(len(chosen) - 1, -1, -1):  # from the end, so that the cache only ever shrinks
        row, context = int(chosen[index]), int(contexts[int(chosen[index])])
        cache.truncate(context)
        pool, keeps = _trees(tokens[context], forest, row)
        union = torch.stack(keeps).any(0).nonzero()[:, 0]
        tree = pool.select(union)
        probs = target.forward(tree.token, cache, tree.depth, tree.ancestors).logits.float().softmax(-1)
        inside = float(probs[0, forest.root_tokens[row, :NODES]].sum())
        found[index, 0, :2] = 1 - inside, inside
        for calls, keep in enumerate(keeps, 1):
            nodes = keep[union].nonzero()[:, 0]
            found[index, calls] = acceptance_distribution(tree.select(nodes), probs[nodes]).cpu().numpy()
    return found


def _trees(root: Tensor, forest, row: int) -> tuple[DraftTree, list[Tensor]]:
    """The pool after 7 expansions as a tree, and which of its nodes each of the trees after 2 to 8 calls keeps."""
    count = 1 + pool_size(DRAFT_CALLS - 1, TOP_K)
    scores, token = forest.scores[row, : count - 1], forest.tokens[row, : count - 1]
    parent = [torch.full((1,), -1, device=token.device), torch.zeros(TOP_K, dtype=torch.long, device=token.device)]
    start = 1
    for level in range(DRAFT_CALLS - 1):
        parent.append((start + forest.beams[row, level]).repeat_interleave(TOP_K))
        start += TOP_K if level == 0 else TOP_K * TOP_K
    depth = torch.arange(1, DRAFT_CALLS + 1, device=token.device)
    depth = torch.cat((depth.new_zeros(1), depth[:1].repeat(TOP_K), depth[1:].repeat_interleave(TOP_K * TOP_K)))
    pool = DraftTree(
        torch.cat((root[None], token)), torch.cat(parent), depth, torch.cat((scores.new_zeros(1), scores)), DRAFT_CALLS
    )
    keeps = []
    for expansions in range(1, DRAFT_CALLS):
        best = scores[: pool_size(expansions, TOP_K)].sort(descending=True, stable=True).indices[:NODES]
        keep = torch.zeros(count, dtype=torch.bool, device=token.device)
        keep[0] = keep[best + 1] = True
        keeps.append(keep)
    return pool, keeps
