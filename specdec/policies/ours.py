"""Our controller: predict what every continuation of this tree would have accepted, price it, and take the best.

After each draft level a small network predicts E[accepted_tok] for every (expansions, verify_nodes) still open, from what
costs nothing: the tree's own scores, the last cycles' luck, and a distilled probe of the target's hidden state. The cost
model turns predictions into value, E[L] - rate * time (the papers maximise E[L / T]; throughput is E[L] / E[T]), so the same
network serves any hardware: new prices, same predictions. Knows nothing about training.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from specdec.config import SpecdecError, TreeConfig, pool_size
from specdec.policies.learned import Learned
from specdec.records import EXTEND, SIZE, Cycle, Question

SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 20, 26, 34, 44, 59)
_TOP = 8  # scores of the newest level that the network sees one by one
_HISTORY = 5


class Forecast:
    """The network: tanh probe of the features, one hidden ReLU layer, E[accepted_tok] for all expansions x sizes.

    arrays: probe.weight [P, F], probe.bias [P], hidden.weight [M, I + P], hidden.bias [M], out.weight [(D + 1) * S, M],
    out.bias. Inputs are standardised inside the first layers' weights.
    """

    def __init__(self, arrays: dict[str, np.ndarray], levels: int, sizes: int):
        self._stored = {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in arrays.items()}
        stored = self._stored
        self.probe_weight, self.probe_bias = stored["probe.weight"], stored["probe.bias"]
        split = stored["hidden.weight"].shape[1] - len(self.probe_bias)
        self.tree_weight = np.ascontiguousarray(stored["hidden.weight"][:, :split])
        self.state_weight = np.ascontiguousarray(stored["hidden.weight"][:, split:])
        self.hidden_bias, self.shape = stored["hidden.bias"], (levels, sizes)
        self.out_weight, self.out_bias = stored["out.weight"], stored["out.bias"]

    def state(self, features: np.ndarray | None) -> np.ndarray:
        """What the hidden state adds to the hidden layer, once per cycle. features [F] or [B, F] -> [M] or [B, M]."""
        if features is None:
            return self.hidden_bias
        return np.tanh(features @ self.probe_weight.T + self.probe_bias) @ self.state_weight.T + self.hidden_bias

    def __call__(self, inputs: np.ndarray, state: np.ndarray) -> np.ndarray:
        """inputs [..., I], state [..., M] -> E[accepted_tok] float32 [..., D + 1, S]."""
        hidden = inputs @ self.tree_weight.T
        hidden += state
        np.maximum(hidden, 0, out=hidden)
        return (hidden @ self.out_weight.T + self.out_bias).reshape(*hidden.shape[:-1], *self.shape)

    def arrays(self) -> dict[str, np.ndarray]:
        return self._stored


class Growing:
    """The network's inputs of one tree (or a batch of trees), filled level by level: only what a new level changes."""

    def __init__(self, view: TreeInputs, context_tok, history: np.ndarray, lead: tuple = ()):
        levels = view.levels
        self.inputs = np.zeros((*lead, view.size), np.float32)
        self.inputs[..., :_TOP] = -2.0
        self.masses = self.inputs[..., _TOP : _TOP + levels]
        self.bests = self.inputs[..., _TOP + levels : _TOP + 2 * levels]
        self.level = self.inputs[..., _TOP + 2 * levels : _TOP + 3 * levels]
        self.sizes = self.inputs[..., _TOP + 3 * levels : -1 - _HISTORY]
        self.inputs[..., -1 - _HISTORY] = np.asarray(context_tok, np.float32) / 500
        self.inputs[..., -_HISTORY:] = history
        self.count = 0  # levels summed up so far


