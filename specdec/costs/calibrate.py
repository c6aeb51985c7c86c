"""Calibration: fits a cost model of this machine to timed cycles of many shapes.

    time = base[setting] + (a + b * setting) * context_tok        with a, b >= 0

Attention over the context costs more with more rows, hence b. Trimmed means per setting and a
monotone fit reduce the effect of slow outliers. A fifth of the cycles and some whole turns are held
out; the model stores its errors on them. `measure` does the timing.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pandas as pd
import scipy

from specdec import machine, runs
from specdec.core.decode import decode
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Policy
from specdec.core.tree_config import pool_size
from specdec.costs.measure import GROWTH_TOK, SHAPE, CalibrateConfig, Measurements, Timings
from specdec.costs.model import TABLES, CostModel
from specdec.data import suites
from specdec.errors import SpecdecError, check_number, door, warn

# children, and rows of an expansion: both sides of steps
TOP_KS = (1, 2, 3, 4, 5, 6, 8, 9, 10, 16, 17, 20, 32)
PER_THOUSAND = 1e-3  # context in thousands keeps the columns of the fit at a similar scale


@door
def calibrate(pair: Pair, config: CalibrateConfig | None = None, **settings: Any) -> CostModel:
    """The cost model of `pair` on this machine, in about `seconds` (45 by default).

    settings: fields of CalibrateConfig by name. SpecdecError for what cannot be measured.

    >>> import specdec, warnings
    >>> warnings.simplefilter("ignore")  # so short a calibration is not exact
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> few = dict(top_ks=(1, 2), nodes=(0, 2, 4), depth=3, contexts=(10, 60))
    >>> calibrate(pair, seconds=0.2, progress=False, **few).kind
    'calibrated'
    """
    return Calibration(pair, config, **settings).model()


class Calibration(Measurements):
    """A calibration in pieces (`go_on`), interleaved with another measurement: a machine's changes
    of speed then affect both. settings: as for `calibrate`.
    """

    def __init__(self, pair: Pair, config: CalibrateConfig | None = None, **settings: Any):
        config = _checked(pair, runs.configured(config, CalibrateConfig, settings))
        drafter: Any = pair.drafter
        # copies need no forward: only the network's drafter is timed
        if drafter.copied_levels:
            pair = dataclasses.replace(pair, drafter=drafter.drafter)
        super().__init__(pair, config, _prompts(pair, config.seed))

    def model(self) -> CostModel:
        """The cost model, after the remaining seconds."""
        # 1. the measurements, and what was measured where
        timings = self.finish()
        config = self.config
        dtype = dtype_name(self.pair.target.dtype)
        facts = machine.speed_facts()
        counter = "processor time" if config.cpu_time else "wall clock"
        count = f"calibrated on {len(timings.cycles)} cycles"
        ranges = {"verify_nodes": (0, config.nodes[-1]), "expansions": (0, config.depth)}
        ranges["top_k"] = (config.top_ks[0], config.top_ks[-1])
        model = fit(
            timings,
            name=f"{config.name or f'{self.pair.name}-{dtype}'}@{machine.short_name(facts)}",
            provenance=f"{count} after {config.contexts} tokens, {counter}.",
            pair=self.pair.name,
            dtype=dtype,
            machine=facts,
            ranges=ranges,
        )
        # 2. its errors
        cycle_frac = model.errors["cycle_median_frac"]
        total_frac = model.errors["total_frac"]
        if cycle_frac > 0.10 or abs(total_frac) > 0.05:
            off = f"cycle_median_frac {cycle_frac:.1%}, total_frac {total_frac:.1%}"
            why = f"{model.name} is off by more than 10 % and 5 % ({off})"
            warn(f"{why}: give it more seconds, a quiet machine or cpu_time=True.")
        return model


def measured_answer_ms(pair: Pair, policy: Policy, costs: CostModel) -> float:
    """Milliseconds of one answer of `policy` in live decoding, beyond costs.question_ms.

    Between two answers the models run, as caches should be cold. Of six embedded prompts the first
    warms up. The slowest twentieth of the cycles, which were interrupted, is left out.
    """
    spent = []
    for number, prompt in enumerate(random.Random(0).sample(_prompts(pair, 0), 6)):
        for row in decode(pair, prompt[-256:], policy, 48, stop_tokens=()).rows:
            if row.questions and number:
                spent.append((row.policy_ms / row.questions, row.policy_ms, row.questions))
    if not spent:
        return 0.0
    _, policy_ms, questions = np.array(sorted(spent)[: len(spent) - len(spent) // 20]).T
    return max(0.0, float(policy_ms.sum() / questions.sum()) - costs.question_ms)


def _checked(pair: Pair, config: CalibrateConfig) -> CalibrateConfig:
    """`config` with contexts, top_ks and nodes filled in."""
    # 1. what can be timed
    if pair.drafter is None or not pair.drafter.forwards:
        raise SpecdecError("calibrate needs a pair whose drafter has forwards to time.")
    check_number("seconds", config.seconds, low=1e-3)
    # 2. contexts that leave room for a turn
    longest = min(900, (pair.target.position_limit or 4096) - GROWTH_TOK - 2 * config.depth - 2)
    usual = [max(8, part) for part in (longest // 12, longest // 2, longest)]
    contexts = tuple(sorted(set(config.contexts or usual)))
    if len(contexts) < 2 or contexts[0] < 2 or contexts[-1] > max(8, longest):
        raise SpecdecError(f"give two or more contexts between 2 and {longest}, got {contexts!r}.")
    # 3. trees that the drafter can draft
    vocabulary = pair.target.vocab_size
    top_ks = tuple(sorted(config.top_ks or [k for k in TOP_KS if k <= vocabulary]))
    if top_ks[0] < 1 or top_ks[-1] > vocabulary:
        raise SpecdecError(f"top_ks must lie between 1 and {vocabulary}, got {top_ks!r}.")
    most = pool_size(config.depth, top_ks[-1])
    nodes = tuple(count for count in sorted(set(config.nodes)) if count <= most)
    if len(nodes) < 2 or nodes[0] != 0 or config.depth < 3:
        raise SpecdecError("give a depth of at least 3, and nodes from 0 to what trees offer.")
    return dataclasses.replace(config, contexts=contexts, top_ks=top_ks, nodes=nodes)


def _prompts(pair: Pair, seed: int) -> list[list[int]]:
    """Token ids of the embedded suites, or random ones without a tokenizer."""
    if pair.tokenizer is None:
        draw = random.Random(seed)
        return [[draw.randrange(pair.target.vocab_size) for _ in range(64)] for _ in range(16)]
    prompts = []
    for name in suites.TIMED_NAMES:
        suite = suites.embedded_suite(name, pair.name)
        prompts += [pair.ids_of(prompt.turns[0]) for prompt in suites.load_suite(suite, limit=16)]
    return prompts


def fit(timings: Timings, **facts: Any) -> CostModel:
    """The calibrated CostModel of `timings`, with its errors. facts: name, pair, machine, ..."""
    # 1. the tables: drafting, verification with the choice of nodes, and plain steps
    cycles = pd.DataFrame(timings.cycles)
    fitted = cycles[~cycles["held"] & cycles["settled"]].assign(children=0)
    later = fitted.dropna(subset="expand_ms").assign(children=fitted["rows"] * fitted["top_k"])
    steps = pd.DataFrame(timings.steps).assign(rows=0, children=0)
    widths, expand, expand_per_tok, per_child = by_setting(later, "rows", "expand_ms")
    rooted = fitted.dropna(subset="root_ms")
    root_widths, root, root_per_tok, _ = by_setting(rooted, "top_k", "root_ms")
    assert np.array_equal(widths, root_widths), "every width was measured both ways"
    nodes, verify, verify_per_tok, _ = by_setting(fitted, "verify_nodes", "verify_ms")
    _, step, step_per_tok, _ = by_setting(steps, "rows", "ms")
    tables = (root, root_per_tok, expand, expand_per_tok, verify, verify_per_tok)
    model = CostModel(
        kind="calibrated",
        widths=widths,
        nodes=nodes,
        candidate_ms=per_child,
        rest_ms=typical(fitted["rest_ms"]),
        question_ms=float(np.median(timings.questions)),
        step=float(step[0]),
        step_per_tok=float(step_per_tok[0]),
        **dict(zip(TABLES, tables, strict=True)),
        **facts,
    )
    # 2. what a cycle's first expansion takes longer
    usual_ms = model.expand_ms(fitted["top_k"], fitted["context_tok"], fitted["rows"])
    first_ms = max(0.0, typical(fitted["first_ms"] - usual_ms))
    model = dataclasses.replace(model, first_ms=first_ms)
    # 3. all parts of a cycle scaled alike, so that the sum over cycles is exact
    predicted = model.cycle_ms(*(fitted[name].to_numpy() for name in SHAPE))
    total_ms = fitted["total_ms"].to_numpy()
    ratio = total_ms / predicted
    near = _near(ratio - np.median(ratio))
    level = total_ms[near].sum() / predicted[near].sum()
    parts = (*TABLES, "candidate_ms", "first_ms", "rest_ms")
    scaled: dict[str, Any] = {}
    for name in parts:
        scaled[name] = (level * np.array(getattr(model, name))).tolist()
    # 4. prefills, and the errors on what was held out
    model = dataclasses.replace(model, **scaled)
    model = dataclasses.replace(model, **_turns(model, timings.turns, cycles[cycles["first"]]))
    return dataclasses.replace(model, errors=errors(model, timings))


def by_setting(
    rows: pd.DataFrame, setting: str, value: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """(settings ascending, ms at context 0, ms per context token), and the ms per child.

    Trimmed means per (setting, place), non-negative least squares of the relative errors, and an
    isotonic fit of the bases, which follows steps wherever both sides were measured.
    """
    # 1. means of the rows of each cell
    cell = [setting, "place", "children"]
    near = rows.groupby(cell)[value].transform(lambda ms: _near(ms - ms.median()))
    means = rows[near.astype(bool)].groupby(cell)
    cells = means.agg(ms=(value, "mean"), context=("context_tok", "mean"), count=(value, "size"))
    cells = cells.reset_index()
    # 2. the columns of the fit: children, one per setting, the context, and context times setting
    settings, which = np.unique(cells[setting].to_numpy(), return_inverse=True)
    context = cells["context"].to_numpy(float) * PER_THOUSAND
    scale = 1.0 / max(1, settings.max())
    extra = cells["children"].to_numpy(float) * PER_THOUSAND
    growing = context * cells[setting].to_numpy() * scale
    columns = np.column_stack([extra, np.eye(len(settings))[which], context, growing])
    # 3. non-negative, by relative errors; a coarse counter may show no time at all in a cell
    ms = cells["ms"].to_numpy()
    weight = np.where(ms > 0, np.sqrt(cells["count"].to_numpy()), 0.0)
    relative = (weight / np.where(ms > 0, ms, 1.0))[:, None]
    per_unit, *base, flat, steep = scipy.optimize.nnls(columns * relative, weight)[0]
    # 4. bases that never fall
    counts = np.bincount(which, weights=cells["count"])
    base = scipy.optimize.isotonic_regression(base, weights=counts).x
    per_tok = PER_THOUSAND * (flat + steep * scale * settings)
    return settings, base, per_tok, float(per_unit) * PER_THOUSAND


def typical(times: pd.Series) -> float:
    """The mean without outliers; a median would miss slower moments, which all work has."""
    values = times.dropna().to_numpy(float)
    return float(values[_near(values - np.median(values))].mean())


def _near(residual: np.ndarray) -> np.ndarray:
    """bool: within three robust standard deviations of 0; the rest was interrupted."""
    residual = np.abs(residual)
    return residual <= max(3 * 1.4826 * np.median(residual), 1e-12)


def _turns(model: CostModel, turns: list[dict], first: pd.DataFrame) -> dict[str, float]:
    """Prefill times, and what a turn's first cycle, which reads the prompt, takes longer."""
    prompt_tok = np.array([turn["prompt_tok"] for turn in turns], dtype=float)
    prefill_ms = np.array([turn["prefill_ms"] for turn in turns])
    usual_ms = model.root_ms(first["top_k"].to_numpy(), first["context_tok"].to_numpy())
    reading_ms = np.maximum(first["root_ms"].to_numpy() - usual_ms, 0)
    # relative to the prefill: prompts differ tenfold in length
    columns = np.stack((np.ones(len(turns)), prompt_tok), axis=1) / prefill_ms[:, None]
    turn, turn_per_tok = _trimmed(columns, prefill_ms / prefill_ms)
    reading, reading_per_tok = _trimmed(columns, reading_ms / prefill_ms)
    return dict(
        turn=turn, turn_per_tok=turn_per_tok, reading=reading, reading_per_tok=reading_per_tok
    )


