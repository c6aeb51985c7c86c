"""Estimates before a run, this machine's missing parts, and the costs of a tree's cycle here.

Memory is counted from shapes on the meta device. Time comes from decoding a few tokens, or, for a
GPU elsewhere, from its data sheet. Of a recording, a few prompts are recorded and measured.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import torch
import transformers

from specdec import machine, runs
from specdec.core.decode import ROWS, autoregress, decode, drive
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Static
from specdec.core.protocols import finish
from specdec.core.records import tau
from specdec.core.tree_config import GIB, TreeConfig, free_bytes
from specdec.costs.profiles import GPUS, HOSTS, MEMORY_GB
from specdec.data.suites import (
    DATA_VARIABLE,
    DEFAULT_NAMES,
    conversation,
    embedded_suite,
    gather,
    openings,
)
from specdec.errors import SpecdecError, check_integer, check_name
from specdec.evaluation import bench
from specdec.models import load, pairs
from specdec.models.eagle_files import read_checkpoint
from specdec.models.eagle_network import layer_like, network_of
from specdec.models.heads import read_heads
from specdec.replays import record
from specdec.replays.record import RecordConfig
from specdec.replays.trace import stacked_columns, write_columns

DRAFT_VOCABULARY = 32_000  # of published EAGLE-3 drafters
PROMPT_TOK = 1024  # the longest prompt to reserve memory for
PROBE_TOK = 24  # tokens that a probe decodes
PROBE_POSITIONS = 24  # of a prompt, whose trees are grown in the probe
TURN_BYTES = 8_000  # the table of one prompt's turns
DISTRIBUTION_BYTES = 8 + 4 * 8 * 9  # a row number and RADAR's eight distributions over nine lengths
OK, NOTE, FAULT = "ok", "note", "fault"


@dataclass(frozen=True)
class Estimate:
    """Requirements of a run. Sizes in GiB; `seconds` per method, at most, for all turns."""

    pair: str
    dtype: str
    device: str  # or the name of a GPU whose data sheet is used
    weights_gib: float
    cache_gib: float
    activations_gib: float
    free_gib: float | None
    prompts: int = 0  # turns
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def needed_gib(self) -> float:
        return self.weights_gib + self.cache_gib + self.activations_gib

    @property
    def fits(self) -> bool:
        return self.free_gib is None or self.needed_gib <= self.free_gib

    @property
    def sentence(self) -> str:
        text = f"{self.pair} in {self.dtype} on {self.device} needs about {self.needed_gib:.1f} GiB"
        if not self.fits:
            advice = "take bfloat16, a smaller pair or a larger machine"
            return f"{text}, but {self.free_gib:.1f} GiB are free; {advice}."
        if self.seconds:
            text += f"; {self.prompts} turns take up to {_duration(sum(self.seconds.values()))}"
        if self.device in GPUS:
            text += " (computed from its data sheet, not measured)"
        return f"{text}."


def estimate(
    pair: str | Pair,
    suites=None,
    *,
    tree: TreeConfig | None = None,
    max_new_tokens: int = 128,
    repeats: int = 1,
    limit: int | None = None,
    part: str | None = None,
    folder: str | Path | None = None,
    drafter: str | Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    gpu: str | None = None,
) -> Estimate:
    """Memory and time of decoding `suites` plainly and with `tree`, before anything large is read.

    pair: a loaded Pair, a preset's name, or a target's folder or hub id. gpu: one of
    `profiles.GPUS` in place of this machine; then time is computed from its data sheet.

    >>> estimate("llama-3.1-8b", dtype="bfloat16", gpu="h100").fits
    True
    """
    tree = tree or TreeConfig()
    if gpu is not None:
        check_name("GPU", gpu, GPUS)
    # 1. where, and in which number format; published weights are in bfloat16
    if isinstance(pair, Pair):
        name, number_format, place = pair.name, pair.target.dtype, pair.target.device
    elif gpu:
        number_format = load.DTYPES.get(dtype, torch.bfloat16)
        name, place = str(pair), torch.device("cuda")
    else:
        name = str(pair)
        number_format, place = load.placement(dtype, device)
    if number_format == "auto":
        number_format = torch.bfloat16
    # 2. memory
    target, network = shapes_of(pair, drafter)
    sizes = _memory(target, network, number_format, tree, max_new_tokens)
    free_gib = MEMORY_GB[gpu] * 1e9 / GIB if gpu else free_memory_gib(place)
    needed = Estimate(name, dtype_name(number_format), gpu or place.type, *sizes, free_gib)
    # 3. time
    loadable = isinstance(pair, Pair) or load.at_hand(name) or Path(name).expanduser().is_dir()
    if suites is None or not needed.fits or not (gpu or loadable):
        return needed
    items = gather(suites, limit=limit, part=part, folder=folder)
    if gpu:
        # each forward reads all weights once, and no draft token is accepted
        launch_s = target.num_hidden_layers * HOSTS["eager"]["launch_ms_per_layer"] / 1e3
        forward_s = needed.weights_gib * GIB / (GPUS[gpu][0] * 1e9) + launch_s
        turn_s = dict.fromkeys(("autoregressive", "tree"), max_new_tokens * forward_s)
    else:
        if not isinstance(pair, Pair):
            source = {"name": pair} if pair in pairs.names() else {"target": pair}
            pair = load.load_pair(**source, drafter=drafter, dtype=dtype, device=device)
        turn_s = _probe(pair, items[0], tree, max_new_tokens)
    turns = repeats * sum(len(item.turns) for item in items)
    seconds = {method: turns * each_s for method, each_s in turn_s.items()}
    return replace(needed, prompts=turns, seconds=seconds)


def shapes_of(pair: str | Pair, drafter: str | Path | None = None) -> tuple:
    """The target's config, and the drafter's network on the meta device or None without weights.

    Without a local folder the network has EAGLE-3's published form.
    """
    if isinstance(pair, Pair):
        return pair.target.config, pair.drafter.network if pair.drafter is not None else None
    # 1. the target
    preset = load.PRESETS.get(pair)
    if preset:
        shape = {"tie_word_embeddings": False, **preset.shape}
        config = getattr(transformers, shape.pop("class"))(**shape)
    elif pair in load.SHIPPED:
        config = transformers.AutoConfig.from_pretrained(load.shipped_folder(pair) / "target")
    else:
        if not runs.placed(pair).exists() and "/" not in pair:
            check_name("preset", pair, pairs.names())
        config = load.target_config(pair)
    # 2. the drafter: a folder's own form, else EAGLE-3's published one
    kind, source = pairs.kind_and_source(str(drafter or ""))
    if not source and pair in pairs.names():
        source = load.weights_of(pair, pairs.KINDS[kind or "eagle3"].folder)
    folder = None
    if source and (Path(source).is_dir() or not pairs.HUB_ID.fullmatch(source)):
        folder = load.drafter_folder(source)
    if not kind and folder:
        kind = pairs.kind_of(load.config_of(folder))
    return config, drafter_network(kind or "eagle3", folder, config)


def on_meta(config) -> torch.nn.Module:
    """The causal LM of this transformers config, without its weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def drafter_network(kind: str, folder: Path | None, config) -> torch.nn.Module | None:
    """A drafter's network, for counting; None for a kind without one."""
    if not pairs.KINDS[kind].needs_folder:
        return None
    if folder is None and kind not in ("eagle3", "hybrid"):
        raise SpecdecError(f"only EAGLE-3's size is known; name a folder, {kind}:FOLDER.")
    if kind == "lm":
        return on_meta(transformers.AutoConfig.from_pretrained(folder))
    if kind in ("medusa", "hydra"):
        sizes = dict(hidden_size=config.hidden_size, vocab_size=config.vocab_size)
        return read_heads(folder, SimpleNamespace(**sizes, num_layers=config.num_hidden_layers))
    drafted = min(DRAFT_VOCABULARY, config.vocab_size)
    layer = layer_like(config, config.vocab_size, draft_vocab_size=drafted)
    if folder is not None:
        layer = read_checkpoint(folder)[0]
    with torch.device("meta"):
        return network_of(layer)


