"""The rules and small classifiers compared in LTD's Table 1, and a gate between copies and trees.

    DDD        continue while the log of the beam's probability >= -0.3, after 5, 7 and 9 expansions
    SVIP       continue while 1 - sqrt(0.15 H) >= 0.3, with H the draft's entropy
    GammaTune  next depth = moving average of accepted tokens
    Disco      continue while P(the newest level holds the target's token) >= 1/2, a classifier
    SpecDec++  continue while P(a level holds it | those above did) >= 1/2, from the hidden state
    C2T        verify the nodes that a classifier considers likely to be on the target's path
    CopyGate   no tree where copies of the text are likely enough (ours)

Settings are those in section 4 of LTD's fact sheet; where it leaves a choice open, the docstring
states ours. `workbook.classifiers` fits the learned ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from specdec.core.policy import largest
from specdec.core.records import EXTEND, PLAN, SIZE, Cycle, Question
from specdec.core.tree_config import CopiedTree, Plan, TreeConfig, pool_size
from specdec.errors import SpecdecError, check_fields
from specdec.policies.base import Learned, Rule, as_array, tree_of

DRAFTED_TOK = 1.0  # accepted tokens that CopyGate expects of a turn's first tree
NEWEST_FRAC = 0.2  # weight of the newest cycle in the moving averages of accepted tokens


def newest_level(question: Question) -> tuple[np.ndarray, np.ndarray]:
    """(cumulative log-probabilities [W, k] of the level drafted last, those of its W parents [W]).

    Parents in beam order: the best k of the level before, descending; after the root pass the root
    alone, with 0.
    """
    newest = as_array(question.newest_scores)
    n = question.expansions
    if n == 0:
        return newest[None], np.zeros(1, dtype=np.float32)
    top_k = math.isqrt(len(newest))
    if top_k * top_k != len(newest):
        raise SpecdecError("this rule reads trees of k beams with k children; plan a TreeConfig.")
    start = 0 if n == 1 else pool_size(n - 2, top_k)
    before = as_array(question.scores[start : pool_size(n - 1, top_k)])
    return newest.reshape(top_k, top_k), np.sort(before)[: -top_k - 1 : -1]


def child_entropy(newest: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """Entropy in nats [..., W] after each parent, of which only the k likeliest tokens are known.

    newest [..., W, k] and parents [..., W]: cumulative log-probabilities. All other tokens count as
    one outcome, so it is never above the true entropy.
    """
    log_probs = np.minimum(newest - parents[..., None], 0.0)
    probs = np.exp(log_probs)
    # what the drafted children leave over
    rest = np.clip(1 - probs.sum(-1), 1e-12, 1)
    nats: np.ndarray = -(probs * log_probs).sum(-1) - rest * np.log(rest)
    return nats


def disco_inputs(
    newest: np.ndarray, parents: np.ndarray, expansions: int, top_k: int
) -> np.ndarray:
    """float32 [..., top_k + 2] of `newest_level`'s arrays, newest [..., W, k], parents [..., W]."""
    flat = newest.reshape(*newest.shape[:-2], -1)
    best = np.exp(np.sort(flat, axis=-1)[..., : -top_k - 1 : -1])
    nats = child_entropy(newest[..., :1, :], parents[..., :1])
    depths = np.full_like(nats, expansions / 10)
    return np.concatenate((best, nats, depths), axis=-1).astype(np.float32)


def unit_features(features: np.ndarray) -> np.ndarray:
    """float32 [..., F], each vector with mean square 1."""
    features = features.astype(np.float32)
    features /= np.sqrt((features**2).mean(-1, keepdims=True) + 1e-6)
    return features


def node_depths(candidates: int, top_k: int) -> np.ndarray:
    """int [candidates]: depth of each node of a pool in creation order, 1 for root's children."""
    return np.maximum(np.arange(candidates) - top_k, -1) // (top_k * top_k) + 2


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits))


@dataclass
class _DepthRule(Rule):
    """Answers EXTEND, or another question, about a tree of at most max_depth expansions."""

    max_depth: int = 12
    verify_nodes: int = 60
    top_k: int = 10

    asks = frozenset({EXTEND})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limits = TreeConfig(self.verify_nodes + 1, self.max_depth, self.top_k)
        self.plan = self.limits


