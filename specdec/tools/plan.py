"""What a whole grid of measurements takes: pairs x suites x temperatures x seeds, every method in each, on a machine by name.

    plan.yml ──▶ shapes on the meta device ──▶ GPUs per worker, memory        (nothing is downloaded or decoded)
             ──▶ the GPU's data sheet      ──▶ ms per cycle ──▶ hours of each shard

A shard is one pair, suite, temperature and seed: its methods take turns on every prompt, so they share one machine. Times
are computed from data sheets with the tokens per cycle that the plan assumes, and leave out what GPUs tell each other: a
lower bound, and no measurement.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pandas as pd
from annotated_types import Ge, MinLen

from specdec import runs
from specdec.core.records import CYCLE_COLUMNS
from specdec.core.tree_config import GIB, TreeConfig
from specdec.costs.model import CostModel
from specdec.costs.profiles import GPUS, HOSTS, MEMORY_GB, roofline
from specdec.data.suites import SUITE_PROMPTS, SUITES
from specdec.errors import SpecdecError, nearest_name_error
from specdec.evaluation.bench import KEYS
from specdec.models import drafters
from specdec.models.load import DTYPES
from specdec.stored import checked
from specdec.tools.estimate import estimate, kept_per_tok, on_meta, shapes_of

ADVICE = "notebooks/papers_plan.yml is an example"
USED_FRAC = 0.9  # of a GPU's memory; the rest goes to its context and to what the allocator cannot use
TURNS = {"mt_bench": 2}  # of a prompt; 1 elsewhere
WEIGHTLESS = "lookahead"  # a drafter without weights, where only the target is meant
Positive = Annotated[int, Ge(1)]
Amount = Annotated[float, Ge(0)]
STRICT = {"extra": "forbid"}  # for pydantic: an unknown key is refused, not passed over


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, and how the host launches their work: eager or graphs."""

    __pydantic_config__ = STRICT
    gpu: str
    count: Positive = 1
    host: str = "eager"


@dataclass(frozen=True)
class Method:
    """A way of decoding. tree: total_tokens, depth, top_k; None decodes plainly.

    tau: tokens per cycle that are assumed; 1: nothing is accepted. training_gpu_hours: of all it takes to have it, stated.
    Both are a number, or one per pair.
    """

    __pydantic_config__ = STRICT
    tree: list[int] | None = None
    drafter: str = "eagle3"
    tau: Annotated[float, Ge(1)] | dict[str, Annotated[float, Ge(1)]] = 1.0
    training_gpu_hours: Amount | dict[str, Amount] = 0.0


@dataclass(frozen=True)
class Plan:
    """plan.yml. suites: names, or prompts by name (80 where only a name is given)."""

    machine: Machine
    pairs: Annotated[list[str], MinLen(1)]
    suites: Annotated[list[str], MinLen(1)] | dict[str, Positive]
    methods: Annotated[dict[str, Method], MinLen(1)]
    temperatures: Annotated[list[Amount], MinLen(1)] = field(default_factory=lambda: [0.0])
    seeds: Annotated[list[int], MinLen(1)] = field(default_factory=lambda: [0])
    dtype: str = "bfloat16"
    prompt_tok: Positive = 512
    max_new_tokens: Positive = 512
    warmup_prompts: Annotated[int, Ge(0)] = 1  # of each shard


@dataclass(frozen=True)
class Priced:
    """What `price` found. table: one row per pair."""

    plan: Plan
    table: pd.DataFrame
    hours: float  # of the machine, at best packing
    gpu_hours: float
    training_gpu_hours: float
    storage_gb: float

    @property
    def sentence(self) -> str:
        machine, count = self.plan.machine, int(self.table["shards"].sum())
        text = f"{count} shards on {machine.count} {machine.gpu} ({machine.host}) take about {self.hours:.1f} h"
        text += f" ({self.gpu_hours:.0f} GPU hours)"
        if self.training_gpu_hours:
            text += f", after {self.training_gpu_hours:.0f} GPU hours of training that the plan states"
        text += f", and {self.storage_gb:.0f} GB of storage"
        return f"{text}: computed from data sheets and the plan's tokens per cycle, not measured."


