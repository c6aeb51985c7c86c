"""Our controller: predict the accepted tokens of every continuation of this tree, subtract its cost, and take the best.

    value(n, V) = E[accepted_tok | n expansions, V nodes] - rate * (draft_ms(n) + verify_ms(V))

       stop here:  max over V of value(now, V)        continue:  max over n > now and V of value(n, V)

With `plans` it also decides before anything is drafted, and "here" is what needs no forward of the drafter: a plain step, or V
tokens copied from the text, where the drafter copies beside its network (`hybrid`).

After a draft level a small network predicts E[accepted_tok] for every (n, V) that is still possible. Its inputs are free: the
tree's own scores, the accepted tokens of recent cycles, and a probe of the models' hidden states. The cost model turns
predictions into value, so that one network serves any hardware.

The papers maximise E[L / T]; throughput is E[L] / E[T], and its maximum is that of E[L] - rate * E[T] at the achieved rate.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from specdec.core.records import EXTEND, PLAN, SIZE, Cycle, Question
from specdec.core.tree_config import CopiedTree, Plan, TreeConfig, pool_size
from specdec.errors import SpecdecError, check_fields
from specdec.policies.base import Config, Learned, as_array, check_width, repetitions, tree_of

SIZES = (0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 20, 26, 34, 44, 59)
# Hidden states that a policy may read: of the target at the last accepted token, of the drafter at the root.
PROBES = {
    "none": (),
    "target": ("features",),
    "draft": ("draft_state",),
    "both": ("features", "draft_state"),
}
_LEAST = np.float32(-2.0)  # a fifth of the lowest log-probability that is distinguished
# What a policy knows before a tree is drafted: five numbers of the last cycles, then what it may see besides.
HISTORY, SURPRISE, MATCHED = 5, 5, (6, 7)
SEES = {"surprise": (SURPRISE,), "copies": MATCHED}
NO_TREE = TreeConfig(1, 0, 1)  # a plain step


class AcceptanceModel:
    """The network: tanh probe of the features, one hidden ReLU layer, E[accepted_tok] for all expansions x sizes.

    arrays: probe.weight [P, F], probe.bias [P], hidden.weight [M, I + P], hidden.bias [M], out.weight [(D + 1) * S, M],
    out.bias. Inputs are standardised inside the first layers' weights.
    """

    NAMES = ("probe.weight", "probe.bias", "hidden.weight", "hidden.bias", "out.weight", "out.bias")

    def __init__(self, arrays: dict[str, np.ndarray], levels: int, sizes: int):
        self._stored = stored = {
            name: np.ascontiguousarray(arrays[name], dtype=np.float32) for name in self.NAMES
        }
        self.probe_weight, self.probe_bias = stored["probe.weight"], stored["probe.bias"]
        split = stored["hidden.weight"].shape[1] - len(self.probe_bias)
        self.tree_weight = np.ascontiguousarray(stored["hidden.weight"][:, :split])
        self.state_weight = np.ascontiguousarray(stored["hidden.weight"][:, split:])
        self.hidden_bias, self.shape, self.width = stored["hidden.bias"], (levels, sizes), split
        self.out_weight, self.out_bias = (
            stored["out.weight"],
            stored["out.bias"].reshape(self.shape),
        )

    def state(self, features: np.ndarray | None) -> np.ndarray:
        """The hidden state's contribution to the hidden layer, once per cycle. features [F] or [B, F] -> [M] or [B, M]."""
        if features is None:
            return self.hidden_bias
        check_width("ValuePolicy", features.shape[-1], self.probe_weight.shape[1])
        probed = np.tanh(features @ self.probe_weight.T + self.probe_bias)
        state: np.ndarray = probed @ self.state_weight.T + self.hidden_bias
        return state

    def __call__(
        self, inputs: np.ndarray, state: np.ndarray, first: int = 0, base: np.ndarray | None = None
    ) -> np.ndarray:
        """inputs [..., I], state [..., M] -> E[accepted_tok] float32 [..., D + 1 - first, S] from `first` expansions on.

        base [D + 1, S]: replaces the output's bias.
        """
        hidden = np.maximum(inputs @ self.tree_weight.T + state, 0)
        levels, sizes = self.shape
        answer: np.ndarray = hidden @ self.out_weight[first * sizes :].T
        answer = answer.reshape(*hidden.shape[:-1], levels - first, sizes)
        answer += (self.out_bias if base is None else base)[first:]
        return answer

    def arrays(self) -> dict[str, np.ndarray]:
        return self._stored