@dataclass
class DDD(_DepthRule):
    """Dynamic depth decoding: continue only while the beam's probability is above a threshold.

    layers: expansions after which it checks; elsewhere it continues.
    """

    layers: tuple[int, ...] = (5, 7, 9)
    # of the log of the beam's summed probability, as in DDD's paper; the sheet says only
    # "cumulative log-prob"
    threshold: float = -0.3

    def answer(self, question: Question) -> bool:
        if question.expansions not in self.layers:
            return True
        beam = np.sort(as_array(question.newest_scores))[-self.top_k :]
        # the log of a sum, without overflow
        best = float(beam[-1])
        return best + math.log(np.exp(beam - best).sum()) >= self.threshold


@dataclass
class SVIP(_DepthRule):
    """Self-verification: stop when the draft's entropy H shows that its tokens will be rejected."""

    # our reading of the sheet's "entropy factor 0.15, minimum entropy 0.3": the lowest estimated
    # acceptance after the beam's best path, 1 - sqrt(0.15 H), at which it continues
    minimum: float = 0.3

    def answer(self, question: Question) -> bool:
        newest, parents = newest_level(question)
        nats = float(child_entropy(newest[0], parents[0]))
        return 1 - math.sqrt(0.15 * max(0.0, nats)) >= self.minimum


@dataclass
class GammaTune(Rule):
    """The depth of the next cycle follows a moving average of accepted tokens.

    Every turn starts at the default depth; low, high: bounds as multiples of it.
    """

    default_depth: int = 8
    low: float = 0.5
    high: float = 1.5
    verify_nodes: int = 60
    top_k: int = 10

    asks = frozenset({PLAN})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.least = math.ceil(self.low * self.default_depth)
        self.most = math.floor(self.high * self.default_depth)
        self.limits = tree_of(self.verify_nodes, self.most, self.top_k)
        self.plan = tree_of(self.verify_nodes, self.default_depth, self.top_k)
        self.reset()

    def reset(self) -> None:
        self.average_tok = float(self.default_depth)

    def answer(self, question: Question) -> TreeConfig:
        depth = min(max(round(self.average_tok), self.least), self.most)
        return tree_of(self.verify_nodes, depth, self.top_k)

    def observe(self, cycle: Cycle) -> None:
        # ours: without growth after a path that was accepted completely it could only fall
        growth = 1.0 if cycle.accepted_tok == cycle.draft_calls else 0.0
        self.average_tok += NEWEST_FRAC * (cycle.accepted_tok + growth - self.average_tok)


@dataclass
class _Classifier(_DepthRule, Learned):
    """A network whose probability is compared with a threshold; no sampling."""

    activation: str = "relu"
    threshold: float = 0.5

    kind = EXTEND

    def chances(self, question: Question) -> np.ndarray:
        """The network's outputs as probabilities."""
        return sigmoid(self.logits(self.observation(question)))


@dataclass
class Disco(_Classifier):
    """Continue while the level drafted last is likely to hold the target's token.

    Inputs [12] (`disco_inputs`): probabilities of the level's 10 best paths, the entropy estimate
    after the best parent, depth / 10. One hidden layer of 128.
    """

    def observation(self, question: Question) -> np.ndarray:
        newest, parents = newest_level(question)
        return disco_inputs(newest, parents, question.expansions, self.top_k)

    def answer(self, question: Question) -> bool:
        return bool(self.chances(question)[0] >= self.threshold)


class ResidualNetwork:
    """SpecDec++'s network in numpy: head(silu(gate(x)) + skip(x)); float32 [F] -> [levels]."""

    NAMES = ("gate.weight", "gate.bias", "skip.weight", "skip.bias", "head.weight", "head.bias")

    def __init__(self, arrays: dict[str, np.ndarray]):
        parts = [np.ascontiguousarray(arrays[name], dtype=np.float32) for name in self.NAMES]
        self._arrays = dict(zip(self.NAMES, parts, strict=True))
        self.width = self._arrays["gate.weight"].shape[1]

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        w = self._arrays
        gate = w["gate.weight"] @ observation + w["gate.bias"]
        hidden = gate * sigmoid(gate) + w["skip.weight"] @ observation + w["skip.bias"]
        return w["head.weight"] @ hidden + w["head.bias"]

    def arrays(self) -> dict[str, np.ndarray]:
        return dict(self._arrays)


