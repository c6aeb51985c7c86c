"""The cost model: milliseconds of every part of a cycle on one machine, from a few tables.

    cycle_ms = root_ms(k) + first_ms + n * expand_ms(k) + verify_ms(V) + rest_ms + questions * question_ms

for k children and k expanded nodes (`levels` separates them), n expansions (first_ms only if any) and V verified nodes.
RADAR's Eq. 6 is a special case. `calibrate` fills the tables from measurements, `profiles` from publications and data sheets.
`batched` turns such a model into that of a cycle shared by several texts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_type_hints

import numpy as np
from numpy.typing import ArrayLike

from specdec import machine, runs
from specdec.core.tree_config import TreeConfig, check_memory
from specdec.errors import SpecdecError, check_integer, check_kind, check_name, check_number, warn
from specdec.stored import checked

SCHEMA = 1
KINDS = ("calibrated", "published", "roofline")
GRIDS = {
    "widths": ("root", "root_per_tok", "expand", "expand_per_tok"),
    "nodes": ("verify", "verify_per_tok"),
}
TABLES = (*GRIDS["widths"], *GRIDS["nodes"])
Numbers = ArrayLike  # a number or an array of them
_warned: set = set()  # warnings given once per process


@dataclass(frozen=True)
class CostModel:
    """Milliseconds of every part of a cycle.

        time = table[setting] + table_per_tok[setting] * context_tok

    widths: rows of a draft forward, ascending: children of the root pass, nodes expanded. candidate_ms: extra per child of an
    expansion. first_ms: extra of a cycle's first expansion, which meets cold caches. nodes:
    verify_nodes, ascending from 0; their tables never fall. Tables are linear between grid points. Past the last nodes the last
    segment continues. Outside the widths the nearest width holds. texts: number of texts that share every cycle, see `batched`.
    A block drafter's root pass drafts all levels: `root` has the whole price of drafting, `expand` the host's work of a level.

    >>> from specdec.costs.profiles import profile
    >>> costs = profile("ltd-a100-vicuna-13b")
    >>> round(float(costs.draft_ms(top_k=10, expansions=10, context_tok=0)), 2)
    18.2
    """

    name: str
    kind: str  # the source of the numbers: one of KINDS
    provenance: str  # the same in words
    widths: tuple[int, ...]
    root: tuple[float, ...]
    root_per_tok: tuple[float, ...]
    expand: tuple[float, ...]
    expand_per_tok: tuple[float, ...]
    nodes: tuple[int, ...]
    verify: tuple[float, ...]
    verify_per_tok: tuple[float, ...]
    step: float
    step_per_tok: float = 0.0
    candidate_ms: float = 0.0
    first_ms: float = 0.0
    rest_ms: float = 0.0
    question_ms: float = 0.0
    policy_ms: dict[str, float] = field(default_factory=dict)
    turn: float = 0.0
    turn_per_tok: float = 0.0
    reading: float = 0.0
    reading_per_tok: float = 0.0
    pair: str | None = None
    dtype: str | None = None
    machine: dict = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # measured: "verify_nodes": (low, high), ...
    errors: dict[str, float] = field(
        default_factory=dict
    )  # relative, on what a calibration held out
    texts: int = 1

    def __post_init__(self) -> None:
        check_integer("texts", self.texts, 1)
        check_name("kind of cost model", self.kind, KINDS)
        for grid, tables in GRIDS.items():
            points = self._numbers(grid)
            if not len(points) or (points % 1 != 0).any() or (np.diff(points) <= 0).any():
                raise SpecdecError(
                    f"{grid} of a cost model must be ascending whole numbers, got {points.tolist()}."
                )
            object.__setattr__(self, grid, tuple(points.astype(int).tolist()))
            for name in tables:
                values = self._numbers(name)
                object.__setattr__(self, name, tuple(values.tolist()))
                if values.shape != points.shape or (
                    grid == "nodes" and (np.diff(values) < 0).any()
                ):
                    wanted = "one time per grid point and never falls with nodes"
                    raise SpecdecError(f"{name} of a cost model holds {wanted}.")
        if self.widths[0] < 1 or self.nodes[0] != 0:
            raise SpecdecError(
                "a cost model's widths start at 1 or more, its nodes at 0; add the missing grid point."
            )
        check_kind("policy_ms", self.policy_ms, dict)
        single = [name for name, hint in get_type_hints(CostModel).items() if hint is float]
        times = [self._numbers(name) for name in TABLES]
        times += [[check_number(name, value, -math.inf) for name, value in self.policy_ms.items()]]
        times += [[check_number(name, getattr(self, name), -math.inf) for name in single]]
        if not (np.isfinite(times := np.concatenate(times)) & (times >= 0)).all():
            raise SpecdecError(
                "a cost model holds times only: every number must be finite and at least 0 ms."
            )

    def __repr__(self) -> str:
        """One line, without the tables."""
        step, node = self.step, self.verify[-1]
        return (
            f"CostModel({self.name!r}, {self.kind}: {step:.3g} ms a plain step, {self.verify[0]:.3g} to {node:.3g} ms to verify "
            f"up to {self.nodes[-1]} nodes, widths {self.widths[0]} to {self.widths[-1]})"
        )

    def _numbers(self, name: str) -> np.ndarray:
        try:
            numbers = np.asarray(getattr(self, name), dtype=float)
        except (TypeError, ValueError):
            numbers = np.zeros(())
        if numbers.ndim != 1:
            raise SpecdecError(
                f"{name} of a cost model must be a list of numbers: one time per grid point."
            )
        return numbers

    def root_ms(self, top_k: Numbers, context_tok: Numbers) -> np.ndarray:
        """The drafter's root pass, with its level's host work."""
        return self._by_width(top_k, self.root) + self._by_width(
            top_k, self.root_per_tok
        ) * np.asarray(context_tok)

    def expand_ms(
        self, top_k: Numbers, context_tok: Numbers, rows: Numbers | None = None
    ) -> np.ndarray:
        """One expansion, not the first, of `rows` nodes (default: top_k) with top_k children each, and its level's host work."""
        rows = top_k if rows is None else rows
        base = self._by_width(rows, self.expand) + self.candidate_ms * np.asarray(
            rows
        ) * np.asarray(top_k)
        return base + self._by_width(rows, self.expand_per_tok) * np.asarray(context_tok)

    def verify_ms(self, verify_nodes: Numbers, context_tok: Numbers) -> np.ndarray:
        """Choosing the nodes, the target's forward over them and the root, and the walk down; non-decreasing in nodes."""
        base, slope = self._by_nodes(verify_nodes)
        return base + slope * np.asarray(context_tok)

    def draft_ms(
        self, top_k: Numbers, expansions: Numbers, context_tok: Numbers, beam: tuple[int, ...] = ()
    ) -> np.ndarray:
        """The root pass and `expansions` expansions; nothing for top_k = 0, a plain step. With a `beam` top_k is one number."""
        self._flag("expansions", expansions)
        if not beam:
            drafts, width = np.asarray(top_k) > 0, np.maximum(top_k, self.widths[0])
            levels_ms = np.asarray(expansions) * self.expand_ms(width, context_tok)
            levels_ms = levels_ms + (np.asarray(expansions) > 0) * self.first_ms
            return drafts * (self.root_ms(width, context_tok) + levels_ms)
        base, per_tok = (
            np.cumsum(part)[expansions]
            for part in self.levels(top_k, int(np.max(expansions)), beam)
        )
        return base + per_tok * np.asarray(context_tok)

    def levels(
        self, top_k: int, depth: int, beam: tuple[int, ...] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ms at context 0, ms per context token) of the root pass and of each of `depth` expansions, [depth + 1] each."""
        rows = np.array(TreeConfig(1, depth, top_k, beam=beam).frontiers, dtype=int)

        def parts(root, expand):
            return np.concatenate(([self._by_width(top_k, root)], self._by_width(rows, expand)))

        base, per_tok = parts(self.root, self.expand), parts(self.root_per_tok, self.expand_per_tok)
        base[1:] += self.candidate_ms * rows * top_k
        base[1:2] += self.first_ms
        return base, per_tok

    def cycle_ms(
        self,
        top_k: Numbers,
        expansions: Numbers,
        verify_nodes: Numbers,
        context_tok: Numbers,
        rows: Numbers | None = None,
    ) -> np.ndarray:
        """A whole cycle without questions to a policy. rows: nodes of each expansion, default top_k."""
        drafting = self.draft_ms(top_k, expansions, context_tok)
        if rows is not None:
            top_k = np.maximum(top_k, self.widths[0])
            narrower = self.expand_ms(top_k, context_tok, rows) - self.expand_ms(top_k, context_tok)
            drafting = drafting + np.asarray(expansions) * narrower
        return drafting + self.verify_ms(verify_nodes, context_tok) + self.rest_ms

    def step_ms(self, context_tok: Numbers) -> np.ndarray:
        """One step of plain autoregressive decoding."""
        return self.step + self.step_per_tok * np.asarray(context_tok)

    def turn_ms(self, prompt_tok: Numbers) -> np.ndarray:
        """The prompt, read by the target (0 where it was not measured)."""
        return self.turn + self.turn_per_tok * np.asarray(prompt_tok)

    def reading_ms(self, prompt_tok: Numbers) -> np.ndarray:
        """Reading the prompt with the drafter: extra time of a turn's first root pass, not part of a cycle's time."""
        return self.reading + self.reading_per_tok * np.asarray(prompt_tok)

    def batched(self, texts: int) -> CostModel:
        """The model of a cycle shared by `texts` texts (`decode_many`). Each text advances in it, so the tokens per ms of
        all of them are texts / ms_per_tok.

            verify_ms(V) = that of one text's tree with as many rows, texts * (V + 1) - 1 nodes
            context, host work (of plain steps as well) and questions count once per text
            expansions: tables of texts * k rows, continued

        Computed, not measured (notebook 53 measures). SpecdecError for a model that is batched already.

        >>> from specdec.costs.profiles import profile
        >>> eight = profile("ltd-a100-vicuna-13b").batched(8)
        >>> float(eight.step_ms(0)), round(float(eight.verify_ms(15, 0)), 1)  # 8 rows are free, 128 are not
        (33.3, 35.8)
        """
        check_integer("texts", texts, 1)
        if self.texts > 1:
            raise SpecdecError(
                f"{self.name!r} holds the costs of {self.texts} texts; start from those of one."
            )
        if texts == 1:
            return self
        nodes, widths = np.arange(self.nodes[-1] + 1), np.array(self.widths)
        verify = _continued(texts * (nodes + 1) - 1, self.nodes, self.verify)
        expand = _continued(texts * widths, self.widths, self.expand)
        rows_ms = np.subtract(
            *_continued(np.array([texts, 1]), self.widths, self.expand)
        )  # of the root passes
        per_text = (
            "root_per_tok",
            "expand_per_tok",
            "step_per_tok",
            "candidate_ms",
            "rest_ms",
            "question_ms",
        )
        per_text += ("turn", "turn_per_tok", "reading", "reading_per_tok")
        low, high = self.ranges.get("verify_nodes", (-np.inf, np.inf))
        ranges = self.ranges | {
            "verify_nodes": (-(-(low + 1) // texts) - 1, (high + 1) // texts - 1)
        }
        return dataclasses.replace(
            self,
            name=f"{self.name} x{texts}",
            provenance=f"{self.provenance} For {texts} texts at once: computed, not measured.",
            nodes=nodes,
            verify=verify,
            verify_per_tok=texts * _continued(nodes, self.nodes, self.verify_per_tok),
            root=np.add(self.root, rows_ms),
            expand=expand,
            # its own text is in `step`
            step=self.step + float(verify[0]) - self.verify[0] + (texts - 1) * self.rest_ms,
            policy_ms={name: texts * ms for name, ms in self.policy_ms.items()},
            ranges=ranges if "verify_nodes" in self.ranges else self.ranges,
            errors={},
            texts=texts,
            **{name: (texts * np.array(getattr(self, name))).tolist() for name in per_text},
        )

    def lookup(self, most_nodes: int) -> tuple[list[float], list[float]]:
        """Verification of 0..most_nodes nodes as plain numbers, for loops: ms at context 0, and ms per context token."""
        check_memory(f"a table of {most_nodes} times", 100 * most_nodes, advice="lower most_nodes")
        base, slope = self._by_nodes(np.arange(most_nodes + 1))
        return base.tolist(), slope.tolist()

    def _by_width(self, top_k, table):
        self._flag("top_k", top_k)
        return np.interp(np.asarray(top_k, dtype=float), self.widths, table)

    def _by_nodes(self, verify_nodes):
        """(ms at context 0, ms per context token): linear between grid points, the last segment continued."""
        self._flag("verify_nodes", verify_nodes)
        nodes = np.asarray(verify_nodes, dtype=float)
        return [
            _continued(nodes, self.nodes, table) for table in (self.verify, self.verify_per_tok)
        ]

    @property
    def uncertainty_frac(self) -> float:
        """Relative difference of two predicted times below which it means nothing (95 %), from the model's errors on single trees.

        0 for models that were not measured here: their errors are unknown.
        """
        return 1.96 * 2**0.5 * self.errors.get("tree_frac", 0.0)

    def measured(self, quantity: str, values) -> list:
        """Those of `values` in the range at which `quantity` was measured; all if no range is known."""
        low, high = self.ranges.get(quantity, (-np.inf, np.inf))
        return [value for value in values if low <= value <= high]

    def _flag(self, quantity: str, values) -> None:
        """Warn once about predictions outside the measured range."""
        low, high = self.ranges.get(quantity, (-np.inf, np.inf))
        if ((np.asarray(values) < low) | (np.asarray(values) > high)).any():
            only = f"was measured at {quantity} {low} to {high} only"
            self._warn_once((quantity,), f"{only}; times elsewhere are extrapolated.")

    def _warn_once(self, about: Sequence[str], what: str) -> None:
        if (self.name, *about) not in _warned:
            _warned.add((self.name, *about))
            warn(f"the cost model {self.name!r} {what}")

    def check_machine(self) -> bool:
        """Whether this machine is the one of a calibrated model; warns once if not. True for profiles."""
        if self.kind != "calibrated":
            return True
        known = {name: here for name, here in machine.speed_facts().items() if here is not None}
        changed = [
            name for name, here in known.items() if self.machine.get(name) not in (None, here)
        ]
        if changed:
            other = ", ".join(f"{name} {self.machine[name]!r}" for name in changed)
            what = f"was calibrated on another machine ({other})"
            self._warn_once(changed, f"{what}; calibrate here before comparing times.")
        return not changed

    def save(self, path) -> Path:
        """Write the model as JSON; returns the path."""
        return runs.write_json(Path(path), {"schema": SCHEMA, "class": "CostModel", **vars(self)})

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """The model that `save` wrote. Raises SpecdecError for a missing, damaged or foreign file."""
        check_kind("path", path, str | Path)
        record = runs.read_json(Path(path))
        advice = f"write a cost model of schema {SCHEMA} with calibrate(pair).save(path)"
        known = isinstance(record, dict) and record.pop("class", None) == "CostModel"
        if not known or record.pop("schema", None) != SCHEMA:
            raise SpecdecError(f"{path} holds no cost model of schema {SCHEMA}; {advice}.")
        return checked(cls, record, path, advice)


def _continued(at: np.ndarray, grid, table) -> np.ndarray:
    """Linear between grid points, the last segment continued."""
    value = np.interp(at, grid, table)
    if len(grid) > 1:
        value = value + (table[-1] - table[-2]) / (grid[-1] - grid[-2]) * np.maximum(
            at - grid[-1], 0
        )
    return value
