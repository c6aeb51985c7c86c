"""The rules and small classifiers compared in LTD's Table 1.

    DDD        continue while the log of the beam's probability >= -0.3, after 5, 7 and 9 expansions
    SVIP       continue while 1 - sqrt(0.15 H) >= 0.3, with H the draft's entropy
    GammaTune  next depth = moving average of accepted tokens
    Disco      continue while P(the newest level holds the target's token) >= 1/2, a classifier
    SpecDec++  continue while P(a level holds it | those above did) >= 1/2, from the hidden state
    C2T        verify the nodes that a classifier considers likely to be on the target's path

Settings are those in section 4 of LTD's fact sheet. Their code was not published; where the text
leaves a choice open, the docstring states ours. `workbook.classifiers` fits the learned ones. A
policy sees scores, not distributions: entropies are estimates from each node's drafted children.

Functions of a level's scores come first. They take arrays with any leading dimensions, so that a
live question and a recording use the same code.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from specdec.core.records import EXTEND, PLAN, SIZE, Cycle, Question
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError
from specdec.policies.base import Learned, Rule, as_array, tree_of


def newest_level(question: Question) -> tuple[np.ndarray, np.ndarray]:
    """(cumulative log-probabilities [W, k] of the level drafted last, those of its W parents [W]),
    float32.

    Parents in beam order: the best k of the level before, descending; after the root pass the root
    alone, with 0.
    """
    newest = as_array(question.newest_scores)
    n = question.expansions
    if n == 0:
        return newest[None], np.zeros(1, dtype=np.float32)
    top_k = math.isqrt(len(newest))
    if top_k * top_k != len(newest):
        why = "this heuristic reads trees of k beams with k children"
        raise SpecdecError(f"{why}; plan a TreeConfig, no static shape.")
    start = 0 if n == 1 else pool_size(n - 2, top_k)
    before = as_array(question.scores[start : pool_size(n - 1, top_k)])
    return newest.reshape(top_k, top_k), np.sort(before)[: -top_k - 1 : -1]


def child_log_probs(newest: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """Log-probability of each child after its parent, [..., W, k] from cumulative ones and the
    parents' [..., W].
    """
    return np.minimum(newest - parents[..., None], 0.0)


def entropy(log_probs: np.ndarray, kind: str = "remainder") -> np.ndarray:
    """Entropy in nats [...] of distributions of which only the k most likely tokens are known,
    log_probs [..., k].

    "remainder" counts all other tokens as one outcome: never above the true entropy. "renormalised"
    ignores them.
    """
    assert kind in ("remainder", "renormalised"), kind
    probs = np.exp(log_probs)
    drafted = probs.sum(-1)
    nats: np.ndarray = -(probs * log_probs).sum(-1)
    if kind == "renormalised":
        nats = nats / drafted + np.log(drafted)
    else:
        rest = np.clip(1 - drafted, 1e-12, 1)
        nats = nats - rest * np.log(rest)
    return nats


def disco_inputs(
    newest: np.ndarray, parents: np.ndarray, expansions: int, top_k: int, estimate: str
) -> np.ndarray:
    """float32 [..., top_k + 2] from `newest_level`'s arrays, newest [..., W, k] and parents [...,
    W].
    """
    flat = newest.reshape(*newest.shape[:-2], -1)
    if flat.shape[-1] < top_k:
        why = f"Disco was made for top_k={top_k}"
        raise SpecdecError(f"{why}, but a level holds {flat.shape[-1]} nodes.")
    best = np.exp(np.sort(flat, axis=-1)[..., : -top_k - 1 : -1])
    nats = entropy(child_log_probs(newest[..., :1, :], parents[..., :1]), estimate)
    depths = np.full_like(nats, expansions / 10)
    return np.concatenate((best, nats, depths), axis=-1).astype(np.float32)


def unit_features(features: np.ndarray) -> np.ndarray:
    """float32 [..., F], each vector with mean square 1."""
    features = features.astype(np.float32)
    features /= np.sqrt((features**2).mean(-1, keepdims=True) + 1e-6)
    return features


def node_depths(candidates: int, top_k: int) -> np.ndarray:
    """int [candidates]: depth of each node of a pool in creation order, 1 for the root's
    children.
    """
    return np.maximum(np.arange(candidates) - top_k, -1) // (top_k * top_k) + 2


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow."""
    return 0.5 * (1 + np.tanh(0.5 * logits))


