"""EAGLE-1, EAGLE-2 and EAGLE-3 drafting: the network of `eagle_layers.py` with its own key-value cache.

The same code serves all three; they differ in features, vocabulary map and head (sheet sections 1, 2, 7), and in the tree,
which is not decided here. Positions count from 0 at the first (feature, next token) pair, as the official engine does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.config import SpecdecError
from specdec.drafters.eagle_layers import EagleConfig, EagleNetwork, default_taps, rotary_tables, rotate
from specdec.target import Target


class EagleDrafter:
    """An EAGLE network bound to a target: it borrows the target's embedding (and, for EAGLE-1/2, its head)."""

    def __init__(self, network: EagleNetwork, target: Target):
        self.network, self.target = network, target
        self.config = network.config
        self.taps = self._taps()
        self._check_fit()
        network.to(device=target.device, dtype=target.dtype).eval()
        self.embedding = network.embed_tokens if self.config.own_embedding else target.embedding
        with torch.inference_mode():
            self.packed = network.prepare()
            offsets = getattr(network, "d2t", None)
            reduced = offsets is not None and self.config.draft_vocab_size < self.config.vocab_size
            self.target_id = torch.arange(len(offsets), device=offsets.device) + offsets if reduced else None

    def _taps(self) -> tuple[int, ...]:
        if self.config.taps is not None:
            return tuple(self.config.taps)
        if self.config.generation == 3:
            return default_taps(self.target.num_layers)
        return (self.target.num_layers,)  # EAGLE-1/2 read the last hidden state after the final norm

    def _check_fit(self) -> None:
        config, target = self.config, self.target
        if config.target_hidden_size != target.hidden_size:
            raise SpecdecError(
                f"the drafter was trained on features of width {config.target_hidden_size}, but the target's hidden size is "
                f"{target.hidden_size}; pair it with the target named in its model card."
            )
        if len(self.taps) != config.num_taps:
            raise SpecdecError(f"the drafter fuses {config.num_taps} features, but {len(self.taps)} taps are named.")
        if not all(0 <= tap <= target.num_layers for tap in self.taps):
            raise SpecdecError(f"taps {self.taps} do not all exist in a target of {target.num_layers} layers.")
        if config.vocab_size > target.vocab_size:
            raise SpecdecError(
                f"the drafter's vocabulary of {config.vocab_size} exceeds the target's {target.vocab_size}; "
                "they do not belong together."
            )
        if not config.own_embedding and config.hidden_size != target.hidden_size:
            raise SpecdecError(
                f"the drafter is {config.hidden_size} wide and brings no embedding, but the target embeds in "
                f"{target.hidden_size}; its checkpoint needs embed_tokens.weight."
            )

    def session(self, context_tok: int, tree_tok: int) -> EagleSession:
        return EagleSession(self, context_tok, tree_tok)

    def lent(self):
        """Inside, the drafter's own weights run packed for this processor."""
        return self.packed.active()

    def head(self, hidden: Tensor) -> Tensor:
        """Draft logits [W, Vd] in float32."""
        if self.config.generation == 3:
            return self.network.head(hidden).float()
        return self.target.model.get_output_embeddings()(hidden).float()

    def calibrate(self, tokens: Tensor) -> float:
        """Top-1 agreement with the target on `tokens` int64 [T]: a wrong reading of a checkpoint shows up here at once."""
        with self.target.lent() as target, self.lent():
            rows = target.forward(tokens, target.new_cache(len(tokens)))
            session = self.session(len(tokens), 0)
            hidden = session.advance(tokens[1:], rows.features[:-1])
            drafted = self.head(hidden).argmax(-1)
            drafted = drafted if self.target_id is None else self.target_id[drafted]
            return float((drafted == rows.logits[1:].argmax(-1)).float().mean())


