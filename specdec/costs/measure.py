"""From timed cycles to a latency model: medians per setting, one slope per table, monotone fits, errors on held-out rows.

Every time is modelled as base(setting) + (a + b * setting) * context_tok with a, b >= 0: attending to the context costs
more with more rows. Knows nothing about models or clocks; `calibration` measures the rows.

The measurements of a calibration: cycles of dealt shapes, plain steps, questions and whole turns, through the engine.

One job is a few measurements at one setting; `calibration` decides when which runs, `fitting` what follows from them.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch

from specdec.core.clock import Clock
from specdec.core.cycle import run_cycle
from specdec.core.engine import LiveEngine
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.records import SIZE
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.core.verification import Picker
from specdec.policies.base import Network


@dataclass
class Timings:
    """Rows of a calibration, each a dict. place: index of the context a row was measured at.

    cycles: place, context_tok, top_k, expansions, verify_nodes, held, first (of its turn), and the stretches root_ms,
    expand_ms (median over all expansions but the last), last_ms (last expansion and choosing the nodes), verify_ms,
    rest_ms, total_ms; NaN where a cycle has no such stretch. turns: prompt_tok, prefill_ms. steps: place, context_tok, ms.
    questions: name, ms. wholes: prompt_tok, total_ms, cycles (list of (top_k, expansions, verify_nodes, context_tok)).
    """

    cycles: list[dict] = field(default_factory=list)
    turns: list[dict] = field(default_factory=list)
    steps: list[dict] = field(default_factory=list)
    questions: list[dict] = field(default_factory=list)
    wholes: list[dict] = field(default_factory=list)


# ---- from probing ----------------------------------------


NETWORKS = ("mlp-128-1024", "mlp-1268-1024-256")  # LTD's depth and size policies: inputs, then hidden layers
ACTIONS = 24
GROWTH_TOK = 96  # a turn is begun anew after so many tokens, so that contexts stay where they were asked
BLOCK, HELD_ONE_IN, STEPS, ASKED, WHOLE_TOK = 12, 5, 8, 4, 32


class Recorder(Clock):
    """A clock that also keeps when each lap of a cycle was marked: the stretches between marks leave nothing out."""

    def start(self) -> None:
        super().start()
        self.begin, self.marks = self._begin, []

    def mark(self) -> None:
        super().mark()
        self.marks.append(self._mark)

    def stretches(self, expansions: int, total_ms: float) -> dict[str, float]:
        """Milliseconds of root, expansions, verification and the rest of the cycle that has just ended."""
        at = 1e3 * np.array([self.begin, *self.marks[1:]]) - 1e3 * self.begin  # the root begins with the cycle
        root, *levels, verify, rest = np.diff(np.append(at, total_ms))
        last = levels[-1] if expansions else np.nan
        usual = float(np.median(levels[:-1])) if expansions > 1 else np.nan
        # Without an expansion the root's stretch ends with choosing nodes, so it cannot be told from them.
        return {
            "root_ms": root if expansions else np.nan,
            "expand_ms": usual,
            "last_ms": last,
            "verify_ms": verify,
            "rest_ms": rest,
        }


@dataclass
class Shapes:
    """Deals trees: rarely seen nodes and widths first, so that a short calibration sees every one."""

    top_ks: tuple[int, ...]
    nodes: tuple[int, ...]
    depth: int
    draw: random.Random

    def __post_init__(self):
        self.seen = Counter()

    @property
    def limits(self) -> TreeConfig:
        return TreeConfig(self.nodes[-1] + 1, self.depth, self.top_ks[-1])

    def grid(self, place: int) -> TreeConfig:
        """A tree of the grid for the context `place`."""
        nodes = self._rarest(self.nodes, (place, "nodes"))
        top_k = self._rarest([k for k in self.top_ks if pool_size(self.depth, k) >= nodes], (place, "top_k"))
        fewest = max(2, -(-(nodes - top_k) // top_k**2))
        return TreeConfig(nodes + 1, self.draw.randint(fewest, self.depth), top_k)

    def free(self) -> TreeConfig:
        """Any tree within the limits, on the grid or off it."""
        top_k, depth = self.draw.randint(self.top_ks[0], self.top_ks[-1]), self.draw.randint(0, self.depth)
        most = min(self.nodes[-1], pool_size(depth, top_k))
        return TreeConfig(self.draw.randint(0, most) + 1, depth, top_k)

    def _rarest(self, values, where):
        fewest = min(self.seen[where, value] for value in values)
        value = self.draw.choice([value for value in values if self.seen[where, value] == fewest])
        self.seen[where, value] += 1
        return value

    def complete(self, places: int) -> bool:
        """Whether every number of nodes and every width was dealt in every context."""
        wanted = [("nodes", self.nodes), ("top_k", self.top_ks)]
        return all(self.seen[(p, what), v] for p in range(places) for what, values in wanted for v in values)


class Asking(Static):
    """Asks SIZE and thinks about it with a network of the given sizes, or without one."""

    asks = frozenset({SIZE})

    def __init__(self, plan: TreeConfig, name: str, device):
        super().__init__(plan.total_tokens, plan.depth, plan.top_k)
        sizes = [int(size) for size in name.split("-")[1:]] + [ACTIONS] if name != "none" else []
        draw = np.random.default_rng(0)
        weights = [draw.normal(0, n**-0.5, (m, n)) for n, m in zip(sizes, sizes[1:], strict=False)]
        self.network = Network(weights, [np.zeros(size) for size in sizes[1:]]) if sizes else None
        self.observed = torch.zeros(sizes[0], device=device) if sizes else None

    def answer(self, question):
        if self.network is not None:
            self.network(self.observed.float().cpu().numpy()).argmax()
        return min(self.plan.verify_nodes, question.largest)


class Jobs:
    """The jobs of a calibration, each a few measurements at one setting; `timings` collects the rows."""

    def __init__(self, pair: Pair, shapes: Shapes, contexts: tuple[int, ...], prompts: list, seed: int, now=None):
        self.pair, self.shapes, self.contexts, self.timings = pair, shapes, contexts, Timings()
        self.clock = Recorder(pair.target.device)
        self.clock.now = now or self.clock.now
        self.draw = random.Random(seed + 1)
        self.prompts = prompts
        self.picker = Picker.from_settings(0.0, 0)
        self.engines, self.plain = {}, {}

    def round(self) -> list:
        """One round in random order."""
        places = range(len(self.contexts))
        jobs = [(self.cycles, place) for place in places for _ in range(2)] + [(self.steps, place) for place in places]
        jobs += [(self.asking, name) for name in ("none", *NETWORKS)] + [(self.whole, None)] * 2
        return self.draw.sample(jobs, len(jobs))

    @property
    def complete(self) -> bool:
        """Whether every setting was measured in every context, some of them held out."""
        held = any(row["held"] for row in self.timings.cycles)
        return held and self.shapes.complete(len(self.contexts))

    def forget(self) -> None:
        """Drop what was measured so far, and the turns that were opened for it."""
        self.timings, self.shapes.seen = Timings(), Counter()
        self.engines.clear()
        self.plain.clear()

    def prompt(self, tokens: int) -> list[int]:
        """The last `tokens` ids of some prompts in a row."""
        ids: list[int] = []
        while len(ids) < tokens:
            ids = self.draw.choice(self.prompts) + ids
        return ids[-tokens:]

    def engine(self, prompt: list[int], new_tok: int, limits: TreeConfig) -> tuple[LiveEngine, float]:
        """A turn of `prompt` that has read it, and the milliseconds that took."""
        ids = torch.tensor(prompt, device=self.pair.target.device)
        self.clock.wait()
        begin = self.clock.now()
        engine = LiveEngine(self.pair, ids, new_tok, limits, self.picker, (), self.clock)
        engine.prefill()
        self.clock.wait()
        return engine, 1e3 * (self.clock.now() - begin)

    def cycles(self, place: int) -> None:
        with self.inference():
            for _ in range(BLOCK):
                engine = self.engines.get(place)
                if first := engine is None or engine.finished:
                    prompt = self.prompt(self.contexts[place])
                    engine, prefill_ms = self.engine(prompt, GROWTH_TOK, self.shapes.limits)
                    self.engines[place] = engine
                    self.timings.turns.append({"prompt_tok": len(prompt), "prefill_ms": prefill_ms})
                held = not first and self.draw.randrange(HELD_ONE_IN) == 0
                tree = self.shapes.free() if held else self.shapes.grid(place)
                row = run_cycle(engine, Static.of(tree))
                seen = {
                    part: getattr(row, part)
                    for part in ("context_tok", "top_k", "expansions", "verify_nodes", "total_ms")
                }
                parts = self.clock.stretches(row.expansions, row.total_ms)
                self.timings.cycles.append({"place": place, "held": held, "first": first, **seen, **parts})

    def steps(self, place: int) -> None:
        target, now = self.pair.target, self.clock.now
        with target.inference(taps=False):
            if place not in self.plain or self.plain[place][1] + STEPS >= len(self.plain[place][0]):
                self.plain[place] = self._plain_turn(self.prompt(self.contexts[place]))
            buffer, length, cache = self.plain[place]
            for _ in range(STEPS):
                self.clock.wait()
                begin = now()
                rows = target.forward(buffer[length : length + 1], cache, last_only=True)
                buffer[length + 1] = self.picker.pick(rows.logits[-1], buffer[: length + 1])
                self.clock.wait()
                self.timings.steps.append({"place": place, "context_tok": length, "ms": 1e3 * (now() - begin)})
                length += 1
            self.plain[place] = (buffer, length, cache)

    def _plain_turn(self, prompt: list[int]):
        target = self.pair.target
        buffer = torch.zeros(len(prompt) + GROWTH_TOK, dtype=torch.long, device=target.device)
        buffer[: len(prompt)] = torch.tensor(prompt)
        cache = target.new_cache(len(buffer))
        rows = target.forward(buffer[: len(prompt)], cache, last_only=True)
        buffer[len(prompt)] = self.picker.pick(rows.logits[-1], buffer[: len(prompt)])
        return buffer, len(prompt), cache

    def asking(self, name: str) -> None:
        top_k = self.shapes.top_ks[-1] if self.shapes.top_ks[-1] < 4 else 4
        policy = Asking(TreeConfig(1 + top_k, 1, top_k), name, self.pair.target.device)
        with self.inference():
            engine, _ = self.engine(self.prompt(self.contexts[0]), 64, policy.limits)
            for _ in range(ASKED):
                self.timings.questions.append({"name": name, "ms": run_cycle(engine, policy).policy_ms})

    def whole(self, _) -> None:
        """A turn with one static tree from its prompt to its last token, held out as a whole."""
        tree = self.shapes.free()
        prompt = self.draw.choice(self.prompts)[-self.contexts[-1] :]
        with self.inference():
            self.clock.wait()
            begin, rows = self.clock.now(), []
            engine, _ = self.engine(prompt, WHOLE_TOK, tree)
            policy = Static.of(tree)
            while not engine.finished:
                row = run_cycle(engine, policy)
                rows.append((row.top_k, row.expansions, row.verify_nodes, row.context_tok))
            total_ms = 1e3 * (self.clock.now() - begin)
        self.timings.wholes.append({"prompt_tok": len(prompt), "total_ms": total_ms, "cycles": rows})

    def inference(self) -> ExitStack:
        stack = ExitStack()
        stack.enter_context(self.pair.target.inference())
        stack.enter_context(self.pair.drafter.inference())
        return stack
