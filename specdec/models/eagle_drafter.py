"""Drafting with an EAGLE network: `EagleSession` by cycles, `BatchedDrafter` from many positions.

Positions count from 0 at the first (feature, next token) pair, as in the official engine. Both
classes share the drafter's layer; they differ in where its keys are and how they are attended to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.core.protocols import Drafter, DraftForward, DraftSession
from specdec.core.tree import additive, apart, causal
from specdec.core.tree_config import check_memory
from specdec.errors import SpecdecError
from specdec.models.eagle_files import read_network
from specdec.models.eagle_network import (
    BlockNetwork,
    EagleConfig,
    best_tokens,
    default_taps,
    rotary_tables,
    rotate,
    vocabulary_ids,
)
from specdec.models.kv_cache import aligned
from specdec.models.kv_cache import attend as attend_heads
from specdec.models.target import Target


class NetworkDrafter(Drafter):
    """A network bound to a target, whose embedding and head it may use; again if that changes."""

    def __init__(self, network: Any, target: Target):
        self.network = network
        self.target = target
        self.config = network.config
        taps = self.config.taps
        if taps is None and self.config.generation == 3:
            taps = default_taps(target.num_layers)
        self.taps = tuple(taps or (target.num_layers,))
        self._bound_to: object = None
        self.refresh()

    def refresh(self) -> None:
        # the map may have been loaded anew
        with torch.inference_mode():
            self.target_id = vocabulary_ids(self.network) if self.config.is_reduced else None
        target = self.target
        if self._bound_to == target.facts:
            return
        check_fit(self.config, self.taps, target)
        self.network.to(device=target.device, dtype=target.dtype).eval()
        if self.config.generation == 1:
            self.network.use_head(target.head)
        self.embedding: Any = target.embedding
        if self.config.own_embedding:
            self.embedding = self.network.embed_tokens
        with torch.inference_mode():
            self.target_id = vocabulary_ids(self.network) if self.config.is_reduced else None
        self._bound_to = target.facts


class EagleDrafter(NetworkDrafter):
    """An EAGLE network bound to a target, whose embedding (and, for EAGLE-1/2, head) it uses."""

    def session(self, context_tok: int, tree_tok: int) -> EagleSession:
        return EagleSession(self, context_tok, tree_tok)

    def batched(self, tokens: Tensor, features: Tensor, depth: int) -> BatchedDrafter:
        return BatchedDrafter(self, tokens, features, depth)

    def run_together(self, forwards: Sequence[DraftForward]) -> list[tuple[Tensor, Tensor]]:
        """One draft step of several sessions, their rows side by side."""
        # 1. every session's rows, side by side
        sessions: list[Any] = [forward.session for forward in forwards]
        steps = []
        for forward, session in zip(forwards, sessions, strict=True):
            steps.append(session.step(forward.kind, *forward.inputs))
        counts = [len(step.tokens) for step in steps]
        cos = torch.cat([step.cos.expand(len(step.tokens), 1, -1) for step in steps])
        sin = torch.cat([step.sin.expand(len(step.tokens), 1, -1) for step in steps])

        # 2. one pass, in which each attends within its own session
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = zip(steps, *(torch.split(part, counts) for part in (q, k, v)), strict=True)
            return torch.cat([step.attend(q, k, v) for step, q, k, v in heads])

        tokens = torch.cat([step.tokens for step in steps])
        hidden = torch.cat([step.hidden for step in steps])
        states = torch.split(self.layer(DraftStep(tokens, hidden, cos, sin, attend)), counts)

        # 3. the children of the rows that each session needs
        needed = []
        for forward, session, rows in zip(forwards, sessions, states, strict=True):
            needed.append(session.keep_states(forward.kind, rows))
        widest = max(forward.top_k for forward in forwards)
        children = self.children(torch.cat(needed), widest)
        parts = [torch.split(part, [len(rows) for rows in needed]) for part in children]
        results = []
        for forward, ids, scores in zip(forwards, *parts, strict=True):
            results.append((ids[:, : forward.top_k], scores[:, : forward.top_k]))
        return results

    def layer(self, step: DraftStep) -> Tensor:
        """States [..., W, H] after the layer."""
        network = self.network
        tokens = step.tokens
        if self.config.own_embedding:
            # others were added to the target's vocabulary
            tokens = tokens.clamp(max=self.config.vocab_size - 1)
        x, residual = network.attention_input(self.embedding(tokens), step.hidden)
        q, k, v = network.midlayer.self_attn.project(x)
        q, k = (rotate(part, step.cos, step.sin) for part in (q, k))
        return network.finish(step.attend(q, k, v), residual)

    def children(self, hidden: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """The k best next tokens after states [..., H]: target ids, log-probabilities [..., k]."""
        return best_tokens(self.network.head(hidden).float(), top_k, self.target_id)


def check_fit(config: EagleConfig, taps: Sequence[int], target: Target) -> None:
    """SpecdecError if a drafter cannot read this target."""
    width = config.target_hidden_size
    reason = ""
    if width != target.hidden_size or (not config.own_embedding and width != config.hidden_size):
        reason = f"reads states of {width} numbers, this target has {target.hidden_size}"
    elif len(taps) != config.num_taps or max(taps) > target.num_layers:
        reason = f"taps layers {tuple(taps)} of a target of {target.num_layers} layers"
    elif config.vocab_size > target.vocab_size:
        reason = f"has a vocabulary of {config.vocab_size}, the target's is {target.vocab_size}"
    if reason:
        raise SpecdecError(f"the drafter {reason}; pair it with the target of its model card.")


@dataclass(slots=True)
class DraftStep:
    """Rows ready for the drafter's layer; the owner of the keys decides which rows see which."""

    tokens: Tensor  # int64 [..., W]
    hidden: Tensor  # [..., W, H]
    cos: Tensor  # broadcasts to [..., W, heads, D]
    sin: Tensor
    # of rotated q [..., W, heads, D] and k, v [..., W, kv heads, D]: [..., W, heads * D]
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]