class EagleSession:
    """One turn: the persistent keys and values of true target features, and behind them those of the tree being drafted."""

    def __init__(self, drafter: EagleDrafter, context_tok: int, tree_tok: int):
        config, device = drafter.config, drafter.target.device
        self.drafter, self.network, self.config = drafter, drafter.network, config
        rows = context_tok + tree_tok
        shape = (2, config.num_key_value_heads, rows, config.head_dim)
        self._store = torch.zeros(shape, dtype=drafter.target.dtype, device=device)
        self._cos, self._sin = rotary_tables(config.head_dim, config.rope_theta, rows, device)
        self.context_tok, self.length = context_tok, 0
        self._own_masks: dict[int, Tensor] = {}
        self._hidden: Tensor | None = None  # states of the last forward, [W, H]

    def root(self, tokens: Tensor, features: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        self._hidden = self.advance(tokens, features)[-1:]
        self.root_state = self._hidden[0]
        self._drawn, self._level, self._tree_mask = 0, 0, None
        return self._children(top_k)

    def advance(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Run the stable rows: pairs (feature of position i, token i + 1), causal, kept for good. Returns states [A, H]."""
        count = tokens.shape[0]
        if self.length + count > self.context_tok:
            raise SpecdecError(
                f"the drafter's cache has room for {self.context_tok} tokens, {self.length + count} are needed."
            )
        hidden = self.network.fuse(features)
        cos, sin = (t[self.length : self.length + count, None] for t in (self._cos, self._sin))
        mask = None
        if self.length and count > 1:
            mask = torch.full((count, count), float("-inf"), dtype=hidden.dtype, device=hidden.device).triu_(1)
            mask = F.pad(mask, (self.length, 0))
        hidden = self._forward(tokens, hidden, cos, sin, self.length, mask, causal=not self.length and count > 1)
        self.length += count
        return hidden

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        width, device = tokens.shape[0], tokens.device
        position = self.length + self._level  # every node of a level sits at the same position
        own = self._own_mask(width, device)
        self._tree_mask = own if self._tree_mask is None else torch.cat((self._tree_mask[rows], own), dim=1)
        mask = F.pad(self._tree_mask, (self.length, 0))
        cos, sin = (t[position, None, None] for t in (self._cos, self._sin))
        hidden = self.network.feed_back(self._hidden[rows])
        self._hidden = self._forward(tokens, hidden, cos, sin, self.length + self._drawn, mask)
        self._drawn += width
        self._level += 1
        return self._children(top_k)

    def _own_mask(self, width: int, device) -> Tensor:
        """Additive [W, W]: each node of a level sees itself and none of its neighbours."""
        if width not in self._own_masks:
            mask = torch.full((width, width), float("-inf"), dtype=self._store.dtype, device=device)
            self._own_masks[width] = mask.fill_diagonal_(0.0)
        return self._own_masks[width]

    def _forward(self, tokens, hidden, cos, sin, start: int, mask, causal: bool = False) -> Tensor:
        """One layer over rows [A, H] written at cache row `start`; mask [A, start + A] is additive or None."""
        config, network = self.config, self.network
        embedded = F.embedding(tokens, self.drafter.embedding.weight)
        x, residual = network.attention_input(embedded, hidden)
        heads = network.heads(x)  # [A, heads + 2 kv, D]
        queries, count = config.num_attention_heads, tokens.shape[0]
        turned = rotate(heads[:, : queries + config.num_key_value_heads], cos, sin)
        end = start + count
        self._store[0, :, start:end] = turned[:, queries:].transpose(0, 1)
        self._store[1, :, start:end] = heads[:, queries + config.num_key_value_heads :].transpose(0, 1)
        # Query heads that share a key head see it through a stride of zero, so that no key is repeated.
        groups = queries // config.num_key_value_heads
        keys, values = self._store[:, :, None, :end].expand(-1, -1, groups, -1, -1)
        q = turned[:, :queries].unflatten(1, (-1, groups)).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal)
        attended = out.permute(2, 0, 1, 3).reshape(count, -1)
        return network.finish(attended, residual)

    def _children(self, top_k: int) -> tuple[Tensor, Tensor]:
        """The k best next tokens of every row: target ids and log-probabilities over the draft vocabulary, in float32."""
        logits = self.drafter.head(self._hidden)
        if top_k > logits.shape[1]:
            raise SpecdecError(f"top_k={top_k} exceeds the draft vocabulary of {logits.shape[1]} tokens.")
        log_probs, best = logits.log_softmax(-1).topk(top_k, dim=-1)
        return (best if self.drafter.target_id is None else self.drafter.target_id[best]), log_probs


__all__ = ["EagleConfig", "EagleDrafter", "EagleNetwork", "EagleSession"]