@dataclass
class DepthRule(Rule):
    """Base of the depth rules: they answer EXTEND over a tree of at most max_depth expansions and
    60 nodes.
    """

    max_depth: int = 12
    verify_nodes: int = 60
    top_k: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asks = frozenset({EXTEND})
        self.limits = TreeConfig(self.verify_nodes + 1, self.max_depth, self.top_k)
        self.plan = self.limits


@dataclass
class DDD(DepthRule):
    """Dynamic depth decoding: after some expansions, continue only while the beam's probability is
    above a threshold.

    layers: expansions after which it checks; elsewhere it continues. threshold: of a
    log-probability. statistic: "mass", the beam's summed probability, as in DDD's paper, or "best",
    that of its best path. The sheet says only "cumulative log-prob".
    """

    layers: tuple[int, ...] = (5, 7, 9)
    threshold: float = -0.3
    statistic: str = "mass"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.statistic in ("mass", "best"), self.statistic

    def answer(self, question: Question) -> bool:
        if question.expansions not in self.layers:
            return True
        newest = as_array(question.newest_scores)
        best = float(newest.max())
        if self.statistic == "best":
            return best >= self.threshold
        # the log of a sum, without overflow
        beam = np.sort(newest)[-self.top_k :]
        return best + math.log(np.exp(beam - best).sum()) >= self.threshold


@dataclass
class SVIP(DepthRule):
    """Self-verification: stop when the draft's entropy H indicates that its tokens will be
    rejected.

    rule: "bound" stops when the estimated acceptance 1 - sqrt(factor * H) falls below `minimum`,
    "distance" when sqrt(factor * H) exceeds it. The sheet's "entropy factor 0.15, minimum entropy
    0.3" leaves that open. The long acceptances in LTD's Table 1 fit "bound", which rarely stops
    drafting. node: H after the beam's "best" path, or the "mean" over the beam, weighted by path
    probability. estimate: see `entropy`.
    """

    factor: float = 0.15
    minimum: float = 0.3
    rule: str = "bound"
    node: str = "best"
    estimate: str = "remainder"

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.rule in ("bound", "distance"), self.rule
        assert self.node in ("best", "mean"), self.node

    def answer(self, question: Question) -> bool:
        newest, parents = newest_level(question)
        if self.node == "best":
            newest = newest[:1]
            parents = parents[:1]
        nats = entropy(child_log_probs(newest, parents), self.estimate)
        weights = np.exp(parents - parents.max())
        mean = float(weights @ nats / weights.sum())
        distance = math.sqrt(self.factor * max(0.0, mean))
        if self.rule == "bound":
            return 1 - distance >= self.minimum
        return distance <= self.minimum


@dataclass
class GammaTune(Rule):
    """The depth of the next cycle follows a moving average of accepted tokens, within bounds around
    the default depth.

    Every turn starts at the default. eta: weight of the newest cycle. low, high: bounds as
    multiples of default_depth. growth: tokens added to a cycle whose longest path was accepted
    completely, since more might have been. The sheet has no such step; without it the average could
    only fall.
    """

    default_depth: int = 8
    low: float = 0.5
    high: float = 1.5
    eta: float = 0.2
    growth: float = 1.0
    verify_nodes: int = 60
    top_k: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        assert 0 < self.eta <= 1 and 0 < self.low <= 1 <= self.high, (self.eta, self.low, self.high)
        self.asks = frozenset({PLAN})
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
        growth = self.growth if cycle.accepted_tok == cycle.draft_calls else 0.0
        self.average_tok += self.eta * (cycle.accepted_tok + growth - self.average_tok)


@dataclasses.dataclass
class _Classifier(Learned):
    """A network whose probability is compared with a threshold; no sampling."""

    activation: str = "relu"
    max_depth: int = 12
    verify_nodes: int = 60
    top_k: int = 10
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.temperature is None and 0 < self.threshold < 1, self.threshold
        self.limits = TreeConfig(self.verify_nodes + 1, self.max_depth, self.top_k)
        self.plan = self.limits


