"""Our controller: predict the accepted tokens of every continuation of this tree, subtract its
cost, and take the best.

    value(n, V) = E[accepted_tok | n expansions, V nodes] - rate * (draft_ms(n) + verify_ms(V))

    stop here:  max over V of value(now, V)     continue:  max over n > now and V of value(n, V)

With `plans` it also decides before anything is drafted, and "here" is what needs no forward of the
drafter: a plain step, or V tokens copied from the text (`hybrid`).

After a draft level a small network predicts E[accepted_tok] for every (n, V) that is still
possible, from the tree's scores, recent cycles and a probe of the models' hidden states. The cost
model turns predictions into value. Throughput is E[L] / E[T], whose maximum is that of
E[L] - rate * E[T] at the achieved rate.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np

from specdec.core.records import EXTEND, PLAN, SIZE, Cycle, Question
from specdec.core.tree_config import CopiedTree, TreeConfig, pool_size
from specdec.errors import SpecdecError, check_fields
from specdec.policies.base import Config, Learned, as_array, check_width, tree_of

SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 20, 26, 34, 44, 59)
# Hidden states that a policy may read: of the target at the last accepted token, of the drafter at
# the root.
PROBES = {
    "none": (),
    "target": ("features",),
    "draft": ("draft_state",),
    "both": ("features", "draft_state"),
}
# a fifth of the lowest log-probability that is distinguished
_LEAST = np.float32(-2.0)
HISTORY = 5  # numbers of the last cycles, see `history_after`
NOTHING = np.zeros(HISTORY, np.float32)  # the history of a text's first cycle
NO_TREE = TreeConfig(1, 0, 1)  # a plain step


class AcceptanceModel:
    """The network: tanh probe of the features, one hidden ReLU layer, E[accepted_tok] of all trees.

    arrays: probe.weight [P, F], probe.bias [P], hidden.weight [M, I + P], hidden.bias [M],
    out.weight [(D + 1) * S, M], out.bias. Inputs are standardised inside the first layers' weights.
    """

    NAMES = ("probe.weight", "probe.bias", "hidden.weight", "hidden.bias", "out.weight", "out.bias")

    def __init__(self, arrays: dict[str, np.ndarray], levels: int, sizes: int):
        parts = [np.ascontiguousarray(arrays[name], dtype=np.float32) for name in self.NAMES]
        self.probe_weight, self.probe_bias, hidden, self.hidden_bias, self.out_weight, bias = parts
        self._arrays = dict(zip(self.NAMES, parts, strict=True))
        self.out_bias = bias.reshape(levels, sizes)
        # the hidden layer reads the tree's inputs and the probe
        self.width = hidden.shape[1] - len(self.probe_bias)
        self.tree_weight = np.ascontiguousarray(hidden[:, : self.width])
        self.state_weight = np.ascontiguousarray(hidden[:, self.width :])

    def state(self, features: np.ndarray | None) -> np.ndarray:
        """The hidden state's part of the hidden layer: features [..., F] -> [..., M]."""
        if features is None:
            return self.hidden_bias
        check_width("ValuePolicy", features.shape[-1], self.probe_weight.shape[1])
        probed = np.tanh(features @ self.probe_weight.T + self.probe_bias)
        state: np.ndarray = probed @ self.state_weight.T + self.hidden_bias
        return state

    def __call__(
        self, inputs: np.ndarray, state: np.ndarray, first: int = 0, base: np.ndarray | None = None
    ) -> np.ndarray:
        """inputs [..., I], state [..., M] -> E[accepted_tok] float32 [..., D + 1 - first, S].

        first: the least expansions. base [D + 1, S]: replaces the output's bias.
        """
        levels, sizes = self.out_bias.shape
        hidden = np.maximum(inputs @ self.tree_weight.T + state, 0)
        answer: np.ndarray = hidden @ self.out_weight[first * sizes :].T
        answer = answer.reshape(*hidden.shape[:-1], levels - first, sizes)
        answer += (self.out_bias if base is None else base)[first:]
        return answer

    def arrays(self) -> dict[str, np.ndarray]:
        return self._arrays


