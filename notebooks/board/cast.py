"""CAST (ICLR 2026), as far as its paper says: a tree is grown and cut by the expected tokens per millisecond."""

from dataclasses import dataclass

import numpy as np

from specdec.core.records import EXTEND, SIZE
from specdec.policies.base import as_array
from specdec.policies.engines import SglangDraftProb


@dataclass
class Cast(SglangDraftProb):
    """A tree is grown while the next level is expected to raise tokens per millisecond, then cut to the best size.

    Source: CAST (arXiv 2510.26577, ICLR 2026): depth, width and size by the utility of acceptance against measured cost. Its code
    was not read, and width is the plan's here. Ours: the next level's expected tokens continue the geometric series of the levels
    before, and all of its expected tokens are verified with as many nodes as its beam has.
    """

    top_k: int = 4
    most_levels: int = 8
    levels: int = 8
    least: int = 0

    kinds = (EXTEND, SIZE)

    def answer(self, question):
        if question.kind == SIZE:
            return super().answer(question)
        scores, drafted = np.sort(as_array(question.scores))[::-1], question.expansions + 1
        newest = float(np.exp(as_array(question.newest_scores)).sum())
        before = 1.0 if drafted == 1 else (np.exp(scores).sum() - newest) / (drafted - 1)
        expected = 1 + np.concatenate(([0.0], np.cumsum(np.exp(scores))))
        now_ms, next_ms = (self.sizes_ms(levels, question.context_tok) for levels in (drafted, drafted + 1))
        expected = expected[: len(now_ms)]
        best = int((expected / now_ms[: len(expected)]).argmax())
        larger = min(best + self.plan.beam_at(drafted - 1), len(next_ms) - 1)
        gained = newest * min(1.0, newest / before)
        return bool((expected[best] + gained) / next_ms[larger] > expected[best] / now_ms[best])
