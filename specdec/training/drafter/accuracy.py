"""Agreement of a drafter with its target on given texts, and how it grows with the training text.

Computed from the training forward, without decoding.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats

from specdec import runs
from specdec.errors import SpecdecError
from specdec.models.eagle_network import EagleNetwork, vocabulary_ids
from specdec.training.drafter.objective import FrozenTarget, TokenBatch
from specdec.training.drafter.ttt import unroll

TAU = "held_out_tau_chain"
TOP1 = "held_out_top1_frac"
# answer tokens from which on the accuracy grows with their logarithm
FIRST_TOK = 30_000


@torch.no_grad()
def draft_accuracy(
    network: EagleNetwork,
    target: FrozenTarget,
    texts: Iterable[TokenBatch],
    *,
    drafts: int = 8,
    top_k: int = 10,
) -> dict:
    """Agreement per drafted token, and the chain's tau, on `texts` of one row each.

    The chain figures are exact if the target wrote the answers greedily. drafts: the longest chain.

    Returns a dict:
        tau_chain      tokens per cycle of greedy chain drafting, bonus token included
        cycles         number of these cycles, and emitted_tok of the tokens
        rank_frac      [drafts, top_k] how often the text's token is the drafter's first, second, ..
                       choice, given that the tokens before it are the text's
    """
    positions = np.zeros(drafts)
    by_rank = np.zeros((drafts, top_k))
    cycles = 0
    emitted = 0
    for text in texts:
        # 1. the rank of each token of the text among the drafter's choices
        answer = text.loss_mask[0].bool().cpu().numpy()
        ranks = _ranks(network, target, text, drafts, top_k)
        # 2. what counts: the drafted token and all tokens between are in one answer
        counted = _inside_answers(answer, drafts)
        positions += counted.sum(1)
        for rank in range(top_k):
            by_rank[:, rank] += ((ranks == rank) & counted).sum(1)
        # 3. the cycles of a chain along each answer
        accepted = np.logical_and.accumulate((ranks == 0) & counted, axis=0).sum(0)
        for begin, end in _spans(answer):
            cycles += _chain_cycles(accepted, begin, end)
            emitted += end - begin - 1
    assert cycles, "no answer of two tokens or more to measure on"
    return {
        "tau_chain": emitted / cycles,
        "cycles": cycles,
        "emitted_tok": emitted,
        "rank_frac": by_rank / np.maximum(positions, 1)[:, None],
    }


def _inside_answers(answer: np.ndarray, drafts: int) -> np.ndarray:
    """Whether tokens i + 1 .. i + step + 2 are of one answer, [step, slot i]. answer [T]."""
    counted = np.zeros((drafts, len(answer)), dtype=bool)
    for step in range(drafts):
        slots = max(0, len(answer) - step - 2)
        counted[step, :slots] = answer[1 : slots + 1] & answer[step + 2 :]
        if step:
            counted[step] &= counted[step - 1]
    return counted


def _ranks(network, target: FrozenTarget, text: TokenBatch, drafts: int, top_k: int) -> np.ndarray:
    """Rank of the text's token among the drafter's top_k, -1 for none of them. int [drafts, T]"""
    length = text.ids.shape[1]
    # the first slot that reads a token of an answer
    first = max(0, int(text.loss_mask[0].int().argmax()) - 1)
    ids = vocabulary_ids(network)
    ranks = np.full((drafts, length), -1)
    features = target(text).features.to(target.embedding.dtype)
    states = unroll(network, target.embedding, features, TokenBatch(text.ids), drafts)
    for step, hidden in enumerate(states):
        end = length - step - 2
        if end <= first:
            break
        logits = network.head(hidden[0, first:end], step)
        best = logits.topk(min(top_k, len(ids))).indices
        same = ids[best] == text.ids[0, first + step + 2 :, None]
        rank = torch.where(same.any(1), same.int().argmax(1), -1)
        ranks[step, first:end] = rank.cpu().numpy()
    return ranks


def _spans(answer: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) of each run of answer tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], answer.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _chain_cycles(accepted: np.ndarray, begin: int, end: int) -> int:
    """Number of cycles for tokens begin + 1 .. end - 1; the prompt's forward gave token `begin`."""
    root = begin
    cycles = 0
    while root < end - 1:
        # the slot that reads the root is the one before it
        root += int(accepted[root - 1]) + 1
        cycles += 1
    return cycles


def learning_curve(out_dir: Path) -> pd.DataFrame:
    """The measurements of a training in `out_dir`, finished or not.

    Columns: step; seen_tok, answer tokens read so far; distinct_tok, those not read before;
    rate_frac of the peak rate; TOP1 and TAU. The last row of a finished training is its drafter.
    """
    folder = Path(out_dir) / "drafter_training"
    plan = runs.read_json(folder / "plan.json")
    rows = runs.read_table(folder / "loss.parquet")
    if plan["finished"]:
        last = {"step": plan["steps_done"], **plan["results"]}
        rows = pd.concat([rows, pd.DataFrame([last])])
    if TAU not in rows:
        raise SpecdecError(f"the training in {out_dir} measured nothing; set held_out.")
    columns = ["step", "seen_tok", "distinct_tok", "rate_frac", TOP1, TAU]
    measured = rows.loc[rows[TAU].notna(), columns].reset_index(drop=True)
    return measured.astype({"seen_tok": int, "distinct_tok": int})


def fit_doubling(curve: pd.DataFrame) -> pd.DataFrame:
    """The gain of each doubling of the distinct tokens, for TOP1 and TAU.

    It is the slope of a line over their log2, fitted to measurements at the full learning rate
    after FIRST_TOK tokens, without repeated text. A row each: measure, per_doubling, its 95 %
    interval (low, high), points. No row without three points.
    """
    at_full_rate = (curve["rate_frac"] == 1) & (curve["distinct_tok"] == curve["seen_tok"])
    points = curve[at_full_rate & (curve["distinct_tok"] >= FIRST_TOK)]
    rows = []
    if len(points) >= 3:
        for measure in (TOP1, TAU):
            line = stats.linregress(np.log2(points["distinct_tok"]), points[measure])
            margin = stats.t.ppf(0.975, len(points) - 2) * line.stderr
            low = line.slope - margin
            rows.append((measure, line.slope, low, line.slope + margin, len(points)))
    return pd.DataFrame(rows, columns=["measure", "per_doubling", "low", "high", "points"])
