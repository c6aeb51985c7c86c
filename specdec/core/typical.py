"""Medusa's typical acceptance. It is LOSSY: what it lets through is not the target's own text, at no temperature above 0.

A drafted token x after a node with the target's distribution p is taken if

    p(x) > min(threshold, alpha * exp(-H(p))),        H the entropy of p

so in an uncertain place many tokens pass. The longest path of such tokens is taken, of equally long ones the likeliest, and
the target's arg-max follows it. No random number is drawn: at temperature 1 the same prompt always gives the same text.
(Medusa, section 2.3.1; the constants are its code's.) It stands here to be measured beside the lossless rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core.decode import opened, turn
from specdec.core.pair import Pair
from specdec.core.policy import Policy
from specdec.core.records import Generation
from specdec.core.tree import DraftTree
from specdec.core.verification import Picker, check_number
from specdec.errors import SpecdecError


class TypicalPicker(Picker):
    """Arg-max for single tokens, and `walk` for trees."""

    def __init__(self, warpers=None, threshold: float = 0.09, alpha: float = 0.3):
        super().__init__(warpers, sample=False)
        check_number("threshold", threshold, 0.0, 1.0)
        check_number("alpha", alpha, 0.0)
        self.threshold, self.alpha = threshold, alpha

    def walk(self, tree: DraftTree, logits: Tensor, committed: Tensor) -> tuple[list[int], list[int]]:
        """The path through the tree and the new tokens, as `verification.verify` gives them. logits [N, V]."""
        tokens, parents = tree.token.tolist(), tree.parent.tolist()
        paths, chances, best = {0: [0]}, {0: 0.0}, (0, 0.0, 0)
        rows: dict[int, tuple[Tensor, float]] = {}
        for node in range(1, len(tokens)):
            parent = parents[node]
            if parent not in paths:
                continue
            if parent not in rows:
                rows[parent] = self._row(logits[parent], torch.cat((committed, tree.token[paths[parent][1:]])))
            log_p, least = rows[parent]
            chance = float(log_p[tokens[node]])
            if chance > least:
                paths[node], chances[node] = [*paths[parent], node], chances[parent] + chance
                best = max(best, (len(paths[node]) - 1, chances[node], node), key=lambda found: found[:2])
        path = paths[best[2]]
        drafted = [tokens[node] for node in path[1:]]
        last = torch.cat((committed, tree.token[path[1:]]))
        return path, [*drafted, self.pick(logits[path[-1]], last)]

    def _row(self, logits: Tensor, ids: Tensor) -> tuple[Tensor, float]:
        """(log p [V], the log of what a token must exceed) after `ids`."""
        log_p = self.warp(logits, ids).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum()
        least = torch.minimum(log_p.new_tensor(self.threshold).log(), log_p.new_tensor(self.alpha).log() - entropy)
        return log_p, float(least)


def decode_typical(
    pair: Pair,
    prompt,
    policy: Policy | None = None,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    *,
    threshold: float = 0.09,
    alpha: float = 0.3,
    **settings,
) -> Generation:
    """`decode` with typical acceptance in place of the lossless rule. settings: those of `decode`; there is no seed.

    SpecdecError at temperature 0, where Medusa, too, takes exact matches alone.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> out = decode_typical(pair, "What is 3 plus 4?", specdec.Static(8, 3, 2), max_new_tokens=8)
    >>> out.tokens == decode_typical(pair, "What is 3 plus 4?", specdec.Static(8, 3, 2), max_new_tokens=8).tokens
    True
    """
    if temperature == 0:
        raise SpecdecError(
            "typical acceptance needs a temperature above 0; at 0 Medusa takes exact matches, as decode does."
        )
    engine, policy = opened(pair, prompt, policy, max_new_tokens, temperature=temperature, **settings)
    engine.picker = TypicalPicker(engine.picker.warpers, threshold, alpha)
    generation = Generation(engine.tokens, engine.prompt_tok)
    with engine.inference():
        for _ in turn(engine, policy, generation):
            pass
    generation.text = pair.text_of(engine.tokens)
    return generation