class TreeInputs:
    """The network's inputs from a growing tree, for training (batches) and decoding.

    Inputs [I], in this order:

        children   scores of the two likeliest children of every node of the newest beam
        masses     per level, the summed path probabilities of its candidates
        bests      per level, the largest of them
        level      one-hot, the expansions so far
        sizes      per size above 0, the summed path probabilities of so many best candidates:
                   the drafter's own E[accepted_tok]
        context    context_tok / 500
        copied     with `plans`, per size above 0, the summed probabilities of so many best copies
        history    see `history_after`

    The cost of an update is numpy's call overhead, so there are few calls.
    """

    def __init__(self, settings: ValueSettings):
        depths = settings.most_expansions + 1
        self.top_k = settings.top_k
        # with `plans` the first level is that before the root pass
        self.before = int(settings.plans)
        self.levels = depths + self.before
        # zero nodes have no mass
        self._counted = np.array([size for size in settings.sizes if size > 0])
        self._children = min(2, self.top_k)
        # 1. the place of each part
        newest = max(self._children * self.top_k, self.top_k)
        sizes = len(self._counted)
        counts = (newest, depths, depths, self.levels, sizes, 1, self.before * sizes, HISTORY)
        ends = list(itertools.accumulate(counts))
        self.size = ends[-1]
        places = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
        _, masses, bests, self._level, self._sizes, self._context, self._copied, _ = places
        self._masses = masses.start
        self._bests = bests.start
        # 2. constants
        self._blank = np.zeros(self.size, np.float32)
        self._blank[:newest] = _LEAST
        self._one_hot = np.eye(self.levels, dtype=np.float32)
        pools = [pool_size(n, self.top_k) for n in range(depths)]
        self._starts = np.array([0, *pools[:-1]])
        self._largest = int(self._counted.max(initial=1))
        self._last = [np.minimum(self._counted, pool) - 1 for pool in pools]

    def begin(self, context_tok: Any, history: np.ndarray, copied: Any = ()) -> np.ndarray:
        """Inputs float32 [..., I] of a tree before its first update.

        context_tok [...], history [..., 5]. copied: with `plans`, [..., N], best first, or -inf.
        """
        inputs = np.empty((*history.shape[:-1], self.size), np.float32)
        inputs[...] = self._blank
        inputs[..., self._context] = np.asarray(context_tok, np.float32)[..., None] / 500
        inputs[..., -HISTORY:] = history
        offered = np.shape(copied)[-1]
        if self.before:
            inputs[..., self._level] = self._one_hot[0]
        if self.before and offered > 0:
            masses = np.cumsum(np.exp(np.asarray(copied, np.float32)), axis=-1)
            last = np.minimum(self._counted, offered) - 1
            inputs[..., self._copied] = masses.take(last, axis=-1)
        return inputs

    def update(self, inputs: np.ndarray, scores: np.ndarray, expansions: int) -> np.ndarray:
        """Enter scores float32 [..., pool after `expansions`] in `inputs`, changed and returned."""
        end = expansions + 1
        starts = self._starts[:end]
        chances = np.exp(scores)
        # 1. per level
        masses = slice(self._masses, self._masses + end)
        inputs[..., masses] = np.add.reduceat(chances, starts, axis=-1)
        bests = slice(self._bests, self._bests + end)
        inputs[..., bests] = np.maximum.reduceat(chances, starts, axis=-1)
        inputs[..., self._level] = self._one_hot[self.before + expansions]
        # 2. the newest beam
        newest = scores[..., self._starts[expansions] :]
        count = self.top_k
        if expansions:
            by_node = newest.reshape(*newest.shape[:-1], self.top_k, self.top_k)
            count = self.top_k * self._children
            newest = by_node[..., : self._children].reshape(*newest.shape[:-1], count)
        inputs[..., :count] = np.maximum(newest * np.float32(0.2), _LEAST)
        # 3. per size
        count = min(self._largest, chances.shape[-1])
        # a large pool: drop what no size reaches before sorting
        if chances.shape[-1] > 4 * count:
            chances = np.partition(chances, -count, axis=-1)[..., -count:]
        best = np.sort(chances, axis=-1)[..., : -count - 1 : -1]
        inputs[..., self._sizes] = np.cumsum(best, axis=-1).take(self._last[expansions], axis=-1)
        return inputs