class EagleSession(DraftSession):
    """One turn: keys and values of true target features, followed by those of the newest tree."""

    def __init__(self, drafter: EagleDrafter, context_tok: int, tree_tok: int):
        self.drafter = drafter
        self.network = drafter.network
        self.context_tok = context_tok
        # 1. room for keys and values [2, kv, rows, D], and as many rotary tables [2, rows, 1, D]
        config, target = drafter.config, drafter.target
        rows = context_tok + tree_tok
        shape = (2, config.num_key_value_heads, rows, config.head_dim)
        size = math.prod(shape) * (4 + target.dtype.itemsize)
        check_memory(f"drafting {rows} nodes and tokens", size, target.device)
        tables = rotary_tables(config.head_dim, config.rope_theta, rows, target.device)
        self._tables = torch.stack(tables)[:, :, None]
        self.store = torch.zeros(shape, dtype=target.dtype, device=target.device)
        self._keys, self._values = self.store
        # 2. where the text ends and what was drafted after it
        self.length = 0
        self._drawn = 0  # rows of the tree
        self._level = 0
        self._visible: Tensor  # additive [W, drafted]: rows of the tree that the last level sees

    def root(self, tokens: Tensor, features: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        assert features is not None, "EAGLE reads the target's features"
        states = self.drafter.layer(self.step("root", tokens, features))
        return self.drafter.children(self.keep_states("root", states), top_k)

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        states = self.drafter.layer(self.step("expand", tokens, rows))
        return self.drafter.children(self.keep_states("expand", states), top_k)

    def step(self, kind: str, tokens: Tensor, inputs: Tensor) -> DraftStep:
        """Rows of new tokens and features ("root"), or of W nodes and parents' rows ("expand")."""
        if kind == "root":
            return self.causal_step(tokens, self.network.fuse(inputs), len(tokens))
        width = len(tokens)
        # the text, what the parent saw of the tree, the node itself: [W, length + drafted + W]
        visible = apart(width, self.store.dtype, tokens.device)
        if self._drawn:
            visible = torch.cat((self._visible[inputs], visible), 1)
        self._visible = visible
        mask = F.pad(visible, (self.length, 0))
        # all nodes of a level have the same position
        cos, sin = self._tables[:, self.length + self._level]
        hidden = self.network.feed_back(self._hidden[inputs])
        attend = functools.partial(self._attend, self.length + self._drawn, mask, False)
        self._drawn += width
        self._level += 1
        return DraftStep(tokens, hidden, cos, sin, attend)

    def causal_step(self, tokens: Tensor, hidden: Tensor, lasting: int) -> DraftStep:
        """Rows of W tokens after the text, the first `lasting` of which join it. hidden [W, H]"""
        count = len(tokens)
        start = self.length
        self.length += lasting
        assert self.length <= self.context_tok, f"no room for {self.length} tokens"
        self._drawn = 0
        self._level = 0
        cos, sin = self._tables[:, start : start + count]
        mask = None
        if start and count > 1:
            mask = F.pad(additive(causal(count, hidden.device), hidden.dtype), (start, 0))
        attend = functools.partial(self._attend, start, mask, not start and count > 1)
        return DraftStep(tokens, hidden, cos, sin, attend)

    def keep_states(self, kind: str, states: Tensor) -> Tensor:
        """Keep the states [W, H] of the last step. Returns those whose children are needed."""
        self._hidden = states
        if kind == "root":
            self._hidden = states[-1:]
            self.root_state = states[-1]
        return self._hidden

    def _attend(
        self, start: int, mask: Tensor | None, causal: bool, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Write k and v [A, kv, D] at row `start`; attend with q [A, heads, D]. mask: additive."""
        end = start + len(k)
        self._keys[:, start:end] = k.transpose(0, 1)
        self._values[:, start:end] = v.transpose(0, 1)
        keys = self._keys[None, :, :end]
        values = self._values[None, :, :end]
        if mask is not None:
            mask = aligned(mask)
        attended = attend_heads(q.transpose(0, 1)[None], keys, values, mask, causal)
        return attended[0].transpose(0, 1).flatten(1)


@dataclass
class TreeBatch:
    """Candidate trees of P roots in creation order, C = k + depth * k**2 candidates each."""

    scores: Tensor  # float32 [P, C]
    tokens: Tensor  # int64 [P, C]
    beams: Tensor  # int64 [P, depth, k]: indices inside level i of the nodes that are expanded
    root_tokens: Tensor  # int64 [P, most]: the root's best children, those beyond the beam too
    root_scores: Tensor


# scores [P, n] of a level -> candidates to expand int64 [P, W], and which are absent bool [P, W]
Choice = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class ChosenTrees:
    """Trees of P roots that expand chosen nodes, level by level; absent nodes score -inf."""

    contexts: Tensor  # int64 [P]: tokens before each root
    states: Tensor  # [P, W, H]: of the last level
    keys: TreeKeys
    root: tuple[Tensor, Tensor]  # its best children, int64 and float32 [P, most]
    scores: list[Tensor]  # float32 [P, k], then [P, W * k] of every level's W expanded nodes
    tokens: list[Tensor]
    beams: list[Tensor] = field(default_factory=list)  # int64 [P, W]: those expanded; -1 for none


class BatchedDrafter:
    """Trees at many positions of one text, as `EagleSession` drafts them, from the same keys.

    tokens int64 [T]: the text; features [T, F]: taps at every token.
    """

    def __init__(self, drafter: EagleDrafter, tokens: Tensor, features: Tensor, depth: int):
        self.drafter = drafter
        count = len(tokens) - 1
        session = drafter.session(count, 0)  # its memory stays with this object
        # [T - 1, H]; row c - 1 drafts after c tokens
        self.states = drafter.layer(session.step("root", tokens[1:], features[:-1]))
        self.store = session.store  # keys and values [2, kv, T - 1, D]
        self._cos, self._sin = rotary_tables(
            drafter.config.head_dim, drafter.config.rope_theta, count + depth + 1, tokens.device
        )

    def grow(self, contexts: Tensor, top_k: int, depth: int, most: int) -> TreeBatch:
        """Trees of `depth` expansions. contexts int64 [P]: committed tokens before each root."""

        def best(scores: Tensor) -> tuple[Tensor, Tensor]:
            beam = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            return beam, torch.zeros_like(beam, dtype=torch.bool)

        trees = self.grow_chosen(contexts, top_k, depth, best, most)
        beams = torch.cat((contexts.new_zeros(len(contexts), 0), *trees.beams), 1)
        beams = beams.view(len(contexts), depth, top_k)
        return TreeBatch(torch.cat(trees.scores, 1), torch.cat(trees.tokens, 1), beams, *trees.root)

    def grow_chosen(
        self, contexts: Tensor, top_k: int, depth: int, choose: Choice, most: int = 0
    ) -> ChosenTrees:
        """Trees that expand the nodes that `choose` returns. most: children of each root."""
        states = self.roots(contexts)
        ids, log_probs = root = self.drafter.children(states[:, 0], max(most, top_k))
        first = ([log_probs[:, :top_k]], [ids[:, :top_k]])
        trees = ChosenTrees(contexts, states, TreeKeys(self.store), root, *first)
        for _ in range(depth):
            beam, absent = choose(trees.scores[-1])
            children, log_probs = self._children_of(trees, beam, top_k)
            scores = (trees.scores[-1].gather(1, beam)[..., None] + log_probs).flatten(1)
            scores = scores.masked_fill(absent.repeat_interleave(top_k, 1), float("-inf"))
            trees.scores.append(scores)
            trees.tokens.append(children.flatten(1))
            trees.beams.append(beam.masked_fill(absent, -1))
        return trees

    def roots(self, contexts: Tensor) -> Tensor:
        """The roots' states, [P, 1, H]."""
        return self.states[contexts - 1][:, None]

    def _children_of(self, trees: ChosenTrees, beam: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Children [P, W, k] of the newest candidates `beam` [P, W], whose states are kept."""
        level = len(trees.beams)
        rows = beam // top_k if level else torch.zeros_like(beam)
        parents = rows[..., None].expand(-1, -1, trees.states.shape[-1])
        hidden = self.drafter.network.feed_back(trees.states.gather(1, parents))
        attend = functools.partial(trees.keys.attend, trees.contexts, rows)
        tokens = trees.tokens[-1].gather(1, beam)
        step = self.step(tokens, hidden, trees.contexts + level, attend)
        trees.states = self.drafter.layer(step)
        return self.drafter.children(trees.states, top_k)

    def step(self, tokens: Tensor, hidden: Tensor, places: Tensor, attend: Any) -> DraftStep:
        """Rows [P, W] at the positions `places` [P]."""
        cos, sin = (table[places][:, None, None] for table in (self._cos, self._sin))
        return DraftStep(tokens, hidden, cos, sin, attend)


class TreeKeys:
    """Keys and values of the text [2, kv, T, D], shared by P roots, and of their trees so far."""

    def __init__(self, text: Tensor):
        self.text_keys, self.text_values = text
        self.keys: Tensor | None = None  # [P, kv, rows, D]
        self.values: Tensor
        self.visible: Tensor  # bool [P, W, rows]: the branches of the newest level's nodes

    def attend(self, contexts: Tensor, rows: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention over the text before each root and the root's own branch, normalised once.

        q [P, W, heads, D], k and v [P, W, kv, D] of a level's nodes, which join the trees;
        rows [P, W]: each one's row in the level before.
        """
        # 1. the branches grow by this level
        groups = q.shape[2] // k.shape[2]
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        itself = torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device)
        visible = itself.expand(len(rows), -1, -1)
        if self.keys is not None:
            index = rows[..., None].expand(-1, -1, self.visible.shape[-1])
            visible = torch.cat((self.visible.gather(1, index), visible), 2)
            k = torch.cat((self.keys, k), 2)
            v = torch.cat((self.values, v), 2)
        self.keys, self.values, self.visible = k, v, visible

        # 2. scores of the text's tokens and of the branch's
        longest = int(contexts.max())
        keys = self.text_keys[:, :longest].repeat_interleave(groups, 0)
        far = torch.einsum("phwd,hld->phwl", q, keys).float()
        beyond = torch.arange(longest, device=q.device) >= contexts[:, None]  # [P, longest]
        far = far.masked_fill_(beyond[:, None, None], float("-inf"))
        near = (q @ k.repeat_interleave(groups, 1).transpose(-1, -2)).float()
        near = near.masked_fill_(~visible[:, None], float("-inf"))

        # 3. their values
        weights = (torch.cat((far, near), -1) * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
        far, near = weights[..., :longest], weights[..., longest:]
        values = self.text_values[:, :longest].repeat_interleave(groups, 0)
        near_values = v.repeat_interleave(groups, 1)
        attended = torch.einsum("phwl,hld->phwd", far, values) + near @ near_values
        return attended.transpose(1, 2).flatten(2)


# A block drafter (ours): one forward drafts every position of a block.
#
#     text ... root | row 1 | row 2 | ...    one causal pass after every commit; the keys of rows
#                 │       │       │          1, 2, ... are not kept
#                q_1     q_2     q_3         q_j: distribution of the j-th token after the root,
#                                            whatever is drafted before it
#
# All nodes of a level have the same children; a node's probability is the product of the q_j along
# its path. So the root pass drafts everything and an expansion is a look-up.


class BlockDrafter(EagleDrafter):
    """A block network bound to a target."""

    def __init__(self, network: Any, target: Target):
        super().__init__(network, target)
        # expansions: the root's children come from the first row
        self.deepest = self.config.block - 1

    def session(self, context_tok: int, tree_tok: int) -> BlockSession:
        return BlockSession(self, context_tok)

    def batched(self, tokens: Tensor, features: Tensor, depth: int) -> BatchedBlocks:
        return BatchedBlocks(self, tokens, features, self.config.block)

    def run_together(self, forwards: Sequence[DraftForward]) -> list[tuple[Tensor, Tensor]]:
        if forwards[0].kind == "expand":
            return [forward.run() for forward in forwards]
        sessions: list[Any] = [forward.session for forward in forwards]
        children = super().run_together(forwards)
        return [session.begin(part) for session, part in zip(sessions, children, strict=True)]


class BlockSession(EagleSession):
    """One turn. The rows of a block follow the text's, and are overwritten by the next tokens."""

    def __init__(self, drafter: BlockDrafter, context_tok: int):
        super().__init__(drafter, context_tok, drafter.config.block - 1)

    def root(self, tokens: Tensor, features: Tensor | None, top_k: int) -> tuple[Tensor, Tensor]:
        return self.begin(super().root(tokens, features, top_k))

    def begin(self, children: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keep the children of every level, [B, k] each; returns those of the root."""
        self._children = children
        self._level = 0
        return children[0][:1], children[1][:1]

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        self._level += 1
        ids, log_probs = (part[self._level, :top_k] for part in self._children)
        return ids.expand(len(tokens), -1), log_probs.expand(len(tokens), -1)

    def step(self, kind: str, tokens: Tensor, inputs: Tensor) -> DraftStep:
        """The lasting rows of A new tokens, and the rows of the block after them."""
        mask_tokens, mask_hidden = self.network.masked()
        rows = torch.cat((tokens, mask_tokens))
        hidden = torch.cat((self.network.fuse(inputs), mask_hidden))
        return self.causal_step(rows, hidden, len(tokens))

    def keep_states(self, kind: str, states: Tensor) -> Tensor:
        """The states [B, H] of the block."""
        block = states[-self.drafter.config.block :]
        self.root_state = block[0]
        return block


class BatchedBlocks(BatchedDrafter):
    """`BatchedDrafter` of a block drafter: the rows of all roots' blocks, position by position."""

    def roots(self, contexts: Tensor) -> Tensor:
        """The states of the blocks, [P, B, H]."""
        network = self.drafter.network
        states = [self.states[contexts - 1][:, None]]
        tokens, hidden = network.masked(len(contexts))
        # each row sees its block's rows before it
        rows = torch.zeros_like(contexts)[:, None]
        attend = functools.partial(TreeKeys(self.store).attend, contexts, rows)
        for place in range(self.drafter.config.block - 1):
            row = slice(place, place + 1)
            step = self.step(tokens[:, row], hidden[:, row], contexts + place, attend)
            states.append(self.drafter.layer(step))
        return torch.cat(states, 1)

    def _children_of(self, trees: ChosenTrees, beam: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        row = len(trees.beams) + 1
        children, log_probs = self.drafter.children(trees.states[:, row : row + 1], top_k)
        return children.expand(-1, beam.shape[1], -1), log_probs


def load_eagle(folder: Path, target: Target) -> EagleDrafter:
    """The drafter in `folder`, of the kind that its weights show, bound to a target."""
    network = read_network(folder)
    kind = BlockDrafter if isinstance(network, BlockNetwork) else EagleDrafter
    return kind(network, target)
