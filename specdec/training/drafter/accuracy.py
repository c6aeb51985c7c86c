"""Agreement of a drafter with its target on given texts, and its growth with the amount of training
text.

Computed from the training forward, without decoding. A test compares the chain figures with
decoding's cycles, so that training and decoding compute the same drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from specdec import runs
from specdec.errors import SpecdecError
from specdec.models.eagle_network import EagleNetwork
from specdec.training.drafter.objective import FrozenTarget, TokenBatch
from specdec.training.drafter.ttt import unroll

TAU, TOP1 = "held_out_tau_chain", "held_out_top1_frac"


@torch.no_grad()
def draft_accuracy(
    network: EagleNetwork,
    target: FrozenTarget,
    texts: Iterable[TokenBatch],
    *,
    drafts: int = 8,
    top_k: int = 10,
) -> dict:
    """Agreement per drafted token and the chain's tau on `texts`: one row each, with a loss mask on
    the answers.

    The target should have written the answers greedily. Then the chain figures are exact: while
    every drafted token is right, the drafter has read the text's own tokens, and its states are
    those of `ttt.unroll`.
    drafts: the longest chain. Returns `tau_chain`, `cycles`, `table`, a row per draft step, and
    `rank_frac` [drafts, top_k], from which `workbook.medusa_tree` makes a static tree.

    tau_chain   tokens per cycle of greedy chain drafting, bonus token included, pooled over
    `cycles` top1_frac   the text's token is the drafter's first choice, given that the tokens
    before it are the text's topk_frac   the same among its first top_k reached_frac   the whole
    chain so far was right rank_frac   the text's token is the drafter's first, second, ... choice,
    given that the tokens before it are the text's
    """
    rows = []
    cycles = emitted = 0
    by_rank = np.zeros((drafts, top_k))
    for text in texts:
        ids, answer = text.ids[0], text.loss_mask[0].bool().cpu().numpy()
        reads = max(0, int(answer.argmax()) - 1)  # the first slot that reads a token of an answer
        ranks = _ranks(
            network, target.embedding, target(text).features, text.ids, (drafts, top_k, reads)
        )
        first, among = ranks == 0, ranks >= 0
        wanted = np.zeros(
            (drafts, len(ids)), dtype=bool
        )  # drafted token i + s + 2 and all between are in one answer
        inside = answer[1:]  # slot i reads token i + 1
        for step in range(drafts):
            wanted[step, : max(0, len(ids) - step - 2)] = (
                inside[: max(0, len(ids) - step - 2)] & answer[step + 2 :]
            )
            if step:
                wanted[step] &= wanted[step - 1]
        right = np.logical_and.accumulate(first & wanted, axis=0)
        rows.append((wanted.sum(1), (first & wanted).sum(1), (among & wanted).sum(1), right.sum(1)))
        by_rank += [
            [np.sum(wanted[step] & (ranks[step] == rank)) for rank in range(top_k)]
            for step in range(drafts)
        ]
        for begin, end in _spans(answer):
            cycles, emitted = (
                cycles + _chain_cycles(right.sum(0), begin, end),
                emitted + end - begin - 1,
            )
    total = np.sum(rows, axis=0) if rows else np.zeros((4, drafts))
    if not cycles:
        raise SpecdecError(
            "no answer of two tokens or more to measure on; give conversations with answers."
        )
    table = pd.DataFrame({"draft_step": range(drafts), "positions_tok": total[0]})
    for name, count in zip(("top1_frac", "topk_frac", "reached_frac"), total[1:], strict=True):
        table[name] = count / np.maximum(total[0], 1)
    ranks = by_rank / np.maximum(total[0], 1)[:, None]
    return {
        "table": table,
        "tau_chain": emitted / cycles,
        "cycles": cycles,
        "emitted_tok": emitted,
        "rank_frac": ranks,
    }


def _ranks(
    network, embedding, features, tokens: Tensor, wanted: tuple[int, int, int]
) -> np.ndarray:
    """Rank of the text's token among the drafter's top_k, at [step, slot]; -1 for none of them. int
    [drafts, T].
    """
    length, (drafts, top_k, first) = tokens.shape[1], wanted  # first: the first slot of interest
    features = features.to(next(network.parameters()).dtype)
    vocabulary_ids = network.t2d.nonzero().squeeze(1)
    ranks = np.full((drafts, length), -1)
    states = unroll(network, embedding.to(features.dtype), features, TokenBatch(tokens), drafts)
    for step, hidden in enumerate(states):
        if length - step - 2 <= first:
            break
        best = (
            network.head(hidden[0, first : length - step - 2], step)
            .topk(min(top_k, len(vocabulary_ids)))
            .indices
        )
        same = vocabulary_ids[best] == tokens[0, first + step + 2 :, None]
        ranks[step, first : first + len(same)] = (
            torch.where(same.any(1), same.int().argmax(1), -1).cpu().numpy()
        )
    return ranks


def _spans(answer: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) of each run of answer tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], answer.astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _chain_cycles(accepted: np.ndarray, begin: int, end: int) -> int:
    """Number of cycles of chain drafting for tokens begin + 1 .. end - 1; the prompt's forward gave
    token `begin`.
    """
    root, cycles = begin, 0
    while root < end - 1:
        root += int(accepted[root - 1]) + 1  # the slot that reads the root is the one before it
        cycles += 1
    return cycles


def learning_curve(out_dir: Path) -> pd.DataFrame:
    """The measurements of a training in `out_dir`, finished or not: step, seen_tok, distinct_tok,
    rate_frac, TOP1, TAU.

    seen_tok: answer tokens read so far. distinct_tok: those not read before. rate_frac: the
    learning rate as a fraction of its peak. The last row of a finished training is the drafter that
    it wrote. SpecdecError if nothing was held out.
    """
    folder = Path(out_dir) / "drafter_training"
    plan = runs.read_json(folder / "plan.json")
    if plan["finished"]:
        last = {"step": plan["steps_done"]} | plan["results"]
        rows = pd.concat([runs.read_table(folder / "loss.parquet"), pd.DataFrame([last])])
    else:
        shards = runs.Shards(folder / "loss")
        rows = shards.read() if shards.done() else pd.DataFrame()
    if TAU not in rows:
        raise SpecdecError(
            f"the training in {out_dir} measured nothing on held-out text (held_out)."
        )
    columns = ["step", "seen_tok", "distinct_tok", "rate_frac", TOP1, TAU]
    measured = rows.loc[rows[TAU].notna(), columns].reset_index(drop=True)
    return measured.astype({"seen_tok": int, "distinct_tok": int})


def fit_doubling(curve: pd.DataFrame, from_tok: int = 30_000) -> pd.DataFrame:
    """The gain of each doubling of the distinct tokens: the slope of a straight line over their
    log2, for TOP1 and TAU.

    Fitted to measurements at the full learning rate after `from_tok` tokens; lower rates and
    repeated text follow another curve. One row each: measure, per_doubling, its 95 % interval (low,
    high), points. Without three points, no row.
    """
    at_full_rate = (curve["rate_frac"] == 1) & (curve["distinct_tok"] == curve["seen_tok"])
    points = curve[at_full_rate & (curve["distinct_tok"] >= from_tok)]
    rows = []
    for measure in (TOP1, TAU) if len(points) >= 3 else ():
        line = stats.linregress(np.log2(points["distinct_tok"]), points[measure])
        margin = stats.t.ppf(0.975, len(points) - 2) * line.stderr
        rows.append({"measure": measure, "per_doubling": line.slope, "low": line.slope - margin})
        rows[-1] |= {"high": line.slope + margin, "points": len(points)}
    return pd.DataFrame(rows, columns=["measure", "per_doubling", "low", "high", "points"])
