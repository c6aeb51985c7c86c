"""Calibration: times cycles of many shapes through the very engine that decodes, and fits a latency model to them.

Settings run interleaved in random order, so that a machine that slows down slows all alike; medians and a monotone fit
(`fitting`) do the rest. A fifth of the cycles and whole turns are held out, and the model carries its errors on them.

From timed cycles to a latency model: medians per setting, one slope per table, monotone fits, errors on held-out rows.

Every time is modelled as base(setting) + (a + b * setting) * context_tok with a, b >= 0: attending to the context costs
more with more rows. Knows nothing about models or clocks; `calibration` measures the rows.
"""

from __future__ import annotations

import random
import time
import warnings

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from specdec.core.pair import Pair, dtype_name
from specdec.core.tree_config import pool_size
from specdec.costs.measure import GROWTH_TOK, Jobs, Shapes, Timings
from specdec.costs.model import CostModel, here_and_now
from specdec.data import suites
from specdec.errors import SpecdecError

TOP_KS = (1, 2, 4, 8, 10, 16, 20, 32)
# Kernels work in blocks of rows, the root being one: the time jumps after 31, 63, ... nodes.
NODES = (
    *(0, 1, 2, 4, 8, 12, 15, 16, 20, 24, 31, 32, 40, 48, 59, 63, 64, 80, 95, 96, 112),
    *(127, 128, 159, 160, 191, 192, 223, 224, 240),
)
ASKED = {"cycle_median_frac": 0.10, "total_frac": 0.05}  # errors beyond which a model warns
BUSY_FRAC = 0.9
SUITES = ("laptop/mt_bench", "laptop/gsm8k", "laptop/cnn_dm")


def calibrate(
    pair: Pair,
    *,
    seconds: float = 45.0,
    seed: int = 0,
    contexts: tuple[int, ...] | None = None,
    top_ks: tuple[int, ...] | None = None,
    nodes: tuple[int, ...] = NODES,
    depth: int = 12,
    prompts: list[list[int]] | None = None,
    now=None,
    name: str | None = None,
    progress: bool = True,
) -> CostModel:
    """The latency model of `pair` on this machine, in about `seconds` (longer only if not every setting was seen yet).

    contexts: prompt lengths, default three up to 900 tokens or the target's limit. top_ks, nodes, depth: the settings
    (expansions run from 1 to depth). prompts: token ids to decode, default texts of the embedded suites, random ids for a
    pair without tokenizer. now: a second counter; time.process_time counts processor time where others use the machine.
    SpecdecError for settings that cannot be measured.
    """
    if pair.drafter is None:
        raise SpecdecError("this pair has no drafter, so there is no cycle to time; load one with load_pair.")
    if not seconds > 0:
        raise SpecdecError(f"seconds must be above 0, got {seconds!r}.")
    contexts = _contexts(pair, contexts, depth)
    top_ks = tuple(k for k in TOP_KS if k <= pair.target.vocab_size) if top_ks is None else tuple(sorted(top_ks))
    if not top_ks or top_ks[0] < 1 or top_ks[-1] > pair.target.vocab_size:
        raise SpecdecError(f"top_ks must lie between 1 and the vocabulary of {pair.target.vocab_size}, got {top_ks!r}.")
    most = pool_size(depth, top_ks[-1])
    nodes = tuple(count for count in sorted(nodes) if count <= most)
    if len(nodes) < 2 or nodes[0] != 0 or depth < 2:
        raise SpecdecError("calibration needs a depth of at least 2, and nodes from 0 up to what the trees offer.")
    work = Jobs(
        pair, Shapes(top_ks, nodes, depth, random.Random(seed)), contexts, _prompts(pair, prompts, seed), seed, now
    )
    _measure(work, seconds, progress)
    dtype = dtype_name(pair.target.dtype)
    ranges = {"top_k": (top_ks[0], top_ks[-1]), "verify_nodes": (0, nodes[-1]), "expansions": (0, depth)}
    counted = "processor time" if now is not None else "wall clock"
    model = fit(
        work.timings,
        name=name or f"{pair.name}-{dtype}",
        pair=pair.name,
        dtype=dtype,
        machine=here_and_now(),
        ranges=ranges,
        provenance=f"calibrated on {len(work.timings.cycles)} cycles after {contexts} tokens, {counted}.",
    )
    if progress:
        tqdm.write(described(model))
    if (
        abs(model.errors["total_frac"]) > ASKED["total_frac"]
        or model.errors["cycle_median_frac"] > ASKED["cycle_median_frac"]
    ):
        warnings.warn(
            f"{described(model)} That is more than the 10 % and 5 % asked for: give it more seconds, a quiet "
            "machine or now=time.process_time.",
            stacklevel=2,
        )
    return model


