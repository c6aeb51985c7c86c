"""Estimates before a run: memory and time of decoding, megabytes and time of a recording, hours of a whole grid.

Decoding: counted from shapes on the meta device. Its time comes from decoding a few tokens or, if only the shape is known,
from reading all weights once per forward (a lower bound). For a GPU elsewhere both come from its data sheet.
Recording: a few prompts are recorded without storing them, timed and measured.
A grid, from plan.yml: pairs x suites x temperatures x seeds, every method in each, on a named machine.

    plan.yml ──▶ shapes on the meta device ──▶ GPUs per worker, memory        (nothing is downloaded or decoded)
             ──▶ the GPU's data sheet      ──▶ ms per cycle ──▶ hours of each shard

A shard is one pair, suite, temperature and seed: its methods alternate on every prompt, so they share one machine. Times
are computed from data sheets with the plan's tokens per cycle, without communication between GPUs: a lower bound, not a
measurement.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import torch
import transformers
from annotated_types import Ge, MinLen

from specdec import runs
from specdec.core.clock import Clock
from specdec.core.decode import ROWS, autoregress, decode, drive
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Static
from specdec.core.protocols import finish
from specdec.core.records import CYCLE_COLUMNS
from specdec.core.tree_config import GIB, TreeConfig, free_bytes
from specdec.costs.model import CostModel
from specdec.costs.profiles import GPUS, HOSTS, MEMORY_GB, roofline
from specdec.data.suites import SUITE_PROMPTS, SUITES, conversation, gather, openings
from specdec.errors import SpecdecError, check_integer, check_name, door, nearest_name_error
from specdec.evaluation.bench import KEYS
from specdec.models import drafters, load, pairs
from specdec.replays import record, trace
from specdec.replays.columns import stacked, write_columns
from specdec.replays.record import RecordConfig
from specdec.stored import Positive, checked


@dataclass(frozen=True)
class EstimateConfig:
    """The decoding task, and the machine. dtype and device as in `load_pair`, for a pair that is not loaded yet."""

    dtype: str = "auto"
    device: str = "auto"
    max_new_tokens: int = 128
    tree: TreeConfig = TreeConfig()
    prompt_tok: int = 1024  # the longest prompt to reserve memory for
    limit: int | None = None  # prompts per suite
    part: str | None = None
    repeats: int = 1
    folder: str | Path | None = None  # of JSONL files, for suites that are not embedded
    probe: bool = True  # decode a few tokens if the weights are available
    free_gib: float | None = None  # default: this machine's free memory
    drafter: str | Path | None = (
        None  # as in `load_drafter`; its published form if no weights are available
    )
    gpu: str | None = (
        None  # one of `profiles.GPUS` in place of this machine: everything is computed, nothing measured
    )

    def __post_init__(self):
        for name in ("prompt_tok", "max_new_tokens", "repeats"):
            check_integer(name, getattr(self, name), 1)
        if self.gpu is not None and self.gpu not in GPUS:
            raise nearest_name_error("GPU", self.gpu, GPUS)


@dataclass(frozen=True)
class Estimate:
    """Requirements of a run. Sizes in GiB; `seconds` per method is an upper (probe) or lower (roofline) bound.

    how: "probe" (a few tokens were decoded), "roofline" (only the shape is known) or "data sheet" (of a GPU not here).
    """

    pair: str
    dtype: str
    device: str
    weights_gib: float
    cache_gib: float
    activations_gib: float
    cache_kib_per_tok: float
    free_gib: float | None
    prompts: int = 0
    how: str = "roofline"
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def needed_gib(self) -> float:
        return self.weights_gib + self.cache_gib + self.activations_gib

    @property
    def fits(self) -> bool:
        return self.free_gib is None or self.needed_gib <= self.free_gib

    @property
    def sentence(self) -> str:
        text = f"{self.pair} in {self.dtype} on {self.device} needs about {_gib(self.needed_gib)}"
        if not self.fits:
            return f"{text}, but {_gib(self.free_gib)} are free; take bfloat16, a smaller pair or a larger machine."
        if not self.seconds:
            return f"{text}."
        bound = {"probe": "at most", "roofline": "at least", "data sheet": "up to"}[self.how]
        text = f"{text}; {self.prompts} turns take {bound} {_duration(sum(self.seconds.values()))}"
        return (
            f"{text} (computed from its data sheet, not measured)."
            if self.how == "data sheet"
            else f"{text}."
        )


@runs.with_settings(EstimateConfig)
def estimate(
    pair: str | Pair, suites=None, config: EstimateConfig | None = None, **settings
) -> Estimate:
    """Memory and time of decoding `suites` plainly and with a tree, before anything large is loaded.

    pair: a loaded Pair, a preset's name, or the folder or hub id of a target (then without a drafter's weights). A pair
    that is loaded or available here is probed; others are bounded by their shape. settings: fields of EstimateConfig by name.

    >>> estimate("llama-3.1-8b", dtype="bfloat16", device="cpu", free_gib=20.0).fits
    True
    """
    config = runs.configured(config, EstimateConfig, settings)
    loaded = isinstance(pair, Pair)
    if loaded:
        name, dtype, place = pair.name, pair.target.dtype, pair.target.device
    elif config.gpu:
        name, dtype, place = str(pair), load.DTYPES.get(config.dtype, "auto"), torch.device("cuda")
    else:
        name, (dtype, place) = str(pair), load.placement(config.dtype, config.device)
    dtype = torch.bfloat16 if dtype == "auto" else dtype  # on a GPU: published in bfloat16
    target, network = shapes_of(pair, config.drafter)
    if (free_gib := config.free_gib) is None:
        free_gib = MEMORY_GB[config.gpu] * 1e9 / GIB if config.gpu else free_memory_gib(place)
    sizes = _memory(target, [network], dtype, place, config)
    needed = Estimate(name, dtype_name(dtype), config.gpu or place.type, free_gib=free_gib, **sizes)
    if suites is None:
        return needed
    items = gather(suites, limit=config.limit, part=config.part, folder=config.folder)
    turns = config.repeats * sum(len(item.turns) for item in items)
    if config.probe and needed.fits and not config.gpu and (loaded or here(pair)):
        if not loaded:
            named = {"name" if pair in pairs.names() else "target": pair}
            pair = load.load_pair(
                **named, drafter=config.drafter, dtype=config.dtype, device=config.device
            )
        per_turn, how = _probe(pair, items[0], config), "probe"
    else:
        launch_s = (
            target.num_hidden_layers * HOSTS["eager"]["launch_ms_per_layer"] / 1e3
            if config.gpu
            else 0.0
        )
        rate = GPUS[config.gpu][0] * 1e9 if config.gpu else bandwidth(place)
        plain_s = config.max_new_tokens * (needed.weights_gib * GIB / rate + launch_s)
        # Every draft token accepted, a drafter forward counted like one of the target's; for a data sheet none accepted.
        gain, how = (1, "data sheet") if config.gpu else (config.tree.depth + 2, "roofline")
        per_turn = {"autoregressive": plain_s, "tree": plain_s / gain}
    return replace(
        needed,
        prompts=turns,
        how=how,
        seconds={way: turns * each_s for way, each_s in per_turn.items()},
    )


def here(pair: str) -> bool:
    """Whether a preset or folder can be decoded with without a network."""
    return load.at_hand(pair) or Path(pair).expanduser().is_dir()


def shapes_of(pair: str | Pair, drafter: str | Path | None = None) -> tuple:
    """The target's transformers config, and the network of its drafter: on the meta device, None for one without weights.

    drafter: as in `load_drafter`; None: the pair's own. Without a local folder, its kind's published form.
    """
    if isinstance(pair, Pair):
        return pair.target.config, pair.drafter.network if pair.drafter is not None else None
    config, (kind, source) = _target_shape(pair), drafters.kind_and_source(str(drafter or ""))
    if source:
        load.is_hub_id(source)  # refuses anything but a hub id or a folder
    if not source and pair in (*load.SHIPPED, *load.PRESETS):
        own = load.PRESETS[pair].drafter if pair in load.PRESETS else pair
        source = str(load.shipped_folder(own) / drafters.KINDS[kind or "eagle3"].folder)
    folder = load.drafter_folder(source) if source and Path(source).expanduser().is_dir() else None
    kind = kind or (drafters.kind_of(load.config_of(folder)) if folder else "eagle3")
    return config, drafters.KINDS[kind].network(folder, config)


def _target_shape(pair: str):
    if pair in load.PRESETS:
        shape = {"tie_word_embeddings": False} | load.PRESETS[pair].shape
        return getattr(transformers, shape.pop("class"))(**shape)
    if pair in load.SHIPPED:
        return transformers.AutoConfig.from_pretrained(load.shipped_folder(pair) / "target")
    if not runs.placed(pair).exists() and "/" not in pair:
        raise nearest_name_error("preset", pair, pairs.names())
    return load.target_config(pair)


def kept_per_tok(network) -> int:
    """Numbers that a network stores per token as keys and values; those of Hydra++ belong to its layer."""
    config = getattr(getattr(network, "prefix", network), "config", None)
    if not (
        heads := getattr(config, "num_attention_heads", 0)
    ):  # nothing, or heads that read only the last state
        return 0
    rows = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * getattr(config, "num_hidden_layers", 1) * rows * size


def parameters(*networks) -> int:
    """Number of weights of these networks; None counts 0."""
    return sum(
        weight.numel()
        for network in networks
        if network is not None
        for weight in network.parameters()
    )


def _memory(
    target, networks: list, dtype: torch.dtype, device: torch.device, config: EstimateConfig
) -> dict[str, float]:
    """Sizes in GiB of the allocations for decoding one prompt at a time.

    Weights of the target (a transformers config) and of the drafters' networks, caches at full
    length of the target and the largest drafter, the largest forward.
    """
    hidden, inner = (
        target.hidden_size,
        getattr(target, "intermediate_size", None) or 4 * target.hidden_size,
    )
    modules = [drafters.on_meta(target), *(network for network in networks if network is not None)]
    width, tree = dtype.itemsize, config.tree
    per_tok = width * (kept_per_tok(modules[0]) + max(map(kept_per_tok, modules[1:]), default=0))
    tree_rows = tree.depth + 2 + max(tree.total_tokens, tree.widest * max(1, tree.depth))
    rows = config.prompt_tok + config.max_new_tokens + tree_rows
    row_bytes, logits_bytes = (
        width * (8 * hidden + 3 * inner + rows),
        (width + 8) * target.vocab_size,
    )
    # the forward over the prompt, with logits of its last row, or the one over the tree, with those of all
    largest = max(
        config.prompt_tok * row_bytes + logits_bytes, tree.total_tokens * (row_bytes + logits_bytes)
    )
    sizes = dict(weights_gib=width * parameters(*modules))
    sizes |= dict(cache_gib=rows * per_tok, activations_gib=largest)
    return {name: value / GIB for name, value in sizes.items()} | {
        "cache_kib_per_tok": per_tok / 1024
    }


def free_memory_gib(device: torch.device | str = "cpu") -> float | None:
    """Memory that can be taken without swapping, in GiB; None if the system does not report it."""
    return None if (free := free_bytes(torch.device(device))) is None else free / GIB


def _probe(pair: Pair, item, config: EstimateConfig, tokens: int = 24) -> dict[str, float]:
    """Seconds of one turn of `max_new_tokens` by both methods, from a few tokens of one prompt after a warm-up."""
    prompt, policy = pair.ids_of(conversation(pair, item, 0, [])), Static.of(config.tree)
    ways = {"autoregressive": lambda: autoregress(pair, prompt, tokens, stop_tokens=())}
    if pair.drafter is not None:
        ways["tree"] = lambda: decode(pair, prompt, policy, tokens, stop_tokens=())
    seconds = {}
    for name, way in ways.items():
        way()
        out = way()
        seconds[name] = (out.prefill_ms + out.decode_ms * config.max_new_tokens / out.new_tok) / 1e3
    return seconds


def bandwidth(device: torch.device | str = "cpu", mib: int = 64) -> float:
    """Memory bandwidth in bytes per second, from the best of a few copies (read and written)."""
    source = torch.zeros(mib << 18, dtype=torch.float32, device=device)
    place, clock, best = torch.empty_like(source), Clock(torch.device(device)), 0.0
    for _ in range(8):
        clock.start()
        place.copy_(source)
        clock.lap("draft")
        best = max(best, 2 * source.nbytes / max(1e-9, clock.stop()["draft_ms"] / 1e3))
    return best


def _gib(value: float) -> str:
    return f"{value:.1f} GiB" if value >= 1 else f"{1024 * value:.0f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


PROBE_POSITIONS = 24  # of a prompt, whose trees are grown in the probe
DISTRIBUTION_BYTES = 8 + 4 * 8 * 9  # a row number and RADAR's eight distributions over nine lengths


@dataclass(frozen=True)
class RecordEstimate:
    """What `record` will write. positions: expected, from the lengths of a few texts; most_positions: if none ends early.

    megabytes: expected on disk; free_megabytes: free there.
    """

    pair: str
    dtype: str
    prompts: int
    turns: int
    positions: int
    most_positions: int
    megabytes: float
    free_megabytes: float
    minutes: float

    @property
    def fits(self) -> bool:
        return self.megabytes <= self.free_megabytes

    @property
    def sentence(self) -> str:
        what = (
            f"recording {self.prompts} prompts ({self.turns} turns) of {self.pair} in {self.dtype}"
        )
        needs = f"about {self.positions} positions, {self.megabytes:.0f} MB, {_duration(60 * self.minutes)}"
        free = (
            ""
            if self.fits
            else f", but only {self.free_megabytes:.0f} MB are free: record fewer widths or prompts"
        )
        return f"{what}: {needs}{free}."


@runs.with_settings(RecordConfig)
@door
def estimate_record(
    pair: Pair,
    prompts: Iterable | trace.Trace,
    config: RecordConfig | None = None,
    *,
    samples: int = 9,
    **settings,
) -> RecordEstimate:
    """Time and space of `record(pair, prompts, ...)` with the same arguments. Nothing is stored.

    samples: prompts decoded for it, spread over all; a third of them also grow a few trees.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> settings = dict(max_new_tokens=8, depth=3, top_ks=(2, 3), trees=())
    >>> needed = estimate_record(pair, {"mine": ["What is 2 + 3?"]}, samples=1, **settings)
    >>> needed.turns, needed.most_positions, needed.fits
    (1, 7, True)
    """
    if samples < 1:
        raise SpecdecError(f"samples must be at least 1, got {samples}.")
    config = record.record_config(config, settings)
    record.check(pair, config)
    items = [item for _, item in record.parted_items(prompts, config)]
    sampled = np.unique(
        np.linspace(0, len(items) - 1, min(samples, len(items))).round().astype(int)
    )
    answer_tok, answer_s, position_s, tables = _probe_recording(
        pair, config, [items[index] for index in sampled]
    )
    turns, (position_bytes, prompt_bytes) = sum(len(item.turns) for item in items), _written(tables)
    positions = turns * (answer_tok - 1)
    distributions = turns * min(config.acceptance_distributions, answer_tok) * DISTRIBUTION_BYTES
    return RecordEstimate(
        pair=pair.name,
        dtype=dtype_name(pair.target.dtype),
        prompts=len(items),
        turns=turns,
        positions=round(positions),
        most_positions=turns * (config.max_new_tokens - 1),
        megabytes=float(positions * position_bytes + len(items) * prompt_bytes + distributions)
        / 1e6,
        free_megabytes=shutil.disk_usage(nearest_existing(runs.runs_dir(config.scale))).free / 1e6,
        minutes=float(turns * answer_s + positions * position_s) / 60,
    )


def _probe_recording(
    pair: Pair, config: RecordConfig, items: list
) -> tuple[float, float, float, list[dict]]:
    """Mean tokens and seconds of an answer, seconds of a position, and the recorded tables of a third of the items."""
    recorder = record.Recorder(pair, config)
    prompts = openings(pair, items)
    with pair.inference():
        finish(recorder.continuing(prompts[0]))  # warms up
        begin = time.perf_counter()
        texts = dict(drive((recorder.continuing(prompt) for prompt in prompts), ROWS))
        answer_s = (time.perf_counter() - begin) / len(items)
    tables, took_s = [], []
    for number in (
        0,
        *range(0, len(prompts), 3),
    ):  # a third of them, the first one twice as a warm-up
        ids, kept_tok = texts[number]
        if kept_tok > 1:
            begin = time.perf_counter()
            tables.append(
                recorder.positions(ids, len(prompts[number]), min(kept_tok, PROBE_POSITIONS + 1))
            )
            took_s.append(time.perf_counter() - begin)
    answer_tok, tables = np.mean([kept_tok for _, kept_tok in texts.values()]), tables[1:]
    return answer_tok, answer_s, sum(took_s[1:]) / max(1, _positions(tables)), tables


def _positions(tables: list[dict]) -> int:
    return sum(len(recorded["positions"]["context_tok"]) for recorded in tables)


def _written(tables: list[dict]) -> tuple[float, float]:
    """Bytes on disk of a position, from the probe's columns, and of one prompt's row of turns."""
    row = {
        "suite": "suite",
        "prompt": "prompt",
        "turn": 0,
        "part": "part",
        "prompt_tok": 1,
        "kept_tok": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        turn = pd.DataFrame([row | {"positions": 0, "piece": 0}])
        prompt_bytes, written = (
            runs.write_table(Path(folder) / "turns.parquet", turn).stat().st_size,
            0,
        )
        for name in ("positions", "trees", "family"):
            if parts := [recorded[name] for recorded in tables if recorded[name]]:
                columns = {column: stacked([part[column] for part in parts]) for column in parts[0]}
                written += write_columns(Path(folder) / f"{name}.parquet", columns).stat().st_size
    return written / max(1, _positions(tables)), prompt_bytes


def nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest existing one above it."""
    return next(place for place in (folder.resolve(), *folder.resolve().parents) if place.exists())


