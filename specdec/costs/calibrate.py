"""Calibration: fits a cost model of this machine to timed cycles of many shapes.

    time = base[setting] + (a + b * setting) * context_tok        with a, b >= 0

Attention over the context costs more with more rows, hence b. Trimmed means per setting and a monotone fit reduce the effect
of slow outliers. A fifth of the cycles and some whole turns are held out; the model stores its errors on them. `measure`
does the timing.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pandas as pd
import scipy
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.core import clock
from specdec.core.pair import Pair, dtype_name
from specdec.core.tree_config import pool_size
from specdec.costs.measure import (
    GROWTH_TOK,
    SHAPE,
    CalibrateConfig,
    Measurements,
    Timings,
    answer_ms,
)
from specdec.costs.model import TABLES, CostModel
from specdec.data import suites
from specdec.errors import SpecdecError, check_number, door, warn

TOP_KS = (
    1,
    2,
    3,
    4,
    5,
    6,
    8,
    9,
    10,
    16,
    17,
    20,
    32,
)  # children, and rows of an expansion: both sides of steps
WARN_BEYOND = {"cycle_median_frac": 0.10, "total_frac": 0.05}  # errors on held-out measurements
PER_THOUSAND = 1e-3  # context in thousands keeps the columns of the fit at a similar scale


@runs.with_settings(CalibrateConfig)
@door
def calibrate(pair: Pair, config: CalibrateConfig | None = None, **settings) -> CostModel:
    """The cost model of `pair` on this machine, in about `seconds` (45 by default).

    settings: fields of CalibrateConfig by name. SpecdecError for what cannot be measured.

    >>> import specdec, warnings
    >>> warnings.simplefilter("ignore")  # so short a calibration is not exact
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> few = dict(top_ks=(1, 2), nodes=(0, 2, 4), depth=3, contexts=(10, 60))
    >>> costs = calibrate(pair, seconds=0.2, progress=False, **few)
    >>> bool(costs.cycle_ms(top_k=2, expansions=2, verify_nodes=4, context_tok=50) > 0)
    True
    """
    return Calibration(pair, config, **settings).model()


class Calibration:
    """A calibration in pieces, interleaved with another measurement, so that changes of the machine's speed affect both.

    settings: as for `calibrate`. `go_on` measures for a part of the config's seconds, `model` for the rest.
    """

    @runs.with_settings(CalibrateConfig)
    def __init__(self, pair: Pair, config: CalibrateConfig | None = None, **settings):
        self.config = config = _checked(pair, runs.configured(config, CalibrateConfig, settings))
        if (
            pair.drafter.copied_levels
        ):  # copies need no forward: only the network's drafter is timed
            pair = dataclasses.replace(pair, drafter=pair.drafter.drafter)
        self.pair, self._measured = pair, None

    @property
    def begun(self) -> bool:
        """Whether anything has been measured yet."""
        return self._measured is not None

    def _measurements(self) -> Measurements:
        if not self.begun:
            self._measured = Measurements(self.pair, self.config, _prompts(self.pair, self.config))
            self._measured.warm_up()
        return self._measured

    def go_on(self, frac: float) -> None:
        """Measure for this fraction of the config's seconds."""
        with clock.by_processor_time(self.config.cpu_time):
            self._measurements().go_on(frac * self.config.seconds)

    def model(self) -> CostModel:
        """The cost model, after the remaining seconds."""
        pair, config = self.pair, self.config
        with clock.by_processor_time(config.cpu_time):
            timings = self._measurements().run(config.seconds, config.progress)
        counter = "processor time" if config.cpu_time else "wall clock"
        name = config.name or f"{pair.name}-{dtype_name(pair.target.dtype)}"
        ranges = {"verify_nodes": (0, config.nodes[-1]), "expansions": (0, config.depth)}
        ranges["top_k"] = config.top_ks[0], config.top_ks[-1]
        facts = {
            "pair": pair.name,
            "dtype": dtype_name(pair.target.dtype),
            "machine": machine.speed_facts(),
        }
        facts |= {"name": f"{name}@{machine.short_name(facts['machine'])}", "ranges": ranges}
        told = (
            f"calibrated on {len(timings.cycles)} cycles after {config.contexts} tokens, {counter}."
        )
        model = fit(timings, provenance=told, **facts)
        off = ", ".join(f"{name} {model.errors[name]:.1%}" for name in WARN_BEYOND)
        if config.progress:
            tqdm.write(
                f"{model.name}: {off}; trees differ measurably beyond {model.uncertainty_frac:.1%}"
            )
        if any(abs(model.errors[name]) > most for name, most in WARN_BEYOND.items()):
            why = f"{model.name} is off by more than 10 % and 5 % ({off})"
            warn(f"{why}: give it more seconds, a quiet machine or cpu_time=True.")
        return model


