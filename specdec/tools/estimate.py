"""Estimates before a run: memory and time of decoding, megabytes and time of a recording.

Decoding is counted from shapes on the meta device. Its time comes from decoding a few tokens or, if
only the shape is known, from reading all weights once per forward (a lower bound). For a GPU
elsewhere both come from its data sheet. Of a recording, a few prompts are recorded and measured.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import transformers

from specdec import runs
from specdec.core.clock import Clock
from specdec.core.decode import ROWS, autoregress, decode, drive
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Static
from specdec.core.protocols import finish
from specdec.core.tree_config import GIB, TreeConfig, free_bytes
from specdec.costs.profiles import GPUS, HOSTS, MEMORY_GB
from specdec.data.suites import conversation, gather, openings
from specdec.errors import check_integer, door, nearest_name_error
from specdec.models import drafters, load, pairs
from specdec.replays import record, trace
from specdec.replays.columns import stacked, write_columns
from specdec.replays.record import RecordConfig

PROBE_TOK = 24  # tokens that a probe decodes
PROBE_POSITIONS = 24  # of a prompt, whose trees are grown in the probe
DISTRIBUTION_BYTES = 8 + 4 * 8 * 9  # a row number and RADAR's eight distributions over nine lengths
BOUND = {"probe": "at most", "roofline": "at least", "data sheet": "up to"}


@dataclass(frozen=True)
class EstimateConfig:
    """The decoding task and the machine. dtype, device and drafter as in `load_pair`.

    prompt_tok: the longest prompt to reserve memory for. limit: prompts per suite. probe: decode a
    few tokens if the weights are available. free_gib: None takes this machine's free memory. gpu:
    one of `profiles.GPUS` in place of this machine; then everything is computed.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_new_tokens: int = 128
    tree: TreeConfig = TreeConfig()
    prompt_tok: int = 1024
    limit: int | None = None
    part: str | None = None
    repeats: int = 1
    folder: str | Path | None = None
    probe: bool = True
    free_gib: float | None = None
    drafter: str | Path | None = None
    gpu: str | None = None

    def __post_init__(self):
        for name in ("prompt_tok", "max_new_tokens", "repeats"):
            check_integer(name, getattr(self, name), 1)
        if self.gpu is not None and self.gpu not in GPUS:
            raise nearest_name_error("GPU", self.gpu, GPUS)