def kept_per_tok(network) -> int:
    """Numbers that a network stores per token as keys and values."""
    config = getattr(network, "config", None)
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


def _memory(target, network, dtype: torch.dtype, tree: TreeConfig, new_tok: int) -> list[float]:
    """GiB for decoding one prompt at a time: weights, full caches, the largest forward."""
    model = on_meta(target)
    width = dtype.itemsize
    weights = parameters(model)
    kept = kept_per_tok(model)
    if network is not None:
        weights += parameters(network)
        kept += kept_per_tok(network)
    widest = max(tree.total_tokens, tree.widest * max(1, tree.depth))
    rows = PROMPT_TOK + new_tok + tree.depth + 2 + widest
    inner = getattr(target, "intermediate_size", None) or 4 * target.hidden_size
    row_bytes = width * (8 * target.hidden_size + 3 * inner + rows)
    logits_bytes = (width + 8) * target.vocab_size
    # the forward over the prompt has logits of its last row, the one over the tree of all rows
    reading = PROMPT_TOK * row_bytes + logits_bytes
    verifying = tree.total_tokens * (row_bytes + logits_bytes)
    return [size / GIB for size in (width * weights, rows * width * kept, max(reading, verifying))]


def free_memory_gib(device: torch.device | str = "cpu") -> float | None:
    """Memory that can be taken without swapping; None if the system does not report it."""
    free = free_bytes(torch.device(device))
    return None if free is None else free / GIB