def measured_answer_ms(pair: Pair, policy, costs: CostModel, turns: int = 6) -> float:
    """`measure.answer_ms` over a few embedded prompts (or random ones where the pair has no tokenizer)."""
    prompts = random.Random(0).sample(_prompts(pair, CalibrateConfig()), turns)
    return answer_ms(pair, policy, costs, [prompt[-256:] for prompt in prompts])


def _checked(pair: Pair, config: CalibrateConfig) -> CalibrateConfig:
    """`config` with contexts, top_ks and nodes filled in."""
    if pair.drafter is None:
        raise SpecdecError(
            "this pair has no drafter, so there is no cycle to time; load one with load_pair."
        )
    if not pair.drafter.forwards:
        why = "this drafter has no forwards to time; calibrate its target with one that has"
        raise SpecdecError(
            f"{why} (load_pair without drafter=), whose costs hold for copies as well."
        )
    if not check_number("seconds", config.seconds) > 0:
        raise SpecdecError(f"seconds must be above 0, got {config.seconds!r}.")
    limit, vocabulary = pair.target.position_limit, pair.target.vocab_size
    longest = min(900, (limit or 4096) - GROWTH_TOK - 2 * config.depth - 2)
    contexts = config.contexts or [max(8, part) for part in (longest // 12, longest // 2, longest)]
    contexts = tuple(sorted(set(contexts)))
    if len(contexts) < 2 or contexts[0] < 2 or contexts[-1] > max(8, longest):
        raise SpecdecError(
            f"calibration needs two or more contexts between 2 and {longest} tokens, got {contexts!r}."
        )
    top_ks = (
        tuple(k for k in TOP_KS if k <= vocabulary)
        if config.top_ks is None
        else tuple(sorted(config.top_ks))
    )
    if not top_ks or top_ks[0] < 1 or top_ks[-1] > vocabulary:
        raise SpecdecError(
            f"top_ks must lie between 1 and the vocabulary of {vocabulary}, got {top_ks!r}."
        )
    nodes = tuple(
        count for count in sorted(config.nodes) if count <= pool_size(config.depth, top_ks[-1])
    )
    if len(nodes) < 2 or nodes[0] != 0 or config.depth < 3:
        raise SpecdecError(
            "calibration needs a depth of at least 3, and nodes from 0 up to what the trees offer."
        )
    if pool_size(config.depth, top_ks[0]) < nodes[1]:
        why = f"no tree of top_k={top_ks[0]} holds {nodes[1]} nodes"
        raise SpecdecError(f"{why}; measure a smaller number of nodes too.")
    return dataclasses.replace(config, contexts=contexts, top_ks=top_ks, nodes=nodes)


def _prompts(pair: Pair, config: CalibrateConfig) -> list[list[int]]:
    """Token ids: of the prompts given, of the embedded suites, or random ones without a tokenizer."""
    if config.prompts is not None:
        if not config.prompts:
            raise SpecdecError(
                "calibration needs at least one prompt; give token ids or leave `prompts` out."
            )
        return [pair.ids_of(prompt) for prompt in config.prompts]
    if pair.tokenizer is None:
        draw = random.Random(config.seed)
        return [[draw.randrange(pair.target.vocab_size) for _ in range(64)] for _ in range(16)]
    names = [suites.embedded_suite(name, pair.name) for name in suites.TIMED_NAMES]
    texts = [prompt.turns[0] for name in names for prompt in suites.load_suite(name, limit=16)]
    return [pair.ids_of(text) for text in texts]


def fit(timings: Timings, **facts) -> CostModel:
    """The calibrated CostModel of `timings`, with its errors on held-out ones. facts: name, pair, dtype, machine, ..."""
    cycles = pd.DataFrame(timings.cycles)
    fitted = cycles[~cycles["held"] & cycles["settled"]]
    expanding = fitted.dropna(subset="expand_ms").assign(children=fitted["rows"] * fitted["top_k"])
    widths, expand, expand_per_tok, per_child = by_setting(
        expanding, "rows", "expand_ms", "children"
    )
    root_widths, root, root_per_tok = by_setting(
        fitted.dropna(subset="root_ms"), "top_k", "root_ms"
    )
    nodes, verify, verify_per_tok = by_setting(fitted, "verify_nodes", "verify_ms")
    if not np.array_equal(widths, root_widths):
        raise SpecdecError(
            "the calibration was too short to see every width; give it more seconds."
        )
    # milliseconds of an expansion that is neither the first nor the last of its cycle
    per_tok = np.interp(fitted["rows"], widths, expand_per_tok)
    usual = np.interp(fitted["rows"], widths, expand) + per_tok * fitted["context_tok"]
    usual += per_child * fitted["rows"] * fitted["top_k"]
    first = max(0.0, typical((fitted["first_ms"] - usual)[fitted["expansions"] > 1].to_numpy()))
    last = fitted["last_ms"] - usual - first * (fitted["expansions"] == 1)
    fixed, per_candidate, per_node = _choosing(fitted, last)
    _, step, step_per_tok = by_setting(pd.DataFrame(timings.steps).assign(rows=0), "rows", "ms")
    drafting = dict(
        widths=widths, root=root + per_candidate * widths, root_per_tok=root_per_tok, first_ms=first
    )
    drafting |= dict(
        expand=expand, expand_per_tok=expand_per_tok, candidate_ms=per_child + per_candidate
    )
    verifying = dict(nodes=nodes, verify=verify + per_node * nodes, verify_per_tok=verify_per_tok)
    rest = dict(
        rest_ms=max(0.0, typical(fitted["rest_ms"])) + fixed,
        question_ms=float(np.median(timings.questions)),
    )
    plain = dict(step=float(step[0]), step_per_tok=float(step_per_tok[0]))
    model = CostModel(kind="calibrated", **drafting, **verifying, **rest, **plain, **facts)
    # all parts of a cycle scaled alike, so that the sum over cycles is exact
    predicted = model.cycle_ms(*(fitted[name].to_numpy() for name in SHAPE))
    ratio = fitted["total_ms"].to_numpy() / predicted
    near = _near(ratio - np.median(ratio))
    level = float(fitted["total_ms"].to_numpy()[near].sum() / predicted[near].sum())
    scaled = {name: level * np.array(getattr(model, name)) for name in TABLES}
    scaled |= {
        name: level * getattr(model, name) for name in ("candidate_ms", "first_ms", "rest_ms")
    }
    model = _with_turns(dataclasses.replace(model, **scaled), timings, cycles)
    return dataclasses.replace(model, errors=errors(model, timings))


def by_setting(rows: pd.DataFrame, setting: str, value: str, beside: str | None = None):
    """(settings ascending, ms at context 0, ms per context token), arrays over the settings; both non-decreasing.

    beside: a second column that counts on top of the setting; its ms per unit follow.
    Trimmed means per (setting, place) limit outliers; then non-negative least squares of the relative errors, and an isotonic
    fit of the bases, which follows steps wherever both sides were measured.
    """
    cell = [setting, "place", *([beside] if beside else [])]
    rows = rows[
        rows.groupby(cell)[value].transform(lambda ms: _near(ms - ms.median())).astype(bool)
    ]
    cells = rows.groupby(cell).agg(
        ms=(value, "mean"), context=("context_tok", "mean"), count=(value, "size")
    )
    cells = cells.reset_index()
    settings, which = np.unique(cells[setting].to_numpy(), return_inverse=True)
    context = cells["context"].to_numpy(float) * PER_THOUSAND
    scale = 1.0 / max(1, settings.max())
    columns = [
        np.eye(len(settings))[which],
        context[:, None],
        (context * cells[setting] * scale).to_numpy()[:, None],
    ]
    if beside:
        columns.insert(0, cells[[beside]].to_numpy(float) * PER_THOUSAND)
    ms, weight = cells["ms"].to_numpy(), np.sqrt(cells["count"].to_numpy())
    weight[ms <= 0] = 0.0  # the processor-time counter may be too coarse for this cell
    solution = scipy.optimize.nnls(
        np.hstack(columns) * (weight / np.where(ms > 0, ms, 1.0))[:, None], weight
    )[0]
    base, flat, growing = (
        solution[-2 - len(settings) : -2],
        solution[-2] * PER_THOUSAND,
        solution[-1] * PER_THOUSAND,
    )
    counts = np.bincount(which, weights=cells["count"])
    table = (
        settings,
        scipy.optimize.isotonic_regression(base, weights=counts).x,
        flat + growing * scale * settings,
    )
    return (*table, float(solution[0]) * PER_THOUSAND) if beside else table


def _choosing(rows: pd.DataFrame, last: pd.Series) -> tuple[float, float, float]:
    """(fixed ms, ms per candidate, ms per node) of choosing the nodes: the extra time of the last expansion."""
    rows, last = rows[last.notna()], last.dropna()
    candidates = rows["top_k"] + rows["expansions"] * rows["rows"] * rows["top_k"]
    columns = np.stack((np.ones(len(rows)), candidates / 1e3, rows["verify_nodes"] / 1e2), axis=1)
    solution = trimmed_nnls(columns, last.to_numpy())
    return float(solution[0]), float(solution[1] / 1e3), float(solution[2] / 1e2)


def trimmed_nnls(columns: np.ndarray, values: np.ndarray, rounds: int = 3) -> np.ndarray:
    """Non-negative least squares without rows more than 3 median deviations from the previous round's fit."""
    near = np.ones(len(values), dtype=bool)
    for _ in range(rounds):
        solution = scipy.optimize.nnls(columns[near], values[near])[0]
        near = _near(values - columns @ solution)
    return solution


def typical(values) -> float:
    """The mean without outliers. A median would miss that every kind of work has its slower moments."""
    values = np.asarray(values, dtype=float)
    values = values[~np.isnan(values)]
    return float(values[_near(values - np.median(values))].mean()) if len(values) else 0.0


def _near(residual: np.ndarray) -> np.ndarray:
    """bool: within three robust standard deviations of a zero residual; the rest was interrupted."""
    residual = np.abs(residual)
    return residual <= max(3 * 1.4826 * np.median(residual), 1e-12)


def _with_turns(model: CostModel, timings: Timings, cycles: pd.DataFrame) -> CostModel:
    """`model` with prefill times, and the extra time of a first cycle, in which the drafter reads the prompt."""
    first, turns = cycles[cycles["first"]], pd.DataFrame(timings.turns)
    usual = model.root_ms(
        first["top_k"].to_numpy(), first["context_tok"].to_numpy()
    )  # never plain steps
    prompt_tok, prefill_ms = turns["prompt_tok"].to_numpy(float), turns["prefill_ms"].to_numpy()
    columns = np.stack((np.ones(len(turns)), prompt_tok * PER_THOUSAND), axis=1)
    times = {}
    for name, spent_ms in (
        ("turn", prefill_ms),
        ("reading", np.maximum(first["root_ms"].to_numpy() - usual, 0)),
    ):
        # Relative to the prefill: prompts differ tenfold in length.
        base, per_thousand = trimmed_nnls(columns / prefill_ms[:, None], spent_ms / prefill_ms)
        times |= {name: float(base), f"{name}_per_tok": float(per_thousand * PER_THOUSAND)}
    return dataclasses.replace(model, **times)


def errors(model: CostModel, timings: Timings) -> dict[str, float]:
    """Relative errors on held-out measurements.

    cycle_median_frac: of |predicted - measured| / measured over held-out cycles; cycles counts them.
    total_frac: of the total time of all held-out turns, signed; turns counts them.
    tree_frac: root mean square, over single trees in these turns, of the error beyond the one common to all trees (prompts
    excluded); trees counts them. It bounds the error of a comparison of two trees.
    """
    cycles = pd.DataFrame(timings.cycles)
    held = cycles[cycles["held"] & cycles["settled"]]
    off = np.abs(
        model.cycle_ms(*(held[name].to_numpy() for name in SHAPE)) / held["total_ms"].to_numpy() - 1
    )
    turns = []
    for turn in timings.held_turns:
        cycles_ms = model.cycle_ms(*np.array(turn["cycles"]).T)
        predicted_ms = (
            model.turn_ms(turn["prompt_tok"])
            + model.reading_ms(turn["prompt_tok"])
            + cycles_ms.sum()
        )
        turns.append((predicted_ms, turn["total_ms"], cycles_ms[1:].sum(), turn["later_ms"]))
    turns = pd.DataFrame(
        turns, columns=["predicted", "measured", "later_predicted", "later_measured"]
    )
    total = turns.sum()
    trees = (
        turns.groupby([turn["tree"] for turn in timings.held_turns])
        .sum()
        .query("later_measured > 0")
    )
    apart = np.log(trees["later_predicted"] / trees["later_measured"])
    tree_frac = float((apart - apart.mean()).std(ddof=1)) if len(trees) > 1 else 0.0
    return {
        "cycle_median_frac": float(np.median(off)),
        "tree_frac": tree_frac,
        "trees": len(trees),
        "cycles": len(held),
        "total_frac": float(total["predicted"] / total["measured"] - 1),
        "turns": len(turns),
    }
