"""From timed cycles to a latency model: medians per setting, one slope per table, monotone fits, errors on held-out rows.

Every time is modelled as base(setting) + (a + b * setting) * context_tok with a, b >= 0: attending to the context costs
more with more rows. Knows nothing about models or clocks; `calibration` measures the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from specdec.config import SpecdecError
from specdec.latency import CostModel

SHAPE = ("top_k", "expansions", "verify_nodes", "context_tok")  # what the time of a cycle depends on
PER_THOUSAND = 1e-3  # context in thousands keeps the columns of the fit of like size


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


def fit(timings: Timings, **facts) -> CostModel:
    """The calibrated CostModel of `timings`, with its errors on the held-out ones. facts: name, pair, dtype, machine, ..."""
    cycles = pd.DataFrame(timings.cycles)
    fitted = cycles[~cycles["held"] & ~cycles["first"]]
    widths, expand, expand_per_tok = by_setting(fitted.dropna(subset="expand_ms"), "top_k", "expand_ms")
    same, root, root_per_tok = by_setting(fitted.dropna(subset="root_ms"), "top_k", "root_ms")
    nodes, verify, verify_per_tok = by_setting(fitted, "verify_nodes", "verify_ms")
    if not np.array_equal(widths, same):
        raise SpecdecError("the calibration was too short to see every width; give it more seconds.")
    fixed, per_candidate, per_node = _choosing(fitted, widths, expand, expand_per_tok)
    asked = pd.DataFrame(timings.questions).groupby("name")["ms"].median()
    question_ms = float(asked["none"])
    policies = {name: max(0.0, float(ms) - question_ms) for name, ms in asked.items() if name != "none"}
    _, step, step_per_tok = by_setting(pd.DataFrame(timings.steps).assign(rows=0), "rows", "ms")
    tables = dict(
        widths=widths, root=root + per_candidate * widths, root_per_tok=root_per_tok,
        expand=expand + per_candidate * widths**2, expand_per_tok=expand_per_tok, nodes=nodes,
        verify=verify + per_node * nodes, verify_per_tok=verify_per_tok, step=float(step[0]),
        step_per_tok=float(step_per_tok[0]), rest_ms=max(0.0, float(fitted["rest_ms"].median())) + fixed, question_ms=question_ms,
        policy_ms=policies,
    )  # fmt: skip
    model = CostModel(kind="calibrated", **{**facts, **tables})
    model = _levelled(model, fitted)
    model = CostModel(**{**vars(model), **_turns(model, timings, cycles)})
    return CostModel(**{**vars(model), "errors": errors(model, timings)})


def by_setting(rows: pd.DataFrame, setting: str, value: str):
    """(settings ascending, ms at context 0, ms per context token), arrays over the settings; both non-decreasing.

    Medians per (setting, place) first, so that a few slow moments count little; then non-negative least squares of
    relative errors over all of them together, then an isotonic fit of the bases.
    """
    from scipy.optimize import isotonic_regression, nnls

    cells = rows.groupby([setting, "place"]).agg(ms=(value, "median"), context=("context_tok", "median"))
    cells = cells.assign(count=rows.groupby([setting, "place"]).size()).reset_index()
    settings, which = np.unique(cells[setting].to_numpy(), return_inverse=True)
    context = cells["context"].to_numpy(float) * PER_THOUSAND
    scale = 1.0 / max(1, settings.max())
    columns = [np.eye(len(settings))[which], context[:, None], (context * cells[setting] * scale).to_numpy()[:, None]]
    ms, weight = cells["ms"].to_numpy(), np.sqrt(cells["count"].to_numpy())
    found = nnls(np.hstack(columns) * (weight / ms)[:, None], weight)[0]
    base, flat, growing = found[:-2], found[-2] * PER_THOUSAND, found[-1] * PER_THOUSAND * scale
    counts = np.bincount(which, weights=cells["count"])
    return settings, isotonic_regression(base, weights=counts).x, flat + growing * settings


def _choosing(rows: pd.DataFrame, widths, expand, expand_per_tok) -> tuple[float, float, float]:
    """(fixed ms, ms per candidate, ms per node) of choosing the nodes: what the last expansion took beyond the others."""
    rows = rows[rows["expansions"] > 0].dropna(subset="last_ms")
    usual = (
        np.interp(rows["top_k"], widths, expand)
        + np.interp(rows["top_k"], widths, expand_per_tok) * rows["context_tok"]
    )
    candidates = rows["top_k"] + rows["expansions"] * rows["top_k"] ** 2
    columns = np.stack((np.ones(len(rows)), candidates / 1e3, rows["verify_nodes"] / 1e2), axis=1)
    found = trimmed_nnls(columns, (rows["last_ms"] - usual).to_numpy())
    return float(found[0]), float(found[1] / 1e3), float(found[2] / 1e2)


def trimmed_nnls(columns: np.ndarray, values: np.ndarray, rounds: int = 3) -> np.ndarray:
    """Non-negative least squares without the rows that lie far (3 median deviations) from the last round's fit."""
    from scipy.optimize import nnls

    kept = np.ones(len(values), dtype=bool)
    for _ in range(rounds):
        found = nnls(columns[kept], values[kept])[0]
        kept = _near(values - columns @ found)
    return found