@dataclasses.dataclass
class Disco(_Classifier):
    """Continue while a classifier considers it likely that the level drafted last holds the
    target's token.

    Inputs [12] (`disco_inputs`): probabilities of the level's 10 best paths, the entropy estimate
    after the best parent, depth / 10. One hidden layer of 128. The sheet lists probability,
    entropy, depth and 12 inputs, not their order.
    """

    estimate: str = "remainder"

    kind = EXTEND

    def observation(self, question: Question) -> np.ndarray:
        newest, parents = newest_level(question)
        return disco_inputs(newest, parents, question.expansions, self.top_k, self.estimate)

    def answer(self, question: Question) -> bool:
        return bool(sigmoid(self.logits(self.observation(question)))[0] >= self.threshold)


class ResidualNetwork:
    """SpecDec++'s network in numpy: head(silu(gate(x)) + skip(x)); float32 [F] -> [levels]."""

    NAMES = ("gate.weight", "gate.bias", "skip.weight", "skip.bias", "head.weight", "head.bias")

    def __init__(self, arrays: dict[str, np.ndarray]):
        self._arrays = {
            name: np.ascontiguousarray(arrays[name], dtype=np.float32) for name in self.NAMES
        }
        self.width = self._arrays["gate.weight"].shape[1]

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        w = self._arrays
        gate = w["gate.weight"] @ observation + w["gate.bias"]
        hidden = gate * sigmoid(gate) + w["skip.weight"] @ observation + w["skip.bias"]
        return w["head.weight"] @ hidden + w["head.bias"]

    def arrays(self) -> dict[str, np.ndarray]:
        return dict(self._arrays)


@dataclasses.dataclass
class SpecDecPlus(_Classifier):
    """Stop when the predicted odds of acceptance, from the hidden state, are too small.

    The network predicts, per level, the odds that it holds the target's token if those above did.
    It runs once per cycle. SpecDec++ reads the drafter's state after each token; a policy here sees
    the target's at the last accepted token. rule: "level" compares a level's odds with the
    threshold, like the other classifiers, "path" the product down to it, as in its paper. The sheet
    leaves it open; LTD's Table 1 shows mild stopping, which fits "level".
    """

    rule: str = "level"

    kind = EXTEND

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.rule in ("level", "path"), self.rule
        self._odds: np.ndarray | None = None  # of each level, in the current cycle

    def observation(self, question: Question) -> np.ndarray:
        """float32 [F]: the features, scaled to unit mean square."""
        if question.features is None:
            raise SpecdecError("SpecDec++ reads features; this pair or recording keeps none.")
        return unit_features(as_array(question.features))

    def answer(self, question: Question) -> bool:
        if question.expansions == 0 or self._odds is None:
            odds = sigmoid(self.logits(self.observation(question)))
            self._odds = odds if self.rule == "level" else odds.cumprod()
        return bool(self._odds[question.expansions] >= self.threshold)

    def build_network(self, arrays: dict[str, np.ndarray]) -> ResidualNetwork:
        return ResidualNetwork(arrays)


@dataclasses.dataclass
class C2T(_Classifier):
    """Verify as many nodes as a classifier considers likely to be on the target's path; at most 60,
    at least `least`.

    Inputs per candidate [2]: cumulative log-probability, depth / 10. One hidden layer of 64. Nodes
    are taken by score, so the classifier only decides how many. prunes=False asks the classifier
    and then verifies the usual 60: LTD's published variant does not use the result, and its Table 1
    shows EAGLE-3's own acceptance lengths.
    """

    max_depth: int = 8
    prunes: bool = True
    least: int = 1

    kind = SIZE

    def observation(self, question: Question) -> np.ndarray:
        """float32 [candidates, 2]."""
        depths = node_depths(len(question.scores), question.plan.top_k)
        return np.stack((as_array(question.scores), depths / 10), axis=-1).astype(np.float32)

    def answer(self, question: Question) -> int:
        chances = sigmoid(self.logits(self.observation(question))[:, 0])
        nodes = self.verify_nodes
        if self.prunes:
            nodes = max(int((chances >= self.threshold).sum()), self.least)
        return min(nodes, self.verify_nodes, int(question.largest))