class TreeInputs:
    """The network's view of a growing tree; the one builder for training (batches) and decoding.

    Inputs [I]: the newest level's best scores, per level the mass and the best chance of its beam, the level, for every
    size the summed path probabilities of the best candidates (the drafter's own E[accepted_tok]), context, history.
    """

    def __init__(self, top_k: int, most_expansions: int, sizes: tuple[int, ...]):
        self.top_k, self.levels, self.sizes = top_k, most_expansions + 1, np.array(sizes)
        self.size = _TOP + 3 * self.levels + len(sizes) + 1 + _HISTORY
        self._ends = [pool_size(n, top_k) for n in range(self.levels)]
        self._most, self._top = max(sizes), min(_TOP, top_k)
        self._reach = [np.minimum(self.sizes, end) for end in self._ends]  # the pool may hold fewer than a size

    def __call__(self, scores, expansions: int, context_tok, history, growing: Growing | None = None) -> np.ndarray:
        """scores float32 [..., pool after `expansions`], context_tok [...], history [..., 5] -> float32 [..., I].

        growing: what earlier looks at this tree filled in; the result is its array.
        """
        growing = growing or Growing(self, context_tok, history, scores.shape[:-1])
        for level in range(growing.count, expansions + 1):
            newest = np.sort(scores[..., self._ends[level - 1] if level else 0 : self._ends[level]], axis=-1)
            chances = np.exp(newest[..., -self.top_k :])
            growing.masses[..., level], growing.bests[..., level] = chances.sum(-1), chances[..., -1]
        if growing.count <= expansions:
            np.maximum(newest[..., : -self._top - 1 : -1] / 5, -2.0, out=growing.inputs[..., : self._top])
            growing.level[..., max(growing.count - 1, 0)], growing.level[..., expansions] = 0.0, 1.0
            growing.sizes[...] = self.size_masses(scores, expansions)
            growing.count = expansions + 1
        return growing.inputs

    def size_masses(self, scores: np.ndarray, expansions: int) -> np.ndarray:
        """Summed path probabilities of the V best candidates, for every V. [..., S]."""
        most = min(self._most, scores.shape[-1])
        if scores.shape[-1] > 4 * most:  # a large pool: drop what no size reaches before sorting
            scores = np.partition(scores, -most, axis=-1)[..., -most:]
        sums = np.zeros((*scores.shape[:-1], most + 1), np.float32)
        np.cumsum(np.exp(np.sort(scores, axis=-1)[..., : -most - 1 : -1]), axis=-1, out=sums[..., 1:])
        return sums.take(self._reach[expansions], axis=-1)


def history_after(history: np.ndarray, accepted_tok: int, expansions: int) -> np.ndarray:
    """The five numbers of luck after one more cycle: last accepted, the one before, their slow mean, whether the last
    was cut by its depth, and 1 once there is any history."""
    slow = 0.8 * history[2] + 0.2 * accepted_tok / 8 if history[4] else accepted_tok / 8
    return np.array([accepted_tok / 8, history[0], slow, accepted_tok > expansions, 1.0], np.float32)


