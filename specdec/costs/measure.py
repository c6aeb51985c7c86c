"""Measurements of a calibration: cycles, plain steps, questions and whole turns, through the engine
that also decodes.

A job is a few measurements at one setting. Jobs run in random order, so that a slow phase of the
machine affects all settings alike.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from specdec.core.clock import Clock, by_processor_time, now
from specdec.core.cycle import run_cycle
from specdec.core.decode import autoregress, decode
from specdec.core.engine import LiveEngine
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.records import SIZE, Question
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.core.verification import Picker

# the time of a cycle depends on these
SHAPE = ("top_k", "expansions", "verify_nodes", "context_tok", "rows")
# a turn restarts after this many tokens, so that the context stays near its setting
GROWTH_TOK = 96
# Caches recover slowly from larger work: a small tree after a large one takes up to a fifth longer
# for about eight cycles. In decoding a tree follows similar ones, so a job measures rows of one
# tree among similar ones, and drops a row's first cycles. Up to so many nodes: dropped and kept.
ROWS = {0: (0, 2), 3: (1, 3), 8: (3, 5), 32: (2, 2), 1 << 30: (0, 1)}
BANDS = (8, 32, 1 << 30)  # upper limits, in nodes, of the bands of similar trees
STEPS, QUESTIONS = 48, 4  # per job
WIDEST = 4  # children and rows for each node of a tree: small trees do not come from wide drafts
HELD_ONE_IN = 5  # one cycle in so many is held out of the fit
TURN_TOK = 32  # length of the turns held out as a whole
CHECKED_TREES = 10  # different trees in these turns
PIECE_S = 1.0  # a calibration that misses a setting continues in pieces of this
# Kernels work in blocks of rows, the root being one: the time jumps after 7, 15, 31, 63, ... nodes.
# Beyond 17 nodes both sides of every step are measured, so that no line crosses one.
NODES = (
    *(*range(18), 20, 23, 24, 28, 31, 32, 40, 47, 48, 59, 63, 64, 80, 95, 96, 112),
    *(127, 128, 159, 160, 191, 192, 223, 224, 240),
)


@dataclass(frozen=True)
class CalibrateConfig:
    """What `calibrate` measures, and how long."""

    seconds: float = 45.0  # longer only if some setting is still unmeasured
    seed: int = 0
    contexts: tuple[int, ...] | None = None  # prompt lengths; None: three, up to 900 tokens
    top_ks: tuple[int, ...] | None = None  # beam widths; None: as far as the vocabulary reaches
    nodes: tuple[int, ...] = NODES  # sizes of the verified trees
    depth: int = 12  # expansions run from 1 to this
    cpu_time: bool = False  # processor time, for one thread on a busy CPU
    name: str | None = None  # of the model; None: the pair's and its dtype
    progress: bool = True


@dataclass
class Timings:
    """Rows of a calibration, each a dict. place: index of its context."""

    # place, SHAPE, held (out of the fit), first (of its turn), settled (after similar ones),
    # stretches, total_ms
    cycles: list[dict] = field(default_factory=list)
    turns: list[dict] = field(default_factory=list)  # prompt_tok, prefill_ms
    steps: list[dict] = field(default_factory=list)  # place, context_tok, ms (mean of a row)
    questions: list[float] = field(default_factory=list)  # ms
    # tree, prompt_tok, total_ms, later_ms (of all cycles but the first), cycles [SHAPE, ...]
    held_turns: list[dict] = field(default_factory=list)


def stretches(clock: Clock, total_ms: float) -> dict[str, float]:
    """Milliseconds of the parts of the cycle that just ended, NaN for one that it lacks.

    A part ends with its forward and begins where the part before it ended, so that the parts cover
    the cycle. Growing a level counts with the next forward. expand_ms: mean without the first.
    """
    ends = [end for _, end in clock.laps["draft"] + clock.laps["verify"]]
    ends_ms = [clock.ms_between(clock.begin, end) for end in ends]
    *drafting, verify, rest = np.diff([0.0, *ends_ms, total_ms])
    root, first = [*drafting, np.nan, np.nan][:2]
    expand = float(np.mean(drafting[2:] or np.nan))
    return dict(root_ms=root, first_ms=first, expand_ms=expand, verify_ms=verify, rest_ms=rest)


@dataclass
class TreeSampler:
    """Draws trees, rare node counts and widths first: a short calibration covers all."""

    top_ks: tuple[int, ...]
    nodes: tuple[int, ...]
    depth: int
    draw: random.Random
    dealt: Counter = field(default_factory=Counter)

    def bands(self) -> list[tuple[int, ...]]:
        """Node counts grouped into bands of similar size, smallest first."""
        groups = itertools.groupby(self.nodes, lambda count: np.searchsorted(BANDS, count))
        return [tuple(band) for _, band in groups]

    def grid(self, place: int, counts: tuple[int, ...]) -> TreeConfig:
        """A grid tree for the context `place` with one of these node counts."""
        nodes = self._rarest(counts, (place, "nodes"))
        if not nodes:  # a plain step: nothing is drafted
            return TreeConfig(1, 0, self.top_ks[0])
        # 1. children and rows that offer so many nodes
        widths = [k for k in self.top_ks if pool_size(self.depth, k) >= nodes]
        top_k = self._rarest([k for k in widths if k <= WIDEST * nodes] or widths, (place, "top_k"))
        narrow = [rows for rows in self.top_ks if rows <= top_k]
        enough = [rows for rows in narrow if pool_size(self.depth, top_k, (rows,)) >= nodes]
        rows = self._rarest(enough, (place, "rows"))
        # 2. a depth; deeper drafts than nodes leave other caches, and are not used
        fewest = max(1, -(-(nodes - top_k) // (top_k * rows)))
        deepest = max(fewest, min(self.depth, nodes + 1))
        return TreeConfig(nodes + 1, self.draw.randint(fewest, deepest), top_k, beam=(rows,))

    def free(self, counts: tuple[int, ...]) -> TreeConfig:
        """Any tree with nodes in the range of `counts`, fewer if its shape offers fewer."""
        top_k = self.draw.choice(self.top_ks)
        depth = self.draw.randint(0, self.depth)
        beam = (self.draw.randint(self.top_ks[0], top_k),)
        nodes = self.draw.randint(max(1, counts[0]), max(1, counts[-1]))
        nodes = min(nodes, pool_size(depth, top_k, beam))
        return TreeConfig(1 + nodes, depth, top_k, beam=beam)

    def _rarest(self, values: Any, where: tuple[int, str]) -> int:
        fewest = min(self.dealt[where, value] for value in values)
        value = self.draw.choice([value for value in values if self.dealt[where, value] == fewest])
        self.dealt[where, value] += 1
        return int(value)


class AskingPolicy(Static):
    """Asks SIZE and answers without thinking: measures the cost of a question itself."""

    asks = frozenset({SIZE})

    def answer(self, question: Question) -> int:
        return question.largest


class Measurements:
    """The jobs of a calibration; `timings` collects their rows. config: with all settings."""

    def __init__(self, pair: Pair, config: CalibrateConfig, prompts: list[list[int]]):
        self.pair = pair
        self.config = config
        self.contexts = config.contexts
        self.prompts = prompts
        draw = random.Random(config.seed)
        self.trees = TreeSampler(config.top_ks, config.nodes, config.depth, draw)
        bands = itertools.islice(itertools.cycle(self.trees.bands()), CHECKED_TREES)
        self.checked = [self.trees.free(band) for band in bands]
        self.draw = random.Random(config.seed + 1)
        self.jobs: list[Any] = []  # methods and their arguments
        self.rounds = 0
        self.spent_s = 0.0

    def go_on(self, frac: float) -> None:
        """Measure for this fraction of the config's seconds, of the counter that it names."""
        with by_processor_time(self.config.cpu_time):
            if not self.spent_s:
                self._warm_up()
            begin = now()
            before = self.spent_s
            while self.spent_s - before < frac * self.config.seconds:
                self.jobs = self.jobs or self._round()
                job, *arguments = self.jobs.pop()
                job(*arguments)
                self.rounds += not self.jobs
                self.spent_s = before + now() - begin

    def finish(self) -> Timings:
        """Use the remaining seconds, and more until all settings are measured."""
        seconds = self.config.seconds
        hidden = not self.config.progress
        with tqdm(total=round(seconds), desc="calibrate", unit="s", disable=hidden) as bar:
            while self.spent_s < seconds or not self.complete():
                self.go_on(min(PIECE_S / seconds, 1))
                bar.update(min(bar.total, int(self.spent_s)) - bar.n)
        return self.timings

    def _warm_up(self) -> None:
        """One job of each kind, whose rows are discarded."""
        self._restart()
        for job, *arguments in {job[0]: job for job in self._round()}.values():
            job(*arguments)
        self._restart()

    def _restart(self) -> None:
        self.timings = Timings()
        self.trees.dealt = Counter()
        self.engines: dict[int, LiveEngine] = {}
        self.turns = 0

    def _round(self) -> list[Any]:
        """One round in random order."""
        places = range(len(self.contexts))
        jobs: list[Any] = []
        jobs += itertools.product([self.cycles], places, self.trees.bands())
        jobs += itertools.product([self.steps], places)
        jobs += [(self.questions,), (self.held_turn,), (self.held_turn,)]
        return self.draw.sample(jobs, len(jobs))

    def complete(self) -> bool:
        """Whether every size was measured in every context, every width, and something held out."""
        widths: dict[str, set] = {"rows": set(), "top_k": set()}
        for cycle in self.timings.cycles:
            if cycle["settled"] and not cycle["held"] and not np.isnan(cycle["expand_ms"]):
                for name, values in widths.items():
                    values.add(cycle[name])
        # a round has every size in every context, but not every width in a deep tree
        measured = self.rounds and any(cycle["held"] for cycle in self.timings.cycles)
        return bool(measured) and set(self.trees.top_ks) <= widths["rows"] & widths["top_k"]

    def cycles(self, place: int, nodes: tuple[int, ...]) -> None:
        """Rows of cycles of random trees with these node counts."""
        with self.pair.inference():
            for _ in nodes:  # every size once, plus the held-out ones
                self._row(place, self.trees.grid(place, nodes), held=False)
                if self.draw.randrange(HELD_ONE_IN - 1) == 0:
                    self._row(place, self.trees.free(nodes), held=True)

    def _row(self, place: int, tree: TreeConfig, held: bool) -> None:
        """Cycles of one tree in a row, until enough are kept; those that read a prompt are not."""
        dropped, missing = next(row for most, row in ROWS.items() if tree.verify_nodes <= most)
        while missing:
            dropped -= 1
            first = place not in self.engines or self.engines[place].finished
            if first:
                self._new_turn(place)
            settled = dropped < 0 and not first
            missing -= settled
            # only a drafted tree shows the drafter's time for reading the prompt
            reads = first and not tree.verify_nodes
            shape = TreeConfig(2, 1, self.trees.top_ks[0]) if reads else tree
            engine = self.engines[place]
            cycle = run_cycle(engine, Static.of(shape))
            row = {name: getattr(cycle, name) for name in (*SHAPE[:-1], "total_ms")}
            row.update(place=place, rows=shape.widest, held=held, first=first, settled=settled)
            self.timings.cycles.append({**row, **stretches(engine.clock, cycle.total_ms)})

    def _new_turn(self, place: int) -> None:
        ids = torch.tensor(self._prompt(place), device=self.pair.target.device)
        limits = TreeConfig(self.trees.nodes[-1] + 1, self.trees.depth, self.trees.top_ks[-1])
        engine = LiveEngine(self.pair, ids, GROWTH_TOK, limits, Picker())
        engine.clock.wait()
        begin = now()
        engine.prefill()
        engine.clock.wait()
        prefill_ms = 1e3 * (now() - begin)
        self.engines[place] = engine
        self.timings.turns.append({"prompt_tok": len(ids), "prefill_ms": prefill_ms})

    def steps(self, place: int) -> None:
        """Plain steps after a prompt of the context `place`."""
        plain = autoregress(self.pair, self._prompt(place), STEPS + 1, stop_tokens=())
        # one mean a row: its first steps are slower and would look interrupted
        row = {"place": place, "context_tok": plain.prompt_tok + (STEPS - 1) / 2}
        self.timings.steps.append({**row, "ms": plain.decode_ms / STEPS})

    def questions(self) -> None:
        """Ask a policy questions after the shortest prompt."""
        top_k = min(4, self.trees.top_ks[-1])
        policy = AskingPolicy(1 + top_k, 1, top_k)
        asked = decode(self.pair, self._prompt(0), policy, 3 * QUESTIONS, stop_tokens=())
        self.timings.questions += [row.policy_ms for row in asked.rows[:QUESTIONS]]

    def held_turn(self) -> None:
        """A turn with one static tree from prompt to last token, held out as a whole."""
        number = self.turns % len(self.checked)
        self.turns += 1
        tree = self.checked[number]
        prompt = self.draw.choice(self.prompts)[-self.contexts[-1] :]
        turn = decode(self.pair, prompt, Static.of(tree), TURN_TOK, stop_tokens=())
        # the time of a turn is also that of everything between its cycles
        row = {"tree": number, "prompt_tok": turn.prompt_tok, "total_ms": turn.total_ms}
        row["later_ms"] = sum(cycle.total_ms for cycle in turn.rows[1:])
        shape = operator.attrgetter(*SHAPE[:-1])
        row["cycles"] = [[*shape(cycle), tree.widest] for cycle in turn.rows]
        self.timings.held_turns.append(row)

    def _prompt(self, place: int) -> list[int]:
        """The last ids of several prompts in a row, as many as the context `place` has."""
        tokens = self.contexts[place]
        ids: list[int] = []
        while len(ids) < tokens:
            ids = self.draw.choice(self.prompts) + ids
        return ids[-tokens:]
