"""Calibration: times cycles of many shapes through the very engine that decodes, and fits a latency model to them.

Settings run interleaved in random order, so that a machine that slows down slows all alike; medians and a monotone fit
(`fitting`) do the rest. A fifth of the cycles and whole turns are held out, and the model carries its errors on them.
"""

from __future__ import annotations

import random
import time
import warnings

from tqdm.auto import tqdm

from specdec import tasks
from specdec.config import SpecdecError, pool_size
from specdec.fitting import fit
from specdec.hub import Pair
from specdec.latency import CostModel, here_and_now
from specdec.probing import GROWTH_TOK, Jobs, Shapes

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
    dtype = str(pair.target.dtype).removeprefix("torch.")
    ranges = {"top_k": (top_ks[0], top_ks[-1]), "verify_nodes": (0, nodes[-1]), "expansions": (0, depth)}
    counted = "processor time" if now is not None else "wall clock"
    model = fit(
        work.timings, name=name or f"{pair.name}-{dtype}", pair=pair.name, dtype=dtype, machine=here_and_now(),
        ranges=ranges, provenance=f"calibrated on {len(work.timings.cycles)} cycles after {contexts} tokens, {counted}.",
    )  # fmt: skip
    if progress:
        tqdm.write(described(model))
    if (
        abs(model.errors["total_frac"]) > ASKED["total_frac"]
        or model.errors["cycle_median_frac"] > ASKED["cycle_median_frac"]
    ):
        warnings.warn(f"{described(model)} That is more than the 10 % and 5 % asked for: give it more seconds, a quiet "
                      "machine or now=time.process_time.", stacklevel=2)  # fmt: skip
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
        warnings.warn(f"this process had only {share:.0%} of a core while it calibrated, so others slowed it down; repeat "
                      "it on a quiet machine or with now=time.process_time.", stacklevel=3)  # fmt: skip


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
    texts = [one.turns[0] for suite in SUITES for one in tasks.load_suite(suite, limit=16)]
    return [pair.ids_of([{"role": "user", "content": text}] if chats else text) for text in texts]