def _trimmed(columns: np.ndarray, values: np.ndarray) -> list[float]:
    """Non-negative least squares, three times, without rows far from the previous fit."""
    near = np.ones(len(values), dtype=bool)
    for _ in range(3):
        solution = scipy.optimize.nnls(columns[near], values[near])[0]
        near = _near(values - columns @ solution)
    return solution.tolist()


def errors(model: CostModel, timings: Timings) -> dict[str, float]:
    """Relative errors on held-out measurements: cycle_median_frac of cycles, total_frac (signed) of
    whole turns. tree_frac: root mean square, over the trees of these turns, of the error beyond the
    common one; it bounds the error of a comparison of two trees.
    """
    # 1. single cycles
    cycles = pd.DataFrame(timings.cycles)
    held = cycles[cycles["held"] & cycles["settled"]]
    predicted = model.cycle_ms(*(held[name].to_numpy() for name in SHAPE))
    off = np.abs(predicted / held["total_ms"].to_numpy() - 1)
    # 2. whole turns
    turns = pd.DataFrame(timings.held_turns)
    cycles_ms = [model.cycle_ms(*np.array(rows).T) for rows in turns.pop("cycles")]
    read_ms = model.turn_ms(turns["prompt_tok"]) + model.reading_ms(turns["prompt_tok"])
    predicted_ms = read_ms.sum() + sum(ms.sum() for ms in cycles_ms)
    # 3. trees, from the cycles after the first
    turns["later"] = [ms[1:].sum() for ms in cycles_ms]
    trees = turns.groupby("tree").sum().query("later_ms > 0")
    apart = np.log(trees["later"] / trees["later_ms"])
    return {
        "cycle_median_frac": float(np.median(off)),
        "tree_frac": float((apart - apart.mean()).std(ddof=1)) if len(trees) > 1 else 0.0,
        "trees": len(trees),
        "cycles": len(held),
        "total_frac": float(predicted_ms / turns["total_ms"].sum() - 1),
        "turns": len(turns),
    }