def described(model: CostModel) -> str:
    """One sentence with the errors on held-out cycles and turns."""
    told = model.errors
    return (
        f"{model.name}: held-out cycles are predicted with a median error of {told['cycle_median_frac']:.1%} "
        f"({told['cycles']} cycles), the time of {told['turns']} held-out turns within {abs(told['total_frac']):.1%}."
    )


def _contexts(pair: Pair, contexts, depth: int) -> tuple[int, ...]:
    """Prompt lengths that leave room for a turn below the target's limit."""
    limit = pair.target.position_limit
    longest = min(900, (limit or 4096) - GROWTH_TOK - 2 * depth - 2)
    if contexts is None:
        contexts = sorted({max(8, longest // 12), max(8, longest // 2), max(8, longest)})
    if len(set(contexts)) < 2 or min(contexts) < 2 or max(contexts) > max(8, longest):
        raise SpecdecError(f"calibration needs two or more contexts between 2 and {longest} tokens, got {contexts!r}.")
    return tuple(sorted(set(contexts)))


def _measure(work: Jobs, seconds: float, progress: bool) -> None:
    """Rounds of jobs until the time is up and every setting was seen; before that, one of each kind to warm up."""
    for job, argument in {job.__name__: (job, argument) for job, argument in work.round()}.values():
        job(argument)
    work.forget()
    begin, jobs, rounds, spent = work.clock.now(), [], 0, 0.0
    busy, wall = time.process_time(), time.perf_counter()
    with tqdm(total=round(seconds), desc="calibrate", unit="s", disable=not progress) as bar:
        while spent < seconds or not rounds or not work.complete:
            jobs = jobs or work.round()
            job, argument = jobs.pop()
            job(argument)
            rounds += not jobs
            spent = work.clock.now() - begin
            bar.update(min(round(seconds), int(spent)) - bar.n)
    share = (time.process_time() - busy) / (time.perf_counter() - wall)
    if share < BUSY_FRAC and work.clock.now is time.perf_counter and work.pair.target.device.type == "cpu":
        warnings.warn(
            f"this process had only {share:.0%} of a core while it calibrated, so others slowed it down; repeat "
            "it on a quiet machine or with now=time.process_time.",
            stacklevel=3,
        )


def _prompts(pair: Pair, prompts, seed: int) -> list[list[int]]:
    """Token ids of prompts: those given, texts of the embedded suites, or random ids without a tokenizer."""
    if prompts is not None:
        if not prompts:
            raise SpecdecError("calibration needs at least one prompt; give token ids or leave `prompts` out.")
        return [pair.ids_of(prompt) for prompt in prompts]
    if pair.tokenizer is None:
        draw = random.Random(seed)
        return [[draw.randrange(pair.target.vocab_size) for _ in range(64)] for _ in range(16)]
    chats = getattr(pair.tokenizer, "chat_template", None)
    texts = [one.turns[0] for suite in SUITES for one in suites.load_suite(suite, limit=16)]
    return [pair.ids_of([{"role": "user", "content": text}] if chats else text) for text in texts]


# ---- from fitting ----------------------------------------


SHAPE = ("top_k", "expansions", "verify_nodes", "context_tok")  # what the time of a cycle depends on
PER_THOUSAND = 1e-3  # context in thousands keeps the columns of the fit of like size


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
        widths=widths,
        root=root + per_candidate * widths,
        root_per_tok=root_per_tok,
        expand=expand + per_candidate * widths**2,
        expand_per_tok=expand_per_tok,
        nodes=nodes,
        verify=verify + per_node * nodes,
        verify_per_tok=verify_per_tok,
        step=float(step[0]),
        step_per_tok=float(step_per_tok[0]),
        rest_ms=max(0.0, float(fitted["rest_ms"].median())) + fixed,
        question_ms=question_ms,
        policy_ms=policies,
    )
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
