"""The bench: several methods decode the same prompts, interleaved; rows are written as they come.

All methods decode every prompt (and every turn of it) in a random order, one right after the other,
so that a slow phase of the machine affects all of them alike. Rows go to small atomic shards: a
killed run continues. Policies start every prompt in their given state.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.core import clock
from specdec.core.decode import autoregress, decode
from specdec.core.pair import Pair
from specdec.core.records import CYCLE_COLUMNS, TURN, Generation
from specdec.core.verification import WARPERS
from specdec.data.suites import check_answer, conversation, describe_items, gather, openings
from specdec.errors import SpecdecError, check_integer, warn
from specdec.evaluation import metrics, stats
from specdec.evaluation.methods import DraftedBy, baseline_of, named_methods, unused_method
from specdec.models import load
from specdec.models.pairs import describe_pair, fingerprint
from specdec.parallel import checked_place, parallel

KEYS = [*TURN, "method", "repeat"]
COUNTED = ("draft_calls", "accepted_tok", "verified_tok")  # summed over cycles
SUMMED = ["new_tok", "cycles", "draft_calls"]  # over prompts


@dataclass(frozen=True)
class EvaluateConfig:
    """How `evaluate` decodes, on which prompts, how often, and where its rows go."""

    # sampling as in transformers; None leaves a setting out
    temperature: float = 0.0  # 0 is greedy
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int = 128
    seed: int = 0  # of sampling, of the order of prompts and methods, and of the subset of prompts
    limit: int | None = None  # prompts per suite
    part: str | None = None  # train, tune or test of each suite
    folder: str | Path | None = None  # JSONL files of suites that are not embedded
    repeats: int = 1
    warmup: int = 1  # prompts decoded first, uncounted
    cpu_time: bool = False  # processor time in place of the wall clock (one thread)
    name: str = "evaluate"  # of the run
    scale: str = "laptop"
    force: bool = False  # start over
    progress: bool = True
    on: str | None = None  # run elsewhere: local, ray or ray://host:port (`parallel`)
    jobs: int | None = None  # the most prompts at once there

    @property
    def warping(self) -> dict:
        """The sampling settings besides temperature."""
        return {name: getattr(self, name) for name in WARPERS if getattr(self, name) is not None}


def evaluate(
    methods: dict, suites, pair: Pair, config=None, *, between: Callable | None = None, **settings
) -> runs.Run:
    """Decode `suites` with every method; returns the Run with prompts.parquet and cycles.parquet.

    methods: {name: policy}, or in place of a policy "autoregressive", "static:60,7,10", or a policy
    `methods.DraftedBy` another drafter on the pair's target. suites: as in `gather`. settings:
    fields of EvaluateConfig by name. between: called before each prompt with its share of the
    prompts, in this process only.

    Later turns of a conversation continue with the *baseline's* answers for all methods. The same
    call continues a stopped run and reuses a finished one.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> methods = {"plain": "autoregressive", "tree": specdec.Static(8, 3, 2)}
    >>> few = dict(max_new_tokens=8, name="example", progress=False)
    >>> run = evaluate(methods, {"mine": ["What is 2 + 3?"]}, pair, **few)
    >>> bool(run.read_table("prompts")["same"].all())
    True
    """
    config = runs.configured(config, EvaluateConfig, settings)
    policies = named_methods(methods)
    chosen = dict(limit=config.limit, folder=config.folder, part=config.part, seed=config.seed)
    items = gather(suites, **chosen)
    place = checked_place(config.on, config.jobs)
    _check(pair, policies, items, config)
    run = runs.start(config.name, _identity(pair, policies, items, config), scale=config.scale)
    if config.force:
        for table in ("prompts", "cycles"):
            shutil.rmtree(run.path(table), ignore_errors=True)
    # every missing prompt is a shard of the run, written here or by workers
    bench = _Bench(pair, policies, items, config, run)
    jobs = bench.missing()
    if place is None:
        bench.measure(jobs, between)
    elif jobs:
        sent = replace(bench, pair=None, config=replace(config, progress=False))
        tasks = [partial(_measure_elsewhere, load.source_of(pair), sent, job) for job in jobs]
        parallel(tasks, config.on, config.jobs, True, desc=run.name, progress=config.progress)
    return bench.finish()


def _check(pair: Pair, policies: dict, items: list, config: EvaluateConfig) -> None:
    """SpecdecError for what cannot be measured, together or in this way."""
    check_integer("repeats", config.repeats, 1)
    check_countable(pair, config.cpu_time)
    openings(pair, items, config.max_new_tokens)
    for label, policy in policies.items():
        if config.on and isinstance(policy, DraftedBy):
            why = f"method {label!r} has its own drafter in memory"
            raise SpecdecError(f"{why}; leave `on` out for it.")
        for item in items:
            if item.digest in getattr(policy, "tuned_on", ()):
                why = f"method {label!r} was tuned on prompt {item.id!r}"
                raise SpecdecError(f"{why}; judge it on others (part='test').")


def _identity(pair: Pair, policies: dict, items: list, config: EvaluateConfig) -> dict:
    """What decides the rows of a run."""
    identity = {
        "methods": {label: fingerprint(policy) for label, policy in policies.items()},
        "baseline": baseline_of(policies),
        "items": describe_items(items),
        "prompts": len(items),
        "pair": describe_pair(pair),
        "threads": torch.get_num_threads(),
        "sampling": config.warping,
    }
    for name in ("repeats", "max_new_tokens", "temperature", "seed"):
        identity[name] = getattr(config, name)
    if config.cpu_time:
        identity["clock"] = "processor"
    return identity


def check_countable(pair: Pair, cpu_time: bool) -> None:
    """SpecdecError if processor time would not measure decoding time."""
    if cpu_time and (torch.get_num_threads() != 1 or pair.target.device.type != "cpu"):
        why = "processor time counts one thread on a CPU"
        raise SpecdecError(f"{why}; call torch.set_num_threads(1) and load the pair on the CPU.")


@dataclass
class _Bench:
    """One call of `evaluate`: the task, and the rows as they come."""

    pair: Pair | None
    policies: dict
    items: list
    config: EvaluateConfig
    run: runs.Run | None

    @functools.cached_property
    def label(self) -> dict:
        """Columns that are the same in all rows."""
        described = describe_pair(self.pair)
        label = {name: described[name] for name in ("pair", "dtype", "device")}
        label["clock"] = "processor" if self.config.cpu_time else "wall"
        label["threads"] = torch.get_num_threads()
        label["machine"] = runs.content_key(**machine.hardware())[:8]
        return label

    def missing(self) -> list[tuple[int, int]]:
        """(repeat, prompt) of every missing shard, whose number is repeat x prompts + prompt."""
        done = set(self.run.shards("prompts").done())
        jobs = []
        for repeat in range(self.config.repeats):
            # suites are mixed, so that a slow minute affects all
            order = list(range(len(self.items)))
            random.Random(f"{self.config.seed}/{repeat}").shuffle(order)
            for index in order:
                if repeat * len(self.items) + index not in done:
                    jobs.append((repeat, index))
        return jobs

    def measure(self, jobs: list[tuple[int, int]], between: Callable | None = None) -> None:
        """Decode these prompts and store their rows. between: see `evaluate`."""
        config = self.config
        with clock.by_processor_time(config.cpu_time):
            # 1. warm up
            for _, index in itertools.islice(itertools.cycle(jobs), config.warmup):
                self.decode_all(self.items[index], repeat=0)
            options = dict(desc=self.run.name, unit="prompt", disable=not config.progress)
            for repeat, index in tqdm(jobs, **options):
                # 2. all methods decode one prompt
                if between is not None:
                    between(1 / (config.repeats * len(self.items)))
                prompts, cycles = self.decode_all(self.items[index], repeat)
                # 3. its rows; the shard of prompts goes last, as it marks the job as done
                cycles = pd.DataFrame(cycles, columns=[*KEYS, *CYCLE_COLUMNS])
                number = repeat * len(self.items) + index
                # another process may measure the same run
                with runs.locked(self.run.directory):
                    if number not in self.run.shards("prompts").done():
                        prompts = pd.DataFrame(prompts).astype({"correct": "boolean"})
                        self.run.shards("cycles").write(number, cycles)
                        self.run.shards("prompts").write(number, prompts)

    def decode_all(self, item, repeat: int) -> tuple[list[dict], list[dict]]:
        """Rows of prompts and of cycles of one prompt by all methods, in a random order."""
        baseline = baseline_of(self.policies)
        prompts = []
        cycles = []
        answers = []
        methods = {name: unused_method(method) for name, method in self.policies.items()}
        for turn in range(len(item.turns)):
            # 1. the conversation so far, with the baseline's answers
            ids = self.pair.ids_of(conversation(self.pair, item, turn, answers))
            draw = random.Random(f"{self.config.seed}/{item.id}/{turn}/{repeat}")
            order = draw.sample(list(methods), len(methods))
            seed = draw.getrandbits(31)
            # 2. one right after the other; on a CPU this process computes all the time
            others = machine.Neighbours()
            outputs = {name: self._decode(methods[name], ids, seed) for name in order}
            on_cpu = self.pair.target.device.type == "cpu"
            busy = others.kept_away() if on_cpu else others.cpus()
            plain = outputs[baseline]
            answers.append(plain.text)
            # 3. their rows; answers to the last turn are checked
            checked = item.check is not None and turn + 1 == len(item.turns)
            verdicts = {}
            for name in methods:
                out = outputs[name]
                keys = dict(zip(KEYS, (item.suite, item.id, turn, name, repeat), strict=True))
                row = {**keys, "order": order.index(name), **self._row(out)}
                # running code takes seconds, so each text once
                text = row["text_hash"]
                if checked and text not in verdicts:
                    verdicts[text] = check_answer(item, out.text or "")
                facts = dict(same=out.tokens == plain.tokens, correct=verdicts.get(text))
                facts["neighbours"] = busy
                prompts.append({**row, **facts, **self.label})
                cycles += [{**keys, **cycle.row()} for cycle in out.rows]
        return prompts, cycles

    def _decode(self, policy, ids: list[int], seed: int) -> Generation:
        config = self.config
        options = dict(max_new_tokens=config.max_new_tokens, seed=seed, **config.warping)
        options["temperature"] = config.temperature
        if policy is None:
            return autoregress(self.pair, ids, **options)
        if isinstance(policy, DraftedBy):
            return decode(policy.of(self.pair), ids, policy.policy, **options)
        return decode(self.pair, ids, policy, **options)

    def _row(self, out: Generation) -> dict:
        """A row of prompts.parquet: new_tok ends at a stop token, cycle_tok counts whole cycles."""
        text = out.text
        if text is None:
            text = " ".join(map(str, out.tokens))
        row = {"prompt_tok": out.prompt_tok, "new_tok": out.new_tok, "cycles": len(out.rows)}
        row["cycle_tok"] = sum(cycle.new_tok for cycle in out.rows)
        for name in COUNTED:
            row[name] = sum(getattr(cycle, name) for cycle in out.rows)
        for name in ("prefill_ms", "decode_ms", "total_ms", "tau", "finish_reason"):
            row[name] = getattr(out, name)
        row["text_hash"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return row

    def finish(self) -> runs.Run:
        """Merge the shards and warn of texts and times that are no result."""
        prompts = self.run.shards("prompts").merge()
        cycles = self.run.shards("cycles").merge()
        differing = prompts[~prompts["same"]]
        if self.label["dtype"] == "float32" and len(differing):
            first = differing.iloc[0]
            why = f"{len(differing)} of {len(prompts)} texts differ from the baseline's"
            which = f"{first['prompt']} by {first['method']} among them"
            warn(f"{why}, {which}: in float32 this is a bug; run specdec audit.")
        crowded = metrics.is_crowded(prompts)
        if crowded:
            why = "other processes kept CPUs busy, or this one was stopped: the ratios of"
            which = f"{self.run.directory.name} are no result; measure again with force=True"
            warn(f"{why} {which}, in the book with --force.")
        counts = dict(texts=len(prompts), texts_differing=len(differing), cycles=len(cycles))
        return self.run.finish(**counts, crowded=crowded)


def _measure_elsewhere(source: dict, bench: _Bench, job: tuple[int, int]) -> None:
    """A task of `evaluate` in another process: writes one prompt's rows into the run's folder."""
    replace(bench, pair=load.load_again(**source)).measure([job])


def summary(run: runs.Run, baseline: str | None = None) -> pd.DataFrame:
    """One row per (suite, method), and 'all' suites: stats.compare, metrics.text_facts, and counts.

    calls: draft forwards. prefill_frac: of the total time.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> methods = {"plain": "autoregressive", "tree": specdec.Static(8, 3, 2)}
    >>> few = dict(max_new_tokens=8, name="example", progress=False)
    >>> table = summary(specdec.evaluate(methods, {"mine": ["What is 2 + 3?"]}, pair, **few))
    >>> table[["suite", "method", "prompts", "same_frac"]].values.tolist()
    [['mine', 'plain', 1, 1.0], ['mine', 'tree', 1, 1.0]]
    """
    prompts = run.read_table("prompts")
    config = run.record()["config"]
    # a method under a second name measures the noise and is no hypothesis
    family = {}
    for name, described in config["methods"].items():
        family.setdefault(runs.canonical(described), name)
    table = stats.compare(prompts, baseline or config["baseline"], family=set(family.values()))
    # counts, texts and prefill
    keys = ["suite", "method"]
    prompts = stats.with_all(prompts)
    sums = prompts.groupby(keys, sort=False)[[*SUMMED, "prefill_ms", "total_ms"]].sum()
    added = sums[SUMMED].rename(columns={"draft_calls": "calls"})
    added = added.join(metrics.text_facts(prompts))
    added["prefill_frac"] = sums["prefill_ms"] / sums["total_ms"]
    table = table.merge(added.reset_index(), on=keys, how="left")
    return stats.in_order(table, list(config["methods"]))