@dataclass(frozen=True)
class Estimate:
    """Requirements of a run. Sizes in GiB; `seconds` per method, bounded as `how` says.

    how: "probe" (a few tokens were decoded: at most), "roofline" (only the shape is known: at
    least) or "data sheet" (of a GPU elsewhere).
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
            advice = "take bfloat16, a smaller pair or a larger machine"
            return f"{text}, but {_gib(self.free_gib)} are free; {advice}."
        if not self.seconds:
            return f"{text}."
        total = _duration(sum(self.seconds.values()))
        text = f"{text}; {self.prompts} turns take {BOUND[self.how]} {total}"
        if self.how == "data sheet":
            text = f"{text} (computed from its data sheet, not measured)"
        return f"{text}."


@runs.with_settings(EstimateConfig)
def estimate(
    pair: str | Pair, suites=None, config: EstimateConfig | None = None, **settings
) -> Estimate:
    """Memory and time of decoding `suites` plainly and with a tree, before anything large is read.

    pair: a loaded Pair, a preset's name, or the folder or hub id of a target. A pair that is loaded
    or available here is probed; others are bounded by their shape. settings: as in EstimateConfig.

    >>> estimate("llama-3.1-8b", dtype="bfloat16", device="cpu", free_gib=20.0).fits
    True
    """
    config = runs.configured(config, EstimateConfig, settings)
    # 1. where, and in which number format
    if isinstance(pair, Pair):
        name = pair.name
        dtype, device = pair.target.dtype, pair.target.device
    elif config.gpu:
        name = str(pair)
        dtype, device = load.DTYPES.get(config.dtype, "auto"), torch.device("cuda")
    else:
        name = str(pair)
        dtype, device = load.placement(config.dtype, config.device)
    if dtype == "auto":  # published in bfloat16
        dtype = torch.bfloat16
    # 2. memory
    target, network = shapes_of(pair, config.drafter)
    free_gib = config.free_gib
    if free_gib is None and config.gpu:
        free_gib = MEMORY_GB[config.gpu] * 1e9 / GIB
    elif free_gib is None:
        free_gib = free_memory_gib(device)
    sizes = _memory(target, network, dtype, config)
    place = config.gpu or device.type
    needed = Estimate(name, dtype_name(dtype), place, free_gib=free_gib, **sizes)
    if suites is None:
        return needed
    # 3. time
    items = gather(suites, limit=config.limit, part=config.part, folder=config.folder)
    turns = config.repeats * sum(len(item.turns) for item in items)
    loaded = isinstance(pair, Pair)
    if config.probe and needed.fits and not config.gpu and (loaded or here(pair)):
        how = "probe"
        turn_s = _probe(pair if loaded else _loaded(pair, config), items[0], config)
    else:
        how = "data sheet" if config.gpu else "roofline"
        turn_s = _computed(target.num_hidden_layers, needed.weights_gib, device, config)
    seconds = {method: turns * each_s for method, each_s in turn_s.items()}
    return replace(needed, prompts=turns, how=how, seconds=seconds)


def here(pair: str) -> bool:
    """Whether a preset or folder can be decoded with without a network."""
    return load.at_hand(pair) or Path(pair).expanduser().is_dir()


def _loaded(pair: str, config: EstimateConfig) -> Pair:
    options = dict(drafter=config.drafter, dtype=config.dtype, device=config.device)
    if pair in pairs.names():
        return load.load_pair(pair, **options)
    return load.load_pair(target=pair, **options)


def shapes_of(pair: str | Pair, drafter: str | Path | None = None) -> tuple:
    """The target's transformers config, and the network of its drafter or None without weights.

    drafter: as in `load_drafter`; None: the pair's own. The network is on the meta device; without
    a local folder it has its kind's published form.
    """
    if isinstance(pair, Pair):
        return pair.target.config, pair.drafter.network if pair.drafter is not None else None
    config = _target_shape(pair)
    kind, source = drafters.kind_and_source(str(drafter or ""))
    if source:
        load.is_hub_id(source)  # refuses anything but a hub id or a folder
    elif pair in load.SHIPPED or pair in load.PRESETS:
        own = load.PRESETS[pair].drafter if pair in load.PRESETS else pair
        source = str(load.shipped_folder(own) / drafters.KINDS[kind or "eagle3"].folder)
    folder = load.drafter_folder(source) if source and Path(source).expanduser().is_dir() else None
    if not kind and folder:
        kind = drafters.kind_of(load.config_of(folder))
    return config, drafters.KINDS[kind or "eagle3"].network(folder, config)


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
    """Numbers that a network stores per token as keys and values; Hydra++'s belong to its layer."""
    config = getattr(getattr(network, "prefix", network), "config", None)
    heads = getattr(config, "num_attention_heads", 0)
    if not heads:  # nothing, or heads that read only the last state
        return 0
    rows = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * getattr(config, "num_hidden_layers", 1) * rows * size


def parameters(network) -> int:
    """Number of weights of a network, packed or not; tied ones count once."""
    buffers = {name for name, _ in network.named_buffers()}
    weights = {}
    for name, weight in network.state_dict(keep_vars=True).items():
        if name not in buffers:
            weights[id(weight)] = weight
    return sum(weight.numel() for weight in weights.values())