@dataclass
class SpecDecPlus(_Classifier):
    """Stop when the predicted odds of acceptance, from the hidden state, are too small.

    The network predicts, per level, the odds that it holds the target's token if those above did.
    """

    def observation(self, question: Question) -> np.ndarray:
        """float32 [F]: the features, scaled to unit mean square."""
        return unit_features(as_array(question.features))

    def answer(self, question: Question) -> bool:
        # once per cycle, from the target's state at the last accepted token; SpecDec++ has the
        # drafter's after each token
        if question.expansions == 0:
            self._odds = self.chances(question)
        # a level's own odds, not the product down to it
        return bool(self._odds[question.expansions] >= self.threshold)

    def build_network(self, arrays: dict[str, np.ndarray]) -> ResidualNetwork:
        return ResidualNetwork(arrays)


@dataclass
class C2T(_Classifier):
    """Verify as many nodes as are likely to be on the target's path: at least 1, at most 60.

    Inputs per candidate [2]: cumulative log-probability, depth / 10. One hidden layer of 64.
    """

    max_depth: int = 8

    kind = SIZE

    def observation(self, question: Question) -> np.ndarray:
        """float32 [candidates, 2]."""
        depths = node_depths(len(question.scores), question.plan.top_k)
        return np.stack((as_array(question.scores), depths / 10), axis=-1).astype(np.float32)

    def answer(self, question: Question) -> int:
        # nodes are taken by score, so the classifier only decides how many
        likely = int((self.chances(question)[:, 0] >= self.threshold).sum())
        return min(max(likely, 1), self.verify_nodes, int(question.largest))


@dataclass
class CopyGate(Rule):
    """PLAN: copies of the text alone, if they promise enough; else the tree, with copies merged.

        promise = sum over the best V copies of exp(score)     their expected accepted tokens
        copies alone, if 1 + promise >= (1 - saved_frac) * (1 + drafted)

    drafted: a moving average of the turn's accepted tokens in cycles with a tree. Needs a drafter
    that copies beside its network (`hybrid`); with any other, every cycle has its tree.
    tree: total_tokens, depth, top_k and, if set, the beam. copied_tokens: rows to verify in a cycle
    of copies, the root included. saved_frac: the part of a cycle's time that they save.

    >>> gate = CopyGate(tree=(8, 3, 3), copied_tokens=12)
    >>> gate.plan.text, gate.limits.total_tokens, round(gate.enough_tok, 2)
    ('8,3,3', 12, 0.6)
    """

    tree: tuple[int, ...] = (8, 3, 3)
    copied_tokens: int = 12
    saved_frac: float = 0.2

    asks = frozenset({PLAN})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        total_tokens, depth, top_k, *beam = self.tree
        self.plan: Plan = TreeConfig(total_tokens, depth, top_k, beam=tuple(beam))
        self.copied = CopiedTree(self.copied_tokens)
        self.limits = self.plan.limits
        if self.copied_tokens > total_tokens:
            # room for the copies' rows; the drafter itself is asked for the tree at most
            self.limits = largest([self.limits, self.copied.limits])
        self.reset()

    def reset(self) -> None:
        self.drafted = DRAFTED_TOK

    @property
    def enough_tok(self) -> float:
        """The promise above which nothing is drafted."""
        return (1 - self.saved_frac) * (1 + self.drafted) - 1

    def answer(self, question: Question) -> Plan:
        scores = np.sort(np.asarray(question.copied_scores, dtype=float))[::-1]
        promise = float(np.exp(scores[: self.copied.verify_nodes]).sum())
        return self.copied if promise >= self.enough_tok else self.plan

    def observe(self, cycle: Cycle) -> None:
        if cycle.draft_calls:
            self.drafted += NEWEST_FRAC * (cycle.accepted_tok - self.drafted)
