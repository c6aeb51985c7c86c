"""Questions in the middle of drafting, over pools of random scores; finished cycles."""

import types

import numpy as np
import torch

from specdec.core.policy import Policy
from specdec.core.records import EXTEND, Question
from specdec.core.tree_config import TreeConfig, pool_size


def pool(random, expansions, top_k=10, scale=1.0) -> np.ndarray:
    """Cumulative scores of a random tree in creation order, children in descending order."""
    scores, parents = [], np.zeros(1)
    for _ in range(expansions + 1):
        steps = -np.sort(random.exponential(scale, size=(len(parents), top_k)), axis=1)
        flat = (parents[:, None] + steps).reshape(-1)
        scores.append(flat)
        parents = np.sort(flat)[::-1][:top_k]
    return np.concatenate(scores).astype(np.float32)


def question(scores, expansions, kind=EXTEND, top_k=10, largest=1, **seen) -> Question:
    """A question over this pool."""
    start = 0 if expansions == 0 else pool_size(expansions - 1, top_k)
    tensor = torch.from_numpy(np.asarray(scores, np.float32))
    seen |= {"scores": tensor, "newest_scores": tensor[start:]}
    return asked(kind, expansions, 0, TreeConfig(61, 12, top_k), 20, largest, **seen)


def finished(accepted_tok, draft_calls, total_ms=1.0, verify_nodes=None) -> types.SimpleNamespace:
    """A cycle as rules observe it; without a number every drafted token is verified."""
    return types.SimpleNamespace(
        new_tok=accepted_tok + 1,
        kept_tok=accepted_tok + 1,
        accepted_tok=accepted_tok,
        draft_calls=draft_calls,
        verify_nodes=draft_calls if verify_nodes is None else verify_nodes,
        total_ms=total_ms,
        context_tok=20,
    )


def asked(kind, expansions=0, cycle=1, plan=None, context_tok=100, largest=1, **seen) -> Question:
    """A question about an engine of which this much is seen (scores, newest_scores, ...)."""
    view = types.SimpleNamespace(**seen)
    return Question(kind, context_tok, expansions, cycle, largest, plan, view)


class Watch(Policy):
    """Passes questions on to a policy and shows each to `look` first."""

    def __init__(self, policy, look):
        self.policy, self.look = policy, look
        self.asks, self.limits, self.plan = policy.asks, policy.limits, policy.plan
        self.reset, self.observe = policy.reset, policy.observe

    def answer(self, question):
        self.look(question)
        return self.policy.answer(question)