def _memory(target, network, dtype: torch.dtype, config: EstimateConfig) -> dict[str, float]:
    """Sizes in GiB for decoding one prompt at a time: weights, full caches, the largest forward."""
    model = drafters.on_meta(target)
    width = dtype.itemsize
    weights = parameters(model)
    kept = kept_per_tok(model)
    if network is not None:
        weights += parameters(network)
        kept += kept_per_tok(network)
    tree = config.tree
    widest = max(tree.total_tokens, tree.widest * max(1, tree.depth))
    rows = config.prompt_tok + config.max_new_tokens + tree.depth + 2 + widest
    inner = getattr(target, "intermediate_size", None) or 4 * target.hidden_size
    row_bytes = width * (8 * target.hidden_size + 3 * inner + rows)
    logits_bytes = (width + 8) * target.vocab_size
    # the forward over the prompt has logits of its last row, the one over the tree of all rows
    reading = config.prompt_tok * row_bytes + logits_bytes
    verifying = tree.total_tokens * (row_bytes + logits_bytes)
    return {
        "weights_gib": width * weights / GIB,
        "cache_gib": rows * width * kept / GIB,
        "activations_gib": max(reading, verifying) / GIB,
        "cache_kib_per_tok": width * kept / 1024,
    }


def free_memory_gib(device: torch.device | str = "cpu") -> float | None:
    """Memory that can be taken without swapping, in GiB; None if the system does not report it."""
    free = free_bytes(torch.device(device))
    return None if free is None else free / GIB


def _probe(pair: Pair, item, config: EstimateConfig) -> dict[str, float]:
    """Seconds of one turn of `max_new_tokens` by both methods, from a few tokens of one prompt."""
    prompt = pair.ids_of(conversation(pair, item, 0, []))
    policies = {"autoregressive": None}
    if pair.drafter is not None:
        policies["tree"] = Static.of(config.tree)
    seconds = {}
    for name, policy in policies.items():
        for _ in range(2):  # the first one warms up
            if policy is None:
                out = autoregress(pair, prompt, PROBE_TOK, stop_tokens=())
            else:
                out = decode(pair, prompt, policy, PROBE_TOK, stop_tokens=())
        seconds[name] = (out.prefill_ms + out.decode_ms * config.max_new_tokens / out.new_tok) / 1e3
    return seconds


def _computed(
    layers: int, weights_gib: float, device: torch.device, config: EstimateConfig
) -> dict[str, float]:
    """Seconds of one turn if each forward reads all weights once."""
    if config.gpu:
        launch_s = layers * HOSTS["eager"]["launch_ms_per_layer"] / 1e3
        rate = GPUS[config.gpu][0] * 1e9
        gain = 1  # no draft token is accepted
    else:
        launch_s = 0.0
        rate = bandwidth(device)
        # every draft token accepted, a drafter forward counted like one of the target's
        gain = config.tree.depth + 2
    plain_s = config.max_new_tokens * (weights_gib * GIB / rate + launch_s)
    return {"autoregressive": plain_s, "tree": plain_s / gain}


def bandwidth(device: torch.device | str = "cpu", mib: int = 64) -> float:
    """Memory bandwidth in bytes per second, from the best of a few copies (read and written)."""
    source = torch.zeros(mib << 18, dtype=torch.float32, device=device)
    copy = torch.empty_like(source)
    clock = Clock(torch.device(device))
    best = 0.0
    for _ in range(8):
        clock.start()
        copy.copy_(source)
        clock.lap("draft")
        best = max(best, 2 * source.nbytes / max(1e-9, clock.stop()["draft_ms"] / 1e3))
    return best