def read_plan(path: str | Path) -> Plan:
    """The plan in a YAML file. SpecdecError names the key that is wrong."""
    record = runs.read_yaml(Path(path))
    if not isinstance(record, dict):
        raise SpecdecError(f"{path} must be a mapping with machine, pairs, suites and methods; {ADVICE}.")
    if isinstance(methods := record.get("methods"), dict):
        record = {**record, "methods": {name: {} if method is None else method for name, method in methods.items()}}
    plan = checked(Plan, record, path, ADVICE)
    for key, name, names in _named(plan):
        if name not in names:
            raise SpecdecError(f"{path}: {key}: {nearest_name_error(key.split('.')[-1], name, names)}")
    for pair in plan.pairs:
        with _under(f"{path}: pairs"):
            _network(pair, WEIGHTLESS)
    for label, method in plan.methods.items():
        if method.tree is not None:
            with _under(f"{path}: methods.{label}.tree"):
                _tree(method)
            with _under(f"{path}: methods.{label}.drafter"):
                _network(plan.pairs[0], method.drafter)
    for key, values in (("pairs", plan.pairs), ("temperatures", plan.temperatures), ("seeds", plan.seeds)):
        if len(set(values)) < len(values):
            raise SpecdecError(f"{path}: {key}: one of them stands there twice, {values}.")
    return plan


def _named(plan: Plan) -> list[tuple[str, str, list]]:
    """(key, name, the names it may have) of everything in a plan that is one of a few names."""
    named = [("machine.gpu", plan.machine.gpu, [*GPUS]), ("machine.host", plan.machine.host, [*HOSTS])]
    named += [("dtype", plan.dtype, [*DTYPES]), *(("suites", suite, [*SUITES]) for suite in plan.suites)]
    for label, method in plan.methods.items():
        if not set("/:") & set(method.drafter):  # neither a folder nor a hub id
            named.append((f"methods.{label}.drafter", method.drafter, [*drafters.KINDS]))
        for key in ("tau", "training_gpu_hours"):
            by_pair = getattr(method, key)
            by_pair = by_pair if isinstance(by_pair, dict) else ()
            named += [(f"methods.{label}.{key}", pair, plan.pairs) for pair in by_pair]
    return named


@contextlib.contextmanager
def _under(key: str) -> Iterator[None]:
    """Errors inside say where in the plan they come from."""
    try:
        yield
    except SpecdecError as error:
        raise SpecdecError(f"{key}: {error}") from None


def _tree(method: Method) -> TreeConfig:
    if len(method.tree) != 3:
        raise SpecdecError(f"a tree is total_tokens, depth and top_k, got {method.tree}.")
    return TreeConfig(*method.tree)


def price(plan: Plan) -> Priced:
    """Hours, memory, storage and shards of a plan. SpecdecError for a pair that does not fit all GPUs of the machine."""
    prompts = plan.suites if isinstance(plan.suites, dict) else dict.fromkeys(plan.suites, SUITE_PROMPTS)
    turns = {name: (count + plan.warmup_prompts) * TURNS.get(name, 1) for name, count in prompts.items()}
    repeats, rows, gpu_hours, longest = len(plan.temperatures) * len(plan.seeds), [], 0.0, 0.0
    for pair in plan.pairs:
        gpus, gib, weights = _workers(plan, pair)
        methods = {name: _turn_cost(plan, pair, method, gpus) for name, method in plan.methods.items()}
        turn_s, row_bytes = (sum(part) for part in zip(*methods.values(), strict=True))
        shard_h = max(turns.values()) * turn_s / 3600
        hours = repeats * sum(turns.values()) * turn_s / 3600 * gpus
        stored = (weights + repeats * sum(turns.values()) * row_bytes) / 1e9
        row = {"pair": pair, "gpus": gpus, "gib_per_gpu": gib / gpus, "shards": repeats * len(prompts)}
        rows.append(row | {"longest_shard_h": shard_h, "gpu_hours": hours, "storage_gb": stored})
        gpu_hours, longest = gpu_hours + hours, max(longest, shard_h)
    table = pd.DataFrame(rows)
    training = sum(_of(method.training_gpu_hours, pair) for method in plan.methods.values() for pair in plan.pairs)
    hours = max(longest, gpu_hours / plan.machine.count)
    return Priced(plan, table, hours, gpu_hours, training, float(table["storage_gb"].sum()))


