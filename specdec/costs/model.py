"""The cost model: milliseconds of every part of a cycle on one machine, from a few tables.

    cycle_ms = root_ms(k) + first_ms + n * expand_ms(k) + verify_ms(V) + rest_ms
               + questions * question_ms

for k children and k expanded nodes (`levels` separates them), n expansions (first_ms only if any)
and V verified nodes. RADAR's Eq. 6 is a special case. `calibrate` fills the tables from
measurements, `profiles` from publications and data sheets.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specdec import machine, runs
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError, check_integer, check_name, warn
from specdec.stored import checked

SCHEMA = 1
KINDS = ("calibrated", "measured", "published", "roofline")  # measured: elsewhere
GRIDS = {
    "widths": ("root", "root_per_tok", "expand", "expand_per_tok"),
    "nodes": ("verify", "verify_per_tok"),
}
TABLES = (*GRIDS["widths"], *GRIDS["nodes"])
# times that several texts in one cycle pay once each
PER_TEXT = "root_per_tok expand_per_tok step_per_tok candidate_ms rest_ms question_ms".split()
PER_TEXT += "turn turn_per_tok reading reading_per_tok".split()
Numbers = ArrayLike  # a number or an array of them


@dataclass(frozen=True)
class CostModel:
    """Milliseconds of every part of a cycle.

        time = table[setting] + table_per_tok[setting] * context_tok

    widths: rows of a draft forward: children of the root pass, nodes expanded. nodes: verify_nodes,
    from 0; their tables never fall, since a tree can be padded to a larger forward that is cheaper.
    Tables are linear between grid points; past the last nodes the last segment continues, outside
    the widths the nearest one holds. candidate_ms: extra per child of an expansion. first_ms: extra
    of a cycle's first expansion, which meets cold caches. A block drafter's `root` has the whole
    price of drafting, `expand` the host's work of a level.

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
    # what was measured: "verify_nodes": (low, high), ...
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)
    # relative, on what a calibration held out
    errors: dict[str, float] = field(default_factory=dict)
    texts: int = 1

    def __post_init__(self) -> None:
        check_name("kind of cost model", self.kind, KINDS)
        for grid, tables in GRIDS.items():
            points = np.asarray(getattr(self, grid), dtype=int)
            object.__setattr__(self, grid, tuple(points.tolist()))
            _require((np.diff(points) > 0).all(), f"{grid} must be ascending")
            for name in tables:
                values = np.asarray(getattr(self, name), dtype=float)
                object.__setattr__(self, name, tuple(values.tolist()))
                fits = values.shape == points.shape and (values >= 0).all()
                _require(fits, f"{name} holds a time of at least 0 ms per grid point of {grid}")
        _require(self.widths[0] >= 1 and self.nodes[0] == 0, "widths start at 1, nodes at 0")
        rises = (np.diff([self.verify, self.verify_per_tok]) >= 0).all()
        _require(rises, "verify and verify_per_tok never fall with nodes")
        _require(self.step >= 0, "step is at least 0 ms")

    def __repr__(self) -> str:
        return f"CostModel({self.name!r}, {self.kind}: {self.step:.3g} ms a plain step)"

    def root_ms(self, top_k: Numbers, context_tok: Numbers) -> np.ndarray:
        """The drafter's root pass, with its level's host work."""
        base = self._by_width(top_k, self.root)
        return base + self._by_width(top_k, self.root_per_tok) * np.asarray(context_tok)

    def expand_ms(
        self, top_k: Numbers, context_tok: Numbers, rows: Numbers | None = None
    ) -> np.ndarray:
        """One expansion, not the first, of `rows` nodes (default: top_k) with top_k children."""
        rows = top_k if rows is None else rows
        candidates = np.asarray(rows) * np.asarray(top_k)
        base = self._by_width(rows, self.expand) + self.candidate_ms * candidates
        return base + self._by_width(rows, self.expand_per_tok) * np.asarray(context_tok)

    def verify_ms(self, verify_nodes: Numbers, context_tok: Numbers) -> np.ndarray:
        """Choosing the nodes, the target's forward over them and the root, and the walk down."""
        base, slope = self._by_nodes(verify_nodes)
        return base + slope * np.asarray(context_tok)

    def draft_ms(
        self,
        top_k: Numbers,
        expansions: Numbers,
        context_tok: Numbers,
        beam: tuple[int, ...] = (),
        rows: Numbers | None = None,
    ) -> np.ndarray:
        """The root pass and the expansions; nothing for top_k = 0, a plain step.

        rows: nodes of every expansion, default top_k; beam: of each expansion by itself.
        """
        self._flag("expansions", expansions)
        expansions = np.asarray(expansions)
        if beam:
            base, per_tok = self.levels(top_k, int(np.max(expansions)), beam)
            summed_per_tok = np.cumsum(per_tok)[expansions]
            return np.cumsum(base)[expansions] + summed_per_tok * np.asarray(context_tok)
        width = np.maximum(top_k, self.widths[0])
        levels_ms = expansions * self.expand_ms(width, context_tok, rows)
        levels_ms = levels_ms + (expansions > 0) * self.first_ms
        return (np.asarray(top_k) > 0) * (self.root_ms(width, context_tok) + levels_ms)

    def levels(
        self, top_k: Any, depth: int, beam: tuple[int, ...] = ()
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ms at context 0, ms per context token) of the root and each expansion, [depth + 1]."""
        tree = TreeConfig(1, depth, top_k, beam=beam)
        rows = np.array([tree.beam_at(level) for level in range(depth)], dtype=int)
        base = np.append(self._by_width(top_k, self.root), self._by_width(rows, self.expand))
        root_per_tok = self._by_width(top_k, self.root_per_tok)
        per_tok = np.append(root_per_tok, self._by_width(rows, self.expand_per_tok))
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
        """A whole cycle without questions."""
        drafting = self.draft_ms(top_k, expansions, context_tok, rows=rows)
        return drafting + self.verify_ms(verify_nodes, context_tok) + self.rest_ms

    def step_ms(self, context_tok: Numbers) -> np.ndarray:
        """One step of plain autoregressive decoding."""
        return self.step + self.step_per_tok * np.asarray(context_tok)

    def turn_ms(self, prompt_tok: Numbers) -> np.ndarray:
        """The prompt, read by the target (0 where it was not measured)."""
        return self.turn + self.turn_per_tok * np.asarray(prompt_tok)

    def reading_ms(self, prompt_tok: Numbers) -> np.ndarray:
        """Reading the prompt with the drafter, extra in a turn's first root pass."""
        return self.reading + self.reading_per_tok * np.asarray(prompt_tok)

    def batched(self, texts: int) -> CostModel:
        """The model of a cycle shared by `texts` texts (`decode_many`), computed, not measured.

        verify_ms(V) = that of one text's tree with as many rows, texts * (V + 1) - 1 nodes
        context, host work (of plain steps as well) and questions count once per text
        expansions: tables of texts * k rows, continued
        """
        check_integer("texts", texts, 1)
        assert self.texts == 1, "a batch starts from the costs of one text"
        if texts == 1:
            return self
        # 1. forwards over the rows of all texts
        nodes = np.arange(self.nodes[-1] + 1)
        verify = _continued(texts * (nodes + 1) - 1, self.nodes, self.verify)
        expand = _continued(texts * np.array(self.widths), self.widths, self.expand)
        one_ms, all_ms = _continued(np.array([1, texts]), self.widths, self.expand)
        # 2. a plain step; its own text's host work is in `step`
        step = self.step + float(verify[0]) - self.verify[0] + (texts - 1) * self.rest_ms
        # 3. nodes of each text that were measured
        ranges = dict(self.ranges)
        if "verify_nodes" in ranges:
            low, high = ranges["verify_nodes"]
            ranges["verify_nodes"] = (-(-(low + 1) // texts) - 1, (high + 1) // texts - 1)
        per_text = {name: (texts * np.array(getattr(self, name))).tolist() for name in PER_TEXT}
        return dataclasses.replace(
            self,
            name=f"{self.name} x{texts}",
            provenance=f"{self.provenance} For {texts} texts at once: computed, not measured.",
            nodes=nodes,
            verify=verify,
            verify_per_tok=texts * _continued(nodes, self.nodes, self.verify_per_tok),
            root=np.add(self.root, all_ms - one_ms),
            expand=expand,
            step=step,
            policy_ms={name: texts * ms for name, ms in self.policy_ms.items()},
            ranges=ranges,
            errors={},
            texts=texts,
            **per_text,
        )

    def lookup(self, most_nodes: int) -> tuple[list[float], list[float]]:
        """(ms at context 0, ms per context token) of 0..most_nodes nodes, as plain numbers."""
        base, slope = self._by_nodes(np.arange(most_nodes + 1))
        return base.tolist(), slope.tolist()

    def _by_width(self, top_k: Numbers, table: tuple[float, ...]) -> np.ndarray:
        self._flag("top_k", top_k)
        return np.interp(np.asarray(top_k, dtype=float), self.widths, table)

    def _by_nodes(self, verify_nodes: Numbers) -> tuple[np.ndarray, np.ndarray]:
        """(ms at context 0, ms per context token)."""
        self._flag("verify_nodes", verify_nodes)
        nodes = np.asarray(verify_nodes, dtype=float)
        base = _continued(nodes, self.nodes, self.verify)
        return base, _continued(nodes, self.nodes, self.verify_per_tok)

    @property
    def uncertainty_frac(self) -> float:
        """Relative difference of two times that means nothing (95 %); 0 if nothing was measured."""
        return 1.96 * 2**0.5 * self.errors.get("tree_frac", 0.0)

    def measured(self, quantity: str, values: Iterable[int]) -> list[int]:
        """Those of `values` in the range at which `quantity` was measured; all if none is known."""
        low, high = self.ranges.get(quantity, (-np.inf, np.inf))
        return [value for value in values if low <= value <= high]

    def _flag(self, quantity: str, values: Numbers) -> None:
        """Warn once about predictions outside the measured range."""
        low, high = self.ranges.get(quantity, (-np.inf, np.inf))
        if ((np.asarray(values) < low) | (np.asarray(values) > high)).any():
            only = f"was measured at {quantity} {low} to {high} only"
            _warn_once(f"the cost model {self.name!r} {only}; times elsewhere are extrapolated.")

    def check_machine(self) -> None:
        """Warn once if the model was calibrated on another machine."""
        for name, value in machine.speed_facts().items():
            there = self.machine.get(name)
            if self.kind == "calibrated" and None not in (there, value) and there != value:
                what = f"was calibrated on another machine ({name} {there!r})"
                _warn_once(f"the cost model {self.name!r} {what}; calibrate here before comparing.")
                break

    def save(self, path: Path | str) -> Path:
        """Write the model as JSON; returns the path."""
        return runs.write_json(Path(path), {"schema": SCHEMA, "class": "CostModel", **vars(self)})

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """The model that `save` wrote. SpecdecError for a missing, damaged or foreign file."""
        record = runs.read_json(Path(path))
        advice = f"write a cost model of schema {SCHEMA} with calibrate(pair).save(path)"
        is_model = isinstance(record, dict) and record.pop("class", None) == "CostModel"
        if not is_model or record.pop("schema", None) != SCHEMA:
            raise SpecdecError(f"{path} holds no cost model of schema {SCHEMA}; {advice}.")
        return checked(cls, record, path, advice)


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise SpecdecError(f"of a cost model {rule}.")


@functools.cache
def _warn_once(message: str) -> None:
    warn(message)


def _continued(at: np.ndarray, grid: tuple[int, ...], table: tuple[float, ...]) -> np.ndarray:
    """Linear between grid points, the last segment continued."""
    value = np.interp(at, grid, table)
    if len(grid) > 1:
        slope = (table[-1] - table[-2]) / (grid[-1] - grid[-2])
        value = value + slope * np.maximum(at - grid[-1], 0)
    return value