ADVICE = "notebooks/papers_plan.yml is an example"
USED_FRAC = 0.9  # of a GPU's memory; the rest is for its context and fragmentation
TURNS = {"mt_bench": 2}  # of a prompt; 1 elsewhere
WEIGHTLESS = "lookahead"  # a drafter without weights, which leaves only the target
Amount = Annotated[float, Ge(0)]
STRICT = {"extra": "forbid"}  # for pydantic: an unknown key is refused, not ignored


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, and how the host launches their work: eager or graphs."""

    __pydantic_config__ = STRICT
    gpu: str
    count: Positive = 1
    host: str = "eager"


@dataclass(frozen=True)
class Method:
    """A decoding method. tree: total_tokens, depth, top_k; None decodes plainly.

    tau: assumed tokens per cycle; 1: nothing is accepted. training_gpu_hours: total hours to obtain it, as stated.
    Both are a number, or one per pair.
    """

    __pydantic_config__ = STRICT
    tree: list[int] | None = None
    drafter: str = "eagle3"
    tau: Annotated[float, Ge(1)] | dict[str, Annotated[float, Ge(1)]] = 1.0
    training_gpu_hours: Amount | dict[str, Amount] = 0.0


@dataclass(frozen=True)
class Plan:
    """plan.yml. suites: names, or prompts by name (80 for a name alone)."""

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
    """The result of `price`. table: one row per pair."""

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
            text += (
                f", after {self.training_gpu_hours:.0f} GPU hours of training that the plan states"
            )
        text += f", and {self.storage_gb:.0f} GB of storage"
        return f"{text}: computed from data sheets and the plan's tokens per cycle, not measured."


def read_plan(path: str | Path) -> Plan:
    """The plan in a YAML file. SpecdecError names the wrong key."""
    record = runs.read_yaml(Path(path))
    if not isinstance(record, dict):
        raise SpecdecError(
            f"{path} must be a mapping with machine, pairs, suites and methods; {ADVICE}."
        )
    if isinstance(methods := record.get("methods"), dict):
        record = {
            **record,
            "methods": {name: {} if method is None else method for name, method in methods.items()},
        }
    plan = checked(Plan, record, path, ADVICE)
    for key, check, *values in _checks(plan):
        try:
            check(*values)
        except SpecdecError as error:
            raise SpecdecError(f"{path}: {key}: {error}") from None
    for key in ("pairs", "temperatures", "seeds"):
        if len(set(values := getattr(plan, key))) < len(values):
            raise SpecdecError(f"{path}: {key}: an entry occurs twice, {values}.")
    return plan


def _checks(plan: Plan) -> Iterator[tuple]:
    """(key, function that raises a SpecdecError for a wrong value, its arguments): known names first, then formats."""
    named = [
        ("machine.gpu", GPUS, [plan.machine.gpu]),
        ("machine.host", HOSTS, [plan.machine.host]),
    ]
    named += [("dtype", load.DTYPES, [plan.dtype]), ("suites", SUITES, plan.suites)]
    for label, method in plan.methods.items():
        by_place = set("/:") & set(method.drafter)  # a folder or a hub id
        named.append(
            (f"methods.{label}.drafter", drafters.KINDS, [] if by_place else [method.drafter])
        )
        by_pair = {key: value for key, value in vars(method).items() if isinstance(value, dict)}
        named += [(f"methods.{label}.{key}", plan.pairs, names) for key, names in by_pair.items()]
    yield from (
        (key, check_name, key.split(".")[-1], name, known)
        for key, known, names in named
        for name in names
    )
    yield from (("pairs", _shapes, pair, WEIGHTLESS) for pair in plan.pairs)
    for label, method in plan.methods.items():
        if method.tree is not None:
            yield f"methods.{label}.tree", _tree, method
            yield f"methods.{label}.drafter", _shapes, plan.pairs[0], method.drafter


def _tree(method: Method) -> TreeConfig:
    if len(method.tree) != 3:
        raise SpecdecError(f"a tree is total_tokens, depth and top_k, got {method.tree}.")
    return TreeConfig(*method.tree)


def price(plan: Plan) -> Priced:
    """Hours, memory, storage and shards of a plan. SpecdecError for a pair that does not fit all GPUs of the machine."""
    prompts = (
        plan.suites if isinstance(plan.suites, dict) else dict.fromkeys(plan.suites, SUITE_PROMPTS)
    )
    turns = {
        name: (count + plan.warmup_prompts) * TURNS.get(name, 1) for name, count in prompts.items()
    }
    repeats, rows = len(plan.temperatures) * len(plan.seeds), []
    for pair in plan.pairs:
        gpus, gib, weights = _workers(plan, pair)
        methods = [_turn_cost(plan, pair, method, gpus) for method in plan.methods.values()]
        turn_s, row_bytes = (sum(part) for part in zip(*methods, strict=True))
        shard_h = max(turns.values()) * turn_s / 3600
        hours = repeats * sum(turns.values()) * turn_s / 3600 * gpus
        stored = (weights + repeats * sum(turns.values()) * row_bytes) / 1e9
        row = {
            "pair": pair,
            "gpus": gpus,
            "gib_per_gpu": gib / gpus,
            "shards": repeats * len(prompts),
        }
        rows.append(row | {"longest_shard_h": shard_h, "gpu_hours": hours, "storage_gb": stored})
    gpu_hours, longest = (
        sum(row["gpu_hours"] for row in rows),
        max(row["longest_shard_h"] for row in rows),
    )
    training = sum(
        _of(method.training_gpu_hours, pair)
        for method in plan.methods.values()
        for pair in plan.pairs
    )
    hours, table = max(longest, gpu_hours / plan.machine.count), pd.DataFrame(rows)
    return Priced(plan, table, hours, gpu_hours, training, float(table["storage_gb"].sum()))


def _of(value: float | dict, pair: str) -> float:
    return value.get(pair, 0.0) if isinstance(value, dict) else value


def _workers(plan: Plan, pair: str) -> tuple[int, float, float]:
    """(GPUs that hold the pair with all its drafters, GiB there, bytes of all weights)."""
    drafting = [method for method in plan.methods.values() if method.tree]
    networks = [
        _shapes(pair, kind)[1] for kind in dict.fromkeys(method.drafter for method in drafting)
    ]
    largest = max(
        map(_tree, drafting), key=lambda tree: tree.total_tokens, default=TreeConfig(1, 0, 1)
    )
    config, machine = _shapes(pair, WEIGHTLESS)[0], plan.machine
    asked = EstimateConfig(
        max_new_tokens=plan.max_new_tokens, prompt_tok=plan.prompt_tok, tree=largest
    )
    sizes = _memory(config, networks, load.DTYPES[plan.dtype], torch.device("cuda"), asked)
    gib = sum(sizes[f"{name}_gib"] for name in ("weights", "cache", "activations"))
    room = USED_FRAC * MEMORY_GB[machine.gpu] * 1e9 / GIB
    for gpus in (1, 2, 4, 8):
        if gpus <= machine.count and config.num_attention_heads % gpus == 0 and gib / gpus <= room:
            return gpus, gib, sizes["weights_gib"] * GIB
    held = f"{machine.count} {machine.gpu} hold {machine.count * room:.0f}"
    raise SpecdecError(
        f"pairs: {pair} needs {gib:.0f} GiB in {plan.dtype}, and {held}; take another machine."
    )


_shapes = functools.lru_cache(64)(shapes_of)


@functools.lru_cache(64)
def _prices(pair: str, drafter: str, gpu: str, host: str, gpus: int, width: int) -> CostModel:
    """The roofline of a pair on so many GPUs that share its weights, with free communication."""
    config, network = _shapes(pair, drafter)
    model, (bandwidth_gb_per_s, tflop_per_s) = drafters.on_meta(config), GPUS[gpu]
    read = parameters(model) - (
        0 if config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    )
    heads = drafters.HEADS.get(drafters.kind_and_source(drafter)[0], 1)  # a level runs one head
    drafting = float((parameters(network) if network is not None else 1) / heads)
    sizes = dict(
        layers=config.num_hidden_layers, hidden=config.hidden_size, bytes_per_parameter=float(width)
    )
    sizes["kv_frac"] = kept_per_tok(model) / 2 / config.num_hidden_layers / config.hidden_size
    speed = dict(bandwidth_gb_per_s=gpus * bandwidth_gb_per_s, tflop_per_s=gpus * tflop_per_s)
    return roofline(float(read), drafting, **sizes, **speed, **HOSTS[host])


def _turn_cost(plan: Plan, pair: str, method: Method, gpus: int) -> tuple[float, float]:
    """(seconds, bytes of rows at most) of one turn."""
    machine, width = plan.machine, load.DTYPES[plan.dtype].itemsize
    drafter = method.drafter if method.tree else WEIGHTLESS
    costs = _prices(pair, drafter, machine.gpu, machine.host, gpus, width)
    context = plan.prompt_tok + plan.max_new_tokens / 2
    read_ms = float(costs.verify_ms(plan.prompt_tok - 1, plan.prompt_tok / 2))
    if method.tree is None:
        return (read_ms + plan.max_new_tokens * float(costs.step_ms(context))) / 1e3, 8.0 * len(
            KEYS
        )
    tree = _tree(method)
    cycles = plan.max_new_tokens / max(1.0, _of(method.tau, pair))
    cycle_ms = float(costs.cycle_ms(tree.top_k, tree.depth, tree.verify_nodes, context))
    return (read_ms + cycles * cycle_ms) / 1e3, 8.0 * cycles * (len(KEYS) + len(CYCLE_COLUMNS))
