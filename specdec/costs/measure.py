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
import pandas as pd
import torch
from tqdm.auto import tqdm

from specdec.core.clock import Clock, by_processor_time
from specdec.core.cycle import run_cycle
from specdec.core.engine import LiveEngine
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.records import SIZE, Question
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.core.verification import Picker

Job = Any  # a method of Measurements and its arguments
# the time of a cycle depends on these
SHAPE = ("top_k", "expansions", "verify_nodes", "context_tok", "rows")
# a turn restarts after this many tokens, so that the context stays near its setting
GROWTH_TOK = 96
# Caches recover slowly from larger work: a small tree after a large one takes up to a fifth longer
# for about eight cycles. In decoding a tree follows similar ones, so a job measures rows of one
# tree among similar ones, and drops a row's first cycles. Up to so many nodes: dropped and kept.
ROWS = {0: (0, 2), 3: (1, 3), 8: (3, 5), 32: (2, 2), 1 << 30: (0, 1)}
BANDS = (8, 32, 1 << 30)  # upper limits, in nodes, of the bands of similar trees
STEPS, SETTLING, QUESTIONS = 30, 2, 4  # per job: plain steps kept and dropped, questions
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

    @property
    def limits(self) -> TreeConfig:
        return TreeConfig(self.nodes[-1] + 1, self.depth, self.top_ks[-1])

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
        self.picker = Picker()
        draw = random.Random(config.seed)
        self.trees = TreeSampler(config.top_ks, config.nodes, config.depth, draw)
        bands = itertools.islice(itertools.cycle(self.trees.bands()), CHECKED_TREES)
        self.checked = [self.trees.free(band) for band in bands]
        self.draw = random.Random(config.seed + 1)
        self.jobs: list[Job] = []
        self.rounds = 0
        self.spent_s = 0.0

    @property
    def begun(self) -> bool:
        """Whether anything has been measured yet."""
        return self.spent_s > 0

    def go_on(self, frac: float) -> None:
        """Measure for this fraction of the config's seconds, of the counter that it names."""
        with by_processor_time(self.config.cpu_time):
            if not self.begun:
                self._warm_up()
            begin = self.clock.now()
            before = self.spent_s
            while self.spent_s - before < frac * self.config.seconds:
                self.jobs = self.jobs or self._round()
                job, *arguments = self.jobs.pop()
                job(*arguments)
                self.rounds += not self.jobs
                self.spent_s = before + self.clock.now() - begin

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
        self.clock = Clock(self.pair.target.device)
        self._restart()
        for job, *arguments in {job[0]: job for job in self._round()}.values():
            job(*arguments)
        self._restart()

    def _restart(self) -> None:
        self.timings = Timings()
        self.trees.dealt = Counter()
        self.engines: dict[int, LiveEngine] = {}
        self.turns = 0

    def _round(self) -> list[Job]:
        """One round in random order."""
        places = range(len(self.contexts))
        jobs: list[Job] = []
        jobs += itertools.product([self.cycles], places, self.trees.bands())
        jobs += itertools.product([self.steps], places)
        jobs += [(self.questions,), (self.held_turn,), (self.held_turn,)]
        return self.draw.sample(jobs, len(jobs))

    def complete(self) -> bool:
        """Whether every size was measured in every context, every width, and something held out."""
        cycles = pd.DataFrame(self.timings.cycles)
        if not self.rounds or not cycles["held"].any():
            return False
        fitted = cycles[~cycles["held"] & cycles["settled"]]
        # grid trees have no other sizes than these
        cells = fitted.drop_duplicates(["place", "verify_nodes"])
        if len(cells) < len(self.contexts) * len(self.trees.nodes):
            return False
        deep = fitted.dropna(subset="expand_ms")
        return set(self.trees.top_ks) <= set(deep["rows"]) & set(deep["top_k"])

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
            cycle = run_cycle(self.engines[place], Static.of(shape))
            row = {name: getattr(cycle, name) for name in (*SHAPE[:-1], "total_ms")}
            row.update(place=place, rows=shape.widest, held=held, first=first, settled=settled)
            self.timings.cycles.append({**row, **stretches(self.clock, cycle.total_ms)})

    def _new_turn(self, place: int) -> None:
        prompt = self._prompt(self.contexts[place])
        engine, prefill_ms = self._engine(prompt, GROWTH_TOK, self.trees.limits)
        self.engines[place] = engine
        self.timings.turns.append({"prompt_tok": len(prompt), "prefill_ms": prefill_ms})

    def steps(self, place: int) -> None:
        """Plain steps after a prompt of the context `place`."""
        target: Any = self.pair.target
        prompt = torch.tensor(self._prompt(self.contexts[place]), device=target.device)
        length = len(prompt)
        # one mean a row: its first steps are slower and would look interrupted
        spent_ms = []
        with target.inference(taps=False):
            ids = torch.cat((prompt, prompt.new_zeros(SETTLING + STEPS + 1)))
            cache = target.new_cache(len(ids))
            new = prompt
            for end in range(length, len(ids)):
                self.clock.wait()
                begin = self.clock.now()
                rows = target.forward(new, cache, last_only=True)
                ids[end] = self.picker.pick(rows.logits[-1], ids[:end])
                self.clock.wait()
                spent_ms.append(1e3 * (self.clock.now() - begin))
                new = ids[end : end + 1]
        row = {"place": place, "context_tok": length + SETTLING + (STEPS - 1) / 2}
        self.timings.steps.append({**row, "ms": float(np.mean(spent_ms[1 + SETTLING :]))})

    def questions(self) -> None:
        """Ask a policy questions after the shortest prompt."""
        top_k = min(4, self.trees.top_ks[-1])
        policy = AskingPolicy(1 + top_k, 1, top_k)
        with self.pair.inference():
            engine, _ = self._engine(self._prompt(self.contexts[0]), 64, policy.limits)
            for _ in range(QUESTIONS):
                self.timings.questions.append(run_cycle(engine, policy).policy_ms)

    def held_turn(self) -> None:
        """A turn with one static tree from prompt to last token, held out as a whole."""
        number = self.turns % len(self.checked)
        self.turns += 1
        tree = self.checked[number]
        prompt = self.draw.choice(self.prompts)[-self.contexts[-1] :]
        cycles = []
        with self.pair.inference():
            self.clock.wait()
            begin = self.clock.now()
            engine, _ = self._engine(prompt, TURN_TOK, tree)
            while not engine.finished:
                cycles.append(run_cycle(engine, Static.of(tree)))
            total_ms = 1e3 * (self.clock.now() - begin)
        # the time of a turn is also that of everything between its cycles
        row = {"tree": number, "prompt_tok": len(prompt), "total_ms": total_ms}
        row["later_ms"] = sum(cycle.total_ms for cycle in cycles[1:])
        shape = operator.attrgetter(*SHAPE[:-1])
        row["cycles"] = [[*shape(cycle), tree.widest] for cycle in cycles]
        self.timings.held_turns.append(row)

    def _prompt(self, tokens: int) -> list[int]:
        """The last `tokens` ids of several prompts in a row."""
        ids: list[int] = []
        while len(ids) < tokens:
            ids = self.draw.choice(self.prompts) + ids
        return ids[-tokens:]

    def _engine(self, prompt: list[int], new_tok: int, limits: TreeConfig) -> Any:
        """A turn's engine after its prefill, and the milliseconds of that."""
        ids = torch.tensor(prompt, device=self.pair.target.device)
        self.clock.wait()
        begin = self.clock.now()
        engine = LiveEngine(self.pair, ids, new_tok, limits, self.picker, (), self.clock)
        engine.prefill()
        self.clock.wait()
        return engine, 1e3 * (self.clock.now() - begin)