def _probe(pair: Pair, item, tree: TreeConfig, new_tok: int) -> dict[str, float]:
    """Seconds of one turn of `new_tok` tokens by both methods, from a few tokens of one prompt."""
    prompt = pair.ids_of(conversation(pair, item, 0, []))
    methods = {"autoregressive": lambda: autoregress(pair, prompt, PROBE_TOK, stop_tokens=())}
    if pair.drafter is not None:
        policy = Static.of(tree)
        methods["tree"] = lambda: decode(pair, prompt, policy, PROBE_TOK, stop_tokens=())
    seconds = {}
    for name, method in methods.items():
        method()  # warms up
        out = method()
        seconds[name] = (out.prefill_ms + out.decode_ms * new_tok / out.new_tok) / 1e3
    return seconds


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@dataclass(frozen=True)
class RecordEstimate:
    """What `record` will write, expected from a few texts."""

    pair: str
    dtype: str
    prompts: int
    turns: int
    positions: int
    megabytes: float
    free_megabytes: float
    minutes: float

    @property
    def fits(self) -> bool:
        return self.megabytes <= self.free_megabytes

    @property
    def sentence(self) -> str:
        needs = f"about {self.positions} positions, {self.megabytes:.0f} MB"
        prompts = f"{self.prompts} prompts ({self.turns} turns) of {self.pair} in {self.dtype}"
        text = f"recording {prompts}: {needs}, {_duration(60 * self.minutes)}"
        if self.fits:
            return f"{text}."
        return f"{text}, but only {self.free_megabytes:.0f} MB are free: record fewer widths."


@runs.with_settings(RecordConfig)
def estimate_record(
    pair: Pair, prompts: Iterable, config: RecordConfig | None = None, *, samples=9, **settings
) -> RecordEstimate:
    """Time and space of `record(pair, prompts, ...)` with the same arguments. Nothing is stored.

    samples: prompts decoded for it, spread over all; a third of them also grow a few trees.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> settings = dict(max_new_tokens=8, depth=3, top_ks=(2, 3), trees=())
    >>> needed = estimate_record(pair, {"mine": ["What is 2 + 3?"]}, samples=1, **settings)
    >>> needed.turns, needed.fits
    (1, True)
    """
    config = runs.configured(config, RecordConfig, settings)
    record.check(pair, config)
    check_integer("samples", samples, 1)
    items = [item for _, item in record.parted_items(prompts, config)]
    places = np.linspace(0, len(items) - 1, min(samples, len(items))).round().astype(int)
    starts = openings(pair, [items[index] for index in np.unique(places)])
    recorder = record.Recorder(pair, config)
    # 1. the texts
    with pair.inference():
        finish(recorder.continuing(starts[0]))  # warms up
        begin = time.perf_counter()
        texts = dict(drive((recorder.continuing(start) for start in starts), ROWS))
        answer_s = (time.perf_counter() - begin) / len(starts)
    answer_tok = np.mean([kept_tok for _, kept_tok in texts.values()])
    # 2. the trees of a third of them; the first one is grown twice, as a warm-up
    tables = []
    trees_s = 0.0
    for number in (0, *range(0, len(starts), 3)):
        ids, kept_tok = texts[number]
        if kept_tok > 1:
            begin = time.perf_counter()
            last = min(kept_tok, PROBE_POSITIONS + 1)
            tables.append(recorder.positions(ids, len(starts[number]), last))
            if len(tables) > 1:
                trees_s += time.perf_counter() - begin
    tables = tables[1:]
    grown = max(1, sum(len(table["positions"]["context_tok"]) for table in tables))
    # 3. all prompts, from these
    turns = sum(len(item.turns) for item in items)
    positions = turns * (answer_tok - 1)
    size = positions * _written_bytes(tables) / grown + len(items) * TURN_BYTES
    size += turns * min(config.lengths, answer_tok) * DISTRIBUTION_BYTES
    return RecordEstimate(
        pair=pair.name,
        dtype=dtype_name(pair.target.dtype),
        prompts=len(items),
        turns=turns,
        positions=round(positions),
        megabytes=float(size) / 1e6,
        free_megabytes=shutil.disk_usage(nearest_existing(runs.runs_dir(config.scale))).free / 1e6,
        minutes=float(turns * answer_s + positions * trees_s / grown) / 60,
    )


def _written_bytes(tables: list[dict]) -> int:
    """Bytes on disk of a few prompts' columns."""
    written = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in ("positions", "trees", "family"):
            parts = [table[name] for table in tables if table[name]]
            if parts:
                path = write_columns(Path(folder) / f"{name}.parquet", stacked_columns(parts))
                written += path.stat().st_size
    return written


def nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest existing one above it."""
    return next(place for place in (folder.resolve(), *folder.resolve().parents) if place.exists())


def checks(names=load.SHIPPED) -> pd.DataFrame:
    """One row per fact: fact, value, state (OK, NOTE for a possible improvement, FAULT)."""
    facts = machine.fingerprint()
    cores = facts["cores"]
    rows = [("CPU", f"{facts['cpu']}, {cores} usable cores, {facts['system']}", OK)]
    rows.append(("GPU", facts["gpu"] or "none", OK))
    # 1. what slows decoding down
    if not facts["gpu"] and not machine.multiplies_bfloat16():
        rows.append(("number format", "no bfloat16 units: use float32", NOTE))
    free_gib = free_memory_gib()
    if free_gib is not None:
        rows.append(("memory", f"{free_gib:.1f} GiB free", NOTE if free_gib < 2 else OK))
    threads = facts["threads"] or 0
    rows.append(("threads", f"{threads} (OMP_NUM_THREADS)", NOTE if threads > cores else OK))
    # 2. what is missing
    for name in names:
        try:
            load.load_pair(name)
            rows.append((f"pair {name}", "loads", OK))
        except SpecdecError as error:
            rows.append((f"pair {name}", str(error), FAULT))
    folder = os.environ.get(DATA_VARIABLE)
    missing = folder is not None and not Path(folder).expanduser().is_dir()
    rows.append(("benchmarks", folder or "embedded only", FAULT if missing else OK))
    writable = os.access(nearest_existing(runs.home()), os.W_OK)
    rows.append(("results", str(runs.home()), OK if writable else FAULT))
    # 3. versions, and who else computes here
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    rows.append(("versions", f"Python {facts['python']}, {versions}", OK))
    crowded = machine.Neighbours().crowded()
    rows.append(("load", crowded or "this process has its cores", NOTE if crowded else OK))
    return pd.DataFrame(rows, columns=["fact", "value", "state"])


def cycle_costs(
    pair: Pair, prompts, tree: TreeConfig, new_tok: int = 24, rounds: int = 1, **settings
) -> dict:
    """Costs of a tree's cycle on `prompts`, as medians over the rounds.

    plain_ms: a step of `autoregress`. draft_steps, verify_steps, rest_steps: of the mean cycle, in
    plain steps. speed: over that of `autoregress`, with the range over the rounds. Both alternate,
    so that a busy machine slows them alike, and only ratios within a round are compared.
    """
    methods = {"plain": "autoregressive", "tree": Static.of(tree)}
    options = {"max_new_tokens": new_tok, "repeats": rounds, "progress": False, **settings}
    turns, cycles = bench.decode_rounds(methods, {pair.name: prompts}, pair, **options)
    facts = {"pair": pair.name, "dtype": dtype_name(pair.target.dtype), "tree": tree.text}
    return {**facts, **in_steps(turns, cycles)}


def in_steps(turns: pd.DataFrame, cycles: pd.DataFrame) -> dict:
    """The mean cycle of the method "tree" in steps of the method "plain"."""
    # 1. sums of every method and round; the prompt's own forward is no step
    columns = ["new_tok", "steps", "cycles", "cycle_tok", "total_ms", "decode_ms"]
    turns = turns.assign(steps=turns["new_tok"] - 1).groupby(["method", "repeat"])[columns].sum()
    plain = turns.loc["plain"]
    tree = turns.loc["tree"]
    laps = ["draft_ms", "verify_ms", "total_ms"]
    laps_ms = cycles[cycles["method"] == "tree"].groupby("repeat")[laps].sum()
    # 2. ratios within a round
    step_ms = plain["decode_ms"] / plain["steps"]
    speed = (plain["total_ms"] / plain["new_tok"]) / (tree["total_ms"] / tree["new_tok"])
    steps = laps_ms.div(tree["cycles"] * step_ms, axis=0)
    rest = steps["total_ms"] - steps["draft_ms"] - steps["verify_ms"]
    return {
        "tau": float(tau(tree["cycle_tok"].sum(), tree["cycles"].sum())),
        "plain_ms": float(step_ms.median()),
        "draft_steps": float(steps["draft_ms"].median()),
        "verify_steps": float(steps["verify_ms"].median()),
        "rest_steps": float(rest.median()),
        "speed": float(speed.median()),
        "speed_low": float(speed.min()),
        "speed_high": float(speed.max()),
    }


def suite_prompts(pair: Pair) -> list[list[int]]:
    """Token ids of one tuning prompt of each of the pair's usual suites."""
    names = [embedded_suite(name, pair.name) for name in DEFAULT_NAMES]
    return openings(pair, gather(names, part="tune", limit=1))
