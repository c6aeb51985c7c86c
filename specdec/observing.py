"""What policies and their training read off the scores of a level: probabilities, entropies, inputs of classifiers.

Arrays in, arrays out, over any leading dimensions, so that a live question and a whole recording are read by the same lines.
Knows nothing about policies, models or the cycle.
"""

from __future__ import annotations

import math

import numpy as np

from specdec.config import SpecdecError, pool_size
from specdec.records import Question

ENTROPIES = ("remainder", "renormalised")


def newest_level(question: Question) -> tuple[np.ndarray, np.ndarray]:
    """(cumulative log-probabilities [W, k] of the level drafted last, those of its W parents [W]), float32.

    Parents in beam order: the best k of the level before, descending; after the root pass the root alone, with 0.
    """
    newest = question.newest_scores.float().cpu().numpy()
    n = question.expansions
    if n == 0:
        return newest[None], np.zeros(1, dtype=np.float32)
    top_k = math.isqrt(len(newest))
    if top_k * top_k != len(newest):
        raise SpecdecError(
            "this heuristic reads trees of k beams with k children; plan a TreeConfig, not a static shape."
        )
    start = 0 if n == 1 else pool_size(n - 2, top_k)
    before = question.scores[start : pool_size(n - 1, top_k)].float().cpu().numpy()
    return newest.reshape(top_k, top_k), np.sort(before)[: -top_k - 1 : -1]


def child_log_probs(newest: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """Log-probability of each child after its parent, [..., W, k] from cumulative ones and the parents' [..., W]."""
    return np.minimum(newest - parents[..., None], 0.0)


def entropy(log_probs: np.ndarray, kind: str = "remainder") -> np.ndarray:
    """Entropy in nats [...] of distributions of which only the k most likely tokens are known, log_probs [..., k].

    "remainder" counts all other tokens as one more outcome: never above the true entropy. "renormalised" forgets them.
    """
    probs = np.exp(log_probs)
    known = probs.sum(-1)
    inner = -(probs * log_probs).sum(-1)
    if kind == "renormalised":
        return inner / known + np.log(known)
    rest = np.clip(1 - known, 1e-12, 1)
    return inner - rest * np.log(rest)


def disco_inputs(newest: np.ndarray, parents: np.ndarray, expansions: int, top_k: int, estimate: str) -> np.ndarray:
    """float32 [..., top_k + 2] from `newest_level`'s arrays, newest [..., W, k] and parents [..., W]."""
    flat = newest.reshape(*newest.shape[:-2], -1)
    if flat.shape[-1] < top_k:
        raise SpecdecError(
            f"Disco was made for top_k={top_k}, but a level holds {flat.shape[-1]} nodes; plan that top_k."
        )
    best = np.exp(np.sort(flat, axis=-1)[..., : -top_k - 1 : -1])
    nats = entropy(child_log_probs(newest[..., :1, :], parents[..., :1]), estimate)
    depth = np.full_like(nats, expansions / 10)
    return np.concatenate((best, nats, depth), axis=-1).astype(np.float32)


def unit_features(features: np.ndarray) -> np.ndarray:
    """float32 [..., F], each vector with mean square 1."""
    features = features.astype(np.float32)
    return features / np.sqrt((features**2).mean(-1, keepdims=True) + 1e-6)


def node_depths(candidates: int, top_k: int) -> np.ndarray:
    """int [candidates]: depth of each node of a pool in creation order, 1 for the root's children."""
    return np.maximum(np.arange(candidates) - top_k, -1) // (top_k * top_k) + 2


def c2t_inputs(scores: np.ndarray, top_k: int) -> np.ndarray:
    """float32 [candidates, 2]: score and depth / 10 of each node of a pool."""
    return np.stack((scores, node_depths(len(scores), top_k) / 10), axis=-1).astype(np.float32)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits))