class TreeInputs:
    """The network's inputs from a growing tree, for training (batches) and decoding. Inputs [I], in this order:

        children   scores of the two likeliest children of every node of the newest beam
        masses     per level, the summed path probabilities of its candidates
        bests      per level, the largest of them
            level      one-hot, the expansions so far
        sizes      per size above 0, the summed path probabilities of so many best candidates: the drafter's E[accepted_tok]
        context    context_tok / 500
        copied     with `plans`, per size above 0, the summed probabilities of so many best copies
        history    see `history_after`; with `sees`, also how far the drafter's forecasts were off, and the text's repetitions

    The cost of an update is numpy's call overhead, so there are few calls.
    """

    def __init__(
        self,
        top_k: int,
        most_expansions: int,
        sizes: tuple[int, ...],
        beam: tuple[int, ...] = (),
        sees: tuple[str, ...] = (),
        plans: bool = False,
    ):
        self._known = [*range(HISTORY), *(number for name in sees for number in SEES[name])]
        self.top_k, self.before, depths = top_k, int(plans), most_expansions + 1
        self.levels = depths + self.before  # with `plans` the first is that before the root pass
        self.widths = TreeConfig(1, most_expansions, top_k, beam=beam)
        counted = np.array([size for size in sizes if size > 0])  # zero nodes have no mass
        self._children = min(2, top_k)
        newest = max(self._children * self.widths.widest, top_k)
        widths = (
            newest,
            depths,
            depths,
            self.levels,
            len(counted),
            1,
            len(counted) * plans,
            len(self._known),
        )
        ends = np.cumsum(widths).tolist()
        self.size, self._newest, self._masses, self._bests = ends[-1], ends[0], ends[0], ends[1]
        self._copied, self._counted = slice(ends[5], ends[6]), counted
        self._level, self._sizes, self._context = (
            slice(ends[2], ends[3]),
            slice(ends[3], ends[4]),
            ends[4],
        )
        self._blank = np.zeros(self.size, np.float32)
        self._blank[: self._newest] = _LEAST
        self._one_hot = np.eye(self.levels, dtype=np.float32)
        self._pools = [pool_size(n, top_k, beam) for n in range(depths)]
        self._starts = np.array([0, *self._pools[:-1]])
        self._most = int(counted.max(initial=1))
        self._places = [
            np.minimum(counted, pool) - 1 for pool in self._pools
        ]  # the pool may be smaller than a size

    def begin(
        self,
        context_tok: Any,
        history: np.ndarray,
        out: np.ndarray | None = None,
        copied: Any = None,
    ) -> np.ndarray:
        """Inputs of a tree before its first update, in `out` where it is given. context_tok [...], history [..., 8].

        copied: with `plans`, scores [..., N] of the copies, best first; -inf for none.
        """
        out = np.empty((*history.shape[:-1], self.size), np.float32) if out is None else out
        out[...] = self._blank
        out[..., self._context] = np.asarray(context_tok, np.float32) / 500
        out[..., -len(self._known) :] = history[..., self._known]
        if self.before:
            out[..., self._level] = self._one_hot[0]
            if (offered := np.shape(copied)[-1]) > 0:
                masses = np.cumsum(np.exp(np.asarray(copied, np.float32)), axis=-1)
                out[..., self._copied] = masses.take(
                    np.minimum(self._counted, offered) - 1, axis=-1
                )
        return out

    def update(self, inputs: np.ndarray, scores: np.ndarray, expansions: int) -> np.ndarray:
        """Enter the information in scores float32 [..., pool after `expansions`], and return the inputs.

        inputs [..., I]: from `begin`, or from an earlier update of the same tree.
        """
        end, begin = expansions + 1, self._starts[expansions]
        chances, starts = np.exp(scores), self._starts[:end]
        inputs[..., self._masses : self._masses + end] = np.add.reduceat(chances, starts, axis=-1)
        inputs[..., self._bests : self._bests + end] = np.maximum.reduceat(chances, starts, axis=-1)
        inputs[..., self._level] = self._one_hot[self.before + expansions]
        newest, count = scores[..., begin:], self.top_k
        if expansions:
            nodes = self.widths.beam_at(expansions - 1)
            by_node = newest.reshape(*newest.shape[:-1], nodes, self.top_k)[..., : self._children]
            count = nodes * self._children
            newest = by_node.reshape(*newest.shape[:-1], count)
            if count < self._newest:  # a narrower level than an earlier one
                inputs[..., count : self._newest] = _LEAST
        inputs[..., :count] = np.maximum(newest * np.float32(0.2), _LEAST)
        inputs[..., self._sizes] = self.size_masses(chances, expansions)
        return inputs

    def size_masses(self, chances: np.ndarray, expansions: int) -> np.ndarray:
        """Summed path probabilities of the V best candidates, for every V above 0. chances [..., pool] -> [..., S]."""
        most = min(self._most, chances.shape[-1])
        if chances.shape[-1] > 4 * most:  # a large pool: drop what no size reaches before sorting
            chances = np.partition(chances, -most, axis=-1)[..., -most:]
        best = np.sort(chances, axis=-1)[..., : -most - 1 : -1]
        masses: np.ndarray = np.cumsum(best, axis=-1).take(self._places[expansions], axis=-1)
        return masses


