"""The interface between the trainer of drafters and its objectives.

An objective sees the drafter, the frozen target and one batch: EAGLE-3's training-time test and
other learning from the given text (`ttt`), or from windows that the drafter drafts (`ppow`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from specdec.core.protocols import TargetForward
from specdec.models.kv_cache import TreeCache
from specdec.models.target import Target, TreeMask


@dataclass(frozen=True)
class TargetOutput:
    """The target's output for a batch: features [B, S, taps * Ht], next-token logits [B, S, V]."""

    features: Tensor
    logits: Tensor

    def at(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """At R places: logits [R, V] in float32 or wider, best token and log-sum-exp [R]."""
        logits = self.logits[rows, columns]
        # an arg-max of the stored type, sums in float32
        best = logits.argmax(-1)
        logits = wide(logits)
        return logits, best, logits.logsumexp(-1)


@dataclass(frozen=True)
class TokenBatch:
    """Rows of packed tokens on the training device.

    documents: index of each token's text, -1 for padding; None if every row is one text. step: the
    number of the optimiser step, which seeds an objective's randomness.
    """

    ids: Tensor  # [B, S]
    loss_mask: Tensor | None = None  # [B, S] 1 on an assistant's tokens
    documents: Tensor | None = None  # [B, S]
    step: int = 0
    output: TargetOutput | None = None  # the target's, if known
    collected: object = None  # the result of the objective's `collect`


@dataclass
class FrozenTarget:
    """The target in training: a batch in, features and logits out, no gradients.

    taps: which hidden states are features. dtype: of features and `embedding` [V, H], in which the
    drafter computes; None keeps the model's own.
    """

    model: torch.nn.Module
    taps: tuple[int, ...]
    dtype: torch.dtype | None = None
    embedding: Tensor = field(init=False)

    def __post_init__(self):
        self.model.eval().requires_grad_(False)
        embedding = self.model.get_input_embeddings().weight.detach()
        self.dtype = self.dtype or embedding.dtype
        self.embedding = embedding.to(self.dtype)

    @cached_property
    def engine(self) -> Target:
        """The target as used in decoding."""
        return Target(self.model)

    @torch.no_grad()
    def __call__(self, batch: TokenBatch) -> TargetOutput:
        """The batch's known output, else one forward of the model."""
        if batch.output is not None:
            return batch.output
        # transformers separates documents where positions restart
        positions = packed_positions(documents_of(batch))
        out = self.model(
            batch.ids, position_ids=positions, output_hidden_states=list(self.taps), use_cache=False
        )
        features = torch.cat([out.hidden_states[tap] for tap in self.taps], -1).to(self.dtype)
        return TargetOutput(features, out.logits)

    @torch.no_grad()
    def continued(
        self, batch: TokenBatch, slots: Tensor, drafted: Tensor
    ) -> tuple[Tensor, list[TreeCache]]:
        """The target along other continuations of its rows: float32 logits [B, A, K, V], caches.

        slots [B, A], drafted int64 [B, A, K]: window a follows the tokens up to slots[a] + 1 of its
        document, and the logits at t verify drafted[a, t]. One cache per row.
        """
        inputs = zip(batch.ids, documents_of(batch), slots, drafted, strict=True)
        logits, caches = zip(*[self._branched(*row) for row in inputs], strict=True)
        return torch.stack(logits), list(caches)

    @torch.no_grad()
    def greedy(
        self, batch: TokenBatch, slots: Tensor, logits: Tensor, caches: list, needed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The target's greedy windows: (tokens [B, A, K], logits [B, A, K, V]); 0 if not `needed`.

        needed [B, A]. logits, caches: of any windows from these slots; the first are the same.
        """
        along = torch.zeros_like(logits)
        documents = documents_of(batch)
        count = logits.shape[2]
        with self.engine.inference(taps=False) as engine:
            # 1. every window begins with the keys of its own document
            branches = []
            for row, column in needed.nonzero().tolist():
                last = int(slots[row, column]) + 1
                begin = int((documents[row] == documents[row, last]).nonzero()[0])
                branch = engine.new_cache(last + 1 - begin + count)
                branch.append(caches[row], begin, last + 1)
                branches.append(branch)
            # 2. one token of all windows per forward
            steps = [logits[needed][:, 0]]
            for _ in range(count - 1):
                newest = steps[-1].argmax(-1)[:, None]
                forwards = []
                for token, branch in zip(newest, branches, strict=True):
                    forwards.append(TargetForward(engine, token, branch))
                rows = engine.run_together(forwards)
                steps.append(torch.cat([row.logits for row in rows]).float())
        along[needed] = torch.stack(steps, 1)
        # an arg-max of zeros is token 0
        return along.argmax(-1), along

    def _branched(
        self, ids: Tensor, documents: Tensor, slots: Tensor, drafted: Tensor
    ) -> tuple[Tensor, TreeCache]:
        """`continued` for one row: the text is the trunk of a tree, windows are its branches."""
        count, width = drafted.shape
        last = slots + 1
        length = int(last.max()) + 1
        ids, documents = ids[:length], documents[:length]
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
    """What a drafter is trained for: a frozen dataclass, whose fields go into a run's plan."""

    network = "eagle3"  # the kind that it trains

    def prepare(self, drafter, target: FrozenTarget, batches: Iterable[TokenBatch]) -> Objective:
        """Once: the objective, fitted to the first batches; it may change the drafter's modules."""
        return self

    def collect(self, drafter, target: FrozenTarget, batch: TokenBatch) -> TokenBatch:
        """Called once per step: the batch, with what is collected with the current weights."""
        return batch

    def __call__(self, drafter, target: FrozenTarget, batch: TokenBatch) -> tuple[Tensor, dict]:
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


def wide(values: Tensor) -> Tensor:
    """The values in float32, or wider if they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