def _levelled(model: CostModel, rows: pd.DataFrame) -> CostModel:
    """`model` with all parts of a cycle scaled alike, so that the cycles' sum is right: medians miss the slower half."""
    predicted = model.cycle_ms(*(rows[name].to_numpy() for name in SHAPE))
    ratio = rows["total_ms"].to_numpy() / predicted
    kept = _near(ratio - np.median(ratio))
    level = float(rows["total_ms"].to_numpy()[kept].sum() / predicted[kept].sum())
    tables = ("root", "root_per_tok", "expand", "expand_per_tok", "verify", "verify_per_tok")
    scaled = {name: level * np.array(getattr(model, name)) for name in tables}
    return CostModel(**{**vars(model), **scaled, "rest_ms": level * model.rest_ms})


def _near(residual: np.ndarray) -> np.ndarray:
    """bool: within three standard deviations (from the median) of no residual; what lies beyond was interrupted."""
    residual = np.abs(residual)
    return residual <= max(3 * 1.4826 * np.median(residual), 1e-12)


def _turns(model: CostModel, timings: Timings, cycles: pd.DataFrame) -> dict[str, float]:
    """turn and turn_per_tok: prefill, and what a turn's first cycle takes longer because the drafter reads the prompt."""
    first = cycles[cycles["first"]]
    usual = model.root_ms(first["top_k"].to_numpy(), first["context_tok"].to_numpy())
    turns = pd.DataFrame(timings.turns)
    prompt_tok = turns["prompt_tok"].to_numpy(float)
    spent = turns["prefill_ms"].to_numpy() + np.maximum(first["root_ms"].to_numpy() - usual, 0)
    columns = np.stack((np.ones(len(turns)), prompt_tok * PER_THOUSAND), axis=1)
    found = trimmed_nnls(columns / spent[:, None], np.ones(len(turns)))  # relative: prompts differ tenfold in length
    return {"turn": float(found[0]), "turn_per_tok": float(found[1] * PER_THOUSAND)}


def errors(model: CostModel, timings: Timings) -> dict[str, float]:
    """Relative errors on what the fit did not see.

    cycle_median_frac, cycle_p90_frac: of |predicted - measured| / measured over held-out cycles; cycles counts them.
    total_frac: of the whole time of all held-out turns together, signed; worst_turn_frac: the largest of a single turn.
    """
    cycles = pd.DataFrame(timings.cycles)
    held = cycles[cycles["held"] & ~cycles["first"]]
    predicted = model.cycle_ms(*(held[name].to_numpy() for name in SHAPE))
    off = np.abs(predicted / held["total_ms"].to_numpy() - 1)
    wholes = np.array([(whole_ms(model, whole), whole["total_ms"]) for whole in timings.wholes])
    return {
        "cycle_median_frac": float(np.median(off)),
        "cycle_p90_frac": float(np.quantile(off, 0.9)),
        "cycles": len(held),
        "total_frac": float(wholes[:, 0].sum() / wholes[:, 1].sum() - 1),
        "worst_turn_frac": float(np.abs(wholes[:, 0] / wholes[:, 1] - 1).max()),
        "turns": len(wholes),
    }


def whole_ms(model: CostModel, whole: dict) -> float:
    """Predicted milliseconds of one turn: its prompt and all its cycles."""
    top_k, expansions, nodes, context = np.array(whole["cycles"]).T
    return float(model.turn_ms(whole["prompt_tok"]) + model.cycle_ms(top_k, expansions, nodes, context).sum())