def history_after(
    history: np.ndarray, accepted_tok: int, expansions: int, expected_tok: float = 0.0
) -> np.ndarray:
    """The eight numbers of history after one more cycle; the last two belong to the next one and are filled in there.

    Accepted tokens of the last two cycles and their slow mean (tokens / 8 each), whether the last cycle was limited by its
    depth, 1 once there is any history, and the slow mean of accepted minus `expected_tok` (0: nothing was verified): the
    summed probabilities of the verified nodes, which is the drafter's own forecast.
    """
    slow = 0.8 * history[2] + 0.2 * accepted_tok / 8 if history[4] else accepted_tok / 8
    surprise = (
        0.8 * history[SURPRISE] + 0.2 * (accepted_tok - expected_tok)
        if expected_tok
        else history[SURPRISE]
    )
    return np.array(
        [accepted_tok / 8, history[0], slow, accepted_tok > expansions, 1.0, surprise, 0, 0],
        np.float32,
    )


def expected_tok(question: Question, nodes: int) -> float:
    """The drafter's own forecast of accepted tokens: the summed probabilities of the `nodes` best candidates."""
    return float(np.sort(np.exp(as_array(question.scores)))[-nodes:].sum())


NOTHING = np.zeros(HISTORY + 3, np.float32)  # the history of a text's first cycle


def seen_now(history: np.ndarray, question: Question, sees: tuple[str, ...]) -> np.ndarray:
    """The history with the text's repetitions at this cycle, where a policy looks at them."""
    return (
        np.concatenate((history[: MATCHED[0]], repetitions(question)))
        if "copies" in sees
        else history
    )


@dataclasses.dataclass
class ValueSettings:
    """The trees of our controller. most_expansions: at most the recording's depth. beam: nodes expanded per level, if other than
    `top_k` (see TreeConfig)."""

    top_k: int = 6
    most_expansions: int = 12
    sizes: tuple[int, ...] = SIZES
    beam: tuple[int, ...] = ()
    sees: tuple[str, ...] = ()  # names of SEES, beside the tree's scores and the history
    plans: bool = False  # decides before the root pass too: a plain step, copies alone, or a tree


