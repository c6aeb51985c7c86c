"""The seam between the one trainer of drafters and what it minimises: an objective, and what an objective is given.

An objective is a frozen dataclass in a file of its own; EAGLE-3's training-time test (`ttt`) is the first. It sees the
drafter, the frozen target and one batch. Knows nothing about optimisers, files or where the text comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from specdec.models.eagle.network import EagleNetwork


@dataclass(frozen=True)
class TokenBatch:
    """Rows of packed tokens on the training device.

    ids [B, S]. loss_mask [B, S]: 1 on the tokens an assistant wrote. documents [B, S]: which text a token belongs to,
    -1 for padding; None where every row is one text. attention_mask [B, S]: 1 on real tokens; None where all are.
    step: the number of the optimiser step, from which an objective draws whatever is random.
    """

    ids: Tensor
    loss_mask: Tensor | None = None
    documents: Tensor | None = None
    attention_mask: Tensor | None = None
    step: int = 0


@dataclass
class FrozenTarget:
    """The target as training sees it: packed rows in, features and logits out, no gradient anywhere.

    model: a transformers causal LM; `tokenizer` is for objectives that write text. taps: which hidden states are
    features. dtype: of features and `embedding` [V, H], which the drafter computes in; None keeps the model's own.
    """

    model: torch.nn.Module
    taps: tuple[int, ...]
    dtype: torch.dtype | None = None
    tokenizer: object = None
    embedding: Tensor = field(init=False)

    def __post_init__(self):
        self.model.eval().requires_grad_(False)
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.dtype = self.dtype or self.embedding.dtype
        self.embedding = self.embedding.to(self.dtype)

    @torch.no_grad()
    def __call__(self, ids: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
        """(features [B, S, taps * Ht], logits [B, S, V]) of packed rows; ids, documents [B, S]."""
        positions = packed_positions(documents)  # transformers keeps documents apart where positions start again
        out = self.model(ids, position_ids=positions, output_hidden_states=list(self.taps), use_cache=False)
        return torch.cat([out.hidden_states[tap] for tap in self.taps], -1).to(self.dtype), out.logits


class Objective(Protocol):
    """What a drafter is trained for. Implementations are frozen dataclasses, whose fields go into the plan of a run."""

    def prepare(self, drafter: EagleNetwork, target: FrozenTarget) -> None:
        """Called once with the drafter as it begins: to change its modules in place, or to keep a copy of it."""

    def __call__(self, drafter: EagleNetwork, target: FrozenTarget, batch: TokenBatch) -> tuple[Tensor, dict]:
        """(loss, measures): a scalar with gradient, and numbers for the row of the training curve."""


def packed_positions(documents: Tensor) -> Tensor:
    """Position of each token inside its document. [B, S] -> [B, S]."""
    slots = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return slots - torch.where(first, slots, 0).cummax(1).values
