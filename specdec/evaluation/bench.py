"""The bench: the same prompts decoded by several methods, interleaved, counted one way for all, written row by row.

Every prompt (and every turn of it) is decoded by all methods in a random order, one right after the other, so that a
machine that slows down slows all of them alike. Rows land in small atomic shards: a killed run continues where it was.
Knows nothing about figures or notebooks, and nothing about how a policy answers.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import time
import warnings
from pathlib import Path

import pandas as pd
import torch
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.core import clock
from specdec.core.decode import autoregress, decode
from specdec.core.pair import Pair
from specdec.core.records import CYCLE_COLUMNS, Generation
from specdec.data import suites as suites_module
from specdec.data.prompts import conversation, describe_items, gather
from specdec.errors import SpecdecError
from specdec.evaluation import stats
from specdec.evaluation.methods import baseline_of, named_methods
from specdec.models.fingerprint import describe_pair, fingerprint

KEYS = ["suite", "prompt", "turn", "method", "repeat"]
SHARES = ("draft", "policy", "verify", "commit", "host")


def evaluate(
    methods: dict,
    suites,
    pair: Pair,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    limit: int | None = None,
    part: str | None = None,
    repeats: int = 1,
    warmup: int = 1,
    cpu_time: bool = False,
    seed: int = 0,
    name: str = "evaluate",
    scale: str = "laptop",
    folder: str | Path | None = None,
    force: bool = False,
    progress: bool = True,
    **sampling,
) -> runs.Run:
    """Decode `suites` with every method; returns the Run that holds prompts.parquet and cycles.parquet.

    methods: {name: policy}, or in place of a policy "autoregressive" or "static:60,7,10". suites: names of
    `tasks.SUITES`, prompts, or {suite: prompts}; limit, part and folder as in `methods.gather`.
    One row of prompts.parquet is a turn of a prompt decoded by a method in a repeat; new_tok counts tokens up to the
    first stop token, the same way for all; cycle_tok sums new_tok of the cycles (what tau counts).

    Later turns of a conversation continue with the *baseline's* answers for all methods. In float32 these are every
    method's own answers; in low precision a near-tie may split the texts, and then all still see the same prompts.

    cpu_time: count processor time in place of the wall clock, for machines that others keep busy; one thread on a CPU.
    Column `clock` says what was counted.

    The same call continues a run that was stopped and reuses a finished one (same methods, prompts, pair, settings,
    threads, machine, source); force=True starts over. SpecdecError for bad input, before anything is decoded.
    """
    policies = named_methods(methods)
    _check_counts(repeats=(repeats, 1), warmup=(warmup, 0), max_new_tokens=(max_new_tokens, 1))
    items = gather(suites, limit=limit, folder=folder, part=part, seed=seed)
    _check_not_tuned_on(policies, items)
    check_countable(pair, cpu_time)
    settings = dict(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, sampling=sampling)
    config = {
        "methods": {label: fingerprint(policy) for label, policy in policies.items()},
        "baseline": baseline_of(policies),
        "items": describe_items(items),
        "prompts": len(items),
        "pair": describe_pair(pair),
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        **settings | ({"clock": "processor"} if cpu_time else {}),
    }
    run = runs.start(name, config, scale=scale)
    if force:
        for table in ("prompts", "cycles"):
            shutil.rmtree(run.path(table), ignore_errors=True)
    bench = _Bench(pair, policies, items, settings, config, run)
    with clock.by_processor_time(cpu_time):
        bench.measure(repeats, warmup, progress)
    return bench.finish()


def check_countable(pair: Pair, cpu_time: bool) -> None:
    """SpecdecError where processor time would not say how long decoding takes."""
    threads, kind = torch.get_num_threads(), pair.target.device.type
    if cpu_time and (threads != 1 or kind != "cpu"):
        raise SpecdecError(
            f"processor time counts one thread on a CPU, but there are {threads} on {kind}; call torch.set_num_threads(1) "
            "and load the pair on the CPU, or measure with cpu_time=False."
        )


def _check_counts(**counts: tuple) -> None:
    for what, (number, lowest) in counts.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < lowest:
            raise SpecdecError(f"{what} must be an integer of at least {lowest}, got {number!r}.")


def _check_not_tuned_on(policies, items) -> None:
    for label, policy in policies.items():
        tuned_on = getattr(policy, "tuned_on", ())
        seen = next((item.id for item in items if tuned_on and item.digest in tuned_on), None)
        if seen is not None:
            raise SpecdecError(f"method {label!r} was tuned on prompt {seen!r}; judge it on others (part='test').")


class _Bench:
    """One call of `evaluate`: what is measured, and the rows as they come."""

    def __init__(self, pair, policies, items, settings, config, run):
        self.pair, self.policies, self.items, self.run = pair, policies, items, run
        self.seed, self.sampling = settings["seed"], settings["sampling"]
        self.options = {"max_new_tokens": settings["max_new_tokens"], "temperature": settings["temperature"]}
        self.baseline = config["baseline"]
        self.label = {name: config["pair"][name] for name in ("pair", "dtype", "device")}
        self.label |= {
            "clock": config.get("clock", "wall"),
            "threads": config["threads"],
            "machine": runs.content_key(**machine.hardware())[:8],
        }
        self._verdicts: dict[tuple, bool | None] = {}

    def measure(self, repeats: int, warmup: int, progress: bool) -> None:
        """Decode what no shard holds yet. Shard number = repeat x prompts + prompt."""
        done = set(self.run.shards("prompts").done())
        jobs = []
        for repeat in range(repeats):
            order = list(range(len(self.items)))
            random.Random(f"{self.seed}/{repeat}").shuffle(order)  # suites mixed: a slow minute hits all of them
            jobs += [(repeat, index) for index in order if repeat * len(self.items) + index not in done]
        if not jobs:
            return
        begin = time.perf_counter()
        for number in range(warmup):
            self.decode_all(self.items[jobs[number % len(jobs)][1]], repeat=0)
        if warmup and progress:
            self._announce((time.perf_counter() - begin) / warmup * len(jobs), len(jobs))
        with tqdm(jobs, desc=self.run.name, unit="prompt", disable=not progress, smoothing=0.1) as bar:
            for repeat, index in bar:
                item = self.items[index]
                bar.set_postfix_str(item.suite, refresh=False)
                self._write(repeat * len(self.items) + index, self.decode_all(item, repeat))

    def _announce(self, seconds: float, prompts: int) -> None:
        if seconds > 60:
            tqdm.write(
                f"{self.run.name}: {prompts} prompts x {len(self.policies)} methods, about {seconds / 60:.0f} minutes; "
                "it can be stopped at any time and continues with the same call."
            )

    def _write(self, number: int, rows: tuple[list, list]) -> None:
        # The shard of prompts goes last: it is what marks the job as done.
        self.run.shards("cycles").write(number, pd.DataFrame(rows[1], columns=[*KEYS, *CYCLE_COLUMNS]))
        self.run.shards("prompts").write(number, pd.DataFrame(rows[0]).astype({"correct": "boolean"}))

    def decode_all(self, item, repeat: int) -> tuple[list[dict], list[dict]]:
        """All turns of one prompt by all methods, in an order drawn per turn. Returns rows of prompts and of cycles."""
        prompts, cycles, answers = [], [], []
        for turn in range(len(item.turns)):
            ids = self.pair.ids_of(conversation(self.pair, item, turn, answers))
            draw = random.Random(f"{self.seed}/{item.id}/{turn}/{repeat}")
            order, seed = draw.sample(list(self.policies), len(self.policies)), draw.getrandbits(31)
            found = {name: self._decode(name, ids, seed) for name in order}
            for name in self.policies:
                keys = dict(zip(KEYS, (item.suite, item.id, turn, name, repeat), strict=True))
                same = found[name].tokens == found[self.baseline].tokens
                prompts.append({**keys, "order": order.index(name), **self._row(item, turn, found[name]), "same": same})
                cycles += [{**keys, **row.row()} for row in found[name].rows]
            answers.append(found[self.baseline].text)
        return prompts, cycles

    def _decode(self, name: str, ids: list[int], seed: int) -> Generation:
        policy = self.policies[name]
        if policy is None:
            return autoregress(self.pair, ids, seed=seed, **self.options, **self.sampling)
        return decode(self.pair, ids, policy, seed=seed, **self.options, **self.sampling)

    def _row(self, item, turn: int, out: Generation) -> dict:
        cycles = out.rows
        text = out.text if out.text is not None else " ".join(map(str, out.tokens))
        return {
            "prompt_tok": out.prompt_tok,
            "new_tok": out.new_tok,
            "cycles": len(cycles),
            "cycle_tok": sum(row.new_tok for row in cycles),
            "draft_calls": sum(row.draft_calls for row in cycles),
            "accepted_tok": sum(row.accepted_tok for row in cycles),
            "verified_tok": sum(row.verified_tok for row in cycles),
            "prefill_ms": out.prefill_ms,
            "decode_ms": out.decode_ms,
            "total_ms": out.total_ms,
            "tau": out.tau,
            "finish_reason": out.finish_reason,
            "text_hash": hashlib.sha256(text.encode()).hexdigest()[:16],
            "correct": self._verdict(item, turn, text),
            **self.label,
        }

    def _verdict(self, item, turn: int, text: str) -> bool | None:
        """Whether the answer to the last turn is right; each distinct text is checked once (code runs for seconds)."""
        if item.prompt is None or turn + 1 < len(item.turns):
            return None
        if (item.id, text) not in self._verdicts:
            self._verdicts[item.id, text] = suites_module.check_answer(item.prompt, text)
        return self._verdicts[item.id, text]

    def finish(self) -> runs.Run:
        prompts, cycles = self.run.shards("prompts").merge(), self.run.shards("cycles").merge()
        differing = prompts[~prompts["same"]]
        if self.label["dtype"] == "float32" and len(differing):
            first = differing.iloc[0]
            warnings.warn(
                f"{len(differing)} of {len(prompts)} texts differ from the baseline's, {first['prompt']} by "
                f"{first['method']} among them: in float32 this is a bug; run specdec audit.",
                stacklevel=3,
            )
        return self.run.finish(texts=len(prompts), texts_differing=len(differing), cycles=len(cycles))


# --- reading a run ----------------------------------------------------------------------------------------------------


def summary(run: runs.Run, baseline: str | None = None, **options) -> pd.DataFrame:
    """One row per (suite, method), and 'all' suites: stats.compare's columns and what the bench adds.

    Added: new_tok, cycles, calls (draft forwards), same_frac (texts equal to the baseline's), accuracy_frac (where
    answers can be checked), prefill_frac (of all time), and draft_frac, policy_frac, verify_frac, commit_frac,
    host_frac (of the time in cycles). options: those of stats.bootstrap. `tables.acceptance_by_depth` and
    `tables.time_split` take the run's cycles table for what is not one number per method.
    """
    prompts, cycles = run.read_table("prompts"), run.read_table("cycles")
    table = stats.compare(prompts, baseline or run.record()["config"]["baseline"], **options)
    several = prompts["suite"].nunique() > 1
    added = [_measures(prompts, cycles, ["suite", "method"])]
    if several:
        added.append(_measures(prompts.assign(suite="all"), cycles.assign(suite="all"), ["suite", "method"]))
    table = table.merge(pd.concat(added).reset_index(), on=["suite", "method"], how="left")
    order = {name: place for place, name in enumerate(run.record()["config"]["methods"])}
    places = pd.DataFrame({"suite": pd.factorize(table["suite"])[0], "method": table["method"].map(order)})
    return table.loc[places.sort_values(["suite", "method"]).index].reset_index(drop=True)


def _measures(prompts: pd.DataFrame, cycles: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    groups = prompts.groupby(by, sort=False)
    sums = groups[["new_tok", "cycles", "draft_calls", "prefill_ms", "total_ms"]].sum()
    found = sums[["new_tok", "cycles"]].assign(calls=sums["draft_calls"], same_frac=groups["same"].mean())
    found["accuracy_frac"] = groups["correct"].mean().astype(float)  # NA where nothing can be checked
    found["prefill_frac"] = sums["prefill_ms"] / sums["total_ms"]
    times = cycles.groupby(by, sort=False)[[f"{part}_ms" for part in (*SHARES, "total")]].sum()
    for part in SHARES:
        found[f"{part}_frac"] = times[f"{part}_ms"] / times["total_ms"]
    return found


def noise_check(run: runs.Run, **options) -> dict:
    """stats.noise_check of two methods in the run that are the same in truth: what this machine cannot tell apart."""
    seen: dict[str, str] = {}
    for name, described in run.record()["config"]["methods"].items():
        twin = seen.setdefault(runs.canonical(described), name)
        if twin != name:
            return {
                "first": twin,
                "second": name,
                **stats.noise_check(run.read_table("prompts"), twin, name, **options),
            }
    raise SpecdecError("no two methods of this run are the same; evaluate one policy under two names to see the noise.")
