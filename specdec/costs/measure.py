"""Measurements of a calibration: cycles, plain steps, questions and whole turns, through the engine that also decodes.

A job is a few measurements at one setting. Jobs run in random order, so that a slow phase of the machine affects all settings
alike. `calibrate` fits a cost model to the rows.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from tqdm.auto import tqdm

from specdec.core.clock import Clock
from specdec.core.cycle import run_cycle
from specdec.core.engine import LiveEngine
from specdec.core.pair import Pair
from specdec.core.policy import Policy, Static
from specdec.core.records import SIZE
from specdec.core.tree_config import TreeConfig, plain_beam, pool_size
from specdec.core.verification import Picker
from specdec.errors import warn

SHAPE = (
    "top_k",
    "expansions",
    "verify_nodes",
    "context_tok",
    "rows",
)  # the time of a cycle depends on these
GROWTH_TOK = (
    96  # a turn restarts after this many tokens, so that the context stays near its setting
)
# Caches recover slowly from larger work: after a prompt or a tree of hundreds of nodes, a small tree takes up to a fifth longer
# for about eight cycles. In decoding a tree follows similar ones, so a job measures rows of one tree among trees of similar
# size, and drops the first cycles of a row; not all slow ones, since a turn has some too. Trees up to so many nodes: cycles
# dropped and kept of a row. The smallest trees, and plain steps, occur in a controller's turn now and then between others.
ROWS = {0: (0, 2), 3: (1, 3), 8: (3, 5), 32: (2, 2), None: (0, 1)}
BANDS = (8, 32, None)  # upper limits, in nodes, of the bands of similar trees
STEPS, SETTLING, QUESTIONS = 30, 2, 4  # per job: plain steps kept and dropped, questions
WIDEST = 4  # children and rows for each node of a tree: small trees do not come from wide drafts
HELD_ONE_IN = 5  # one cycle in so many is held out of the fit
TURN_TOK = 32  # length of the turns held out as a whole
CHECKED_TREES = 10  # different trees in these turns
PIECE_S = 1.0  # a calibration that misses a setting continues in pieces of this
BUSY_FRAC = 0.9  # of a core: with less, other processes slowed this one down
# Kernels work in blocks of rows, the root being one: the time jumps after 7, 15, 31, 63, ... nodes. Every size up to 16 is
# measured, where the best trees lie; beyond it both sides of every step, so that no line crosses one.
NODES = (
    *range(18),
    *(
        20,
        23,
        24,
        28,
        31,
        32,
        40,
        47,
        48,
        59,
        63,
        64,
        80,
        95,
        96,
        112,
        127,
        128,
        159,
        160,
        191,
        192,
        223,
        224,
        240,
    ),
)


@dataclass(frozen=True)
class CalibrateConfig:
    """What `calibrate` measures, and how long."""

    seconds: float = 45.0  # longer only if some setting is still unmeasured
    seed: int = 0
    contexts: tuple[int, ...] | None = (
        None  # prompt lengths; None: three, up to 900 tokens or the target's limit
    )
    top_ks: tuple[int, ...] | None = (
        None  # beam widths; None: eight, as far as the vocabulary reaches
    )
    nodes: tuple[int, ...] = NODES  # sizes of the verified trees
    depth: int = 12  # expansions run from 1 to this
    prompts: list[list[int]] | None = (
        None  # token ids; None: texts of embedded suites, random ids without a tokenizer
    )
    cpu_time: bool = (
        False  # processor time in place of the wall clock, for one thread on a busy CPU
    )
    name: str | None = None  # of the model; None: the pair's and its dtype
    progress: bool = True


@dataclass
class Timings:
    """Rows of a calibration, each a dict. place: index of its context.

    first_ms is the first expansion, expand_ms the mean of those between it and the last, last_ms the last one and choosing
    the nodes. A stretch that a cycle lacks is NaN.
    """

    # place, context_tok, top_k, rows (of an expansion), expansions, verify_nodes, held (out of the fit), first (of its turn),
    # settled (after similar ones), `stretches`, total_ms
    cycles: list[dict] = field(default_factory=list)
    turns: list[dict] = field(default_factory=list)  # prompt_tok, prefill_ms
    steps: list[dict] = field(
        default_factory=list
    )  # place, context_tok, ms: means of a row of plain steps
    questions: list[float] = field(default_factory=list)  # ms
    # tree, prompt_tok, total_ms, later_ms (of all cycles but the first), cycles [(SHAPE's numbers), ...]
    held_turns: list[dict] = field(default_factory=list)


class MarkedClock(Clock):
    """A clock that also keeps the time of each mark, so that the stretches between marks cover the whole cycle."""

    def start(self) -> None:
        super().start()
        self.begin, self.marks = self._begin, []

    def mark(self) -> None:
        super().mark()
        self.marks.append(self._mark)

    def stretches(self, expansions: int, total_ms: float) -> dict[str, float]:
        """Milliseconds of root, expansions, verification and the rest of the cycle that just ended."""
        at = [
            self.ms_between(self.begin, mark) for mark in (self.begin, *self.marks[1:])
        ]  # the root begins the cycle
        *drafting, verify, rest = np.diff(np.append(at, total_ms))  # a plain step drafts nothing
        root, levels = drafting[:1], drafting[1:]
        # Without an expansion the root's stretch includes choosing nodes; they cannot be separated.
        return {
            "root_ms": root[0] if expansions else np.nan,
            "first_ms": levels[0] if expansions > 1 else np.nan,
            "expand_ms": float(np.mean(levels[1:-1])) if expansions > 2 else np.nan,
            "last_ms": levels[-1] if expansions else np.nan,
            "verify_ms": verify,
            "rest_ms": rest,
        }


@dataclass
class TreeSampler:
    """Draws trees; rare node counts and widths first, so that a short calibration covers all of them."""

    top_ks: tuple[int, ...]
    nodes: tuple[int, ...]
    depth: int
    draw: random.Random

    def __post_init__(self):
        self.dealt = Counter()

    @property
    def limits(self) -> TreeConfig:
        return TreeConfig(self.nodes[-1] + 1, self.depth, self.top_ks[-1])

    def bands(self) -> list[tuple[int, ...]]:
        """Node counts grouped into bands of similar size, smallest first."""
        highs = [most or self.nodes[-1] for most in BANDS]
        lows = [-1, *highs[:-1]]
        parts = [
            tuple(n for n in self.nodes if low < n <= high)
            for low, high in zip(lows, highs, strict=True)
        ]
        return [part for part in parts if part]

    def grid(self, place: int, among: tuple[int, ...]) -> TreeConfig:
        """A grid tree for the context `place` with one of these node counts."""
        nodes = self._rarest(among, (place, "nodes"))
        if not nodes:  # a plain step: nothing is drafted
            return TreeConfig(1, 0, self.top_ks[0])
        widths = [k for k in self.top_ks if pool_size(self.depth, k) >= nodes]
        top_k = self._rarest([k for k in widths if k <= WIDEST * nodes] or widths, (place, "top_k"))
        narrow = [k for k in self.top_ks if k <= top_k]
        enough = [
            k for k in narrow if pool_size(self.depth, top_k, plain_beam(top_k, (k,))) >= nodes
        ]
        rows = self._rarest(enough, (place, "rows"))
        fewest = max(1, -(-(nodes - top_k) // (top_k * rows)))
        deepest = max(
            fewest, min(self.depth, nodes + 1)
        )  # deeper drafts leave other caches, and are not used
        if min(self.dealt[(place, "top_k"), top_k], self.dealt[(place, "rows"), rows]) == 1:
            # A width's first tree needs an expansion between its first and its last.
            fewest = max(fewest, min(3, deepest))
        return TreeConfig(nodes + 1, self.draw.randint(fewest, deepest), top_k, beam=(rows,))

    def free(self, among: tuple[int, ...] = ()) -> TreeConfig:
        """Any tree within the limits, on or off the grid; with one of these node counts if its shape offers them."""
        top_k, depth = self._like(self.top_ks[0], self.top_ks[-1]), self.draw.randint(0, self.depth)
        beam = plain_beam(top_k, (self.draw.randint(self.top_ks[0], top_k),))
        least, most = (among[0], among[-1]) if among else (1, self.nodes[-1])
        most = min(most, pool_size(depth, top_k, beam))
        return TreeConfig(1 + self._like(max(1, min(least, most)), most), depth, top_k, beam=beam)

    def _like(self, low: int, high: int) -> int:
        """A log-uniform number from low to high, so that all tree sizes are compared."""
        return min(high, int(low * ((high + 1) / low) ** self.draw.random()))

    def _rarest(self, values, where):
        fewest = min(self.dealt[where, value] for value in values)
        value = self.draw.choice([value for value in values if self.dealt[where, value] == fewest])
        self.dealt[where, value] += 1
        return value

    def complete(self, places: int) -> bool:
        """Whether every node count and every width occurred in every context."""
        wanted = [("nodes", self.nodes), ("top_k", self.top_ks), ("rows", self.top_ks)]
        return all(
            self.dealt[(p, what), v]
            for p in range(places)
            for what, values in wanted
            for v in values
        )


class AskingPolicy(Static):
    """Asks SIZE and answers without thinking: measures the cost of a question itself."""

    asks = frozenset({SIZE})

    def answer(self, question):
        return min(self.plan.verify_nodes, question.largest)


def answer_ms(
    pair: Pair, policy: Policy, costs, prompts: list[list[int]], new_tok: int = 48
) -> float:
    """Milliseconds of one answer of `policy` in live decoding, beyond the cost of asking (costs.question_ms).

    Between two answers the models run, so every answer finds realistically cold caches. prompts: token ids. The mean without
    the slowest twentieth of the cycles, which were interrupted.
    """
    spent = []
    with pair.inference():
        for number, prompt in enumerate(prompts):
            ids = torch.tensor(prompt, device=pair.target.device)
            engine = LiveEngine(pair, ids, new_tok, policy.limits, Picker())
            policy.reset()
            engine.prefill()
            while not engine.finished:
                row = run_cycle(engine, policy)
                if row.questions and number:  # the first turn is a warm-up
                    spent.append((row.policy_ms / row.questions, row.policy_ms, row.questions))
    kept = np.array(sorted(spent)[: max(1, len(spent) - len(spent) // 20)])
    return (
        max(0.0, float(kept[:, 1].sum() / kept[:, 2].sum()) - costs.question_ms)
        if len(kept)
        else 0.0
    )


class Measurements:
    """The jobs of a calibration; `timings` collects their rows. config: with contexts, top_ks and nodes filled in."""

    def __init__(self, pair: Pair, config: CalibrateConfig, prompts: list[list[int]]):
        self.pair, self.contexts, self.prompts, self.timings = (
            pair,
            config.contexts,
            prompts,
            Timings(),
        )
        self.trees = TreeSampler(
            config.top_ks, config.nodes, config.depth, random.Random(config.seed)
        )
        self.clock, self.picker = MarkedClock(pair.target.device), Picker()
        self.draw = random.Random(config.seed + 1)
        self.engines, self.plain = {}, {}
        self.checked = [self.trees.free() for _ in range(CHECKED_TREES)]
        self.turns, self.jobs, self.rounds = 0, [], 0
        self.spent_s = self.cpu_s = self.wall_s = (
            0.0  # by the chosen clock, of the processor, by the wall
        )

    def warm_up(self) -> None:
        """One job of each kind, discarded."""
        for job, argument in {
            job.__name__: (job, argument) for job, argument in self.round()
        }.values():
            job(argument)
        self.timings, self.trees.dealt, self.engines, self.plain, self.turns = (
            Timings(),
            Counter(),
            {},
            {},
            0,
        )

    def go_on(self, seconds: float, bar=None) -> None:
        """Run rounds of jobs for so many more seconds. bar: counts the seconds of all calls."""
        begin, cpu, wall = self.clock.now(), time.process_time(), time.perf_counter()
        before, spent = self.spent_s, 0.0
        while spent < seconds:
            self.jobs = self.jobs or self.round()
            job, argument = self.jobs.pop()
            job(argument)
            self.rounds += not self.jobs
            spent = self.clock.now() - begin
            self.spent_s = before + spent
            if bar is not None:
                bar.update(min(bar.total, int(self.spent_s)) - bar.n)
        self.cpu_s += time.process_time() - cpu
        self.wall_s += time.perf_counter() - wall

    def run(self, seconds: float, progress: bool) -> Timings:
        """Use the remaining seconds, and more until every setting is measured."""
        with tqdm(total=round(seconds), desc="calibrate", unit="s", disable=not progress) as bar:
            self.go_on(seconds - self.spent_s, bar)
            while not self.complete():
                self.go_on(PIECE_S, bar)
        share = self.cpu_s / self.wall_s
        if (
            share < BUSY_FRAC
            and self.clock.now is time.perf_counter
            and self.pair.target.device.type == "cpu"
        ):
            why = f"this process had only {share:.0%} of a core while it calibrated, so others slowed it down"
            warn(f"{why}; repeat it on a quiet machine or with cpu_time=True.")
        return self.timings

    def round(self) -> list:
        """One round in random order: (job, its argument)."""
        places = range(len(self.contexts))
        jobs = [(self.cycles, (place, band)) for place in places for band in self.trees.bands()]
        jobs += [
            *((self.steps, place) for place in places),
            (self.questions, 0),
            *[(self.held_turn, None)] * 2,
        ]
        return self.draw.sample(jobs, len(jobs))

    def complete(self) -> bool:
        """Whether a round has ended with every setting measured in every context, some of it held out."""
        drafted = [
            row
            for row in self.timings.cycles
            if row["expansions"] > 2 and row["settled"] and not row["held"]
        ]
        seen = all(
            {row[name] for row in drafted} >= set(self.trees.top_ks) for name in ("rows", "top_k")
        )
        held = any(row["held"] for row in self.timings.cycles)
        return bool(self.rounds) and seen and held and self.trees.complete(len(self.contexts))

    def cycles(self, where: tuple[int, tuple[int, ...]]) -> None:
        """Rows of cycles of random trees in the open turn of a context. where: its place, a band's node counts."""
        place, nodes = where
        with self.pair.inference():
            for _ in nodes:  # every size once, plus the held-out ones
                self._row(place, self.trees.grid(place, nodes), held=False)
                if self.draw.randrange(HELD_ONE_IN - 1) == 0:
                    self._row(place, self.trees.free(nodes), held=True)

    def _row(self, place: int, tree: TreeConfig, held: bool) -> None:
        """Cycles of one tree in a row, until enough are kept."""
        left_out, kept = next(
            row for most, row in ROWS.items() if most is None or tree.verify_nodes <= most
        )
        while kept:
            left_out, kept = left_out - 1, kept - self._cycle(place, tree, held, left_out <= 0)

    def _cycle(self, place: int, tree: TreeConfig, held: bool, settled: bool) -> bool:
        """One cycle, in a new turn if the last has ended. Returns whether it counts: not if it reads the prompt."""
        engine = self.engines.get(place)
        if first := engine is None or engine.finished:
            prompt = self._prompt(self.contexts[place])
            engine, prefill_ms = self._engine(prompt, GROWTH_TOK, self.trees.limits)
            self.engines[place] = engine
            self.timings.turns.append({"prompt_tok": len(prompt), "prefill_ms": prefill_ms})
            if not (
                tree.verify_nodes and tree.depth
            ):  # shows the drafter's time for reading the prompt
                tree = TreeConfig(2, 2, self.trees.top_ks[0])
        row = run_cycle(engine, Static.of(tree))
        shape = {name: getattr(row, name) for name in (*SHAPE[:-1], "total_ms")} | {
            "rows": tree.widest
        }
        kind = {"held": held, "first": first, "settled": settled and not first}
        parts = self.clock.stretches(row.expansions, row.total_ms)
        self.timings.cycles.append({"place": place, **kind, **shape, **parts})
        return kind["settled"]

    def steps(self, place: int) -> None:
        """Plain steps at the context `place`, in a turn that restarts at the end of its buffer."""
        target = self.pair.target
        with target.inference(taps=False):
            buffer, length, cache = self.plain.get(place, ((), 0, None))
            if length + SETTLING + STEPS >= len(buffer):
                prompt = torch.tensor(self._prompt(self.contexts[place]), device=target.device)
                length = len(prompt)
                buffer = torch.zeros(length + GROWTH_TOK, dtype=torch.long, device=target.device)
                buffer[:length] = prompt
                cache = target.new_cache(len(buffer))
                rows = target.forward(prompt, cache, last_only=True)
                buffer[length] = self.picker.pick(rows.logits[-1], prompt)
            spent_ms = []
            for number in range(SETTLING + STEPS):
                self.clock.wait()
                begin = self.clock.now()
                rows = target.forward(buffer[length : length + 1], cache, last_only=True)
                buffer[length + 1] = self.picker.pick(rows.logits[-1], buffer[: length + 1])
                self.clock.wait()
                if number >= SETTLING:
                    spent_ms.append(1e3 * (self.clock.now() - begin))
                length += 1
            # One mean a row: its first steps are slower, as in a turn, and single ones would look interrupted.
            mean = {"context_tok": length - (STEPS + 1) / 2, "ms": float(np.mean(spent_ms))}
            self.timings.steps.append({"place": place, **mean})
            self.plain[place] = (buffer, length, cache)

    def questions(self, place: int) -> None:
        """Ask a policy questions at the context `place`."""
        top_k = min(4, self.trees.top_ks[-1])
        policy = AskingPolicy(1 + top_k, 1, top_k)
        with self.pair.inference():
            engine, _ = self._engine(self._prompt(self.contexts[place]), 64, policy.limits)
            for _ in range(QUESTIONS):
                self.timings.questions.append(run_cycle(engine, policy).policy_ms)

    def held_turn(self, _) -> None:
        """A turn with one static tree from prompt to last token, held out as a whole."""
        number = self.turns % len(self.checked)
        self.turns, tree = self.turns + 1, self.checked[number]
        prompt = self.draw.choice(self.prompts)[-self.contexts[-1] :]
        with self.pair.inference():
            self.clock.wait()
            begin, rows, times_ms = self.clock.now(), [], []
            engine, _ = self._engine(prompt, TURN_TOK, tree)
            policy = Static.of(tree)
            while not engine.finished:
                row = run_cycle(engine, policy)
                rows.append([*(getattr(row, name) for name in SHAPE[:-1]), tree.widest])
                times_ms.append(row.total_ms)
            total_ms = 1e3 * (self.clock.now() - begin)
        held = {"tree": number, "prompt_tok": len(prompt), "cycles": rows}
        self.timings.held_turns.append(held | {"total_ms": total_ms, "later_ms": sum(times_ms[1:])})

    def _prompt(self, tokens: int) -> list[int]:
        """The last `tokens` ids of several prompts in a row."""
        ids: list[int] = []
        while len(ids) < tokens:
            ids = self.draw.choice(self.prompts) + ids
        return ids[-tokens:]

    def _engine(
        self, prompt: list[int], new_tok: int, limits: TreeConfig
    ) -> tuple[LiveEngine, float]:
        """A turn after its prefill, and the milliseconds of that."""
        ids = torch.tensor(prompt, device=self.pair.target.device)
        self.clock.wait()
        begin = self.clock.now()
        engine = LiveEngine(self.pair, ids, new_tok, limits, self.picker, (), self.clock)
        engine.prefill()
        self.clock.wait()
        return engine, 1e3 * (self.clock.now() - begin)