@dataclasses.dataclass
class ValuePolicy(Learned):
    """Asks EXTEND and SIZE on a beam of `top_k`. network: a Forecast; `price` must have been called before use.

    stride: the next look is so many levels before the best stop seen so far, or at the next level if that is later.
    patience_tok: added to going on, in tokens: a later look will know more than this one, which the forecast leaves out.
    probe: whether the hidden state is looked at. rate: tokens per ms that time is worth; verify_ms [S], verify_per_tok
    [S], expand_ms and expand_per_tok are the prices, of the cost model named in `priced_for`.
    """

    top_k: int = 6
    most_expansions: int = 12
    sizes: tuple[int, ...] = SIZES
    stride: int = 2
    patience_tok: float = 0.0
    probe: bool = True
    rate: float = 0.0
    verify_ms: tuple[float, ...] = ()
    verify_per_tok: tuple[float, ...] = ()
    expand_ms: float = 0.0
    expand_per_tok: float = 0.0
    priced_for: str = ""

    kind = SIZE

    def __post_init__(self):
        super().__post_init__()
        self.asks = frozenset({EXTEND, SIZE})
        pool = pool_size(self.most_expansions, self.top_k)
        self.limits = TreeConfig(min(max(self.sizes), pool) + 1, self.most_expansions, self.top_k)
        self.plan = self.limits
        self.inputs = TreeInputs(self.top_k, self.most_expansions, self.sizes)
        self.observation_size = self.inputs.size
        if self.verify_ms:
            self._time_at_zero, self._time_per_tok = self._time_tables()
        self.reset()

    # ---- prices ------------------------------------------------------------------------------------------------------
    def price(self, costs, rate: float) -> ValuePolicy:
        """The same predictions at the prices of `costs` (a CostModel) and a `rate` in tokens per ms."""
        at_zero, at_one = costs.verify_ms(np.array(self.sizes), 0), costs.verify_ms(np.array(self.sizes), 1)
        expand = float(costs.expand_ms(self.top_k, 0))
        priced = dataclasses.replace(
            self, rate=float(rate), verify_ms=tuple(at_zero.tolist()), verify_per_tok=tuple((at_one - at_zero).tolist()),
            expand_ms=expand, expand_per_tok=float(costs.expand_ms(self.top_k, 1)) - expand, priced_for=costs.name,
        )  # fmt: skip
        priced.network, priced.trained_for = self.network, dict(self.trained_for)
        return priced

    # ---- the Policy protocol -----------------------------------------------------------------------------------------
    def reset(self) -> None:
        self.history = np.zeros(_HISTORY, np.float32)
        self._start()

    def _start(self) -> None:
        self._state, self._look_at, self._decided = None, 0, None
        self._growing: Growing | None = None

    def answer(self, question: Question):
        if question.kind == EXTEND:
            return self._extend(question)
        if self._decided is None or self._decided[0] != question.expansions:
            self._look(question)
        return min(self._decided[1], question.largest)

    def observe(self, cycle: Cycle) -> None:
        self.history = history_after(self.history, cycle.accepted_tok, cycle.expansions)
        self._start()

    def _extend(self, question: Question) -> bool:
        if question.expansions < self._look_at:
            return True
        best_here, best_later, when = self._look(question)
        if best_later + self.patience_tok <= best_here:
            return False
        self._look_at = max(question.expansions + 1, when - self.stride)
        return True

    def _look(self, question: Question) -> tuple[float, float, int]:
        """Value of stopping here, of the best later stop, and after how many expansions that is; remembers the size."""
        if not self.verify_ms:
            raise SpecdecError("this ValuePolicy has no prices yet; call price(costs, rate) first.")
        if self._state is None:
            features = question.features.float().cpu().numpy() if self.probe else None
            self._state = self.network.state(features)
            self._time = self.time_table(question.context_tok)
        now = question.expansions
        value = (self.network(self.observation(question), self._state) + self._time)[now:]
        here = int(value[0].argmax())
        self._decided = now, self.sizes[here]
        if now == self.most_expansions:
            return float(value[0, here]), -np.inf, now
        later = int(value[1:].argmax())
        return float(value[0, here]), float(value[1:].flat[later]), now + 1 + later // len(self.sizes)

    def observation(self, question: Question) -> np.ndarray:
        if self._growing is None:
            self._growing = Growing(self.inputs, question.context_tok, self.history)
        scores = question.scores.float().cpu().numpy()
        return self.inputs(scores, question.expansions, question.context_tok, self.history, self._growing)

    def time_table(self, context_tok: int) -> np.ndarray:
        """What the network's answer lacks to be a value: -rate * time of every (expansions, size), -inf where a size
        exceeds the pool. float32 [D + 1, S]; the time of levels already drafted is the same for all that is open."""
        return self._time_at_zero + context_tok * self._time_per_tok

    def _time_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """time_table at context 0, and its slope per context token."""
        ahead = np.arange(self.most_expansions + 1)[:, None]
        pools = np.array([pool_size(n, self.top_k) for n in range(self.most_expansions + 1)])[:, None]
        allowed = np.where(np.array(self.sizes) <= pools, 0.0, -np.inf)
        at_zero = allowed - self.rate * (ahead * self.expand_ms + np.array(self.verify_ms))
        per_tok = -self.rate * (ahead * self.expand_per_tok + np.array(self.verify_per_tok))
        return at_zero.astype(np.float32), per_tok.astype(np.float32)

    def build_network(self, arrays):
        return Forecast(arrays, self.most_expansions + 1, len(self.sizes))