def _of(value: float | dict, pair: str) -> float:
    return value.get(pair, 0.0) if isinstance(value, dict) else value


def _workers(plan: Plan, pair: str) -> tuple[int, float, float]:
    """(GPUs that hold the pair with all its drafters, GiB there, bytes of all weights)."""
    kinds = dict.fromkeys(method.drafter for method in plan.methods.values() if method.tree)
    trees = [_tree(method) for method in plan.methods.values() if method.tree] or [TreeConfig(1, 0, 1)]
    settings = dict(
        dtype=plan.dtype, gpu=plan.machine.gpu, max_new_tokens=plan.max_new_tokens, prompt_tok=plan.prompt_tok
    )
    largest = max(trees, key=lambda tree: tree.total_tokens)
    needed = estimate(pair, tree=largest, drafter=WEIGHTLESS, **settings)
    networks = [network for network in (_network(pair, kind) for kind in kinds) if network is not None]
    width = DTYPES[plan.dtype].itemsize
    drafting = width * sum(weight.numel() for network in networks for weight in network.parameters())
    rows = plan.prompt_tok + plan.max_new_tokens + largest.total_tokens
    gib = needed.needed_gib + (drafting + width * rows * max(map(kept_per_tok, networks), default=0)) / GIB
    room = USED_FRAC * MEMORY_GB[plan.machine.gpu] * 1e9 / GIB
    heads = shapes_of(pair, WEIGHTLESS)[0].num_attention_heads
    for gpus in (1, 2, 4, 8):
        if gpus <= plan.machine.count and heads % gpus == 0 and gib / gpus <= room:
            return gpus, gib, needed.weights_gib * GIB + drafting
    raise SpecdecError(
        f"pairs: {pair} needs {gib:.0f} GiB in {plan.dtype}, and {plan.machine.count} {plan.machine.gpu} hold "
        f"{plan.machine.count * room:.0f}; take another machine."
    )


@functools.lru_cache(64)
def _network(pair: str, kind: str):
    return shapes_of(pair, kind)[1]


@functools.lru_cache(64)
def _prices(pair: str, drafter: str, gpu: str, host: str, gpus: int, width: int) -> CostModel:
    """The roofline of a pair on so many GPUs that share its weights and talk for nothing."""
    config, network = shapes_of(pair, drafter)
    model = on_meta(config)
    embedded = 0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    drafting = sum(weight.numel() for weight in network.parameters()) if network is not None else 1
    drafting /= drafters.HEADS.get(drafters.kind_and_source(drafter)[0], 1)  # a level runs one head
    kept = kept_per_tok(model) / 2 / config.num_hidden_layers
    bandwidth, rate = GPUS[gpu]
    return roofline(
        float(sum(weight.numel() for weight in model.parameters()) - embedded),
        float(drafting),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        kv_frac=kept / config.hidden_size,
        bytes_per_parameter=float(width),
        bandwidth_gb_per_s=gpus * bandwidth,
        tflop_per_s=gpus * rate,
        **HOSTS[host],
    )


def _turn_cost(plan: Plan, pair: str, method: Method, gpus: int) -> tuple[float, float]:
    """(seconds, bytes of rows at most) of one turn."""
    machine, width = plan.machine, DTYPES[plan.dtype].itemsize
    drafter = method.drafter if method.tree else WEIGHTLESS
    costs = _prices(pair, drafter, machine.gpu, machine.host, gpus, width)
    context = plan.prompt_tok + plan.max_new_tokens / 2
    read_ms = float(costs.verify_ms(plan.prompt_tok - 1, plan.prompt_tok / 2))
    if method.tree is None:
        return (read_ms + plan.max_new_tokens * float(costs.step_ms(context))) / 1e3, 8.0 * len(KEYS)
    tree = _tree(method)
    cycles = plan.max_new_tokens / max(1.0, _of(method.tau, pair))
    cycle_ms = float(costs.cycle_ms(tree.top_k, tree.depth, tree.verify_nodes, context))
    return (read_ms + cycles * cycle_ms) / 1e3, 8.0 * cycles * (len(KEYS) + len(CYCLE_COLUMNS))
