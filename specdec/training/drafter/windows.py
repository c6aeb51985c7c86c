"""Windows of K drafted tokens: possible starts, drafting, and the target's output along them.

A window at slot i follows the tokens up to i + 1: its state is that of slot i in `ttt.unroll`, which reads the target's
features of positions up to i and the tokens up to i + 1, as in a decoding cycle. It drafts stream positions
i + 2 .. i + 1 + K, and at step s > 0 reads its own drafts.
Knows nothing about rewards, losses or how an objective chooses windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.errors import SpecdecError
from specdec.models.eagle.network import EagleNetwork, vocabulary_ids
from specdec.training.drafter.objective import FrozenTarget, TokenBatch
from specdec.training.drafter.ttt import UnrollPlan, unroll

ROWS = 256  # full logits computed at once


def window_starts(batch: TokenBatch, window: int) -> Tensor:
    """[B, S] bool: slots whose window is inside one answer, together with the token before it.

    SpecdecError if no row is long enough.
    """
    slots = batch.ids.shape[1]
    if window + 2 > slots:
        raise SpecdecError(
            f"a window of {window} tokens and the two before it do not fit into rows of {slots} tokens; lower the "
            "objective's window or raise the setting length."
        )
    answer = batch.loss_mask.bool()
    inside = F.pad(answer.long(), (1, window + 1)).cumsum(1)  # answer tokens before each position
    fits = inside[:, window + 2 : window + 2 + slots] - inside[:, 1 : slots + 1] == window + 1
    if batch.documents is not None:
        ends = F.pad(batch.documents[:, window + 1 :], (0, window + 1), value=-2)
        fits = fits & (ends == batch.documents)
    return fits


def draft_logits(network, embedding, batch: TokenBatch, followed: UnrollPlan, steps: int) -> Tensor:
    """Logits [B, A, steps, Vd] in float32 or wider of the followed windows' steps, with gradient.

    batch: with the target's `output`, as everywhere here.
    """
    states = unroll(network, embedding, batch.output.features.to(embedding.dtype), batch, steps, followed)
    return torch.stack([_wide(network.head(hidden, step)) for step, hidden in enumerate(states)], 2)


@torch.no_grad()
def roll_out(
    network, embedding, batch: TokenBatch, slots: Tensor, given: Tensor, choose: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """(drafted [B, A, K] as target ids, logits [B, A, K, Vd]): windows from `slots` [B, A], token by token.

    choose(logits [B, A, Vd]) -> columns [B, A]. given [B, A, K]: fixed tokens; below 0 the drafter chooses.
    """
    ids, drafted = vocabulary_ids(network), given.clone()
    steps = given.shape[-1]
    followed, logits = UnrollPlan(slots, drafted), []
    states = unroll(network, embedding, batch.output.features.to(embedding.dtype), batch, steps, followed)
    for step, hidden in enumerate(states):
        logits.append(_wide(network.head(hidden, step)))
        drafted[..., step] = torch.where(given[..., step] < 0, ids[choose(logits[-1])], given[..., step])
    return drafted, torch.stack(logits, 2)


def columns_of(network: EagleNetwork, tokens: Tensor) -> Tensor:
    """The head's column of each token, -1 for one that cannot be drafted."""
    columns = torch.full((len(network.t2d),), -1, dtype=torch.long, device=tokens.device)
    ids = vocabulary_ids(network)
    columns[ids] = torch.arange(len(ids), device=ids.device)
    return columns[tokens]


def text_windows(batch: TokenBatch, slots: Tensor, window: int) -> Tensor:
    """The text's own tokens in the windows. slots [B, A] -> [B, A, window]; token 0 past the end of a row."""
    places = slots[..., None] + 2 + torch.arange(window, device=slots.device)
    padded = F.pad(batch.ids, (0, window + 2))
    return padded.gather(1, places.flatten(1)).view_as(places)


def greedy_windows(
    target: FrozenTarget, batch: TokenBatch, slots: Tensor, said: Tensor, caches: list, needed: Tensor
) -> tuple[Tensor, Tensor]:
    """The target's own greedy windows: (tokens [B, A, K], logits [B, A, K, V] along them), zeros where not `needed` [B, A].

    said [B, A, K, V] and caches: from `continued` for any windows from these slots, whose first logits are the same.
    """
    documents = torch.zeros_like(batch.ids) if batch.documents is None else batch.documents
    tokens, along = torch.zeros(said.shape[:-1], dtype=torch.long, device=slots.device), torch.zeros_like(said)
    places = list(zip(needed.nonzero()[:, 0].tolist(), (slots[needed] + 1).tolist(), strict=True))
    if places:
        found = target.greedy(documents, places, caches, said[needed][:, 0], said.shape[2])
        tokens[needed], along[needed] = found
    return tokens, along


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) [.., V] at `tokens` [..]."""
    return logits.gather(-1, tokens[..., None]).squeeze(-1) - logits.logsumexp(-1)


@torch.no_grad()
def divergence_along(network, target: FrozenTarget, batch: TokenBatch, wanted: Tensor):
    """(v [B, S], first_right [B, S]) at stream positions `wanted` [B, S], 0 and True elsewhere.

        v = (1 - H(P) / log V) * KL(P || Q)

    At position p both predict token p + 2, given the text before it: P is the target's distribution, Q the drafter's at
    its first step. H over the whole vocabulary; KL over the draft vocabulary, P renormalised there. first_right: the
    drafter's likeliest token is the target's.
    """
    rows, columns = wanted.nonzero(as_tuple=True)
    ids, everything = vocabulary_ids(network), torch.arange(len(network.t2d), device=batch.ids.device)
    states = next(unroll(network, target.embedding, batch.output.features.to(target.dtype), batch, 1))[rows, columns]
    scores, right = torch.zeros_like(wanted, dtype=torch.float32), torch.ones_like(wanted)
    for part in torch.arange(len(rows), device=rows.device).split(ROWS):
        row, column = rows[part], columns[part]
        full, best, log_sum = batch.output.logits.at(row, column + 1, everything)
        log_q = torch.log_softmax(_wide(network.head(states[part])), -1)
        scores[row, column] = criticality(full - log_sum[:, None], log_q, ids).float()
        right[row, column] = ids[log_q.argmax(-1)] == best
    return scores, right


def criticality(log_p: Tensor, log_q: Tensor, ids: Tensor) -> Tensor:
    """v of `divergence_along` from log P [.., V] over the whole vocabulary and log Q [.., Vd] over the tokens `ids`."""
    entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)
    kept = torch.log_softmax(log_p[..., ids], -1)
    divergence = (kept.exp() * (kept - log_q)).nan_to_num(0.0).sum(-1)
    return (1 - entropy / math.log(log_p.shape[-1])) * divergence


def window_means(scores: Tensor, window: int) -> Tensor:
    """Mean of `scores` [B, S] over each window [i, i + window - 1]; zero counts past the end."""
    return F.pad(scores, (0, window - 1)).unfold(1, window, 1).mean(-1)


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