@dataclasses.dataclass
class ValuePolicy(ValueSettings, Learned):
    """Answers EXTEND and SIZE on a beam of `top_k`, and PLAN with `plans`. network: an AcceptanceModel; call `price` before use.

    first_evaluation: expansions before the network's first run; `evaluations` counts its runs, as they cost time.
    stride: it runs next so many levels before the best known stop, or at the next level if that is later.
    continue_bonus_tok: added to the value of continuing: a later evaluation will know more, which the prediction ignores.
    probe: the hidden states it reads, a name of PROBES. rate: value of time in tokens per ms.
    follow: weight of the newest cycle in how far forecasts were off in this text, copies and trees apart; 0 never corrects any.
    verify_ms [S], verify_per_tok [S], expand_*, root_*: from the cost model named in `priced_for`.
    """

    first_evaluation: int = 0
    stride: int = 2
    continue_bonus_tok: float = 0.0
    probe: str = "draft"
    follow: float = 0.0
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
        assert self.probe in PROBES, self.probe
        if self.plans and "draft_state" in PROBES[self.probe]:
            raise SpecdecError(
                'before a tree there is no state of the drafter; with plans=True use probe="none" or "target".'
            )
        self.asks = frozenset({EXTEND, SIZE, *((PLAN,) if self.plans else ())})
        self.plan = self.limits = tree_of(
            max(self.sizes), self.most_expansions, self.top_k, self.beam
        )
        self.inputs = TreeInputs(
            self.top_k, self.most_expansions, self.sizes, self.plan.beam, self.sees, self.plans
        )
        self.observation_size = self.inputs.size
        self._smaller = np.array(self.sizes[:-1])  # of each size above the first, the one before it
        self.evaluations = 0
        self._row = np.zeros(self.inputs.size, np.float32)
        self._biased: tuple[Any, np.ndarray] | None = None
        if self.verify_ms:
            self._time_at_zero, self._time_per_tok = self._time_tables()
        self.reset()

    def price(self, costs: Any, rate: float) -> ValuePolicy:
        """The same predictions with the times of `costs` (a CostModel) and a `rate` in tokens per ms."""
        at_zero, at_one = (
            costs.verify_ms(np.array(self.sizes), 0),
            costs.verify_ms(np.array(self.sizes), 1),
        )
        rows = self.plan.beam_at(
            self.most_expansions
        )  # later levels continue from the last width of the beam
        expand = float(costs.expand_ms(self.top_k, 0, rows))
        expanding = dict(
            expand_ms=expand, expand_per_tok=float(costs.expand_ms(self.top_k, 1, rows)) - expand
        )
        verifying = dict(
            verify_ms=tuple(at_zero.tolist()), verify_per_tok=tuple((at_one - at_zero).tolist())
        )
        root = float(costs.root_ms(self.top_k, 0))
        rooted = dict(root_ms=root, root_per_tok=float(costs.root_ms(self.top_k, 1)) - root)
        return self.with_settings(
            rate=float(rate), **verifying, **expanding, **rooted, priced_for=costs.name
        )

    def reset(self) -> None:
        self.history, self._expected_tok = NOTHING, 0.0
        self._gained, self._promised, self._forecast = np.ones(2), np.ones(2), (0, 0.0)
        self._next_cycle()

    def _next_cycle(self) -> None:
        self._state: np.ndarray | None = None
        self._evaluate_at, self._decided_at, self._decided = self.first_evaluation, -1, 0

    def answer(self, question: Question) -> Any:
        if question.kind == PLAN:
            return self._planned(question)
        if question.kind == SIZE:
            if isinstance(question.plan, CopiedTree):
                return min(question.plan.verify_nodes, question.largest)
            if self._decided_at != question.expansions:
                self._evaluate(question)
            nodes = min(self._decided, question.largest)
            if "surprise" in self.sees and nodes:
                self._expected_tok = expected_tok(question, nodes)
            return nodes
        if question.expansions < self._evaluate_at:
            return True
        best_here, best_later, when = self._evaluate(question)
        if best_later + self.continue_bonus_tok <= best_here:
            return False
        self._evaluate_at = max(question.expansions + 1, when - self.stride)
        return True

    def observe(self, cycle: Cycle) -> None:
        self.history = history_after(
            self.history, cycle.accepted_tok, cycle.expansions, self._expected_tok
        )
        self._expected_tok = 0.0
        if self.follow and (tokens := self._forecast[1]) > 0:
            kind, keep = self._forecast[0], 1 - self.follow
            self._gained[kind] = keep * self._gained[kind] + self.follow * cycle.accepted_tok
            self._promised[kind] = keep * self._promised[kind] + self.follow * tokens
        self._next_cycle()

    def _planned(self, question: Question) -> Plan:
        """Before anything is drafted: a plain step, copies alone, or the tree."""
        self._begin(question)
        here, later, when = self._valued(-1, len(question.copied_scores))  # type: ignore[arg-type]  # an array
        if later + self.continue_bonus_tok > here:
            self._evaluate_at = max(self.first_evaluation, when - self.stride)
            return self.plan
        nodes = min(
            self._decided, self.limits.verify_nodes
        )  # a small tree may hold fewer nodes than the largest size
        return CopiedTree(nodes + 1) if nodes else NO_TREE

    def _evaluate(self, question: Question) -> tuple[float, float, int]:
        """Value of stopping here, of the best later stop, and that stop's expansions; stores the size."""
        if self._state is None:
            self._begin(question)
        self.inputs.update(self._row, as_array(question.scores), question.expansions)
        return self._valued(question.expansions)

    def _valued(self, now: int, offered: int = 0) -> tuple[float, float, int]:
        """As `_evaluate`, from the inputs in `_row`. now: expansions, -1 before the root pass, where so many copies are offered."""
        self.evaluations += 1
        first = now + self.inputs.before
        self.outputs = value = self.network(self._row, self._state, first, self._base)
        if self.follow:
            tokens = value - self._base[first:] + self.network.out_bias[first:]
            copies, trees = (self._gained / self._promised).clip(0.5, 2.0) - 1
            value[:1] += (copies if now < 0 else trees) * tokens[:1]
            value[1:] += trees * tokens[1:]
        if now < 0:
            value[0, 1:][self._smaller >= offered] = -np.inf
        here = int(value[0].argmax())
        self._decided_at, self._decided = now, self.sizes[here]
        if self.follow:
            self._forecast = int(now >= 0), float(tokens[0, here])
        if now == self.most_expansions:
            return float(value[0, here]), -np.inf, now
        later = int(value[1:].argmax())
        return (
            float(value[0, here]),
            float(value[1:].flat[later]),
            now + 1 + later // len(self.sizes),
        )

    def _begin(self, question: Question) -> None:
        """The constants of a cycle: the hidden state's contribution, the costs at this context, the fixed inputs."""
        if not self.verify_ms:
            raise SpecdecError("this ValuePolicy has no costs yet; call price(costs, rate) first.")
        states = [as_array(getattr(question, name)) for name in PROBES[self.probe]]
        seen = np.concatenate(states) if states else None
        if seen is not None and seen.size != (reads := self.network.probe_weight.shape[1]):
            raise SpecdecError(
                f"this ValuePolicy reads a hidden state of {reads}, but the pair gives {seen.size}."
            )
        self._state = self.network.state(seen)
        if self._biased is None or self._biased[0] is not self.network:
            self._biased = self.network, self._time_at_zero + self.network.out_bias
        self._base: np.ndarray = self._biased[1] + question.context_tok * self._time_per_tok
        seen_here = seen_now(self.history, question, self.sees)
        self.inputs.begin(
            question.context_tok,
            seen_here,
            self._row,
            question.copied_scores if self.plans else None,
        )

    def _time_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Terms that turn the network's output into a value: at context 0, and their slope per context token.

        -rate * time of every (expansions, size), -inf if a size exceeds the pool. float32 [D + 1, S] each; with `plans` after the
        row of what needs no root pass. The time of levels already drafted is left out: it is the same for all options.
        """
        ahead = np.arange(self.most_expansions + 1)[:, None]
        pools = np.array([pool_size(n, self.top_k, self.plan.beam) for n in range(len(ahead))])[
            :, None
        ]
        allowed = np.where(
            np.array(self.sizes) <= pools + self.plans * max(self.sizes), 0.0, -np.inf
        )  # copies join them
        at_zero = allowed - self.rate * (ahead * self.expand_ms + np.array(self.verify_ms))
        per_tok = -self.rate * (ahead * self.expand_per_tok + np.array(self.verify_per_tok))
        if self.plans:
            undrafted = [
                -self.rate * np.array(part)[None] for part in (self.verify_ms, self.verify_per_tok)
            ]
            at_zero = np.concatenate((undrafted[0], at_zero - self.rate * self.root_ms))
            per_tok = np.concatenate((undrafted[1], per_tok - self.rate * self.root_per_tok))
        return at_zero.astype(np.float32), per_tok.astype(np.float32)

    def build_network(self, arrays: dict[str, np.ndarray]) -> AcceptanceModel:
        return AcceptanceModel(arrays, self.inputs.levels, len(self.sizes))


@dataclasses.dataclass(unsafe_hash=True)
class ValueConfig(Config, ValueSettings):
    """The trees of our controller, and how its network learns; the defaults train in about a minute on one core."""

    name: str = "ours"
    probe: str | None = None  # a name of PROBES; None: "draft" if recorded, else "target"
    hidden: int = 64
    probe_width: int = 8
    steps: int = 2000  # at most: the weights with the lowest loss on held-out turns are kept
    batch: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 3e-2
    dropout: float = 0.2  # of features and hidden units: few prompts, many dimensions
    noise: float = 0.3  # on standardised features
    rounds: int = 2  # of collecting cycle starts; later rounds use the policy itself
    detours: int = 3  # replays per round that deviate from the policy's path at random
    ensemble: int = 3  # networks trained separately and averaged
    distil: bool = (
        True  # train one network of the same size on the ensemble's mean, and use it alone
    )
    held_out_frac: float = 0.15
    patience: int = (
        4  # held-out losses without improvement before training stops; one per 100 steps
    )

    def __post_init__(self) -> None:
        counts = dict.fromkeys(
            ("top_k", "most_expansions", "steps", "batch", "rounds", "ensemble"), (1, math.inf)
        )
        check_fields(self, dropout=(0.0, 1.0), **counts)


OURS = ValueConfig()