def history_after(history: np.ndarray, accepted_tok: int, expansions: int) -> np.ndarray:
    """The five numbers of history after one more cycle.

    Accepted tokens of the last two cycles and their slow mean (tokens / 8 each), whether the last
    cycle was limited by its depth, and 1 once there is any history.
    """
    slow = accepted_tok / 8
    if history[4]:
        slow = 0.8 * history[2] + 0.2 * slow
    limited = accepted_tok > expansions
    return np.array([accepted_tok / 8, history[0], slow, limited, 1.0], np.float32)


@dataclasses.dataclass
class ValueSettings:
    """The trees of our controller.

    most_expansions: at most the recording's depth. plans: it decides before the root pass too: a
    plain step, copies alone, or a tree.
    """

    top_k: int = 6
    most_expansions: int = 12
    sizes: tuple[int, ...] = SIZES
    plans: bool = False


@dataclasses.dataclass
class ValuePolicy(ValueSettings, Learned):
    """Answers EXTEND and SIZE on a beam of `top_k`, and PLAN with `plans`. `price` comes first.

    first_evaluation: expansions before the network's first run; `evaluations` counts its runs.
    stride: it runs next so many levels before the best known stop. continue_bonus_tok: added to the
    value of continuing, since a later evaluation will know more. probe: a name of PROBES.
    rate: value of time in tokens per ms. verify_ms [S] and all below: of the cost model named in
    `priced_for`.
    """

    first_evaluation: int = 0
    stride: int = 2
    continue_bonus_tok: float = 0.0
    probe: str = "draft"
    rate: float = 0.0
    verify_ms: tuple[float, ...] = ()
    verify_per_tok: tuple[float, ...] = ()
    expand_ms: float = 0.0
    expand_per_tok: float = 0.0
    root_ms: float = 0.0
    root_per_tok: float = 0.0
    priced_for: str = ""

    kind = SIZE

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asks = frozenset({EXTEND, SIZE, PLAN} if self.plans else {EXTEND, SIZE})
        if self.plans and "draft_state" in PROBES[self.probe]:
            why = "before a tree there is no state of the drafter"
            raise SpecdecError(f'{why}; with plans=True use probe="none" or "target".')
        self.limits = tree_of(max(self.sizes), self.most_expansions, self.top_k)
        self.plan = self.limits
        self.inputs = TreeInputs(self)
        self.observation_size = self.inputs.size
        self.evaluations = 0
        if self.verify_ms:
            self._time_at_zero, self._time_per_tok = self._time_tables()
        self.reset()

    def price(self, costs: Any, rate: float) -> ValuePolicy:
        """The same predictions with the times of `costs`, a CostModel; rate in tokens/ms."""
        sizes = np.array(self.sizes)
        verify_ms = costs.verify_ms(sizes, 0)
        expand_ms = float(costs.expand_ms(self.top_k, 0, self.top_k))
        root_ms = float(costs.root_ms(self.top_k, 0))
        return self.with_settings(
            rate=float(rate),
            verify_ms=tuple(verify_ms.tolist()),
            verify_per_tok=tuple((costs.verify_ms(sizes, 1) - verify_ms).tolist()),
            expand_ms=expand_ms,
            expand_per_tok=float(costs.expand_ms(self.top_k, 1, self.top_k)) - expand_ms,
            root_ms=root_ms,
            root_per_tok=float(costs.root_ms(self.top_k, 1)) - root_ms,
            priced_for=costs.name,
        )

    def reset(self) -> None:
        self.history = NOTHING
        self._next_cycle()

    def observe(self, cycle: Cycle) -> None:
        self.history = history_after(self.history, cycle.accepted_tok, cycle.expansions)
        self._next_cycle()

    def _next_cycle(self) -> None:
        self._state: np.ndarray | None = None
        self._evaluate_at = self.first_evaluation  # expansions before the next evaluation
        self._decided_at = -1
        self._decided = 0

    def answer(self, question: Question) -> Any:
        if question.kind == SIZE:
            if isinstance(question.plan, CopiedTree):
                return min(question.plan.verify_nodes, question.largest)
            if self._decided_at != question.expansions:
                self._evaluate(question, question.expansions)
            return min(self._decided, question.largest)
        # EXTEND: continue to the next evaluation, or while a later stop is worth more
        if question.kind == EXTEND and question.expansions < self._evaluate_at:
            return True
        now = -1 if question.kind == PLAN else question.expansions
        here, later, when = self._evaluate(question, now)
        continues = later + self.continue_bonus_tok > here
        if continues:
            self._evaluate_at = max(self.first_evaluation, now + 1, when - self.stride)
        if question.kind == EXTEND:
            return continues
        if continues:
            return self.plan
        # copies alone or a plain step; a small tree may hold fewer nodes than the largest size
        nodes = min(self._decided, self.limits.verify_nodes)
        return CopiedTree(nodes + 1) if nodes else NO_TREE

    def _evaluate(self, question: Question, now: int) -> tuple[float, float, int]:
        """Value of stopping here, of the best later stop, and that stop's expansions.

        now: expansions; -1 before the root pass.
        """
        if self._state is None or now < 0:
            self._begin(question)
        if now >= 0:
            self.inputs.update(self._row, as_array(question.scores), now)
        self.evaluations += 1
        value = self.network(self._row, self._state, now + self.inputs.before, self._base)
        self.outputs = value
        if now < 0:
            # a size needs more copies than the one before it
            value[0, 1:][np.array(self.sizes[:-1]) >= len(question.copied_scores)] = -np.inf
        here = int(value[0].argmax())
        self._decided_at = now
        self._decided = self.sizes[here]
        if now == self.most_expansions:
            return float(value[0, here]), -np.inf, now
        later = int(value[1:].argmax())
        when = now + 1 + later // len(self.sizes)
        return float(value[0, here]), float(value[1:].flat[later]), when

    def _begin(self, question: Question) -> None:
        """What is the same in all of a cycle: the hidden state's part, costs, fixed inputs."""
        if not self.verify_ms:
            raise SpecdecError("this ValuePolicy has no costs yet; call price(costs, rate) first.")
        # 1. the hidden states
        states = [as_array(getattr(question, name)) for name in PROBES[self.probe]]
        self._state = self.network.state(np.concatenate(states) if states else None)
        # 2. the costs at this context, as the output's bias
        biased = self._time_at_zero + self.network.out_bias
        self._base: np.ndarray = biased + question.context_tok * self._time_per_tok
        # 3. the inputs that do not change
        copied: Any = question.copied_scores if self.plans else ()
        self._row = self.inputs.begin(question.context_tok, self.history, copied)

    def _time_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """-rate * time of every (expansions, size) at context 0, and its slope per context token.

        float32 [D + 1, S] each; -inf if a size exceeds the pool. With `plans` they begin with a
        row of what needs no root pass. Levels already drafted cost the same for all options.
        """
        sizes = np.array(self.sizes)
        ahead = np.arange(self.most_expansions + 1)[:, None]
        pools = np.array([pool_size(n, self.top_k) for n in range(len(ahead))])[:, None]
        if self.plans:
            pools = pools + max(self.sizes)  # copies join them
        at_zero = np.where(sizes <= pools, 0.0, -np.inf)
        tables = []
        for allowed, expand, verify, root in (
            (at_zero, self.expand_ms, np.array(self.verify_ms), self.root_ms),
            (0.0, self.expand_per_tok, np.array(self.verify_per_tok), self.root_per_tok),
        ):
            table = allowed - self.rate * (ahead * expand + verify)
            if self.plans:
                table = np.concatenate((-self.rate * verify[None], table - self.rate * root))
            tables.append(table.astype(np.float32))
        return tables[0], tables[1]

    def build_network(self, arrays: dict[str, np.ndarray]) -> AcceptanceModel:
        return AcceptanceModel(arrays, self.inputs.levels, len(self.sizes))


@dataclasses.dataclass(unsafe_hash=True)
class ValueConfig(Config, ValueSettings):
    """The trees of our controller, and how its network learns, in about a minute on one core.

    probe: None: "draft" if recorded, else "target". steps: at most; the weights with the lowest
    held-out loss are kept. rounds: of collecting cycle starts, later ones by the policy itself.
    """

    policy_class = ValuePolicy
    name: str = "ours"
    probe: str | None = None
    hidden: int = 64
    steps: int = 2000
    batch: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 3e-2
    dropout: float = 0.2  # of features and hidden units: few prompts, many dimensions
    noise: float = 0.3  # on standardised features
    rounds: int = 2

    def __post_init__(self) -> None:
        counted = ("top_k", "most_expansions", "steps", "batch", "rounds")
        limits = dict.fromkeys(counted, (1, math.inf))
        check_fields(self, dropout=(0.0, 1.0), **limits)


OURS = ValueConfig()
