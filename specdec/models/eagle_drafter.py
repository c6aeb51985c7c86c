"""Drafting with an EAGLE network: `EagleSession` cycle by cycle, `BatchedDrafter` from many positions.

The same code serves EAGLE-1, 2 and 3: they differ in features, vocabulary map and head, and in the
tree, which is decided elsewhere. Positions count from 0 at the first (feature, next token) pair, as in
the official engine. Both classes share the drafter's layer and its candidate children; they differ in
where keys are stored and how they are attended to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.core.protocols import Drafter, DraftForward, DraftSession
from specdec.core.tree import additive, apart, causal
from specdec.core.tree_config import check_memory, pool_size
from specdec.errors import SpecdecError
from specdec.models.attention import aligned
from specdec.models.attention import attend as attend_heads
from specdec.models.eagle_files import EMBEDDING, read_checkpoint
from specdec.models.eagle_network import (
    EagleConfig,
    best_tokens,
    default_taps,
    rotary_tables,
    rotate,
    vocabulary_ids,
)
from specdec.models.target import Target


class NetworkDrafter(Drafter):
    """A network bound to a target, whose embedding and head it may use.

    It is bound again if the target changes. network: with `config` and `use_head`, as
    `EagleNetwork` has them.
    """

    def __init__(self, network: Any, target: Target):
        self.network = network
        self.target = target
        self.config = network.config
        usual = (
            default_taps(target.num_layers) if self.config.generation == 3 else (target.num_layers,)
        )
        self.taps = usual if self.config.taps is None else tuple(self.config.taps)
        self._bound_to: tuple | None = None
        self.refresh()
        with torch.inference_mode():
            self.target_id = vocabulary_ids(network) if self.config.is_reduced else None

    def refresh(self) -> None:
        target, network = self.target, self.network
        if self._bound_to == target.facts:
            return
        check_fit(self.config, self.taps, target)
        network.to(device=target.device, dtype=target.dtype).eval()
        network.use_head(target.head)
        self.embedding = network.embed_tokens if self.config.own_embedding else target.embedding
        self._bound_to = target.facts


class EagleDrafter(NetworkDrafter):
    """An EAGLE network bound to a target: it uses the target's embedding (and, for EAGLE-1/2, its head)."""

    def session(self, context_tok: int, tree_tok: int) -> EagleSession:
        return EagleSession(self, context_tok, tree_tok)

    def batched(self, tokens: Tensor, features: Tensor, depth: int) -> BatchedDrafter:
        """Its trees at many positions of one text; see `BatchedDrafter`."""
        return BatchedDrafter(self, tokens, features, depth)

    def run(self, step: DraftStep) -> Tensor:
        """States [W, H] after one step."""
        return self.layer(step.tokens, step.hidden, step.cos, step.sin, step.attend)

    def run_together(self, forwards: Sequence[DraftForward]) -> list[tuple[Tensor, Tensor]]:
        """One draft step of several sessions, their rows side by side; each attends within its own session."""
        # 1. every session's rows, side by side
        sessions: list[Any] = [forward.session for forward in forwards]
        steps = []
        for forward, session in zip(forwards, sessions, strict=True):
            steps.append(session.step(forward.kind, *forward.inputs))
        counts = [len(step.tokens) for step in steps]
        tokens = torch.cat([step.tokens for step in steps])
        hidden = torch.cat([step.hidden for step in steps])
        cos = torch.cat([step.cos.expand(len(step.tokens), 1, -1) for step in steps])
        sin = torch.cat([step.sin.expand(len(step.tokens), 1, -1) for step in steps])

        # 2. one pass, in which each attends within its own session
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = zip(steps, q.split(counts), k.split(counts), v.split(counts), strict=True)
            return torch.cat([step.attend(q, k, v) for step, q, k, v in heads])

        states = self.layer(tokens, hidden, cos, sin, attend).split(counts)

        # 3. the children of the rows that each session needs
        needed = []
        for forward, session, rows in zip(forwards, sessions, states, strict=True):
            needed.append(session.keep_states(forward.kind, rows))
        widest = max(forward.top_k for forward in forwards)
        tokens, log_probs = self.children(torch.cat(needed), widest)
        results = []
        start = 0
        for forward, rows in zip(forwards, needed, strict=True):
            part = slice(start, start + len(rows))
            results.append((tokens[part, : forward.top_k], log_probs[part, : forward.top_k]))
            start = part.stop
        return results

    def layer(
        self, tokens: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Callable
    ) -> Tensor:
        """One draft step: states [..., W, H] of `tokens` int64 [..., W], given the inputs `hidden` [..., W, H].

        cos, sin broadcast to [..., W, heads, D]. attend(q [..., W, heads, D], k and v [..., W, kv heads, D]), rotated where
        needed, returns [..., W, heads * D]: the owner of the keys decides which rows see which.
        """
        network = self.network
        embedded = F.embedding(tokens, self.embedding.weight)
        x, residual = network.attention_input(embedded, hidden)
        q, k, v = network.midlayer.self_attn.project(x)
        return network.finish(attend(rotate(q, cos, sin), rotate(k, cos, sin), v), residual)

    def children(self, hidden: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """The k best next tokens after states [..., H]: target ids and float32 log-probabilities, [..., k] each.

        Probabilities are over the draft vocabulary.
        """
        return best_tokens(self.head(hidden), top_k, self.target_id)

    def head(self, hidden: Tensor) -> Tensor:
        """Draft logits [..., Vd] in float32."""
        return self.network.head(hidden).float()


def check_fit(config: EagleConfig, taps: Sequence[int], target: Target) -> None:
    """SpecdecError if a drafter cannot read this target."""
    if config.target_hidden_size != target.hidden_size:
        raise SpecdecError(
            f"the drafter was trained on features of width {config.target_hidden_size}, but the target's hidden size is "
            f"{target.hidden_size}; pair it with the target named in its model card."
        )
    if len(taps) != config.num_taps:
        raise SpecdecError(
            f"the drafter fuses {config.num_taps} features, but {len(taps)} taps are named."
        )
    if not all(0 <= tap <= target.num_layers for tap in taps):
        raise SpecdecError(
            f"taps {tuple(taps)} do not all exist in a target of {target.num_layers} layers."
        )
    if config.vocab_size > target.vocab_size:
        why = f"the drafter's vocabulary of {config.vocab_size} exceeds the target's {target.vocab_size}"
        raise SpecdecError(f"{why}; they do not belong together.")
    if not config.own_embedding and config.hidden_size != target.hidden_size:
        why = f"the drafter is {config.hidden_size} wide and brings no embedding, but the target embeds in {target.hidden_size}"
        raise SpecdecError(f"{why}; its checkpoint needs embed_tokens.weight.")


@dataclass(slots=True)
class DraftStep:
    """W rows ready for the drafter's layer: tokens int64 [W], inputs hidden [W, H], tables, and `attend`."""

    tokens: Tensor
    hidden: Tensor
    cos: Tensor
    sin: Tensor
    attend: Callable


class EagleSession(DraftSession):
    """One turn: keys and values of true target features, kept permanently, followed by those of the tree being drafted."""

    def __init__(self, drafter: EagleDrafter, context_tok: int, tree_tok: int):
        self.drafter, self.network = drafter, drafter.network
        self.store, self._tables = keys_and_tables(drafter, context_tok + tree_tok)
        self._keys, self._values = self.store
        self.stores = [self.store]  # of each layer
        self.context_tok, self.length = context_tok, 0
        self._mask = self.store.new_zeros(0, self.store.shape[2])  # of a level; see `_level_mask`
        self._hidden: Tensor | None = None  # states of the last forward, [W, H]

    def root(self, tokens: Tensor, features: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        states = self.keep_states("root", self.drafter.run(self.root_step(tokens, features)))
        return self.drafter.children(states, top_k)

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        states = self.keep_states("expand", self.drafter.run(self.expand_step(tokens, rows)))
        return self.drafter.children(states, top_k)

    def advance(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Run the lasting rows: pairs (feature of position i, token i + 1), causal, kept permanently. Returns states [A, H]."""
        return self.drafter.run(self.root_step(tokens, features))

    def step(self, kind: str, tokens: Tensor, given: Tensor) -> DraftStep:
        """A step of the kind "root" or "expand". given: the features, or the rows of the frontier nodes."""
        return self.root_step(tokens, given) if kind == "root" else self.expand_step(tokens, given)

    def root_step(self, tokens: Tensor, features: Tensor) -> DraftStep:
        """The lasting rows of A new tokens; a new tree begins after them."""
        return self.causal_step(tokens, self.network.fuse(features), len(tokens))

    def causal_step(self, tokens: Tensor, hidden: Tensor, lasting: int) -> DraftStep:
        """Rows of W tokens after the text, the first `lasting` of which join it. hidden [W, H]"""
        count = len(tokens)
        start, end = self.length, self.length + lasting
        if end > self.context_tok:
            raise SpecdecError(
                f"the drafter's cache has room for {self.context_tok} tokens, {end} are needed."
            )
        self.length, self._drawn, self._level = end, 0, 0
        cos, sin = self._tables[:, start : start + count]
        mask = None
        if start and count > 1:
            mask = F.pad(additive(causal(count, hidden.device), hidden.dtype), (start, 0))
        attend = functools.partial(self._attend, start, mask, not start and count > 1)
        return DraftStep(tokens, hidden, cos, sin, attend)

    def expand_step(self, tokens: Tensor, rows: Tensor) -> DraftStep:
        """A level of the tree: the rows of W frontier nodes."""
        width = tokens.shape[0]
        mask = self._level_mask(width, rows)
        cos, sin = self._tables[
            :, self.length + self._level
        ]  # all nodes of a level have the same position
        hidden = self.network.feed_back(self._hidden[rows])
        attend = functools.partial(self._attend, self.length + self._drawn, mask, False)
        self._drawn += width
        self._level += 1
        return DraftStep(tokens, hidden, cos, sin, attend)

    def _level_mask(self, width: int, rows: Tensor) -> Tensor:
        """Additive [W, length + drafted + W]: the text, what the node's parent saw, and the node itself.

        In its buffer the tree begins at column `context_tok`; all earlier columns are visible, whatever the text's length.
        """
        if width > len(self._mask):
            self._mask = F.pad(self._mask, (0, 0, 0, 2 * width - len(self._mask)))
        start, end = self.context_tok, self.context_tok + self._drawn
        mask = self._mask[:width]
        if self._drawn:
            mask[:, start:end] = self._mask[:, start:end][rows]
        mask[:, end : end + width] = apart(width, mask.dtype, mask.device)
        return mask[:, start - self.length : end + width]

    def keep_states(self, kind: str, states: Tensor) -> Tensor:
        """Keep the states [W, H] of the last step. Returns those whose children are needed."""
        self._hidden = states if kind == "expand" else states[-1:]
        if kind == "root":
            self.root_state = self._hidden[0]
        return self._hidden

    def _attend(
        self, start: int, mask: Tensor | None, causal: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Write k and v [A, kv, D] at row `start` and attend with q [A, heads, D]; mask [A, start + A] is additive."""
        end = start + len(k)
        self._keys[:, start:end] = k.transpose(0, 1)
        self._values[:, start:end] = v.transpose(0, 1)
        return attend(q, self._keys[:, :end], self._values[:, :end], mask, causal)


def keys_and_tables(drafter: EagleDrafter, rows: int) -> tuple[Tensor, Tensor]:
    """Room for keys and values [2, kv, rows, D], and the rotary tables [2, rows, 1, D] of as many positions."""
    config, target = drafter.config, drafter.target
    shape = (2, config.num_key_value_heads, rows, config.head_dim)
    check_memory(
        f"drafting {rows} nodes and tokens",
        math.prod(shape) * (4 + target.dtype.itemsize),
        target.device,
    )
    tables = rotary_tables(config.head_dim, config.rope_theta, rows, target.device)
    return torch.zeros(shape, dtype=target.dtype, device=target.device), torch.stack(tables)[
        :, :, None
    ]


def attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool = False
) -> Tensor:
    """q [W, heads, D] over keys and values [kv, M, D] -> [W, heads * D]; mask [W, M] is additive."""
    if mask is not None:
        mask = aligned(mask)
    out = attend_heads(q.transpose(0, 1)[None], keys[None], values[None], mask, causal)
    return out[0].transpose(0, 1).flatten(1)


@dataclass
class TreeBatch:
    """Candidate trees of P roots in creation order, C = k + depth * k**2 candidates each."""

    scores: Tensor  # float32 [P, C]
    tokens: Tensor  # int64 [P, C]
    beams: Tensor  # int64 [P, depth, k]: flat indices inside level i of the nodes that expansion i expands
    root_tokens: (
        Tensor  # int64 [P, most]: the root's best children, including those beyond the beam
    )
    root_scores: Tensor  # float32 [P, most]


@dataclass
class ChosenTrees:
    """Trees of P roots that expand chosen nodes, level by level. Absent candidates have the score -inf."""

    scores: list[Tensor]  # float32 [P, k], then [P, W * k] of every level's W expanded nodes
    tokens: list[Tensor]  # int64, of the same shapes
    beams: list[
        Tensor
    ]  # int64 [P, W]: the candidates expanded, in the order of their scores; -1 for none
    root: tuple[Tensor, ...] = field(
        default=(), init=False
    )  # the root's best children, int64 and float32 [P, most]


class BatchedDrafter:
    """Trees at many positions of one text: its keys and values are computed once, then `grow` drafts from any position.

    Does what `EagleSession` does, for a batch of roots: they share the text's keys, and each root adds the keys of its own
    tree. A test checks that both give the same trees. tokens int64 [T]: the text; features [T, F]: the target's taps at every
    token.
    """

    def __init__(self, drafter: EagleDrafter, tokens: Tensor, features: Tensor, depth: int):
        self.drafter, config = drafter, drafter.config
        count = len(tokens) - 1
        session = drafter.session(count, 0)  # its memory stays with this object
        self.states = session.advance(
            tokens[1:], features[:-1]
        )  # [T - 1, H]; row c - 1 drafts after c tokens
        self.keys, self.values = session.store  # [kv, T - 1, D]
        self.stores = session.stores
        rows = count + depth + 1
        self._cos, self._sin = rotary_tables(
            config.head_dim, config.rope_theta, rows, tokens.device
        )

    def grow(self, contexts: Tensor, top_k: int, depth: int, most: int) -> TreeBatch:
        """Trees of `depth` expansions. contexts int64 [P]: committed tokens before each root (their features are known)."""

        def best(scores: Tensor) -> tuple[Tensor, Tensor]:
            beam = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            return beam, torch.zeros_like(beam, dtype=torch.bool)

        chosen = self.grow_chosen(contexts, top_k, depth, best, most)
        beams = (
            torch.stack(chosen.beams, 1)
            if depth
            else torch.zeros((len(contexts), 0, top_k), dtype=torch.long)
        )
        trees = TreeBatch(
            torch.cat(chosen.scores, 1), torch.cat(chosen.tokens, 1), beams, *chosen.root
        )
        assert trees.scores.shape == (len(contexts), pool_size(depth, top_k))
        return trees

    def grow_chosen(
        self, contexts: Tensor, top_k: int, depth: int, choose: Callable, most: int = 0
    ) -> ChosenTrees:
        """Trees that expand the nodes returned by `choose`.

        choose(scores [P, n] of a level) -> (candidates to expand int64 [P, W], which of them are absent bool [P, W]).
        most: children of each root to name, at least top_k.
        """
        hidden = self.roots(contexts)
        root = tuple(part[:, 0] for part in self.drafter.children(hidden[:, :1], max(most, top_k)))
        tokens, scores = (part[:, :top_k] for part in root)
        trees, keys = ChosenTrees([scores], [tokens], []), TreeKeys()
        trees.root = root
        for level in range(depth):
            beam, nobody = choose(scores)
            scores, tokens, hidden = self._level(
                contexts, level, keys, beam, scores, tokens, hidden, top_k
            )
            scores = scores.masked_fill(nobody.repeat_interleave(top_k, 1), float("-inf"))
            trees.scores.append(scores)
            trees.tokens.append(tokens)
            trees.beams.append(beam.masked_fill(nobody, -1))
        return trees

    def roots(self, contexts: Tensor) -> Tensor:
        """The roots' states, [P, 1, H]."""
        return self.states[contexts - 1][:, None]

    def _level(
        self, contexts, level: int, keys: TreeKeys, beam: Tensor, scores, tokens, hidden, top_k: int
    ):
        """Scores and tokens [P, W * k] of the children of the candidates `beam` [P, W], and these candidates' states [P, W, H].

        scores, tokens [P, n]: of the level that `beam` indexes; hidden: states of the parents of its nodes.
        """
        frontier, best = tokens.gather(1, beam), scores.gather(1, beam)
        rows = torch.div(beam, top_k, rounding_mode="floor") if level else torch.zeros_like(beam)
        hidden = hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))
        cos, sin = (table[contexts + level][:, None, None] for table in (self._cos, self._sin))
        attend = functools.partial(self._attend, contexts, rows, keys)
        hidden = self.drafter.layer(
            frontier, self.drafter.network.feed_back(hidden), cos, sin, attend
        )
        children, log_probs = self.drafter.children(hidden, top_k)
        return (best[..., None] + log_probs).flatten(1), children.flatten(1), hidden

    def _attend(
        self, contexts: Tensor, rows: Tensor, tree: TreeKeys, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """softmax over the text before each root and the root's own branch; one normalisation over both.

        q [P, W, heads, D], k and v [P, W, kv, D] of a level's nodes; rows [P, W] as in `TreeKeys.add`.
        """
        tree.add(k, v, rows)
        q, groups, longest = q.transpose(1, 2), q.shape[2] // k.shape[2], int(contexts.max())
        keys, values = (
            part[:, :longest].repeat_interleave(groups, 0) for part in (self.keys, self.values)
        )
        near_keys, near_values = (
            part.repeat_interleave(groups, 1) for part in (tree.keys, tree.values)
        )
        far = torch.einsum("phwd,hld->phwl", q, keys).float()
        beyond = torch.arange(longest, device=q.device) >= contexts[:, None]  # [P, longest]
        far = far.masked_fill_(beyond[:, None, None], float("-inf"))
        near = (
            (q @ near_keys.transpose(-1, -2))
            .float()
            .masked_fill_(~tree.seen[:, None], float("-inf"))
        )
        weights = (torch.cat((far, near), -1) * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
        far, near = weights.split((longest, near.shape[-1]), dim=-1)
        attended = torch.einsum("phwl,hld->phwd", far, values) + near @ near_values
        return attended.transpose(1, 2).flatten(2)


class TreeKeys:
    """Keys and values of the trees drafted so far. keys, values [P, kv, rows, D]; seen bool [P, W, rows]: what the newest
    level's nodes may attend to, which is their own branch."""

    def __init__(self):
        self.keys = self.values = self.seen = None

    def add(self, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        """keys, values [P, W, kv, D] of a level's nodes; rows [P, W]: the previous level's row that each came from."""
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        own = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device).expand(
            len(rows), -1, -1
        )
        if self.keys is None:
            self.keys, self.values, self.seen = keys, values, own
            return
        before = self.seen.gather(1, rows[..., None].expand(-1, -1, self.seen.shape[-1]))
        self.keys, self.values = (
            torch.cat((self.keys, keys), 2),
            torch.cat((self.values, values), 2),
        )
        self.seen = torch.cat((before, own), 2)


def load_eagle(folder: Path, target: Target) -> EagleDrafter:
    """The drafter in `folder`, bound to a target."""
    checkpoint = read_checkpoint(folder)
    embedding = checkpoint.tensors.get(EMBEDDING)
    theirs = target.embedding.weight
    if embedding is not None and embedding.shape == theirs.shape:
        if torch.equal(embedding.to(theirs.device, theirs.dtype), theirs):
            # a copy of the target's embedding takes memory
            checkpoint.config = replace(checkpoint.config, own_embedding=False)
            del checkpoint.tensors[EMBEDDING]
    return EagleDrafter(checkpoint.network(), target)
