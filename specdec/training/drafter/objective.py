"""The interface between the trainer of drafters and its objectives.

An objective is a frozen dataclass in its own file: EAGLE-3's training-time test (`ttt`), other
learning from the given text (`ttt.Supervised`), learning from windows that the drafter drafts
(`ppow`); `presets` names them. It sees the drafter, the frozen target and one batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.core.protocols import TargetForward
from specdec.models.eagle_network import EagleNetwork
from specdec.models.kv_cache import TreeCache
from specdec.models.target import Target, TreeMask


class FullLogits:
    """The target's next-token logits from its forward: logits [B, S, V]."""

    def __init__(self, logits: Tensor):
        self.logits = logits

    def at(
        self, rows: Tensor, columns: Tensor, vocabulary_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """At R places: logits of the Vd given tokens [R, Vd], and over all tokens the best one [R]
        and the log-sum-exp [R].

        Logits and sums are in float32 or wider.
        """
        full = self.logits[rows, columns]
        # an arg-max of the stored type, sums in float32
        best = full.argmax(-1)
        full = full.to(torch.promote_types(full.dtype, torch.float32))
        part = full[:, vocabulary_ids] if len(vocabulary_ids) < full.shape[1] else full
        return part, best, full.logsumexp(-1)


@dataclass(frozen=True)
class HeadLogits:
    """The same from the stored states of an earlier forward: only the required columns are
    computed.

    hidden [A, H], best [A], log_sum [A] of A places; place [B, S]: index of the stored place, -1
    for none.
    head: the target's, a linear map [H] -> [V].
    """

    head: torch.nn.Linear
    hidden: Tensor
    best: Tensor
    log_sum: Tensor
    place: Tensor

    def at(
        self, rows: Tensor, columns: Tensor, vocabulary_ids: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See FullLogits.at. A place that is not stored gives logits of zero and a log-sum-exp of
        zero.
        """
        place = self.place[rows, columns]
        missing = place < 0
        place = place.clamp(min=0)
        bias = None if self.head.bias is None else self.head.bias[vocabulary_ids]
        part = F.linear(self.hidden[place], self.head.weight[vocabulary_ids], bias)
        part = part.to(torch.promote_types(part.dtype, torch.float32))
        part = part.masked_fill_(missing[:, None], 0.0)
        return part, self.best[place], self.log_sum[place].masked_fill(missing, 0.0)


@dataclass(frozen=True)
class TargetOutput:
    """The target's output for a batch: features [B, S, taps * Ht], and next-token logits."""

    features: Tensor
    logits: FullLogits | HeadLogits


@dataclass(frozen=True)
class TokenBatch:
    """Rows of packed tokens on the training device.

    ids [B, S]. loss_mask [B, S]: 1 on an assistant's tokens. documents [B, S]: index of each
    token's text, -1 for padding; None if every row is one text. attention_mask [B, S]: 1 on real
    tokens; None if all are.
    step: the number of the optimiser step, which seeds an objective's randomness. output: the
    target's output for these rows, if known. collected: the result of the objective's own
    `collect`.
    """

    ids: Tensor
    loss_mask: Tensor | None = None
    documents: Tensor | None = None
    attention_mask: Tensor | None = None
    step: int = 0
    output: TargetOutput | None = None
    collected: object = None


@dataclass
class FrozenTarget:
    """The target in training: a batch in, features and logits out, no gradients.

    model: a transformers causal LM; `tokenizer` is for objectives that write text. taps: which
    hidden states are features. dtype: of features and `embedding` [V, H], in which the drafter
    computes; None keeps the model's own.
    """

    model: torch.nn.Module
    taps: tuple[int, ...]
    dtype: torch.dtype | None = None
    tokenizer: object = None
    embedding: Tensor = field(init=False)
    head: torch.nn.Module = field(init=False)

    def __post_init__(self):
        self.model.eval().requires_grad_(False)
        self.head = self.model.get_output_embeddings()
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.dtype = self.dtype or self.embedding.dtype
        self.embedding = self.embedding.to(self.dtype)

    @torch.no_grad()
    def __call__(self, batch: TokenBatch) -> TargetOutput:
        """The batch's stored output, else one forward of the model."""
        if batch.output is not None:
            return batch.output
        # transformers separates documents where positions restart
        positions = packed_positions(documents_of(batch))
        out = self.model(
            batch.ids, position_ids=positions, output_hidden_states=list(self.taps), use_cache=False
        )
        features = torch.cat([out.hidden_states[tap] for tap in self.taps], -1).to(self.dtype)
        return TargetOutput(features, FullLogits(out.logits))

    @cached_property
    def engine(self) -> Target:
        """The target as used in decoding."""
        return Target(self.model)

    @torch.no_grad()
    def continued(
        self, batch: TokenBatch, slots: Tensor, drafted: Tensor, caches: list | None = None
    ) -> Tensor:
        """The target's output along other continuations of its rows: float32 logits [B, A, K, V].

        slots [B, A], drafted int64 [B, A, K]: window a follows the tokens up to slots[a] + 1 of its
        document, and the logits at t verify drafted[a, t]. One forward per row, with the text and
        all of its windows. caches: a list that receives each row's cache, cut to the text up to
        its last window.
        """
        documents = documents_of(batch)
        logits = []
        for row in range(len(batch.ids)):
            along, cache = self._branched(batch.ids[row], documents[row], slots[row], drafted[row])
            logits.append(along)
            if caches is not None:
                caches.append(cache)
        return torch.stack(logits)

    @torch.no_grad()
    def greedy(
        self, documents: Tensor, places: list, caches: list, first: Tensor, count: int
    ) -> tuple[Tensor, Tensor]:
        """The target's own next tokens int64 [N, count] after N places, and their logits [N, count,
        V].

        documents [B, S]: index of each token's text. places: (row, last) of each, the token to
        continue after. caches: those left by `continued`. first [N, V]: the known logits of the
        first token. All places advance together: count - 1 forwards of N tokens.
        """
        logits = [first]
        with self.engine.inference(taps=False) as engine:
            # 1. every place begins with the keys of its own document
            branches = []
            for row, last in places:
                begin = int((documents[row] == documents[row, last]).nonzero()[0])
                branch = engine.new_cache(last + 1 - begin + count)
                branch.append(caches[row], begin, last + 1)
                branches.append(branch)
            # 2. one token of all places per forward
            for _ in range(count - 1):
                tokens = logits[-1].argmax(-1)[:, None]
                forwards = []
                for token, branch in zip(tokens, branches, strict=True):
                    forwards.append(TargetForward(engine, token, branch))
                rows = engine.run_together(forwards)
                logits.append(torch.cat([row.logits for row in rows]).float())
        along = torch.stack(logits, 1)
        return along.argmax(-1), along

    def _branched(
        self, ids: Tensor, documents: Tensor, slots: Tensor, drafted: Tensor
    ) -> tuple[Tensor, TreeCache]:
        """`continued` for one row: the text is the trunk of a tree, windows are its branches."""
        count, width = drafted.shape
        last = slots + 1
        length = int(last.max()) + 1
        ids = ids[:length]
        documents = documents[:length]
        # 1. the trunk: tokens see the earlier ones of their own document
        positions = packed_positions(documents[None])[0]
        places = torch.arange(length, device=ids.device)
        trunk = (places <= places[:, None]) & (documents == documents[:, None])
        # 2. a branch sees its part of the trunk, and itself; its last token is not needed
        inner = width - 1
        before = (places <= last[:, None]) & (documents == documents[last][:, None])  # [A, length]
        within = torch.kron(torch.eye(count), torch.ones(inner, inner).tril()).bool().to(ids.device)
        upper = torch.cat((trunk, trunk.new_zeros(length, count * inner)), 1)
        lower = torch.cat((before.repeat_interleave(inner, 0), within), 1)
        ancestors = torch.cat((upper, lower))
        # 3. positions, and the rows whose logits verify a drafted token
        further = torch.arange(count * inner, device=ids.device).view(count, inner)
        depth = torch.cat((positions, (positions[last, None] + 1 + further[0]).flatten()))
        verified = torch.cat((last[:, None], length + further), 1)
        rows, index = verified.unique(return_inverse=True)
        tokens = torch.cat((ids, drafted[:, :inner].flatten()))
        with self.engine.inference(taps=False) as engine:
            cache = engine.new_cache(len(tokens))
            output = engine.run(tokens, cache, TreeMask(depth, 0, ancestors), rows)
        return output.logits.float()[index], cache


class Objective(Protocol):
    """What a drafter is trained for. Implementations are frozen dataclasses, whose fields go into
    the plan of a run.

    updates: optimiser steps per `collect`. network: the default kind of network.
    """

    updates = 1
    network = "eagle3"

    def prepare(self, drafter: EagleNetwork, target: FrozenTarget) -> None:
        """Called once with the initial drafter: may change its modules in place, or refuse one that
        does not fit.
        """

    def measured(
        self, drafter: EagleNetwork, target: FrozenTarget, batches: Iterable[TokenBatch]
    ) -> Objective:
        """Called once after `prepare`: the objective with fields that must be measured. batches:
        the first ones.
        """
        return self

    def collect(self, drafter: EagleNetwork, target: FrozenTarget, batch: TokenBatch) -> TokenBatch:
        """Called once per step, before the loss: the batch, with whatever an objective collects
        with the current weights.
        """
        return batch

    def __call__(
        self, drafter: EagleNetwork, target: FrozenTarget, batch: TokenBatch
    ) -> tuple[Tensor, dict]:
        """(loss, measures): a scalar with gradient, and numbers for a row of the training curve."""


def documents_of(batch: TokenBatch) -> Tensor:
    """Index of each token's text [B, S]; zeros if every row is one text."""
    return torch.zeros_like(batch.ids) if batch.documents is None else batch.documents


def packed_positions(documents: Tensor) -> Tensor:
    """Position of each token inside its document. [B, S] -> [B, S]."""
    slots = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return slots - torch.where(first, slots, 0).cummax(1).values
