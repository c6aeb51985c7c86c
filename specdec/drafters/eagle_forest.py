"""The candidate trees of many positions of one text at once, for recording.

What `EagleSession` does cycle by cycle, for a batch of roots: the stable keys of the text are shared, each root brings the
keys of its own tree. Only the arrangement differs; the network's pieces and their order are the session's. A test holds
both to the same trees. Knows nothing about policies, targets or files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.config import SpecdecError, pool_size
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.eagle_layers import rotary_tables, rotate


@dataclass
class Forest:
    """Trees of P roots in creation order. scores float32 [P, C], tokens int64 [P, C], beams int64 [P, depth, k] (flat
    indices inside level i of the nodes that expansion i goes on from); root_tokens, root_scores [P, most]: the root's
    best children beyond the beam."""

    scores: Tensor
    tokens: Tensor
    beams: Tensor
    root_tokens: Tensor
    root_scores: Tensor


class ForestDrafter:
    """One text: its stable keys and values are computed once, then `grow` drafts from any of its positions.

    tokens int64 [T]: the text; features [T, F]: the target's taps at every token.
    """

    def __init__(self, drafter: EagleDrafter, tokens: Tensor, features: Tensor, depth: int):
        self.drafter, self.network, self.config = drafter, drafter.network, drafter.config
        count = len(tokens) - 1
        session = drafter.session(count, 0)
        self.states = session.advance(tokens[1:], features[:-1])  # [T - 1, H]; row c - 1 drafts after c tokens
        self.keys, self.values = session._store  # [kv, T - 1, D]
        rows = count + depth + 1
        self._cos, self._sin = rotary_tables(self.config.head_dim, self.config.rope_theta, rows, tokens.device)

    def grow(self, contexts: Tensor, top_k: int, depth: int, most: int) -> Forest:
        """Trees of `depth` expansions. contexts int64 [P]: committed tokens before each root (its features are known)."""
        hidden = self.states[contexts - 1][:, None]  # [P, 1, H]
        root_tokens, root_scores = self._children(hidden, max(most, top_k))
        tokens, scores = root_tokens[:, 0, :top_k], root_scores[:, 0, :top_k]
        level_scores, level_tokens, beams = [scores], [tokens], []
        rows = torch.zeros_like(tokens)
        tree = _TreeKeys()
        for level in range(depth):
            chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            beams.append(chosen)
            frontier, best = tokens.gather(1, chosen), scores.gather(1, chosen)
            rows = rows if level == 0 else torch.div(chosen, top_k, rounding_mode="floor")
            came_from = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
            hidden = self._forward(frontier, came_from, contexts, level, rows, tree)
            children, log_probs = self._children(hidden, top_k)
            scores = (best[..., None] + log_probs).flatten(1)
            tokens = children.flatten(1)
            level_scores.append(scores)
            level_tokens.append(tokens)
        shape = (len(contexts), depth, top_k)
        chosen = torch.stack(beams, 1) if beams else torch.zeros(shape, dtype=torch.long)
        forest = Forest(
            torch.cat(level_scores, 1), torch.cat(level_tokens, 1), chosen, root_tokens[:, 0], root_scores[:, 0]
        )
        assert forest.scores.shape == (len(contexts), pool_size(depth, top_k))
        return forest

    def _forward(self, tokens: Tensor, states: Tensor, contexts: Tensor, level: int, rows: Tensor, tree: _TreeKeys):
        """One expansion of every root: tokens [P, W], states [P, W, H] of the parents -> states [P, W, H]."""
        config, network = self.config, self.network
        embedded = F.embedding(tokens, self.drafter.embedding.weight)
        x, residual = network.attention_input(embedded, network.feed_back(states))
        heads = network.heads(x)  # [P, W, heads + 2 kv, D]
        queries, groups = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
        cos, sin = (table[contexts + level][:, None, None] for table in (self._cos, self._sin))
        turned = rotate(heads[:, :, : queries + config.num_key_value_heads], cos, sin)
        tree.add(turned[:, :, queries:], heads[:, :, queries + config.num_key_value_heads :], rows)
        q = turned[:, :, :queries].transpose(1, 2)  # [P, heads, W, D]
        attended = self._attend(q, contexts, tree, groups)  # [P, heads, W, D]
        return network.finish(attended.transpose(1, 2).flatten(2), residual)

    def _attend(self, q: Tensor, contexts: Tensor, tree: _TreeKeys, groups: int) -> Tensor:
        """softmax over the text before each root and the root's own branch; one normalisation over both."""
        longest = int(contexts.max())
        keys, values = (part[:, :longest].repeat_interleave(groups, 0) for part in (self.keys, self.values))
        near_keys, near_values = (part.repeat_interleave(groups, 1) for part in (tree.keys, tree.values))
        far = torch.einsum("phwd,hld->phwl", q, keys).float()
        beyond = torch.arange(longest, device=q.device) >= contexts[:, None]  # [P, longest]
        far = far.masked_fill_(beyond[:, None, None], float("-inf"))
        near = (q @ near_keys.transpose(-1, -2)).float().masked_fill_(~tree.seen[:, None], float("-inf"))
        weights = (torch.cat((far, near), -1) * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
        far, near = weights.split((longest, near.shape[-1]), dim=-1)
        return torch.einsum("phwl,hld->phwd", far, values) + near @ near_values

    def _children(self, hidden: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """The k best next tokens of rows [P, W, H]: target ids and log-probabilities [P, W, k], as in the session."""
        logits = self.drafter.head(hidden)
        if top_k > logits.shape[-1]:
            raise SpecdecError(f"top_k={top_k} exceeds the draft vocabulary of {logits.shape[-1]} tokens.")
        log_probs, best = logits.log_softmax(-1).topk(top_k, dim=-1)
        return (best if self.drafter.target_id is None else self.drafter.target_id[best]), log_probs


class _TreeKeys:
    """Keys and values of the trees drawn so far. keys, values [P, kv, rows, D]; seen bool [P, W, rows]: what the newest
    level's nodes may look at, which is their own branch."""

    def __init__(self):
        self.keys = self.values = self.seen = None

    def add(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        """keys, values [P, W, kv, D] of a level's nodes; rows [P, W]: the row of the level before that each came from."""
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        width = rows.shape[1]
        own = torch.eye(width, dtype=torch.bool, device=rows.device).expand(len(rows), -1, -1)
        if self.keys is None:
            self.keys, self.values, self.seen = keys, values, own
            return
        before = self.seen.gather(1, rows[..., None].expand(-1, -1, self.seen.shape[-1]))
        self.keys, self.values = torch.cat((self.keys, keys), 2), torch.cat((self.values, values), 2)
        self.seen = torch.cat((before, own), 2)