def _gib(value: float) -> str:
    return f"{value:.1f} GiB" if value >= 1 else f"{1024 * value:.0f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class RecordEstimate:
    """What `record` will write. megabytes: expected on disk; free_megabytes: free there.

    positions: expected, from the lengths of a few texts; most_positions: if none ends early.
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
        prompts = f"{self.prompts} prompts ({self.turns} turns)"
        needs = f"about {self.positions} positions, {self.megabytes:.0f} MB"
        text = f"recording {prompts} of {self.pair} in {self.dtype}: {needs}"
        text = f"{text}, {_duration(60 * self.minutes)}"
        if self.fits:
            return f"{text}."
        advice = "record fewer widths or prompts"
        return f"{text}, but only {self.free_megabytes:.0f} MB are free: {advice}."


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
    check_integer("samples", samples, 1)
    config = record.record_config(config, settings)
    record.check(pair, config)
    items = [item for _, item in record.parted_items(prompts, config)]
    places = np.linspace(0, len(items) - 1, min(samples, len(items))).round().astype(int)
    sampled = [items[index] for index in np.unique(places)]
    answer_tok, answer_s, position_s, tables = _probe_recording(pair, config, sampled)
    position_bytes, prompt_bytes = _written(tables)
    turns = sum(len(item.turns) for item in items)
    positions = turns * (answer_tok - 1)
    size = positions * position_bytes + len(items) * prompt_bytes
    size += turns * min(config.acceptance_distributions, answer_tok) * DISTRIBUTION_BYTES
    disk = shutil.disk_usage(nearest_existing(runs.runs_dir(config.scale)))
    return RecordEstimate(
        pair=pair.name,
        dtype=dtype_name(pair.target.dtype),
        prompts=len(items),
        turns=turns,
        positions=round(positions),
        most_positions=turns * (config.max_new_tokens - 1),
        megabytes=float(size) / 1e6,
        free_megabytes=disk.free / 1e6,
        minutes=float(turns * answer_s + positions * position_s) / 60,
    )


def _probe_recording(
    pair: Pair, config: RecordConfig, items: list
) -> tuple[float, float, float, list[dict]]:
    """Mean tokens and seconds of an answer, seconds of a position, and tables of some items."""
    recorder = record.Recorder(pair, config)
    prompts = openings(pair, items)
    # 1. the texts
    with pair.inference():
        finish(recorder.continuing(prompts[0]))  # warms up
        begin = time.perf_counter()
        texts = dict(drive((recorder.continuing(prompt) for prompt in prompts), ROWS))
        answer_s = (time.perf_counter() - begin) / len(items)
    answer_tok = np.mean([kept_tok for _, kept_tok in texts.values()])
    # 2. the trees of a third of them; the first one is grown twice, as a warm-up
    tables = []
    position_s = 0.0
    for number in (0, *range(0, len(prompts), 3)):
        ids, kept_tok = texts[number]
        if kept_tok > 1:
            begin = time.perf_counter()
            last = min(kept_tok, PROBE_POSITIONS + 1)
            tables.append(recorder.positions(ids, len(prompts[number]), last))
            if len(tables) > 1:
                position_s += time.perf_counter() - begin
    tables = tables[1:]
    return answer_tok, answer_s, position_s / max(1, _positions(tables)), tables


def _positions(tables: list[dict]) -> int:
    return sum(len(table["positions"]["context_tok"]) for table in tables)


def _written(tables: list[dict]) -> tuple[float, float]:
    """Bytes on disk of a position, from the probe's columns, and of one prompt's row of turns."""
    row = {"suite": "suite", "prompt": "prompt", "turn": 0, "part": "part"}
    row |= {"prompt_tok": 1, "kept_tok": 1, "positions": 0, "piece": 0}
    written = 0
    with tempfile.TemporaryDirectory() as folder:
        path = runs.write_table(Path(folder) / "turns.parquet", pd.DataFrame([row]))
        prompt_bytes = path.stat().st_size
        for name in ("positions", "trees", "family"):
            parts = [table[name] for table in tables if table[name]]
            if parts:
                columns = {column: stacked([part[column] for part in parts]) for column in parts[0]}
                path = write_columns(Path(folder) / f"{name}.parquet", columns)
                written += path.stat().st_size
    return written / max(1, _positions(tables)), prompt_bytes


def nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest existing one above it."""
    return next(place for place in (folder.resolve(), *folder.resolve().parents) if place.exists())
