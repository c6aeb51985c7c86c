"""Questions in the middle of drafting, with pools of trees that nobody drafted."""

import types

import numpy as np
import torch

from specdec.core.records import EXTEND, Question
from specdec.core.tree_config import TreeConfig, pool_size


def pool(random, expansions, top_k=10, scale=1.0) -> np.ndarray:
    """Cumulative scores of a random tree in creation order, children descending below each parent."""
    scores, parents = [], np.zeros(1)
    for _ in range(expansions + 1):
        steps = -np.sort(random.exponential(scale, size=(len(parents), top_k)), axis=1)
        flat = (parents[:, None] + steps).reshape(-1)
        scores.append(flat)
        parents = np.sort(flat)[::-1][:top_k]
    return np.concatenate(scores).astype(np.float32)


def question(scores, expansions, kind=EXTEND, top_k=10, largest=1, features=None, plan=None) -> Question:
    start = 0 if expansions == 0 else pool_size(expansions - 1, top_k)
    tensor = torch.from_numpy(np.asarray(scores, np.float32))
    view = types.SimpleNamespace(scores=tensor, newest_scores=tensor[start:], features=features)
    return Question(kind, 20, expansions, 0, largest, plan or TreeConfig(61, 12, top_k), view)
