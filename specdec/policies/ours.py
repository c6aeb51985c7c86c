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
from specdec.policies.learned import Learned, Network
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
        self.out = Network([stored["out.weight"]], [stored["out.bias"]])

    def state(self, features: np.ndarray | None) -> np.ndarray:
        """What the hidden state adds to the hidden layer, once per cycle. features [F] or [B, F] -> [M] or [B, M]."""
        if features is None:
            return self.hidden_bias
        return np.tanh(features @ self.probe_weight.T + self.probe_bias) @ self.state_weight.T + self.hidden_bias

    def __call__(self, inputs: np.ndarray, state: np.ndarray) -> np.ndarray:
        """inputs [..., I], state [..., M] -> E[accepted_tok] float32 [..., D + 1, S]."""
        hidden = np.maximum(inputs @ self.tree_weight.T + state, 0)
        return self.out(hidden).reshape(*hidden.shape[:-1], *self.shape)

    def arrays(self) -> dict[str, np.ndarray]:
        return self._stored


class _Levels:
    """Sums over the levels of a tree that were looked at already: masses and best chances [..., D + 1]."""

    def __init__(self, lead: tuple, levels: int):
        self.masses, self.bests = np.zeros((*lead, levels), np.float32), np.zeros((*lead, levels), np.float32)
        self.newest, self.count = None, 0


class TreeInputs:
    """The network's view of a growing tree, level by level; the one builder for training (batches) and decoding.

    All methods take scores with any leading dimensions: [..., width].
    """

    def __init__(self, top_k: int, most_expansions: int, sizes: tuple[int, ...]):
        self.top_k, self.levels, self.sizes = top_k, most_expansions + 1, sizes
        self.size = _TOP + 3 * self.levels + len(sizes) + 1 + _HISTORY
        self._ends = [pool_size(n, top_k) for n in range(self.levels)]
        self._largest = np.array([max(size, 1) for size in sizes]) - 1
        self._none, self._most = np.array(sizes) == 0, max(sizes)

    def __call__(self, scores, expansions: int, context_tok, history, seen: _Levels | None = None) -> np.ndarray:
        """scores float32 [..., pool after `expansions`], context_tok [...], history [..., 5] -> float32 [..., I].

        seen: what earlier looks at this tree found, so that only new levels are summed up.
        """
        lead = scores.shape[:-1]
        seen = _Levels(lead, self.levels) if seen is None else seen
        for level in range(seen.count, expansions + 1):
            block = scores[..., self._ends[level - 1] if level else 0 : self._ends[level]]
            seen.newest = np.sort(block, axis=-1)[..., -self.top_k :]
            chances = np.exp(seen.newest)
            seen.masses[..., level], seen.bests[..., level] = chances.sum(-1), chances[..., -1]
            seen.count = level + 1
        found = np.zeros((*lead, self.size), np.float32)
        top, levels, sizes = min(_TOP, self.top_k), self.levels, len(self.sizes)
        found[..., :_TOP] = -2.0
        found[..., :top] = np.maximum(seen.newest[..., : -top - 1 : -1], -10.0) / 5
        found[..., _TOP : _TOP + levels] = seen.masses
        found[..., _TOP + levels : _TOP + 2 * levels] = seen.bests
        found[..., _TOP + 2 * levels + expansions] = 1.0
        found[..., _TOP + 3 * levels : _TOP + 3 * levels + sizes] = self.size_masses(scores)
        found[..., -_HISTORY - 1] = np.asarray(context_tok, np.float32) / 500
        found[..., -_HISTORY:] = history
        return found

    def size_masses(self, scores: np.ndarray) -> np.ndarray:
        """Summed path probabilities of the V best candidates, for every V: the drafter's own E[accepted_tok]. [..., S]."""
        most = min(self._most, scores.shape[-1])
        if scores.shape[-1] > 4 * most:  # a large pool: drop what no size reaches before sorting
            scores = np.partition(scores, -most, axis=-1)[..., -most:]
        chances = np.exp(np.sort(scores, axis=-1)[..., : -most - 1 : -1]).cumsum(-1)
        sums = chances[..., np.minimum(self._largest, most - 1)]
        sums[..., self._none] = 0.0
        return sums


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
        self._verify = np.array(self.verify_ms), np.array(self.verify_per_tok)
        self._ahead = np.arange(self.most_expansions + 1)
        # A size beyond the pool after n expansions cannot be had.
        pools = np.array([pool_size(n, self.top_k) for n in range(self.most_expansions + 1)])
        self._allowed = np.where(np.array(self.sizes)[None] <= pools[:, None], 0.0, -np.inf)
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
        self._seen = _Levels((), self.most_expansions + 1)

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
        scores = question.scores.float().cpu().numpy()
        return self.inputs(scores, question.expansions, question.context_tok, self.history, self._seen)

    def time_table(self, context_tok: int) -> np.ndarray:
        """What the network's answer lacks to be a value: -rate * time of every (expansions, size), -inf where a size
        exceeds the pool. float32 [D + 1, S]; the time of levels already drafted is the same for all that is open."""
        verify = self._verify[0] + self._verify[1] * context_tok
        drafting = self._ahead[:, None] * (self.expand_ms + self.expand_per_tok * context_tok)
        return (self._allowed - self.rate * (drafting + verify)).astype(np.float32)

    def build_network(self, arrays):
        return Forecast(arrays, self.most_expansions + 1, len(self.sizes))
