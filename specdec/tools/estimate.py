"""Estimates before a run, and this machine's missing parts.

Memory is counted from shapes on the meta device. Time comes from decoding a few tokens, or, for a
GPU elsewhere, from its data sheet. Of a recording, a few prompts are recorded and measured.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import transformers

from specdec import machine, runs
from specdec.core.decode import ROWS, autoregress, decode, drive
from specdec.core.pair import Pair, dtype_name
from specdec.core.policy import Static
from specdec.core.protocols import finish
from specdec.core.tree_config import GIB, TreeConfig, free_bytes
from specdec.costs.profiles import GPUS, HOSTS, MEMORY_GB
from specdec.data import suites as suites_module
from specdec.data.suites import conversation, gather, openings
from specdec.errors import SpecdecError, check_name
from specdec.models import load, pairs
from specdec.models.eagle_network import layer_like, network_of
from specdec.replays import record
from specdec.replays.record import RecordConfig
from specdec.replays.trace import stacked_columns, write_columns

DRAFT_VOCABULARY = 32_000  # of published EAGLE-3 drafters
PROMPT_TOK = 1024  # the longest prompt to reserve memory for
PROBE_TOK = 24  # tokens that a probe decodes, and positions whose trees it grows
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
            minutes = sum(self.seconds.values()) / 60
            text += f"; {self.prompts} turns take up to {max(1, minutes):.0f} min"
        if self.device in GPUS:
            text += " (computed from its data sheet, not measured)"
        return f"{text}."


def estimate(
    pair, suites=None, *, tree=None, max_new_tokens=128, repeats=1, gpu=None, limit=None, **loading
) -> Estimate:
    """Memory and time of decoding `suites` plainly and with `tree`, before anything large is read.

    pair: a loaded Pair, a preset's name, or a target's folder or hub id, with dtype, device and
    drafter as `loading`. gpu: one of `profiles.GPUS` in place of this machine, whose time is
    computed from its data sheet.

    >>> estimate("llama-3.1-8b", dtype="bfloat16", gpu="h100").fits
    True
    """
    tree = tree or TreeConfig()
    # 1. where, and in which number format; published weights are in bfloat16
    name = pair
    dtype = loading.get("dtype", "auto")
    if isinstance(pair, Pair):
        name, number_format, place = pair.name, pair.target.dtype, pair.target.device
    elif gpu:
        check_name("GPU", gpu, GPUS)
        number_format, place = load.DTYPES.get(dtype), torch.device("cuda")
    else:
        number_format, place = load.placement(dtype, loading.get("device", "auto"))
    if number_format in (None, "auto"):
        number_format = torch.bfloat16
    free = MEMORY_GB[gpu] * 1e9 if gpu else free_bytes(place)
    free_gib = None if free is None else free / GIB
    # 2. memory
    target, network = shapes_of(pair, loading.get("drafter"))
    sizes = _memory(target, network, number_format, tree, max_new_tokens)
    needed = Estimate(name, dtype_name(number_format), gpu or place.type, *sizes, free_gib)
    loadable = isinstance(pair, Pair) or load.at_hand(name) or Path(name).expanduser().is_dir()
    if suites is None or not needed.fits or not (gpu or loadable):
        return needed
    # 3. time
    items = gather(suites, limit=limit)
    turns = repeats * sum(len(item.turns) for item in items)
    if gpu:
        # each forward reads all weights once, and no draft token is accepted
        launch_s = target.num_hidden_layers * HOSTS["eager"]["launch_ms_per_layer"] / 1e3
        forward_s = needed.weights_gib * GIB / (GPUS[gpu][0] * 1e9) + launch_s
        turn_s = pd.Series(max_new_tokens * forward_s, ["autoregressive", "tree"])
    else:
        if not isinstance(pair, Pair):
            source = {"name" if pair in pairs.names() else "target": pair}
            pair = load.load_pair(**source, **loading)
        turn_s = _probe(pair, items[0], tree, max_new_tokens)
    return replace(needed, prompts=turns, seconds=(turns * turn_s).to_dict())


def shapes_of(pair: str | Pair, drafter: str | None = None) -> tuple:
    """The target's config, and the drafter's network on the meta device or None without weights.

    A drafter that is not loaded counts as one of EAGLE-3's published form.
    """
    if not isinstance(pair, Pair) and pair in load.SHIPPED:
        pair = load.load_pair(pair, drafter=drafter)
    if isinstance(pair, Pair):
        return pair.target.config, getattr(pair.drafter, "network", None)
    preset = load.PRESETS.get(pair)
    if preset:
        shape = {"tie_word_embeddings": False, **preset.shape}
        config = getattr(transformers, shape.pop("class"))(**shape)
    else:
        config = load.target_config(pair)
    kind, _ = pairs.kind_and_source(drafter or "")
    if kind and not pairs.KINDS[kind].needs_folder:
        return config, None
    drafted = min(DRAFT_VOCABULARY, config.vocab_size)
    with torch.device("meta"):
        return config, network_of(layer_like(config, config.vocab_size, draft_vocab_size=drafted))


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
    buffers = dict(network.named_buffers())
    sizes = {}
    for name, weight in network.state_dict(keep_vars=True).items():
        if name not in buffers:
            sizes[id(weight)] = weight.numel()
    return sum(sizes.values())


def _memory(target, network, dtype: torch.dtype, tree: TreeConfig, new_tok: int) -> list[float]:
    """GiB for decoding one prompt at a time: weights, full caches, the largest forward."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(target)
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


def _probe(pair: Pair, item, tree: TreeConfig, new_tok: int) -> pd.Series:
    """Seconds of one turn of `new_tok` tokens by both methods, from a few tokens of one prompt."""
    prompt = pair.ids_of(conversation(pair, item, 0, []))
    settings = {"max_new_tokens": PROBE_TOK, "stop_tokens": ()}
    seconds = {}
    for _ in range(2):  # the first round warms up
        outs = {"autoregressive": autoregress(pair, prompt, **settings)}
        if pair.drafter is not None:
            outs["tree"] = decode(pair, prompt, Static.of(tree), **settings)
        for name, out in outs.items():
            seconds[name] = (out.prefill_ms + out.decode_ms * new_tok / out.new_tok) / 1e3
    return pd.Series(seconds)


@dataclass(frozen=True)
class RecordEstimate:
    """What `record` will write, expected from a few texts."""

    pair: str
    prompts: int
    turns: int
    positions: int
    megabytes: float
    minutes: float

    @property
    def sentence(self) -> str:
        text = f"recording {self.prompts} prompts ({self.turns} turns) of {self.pair}: about "
        size = f"{self.positions} positions, {self.megabytes:.0f} MB"
        return f"{text}{size}, {max(1, self.minutes):.0f} min."


def estimate_record(
    pair: Pair, prompts: Iterable, config: RecordConfig | None = None, *, samples=9, **settings
) -> RecordEstimate:
    """Time and space of `record(pair, prompts, ...)` with the same arguments. Nothing is stored.

    samples: prompts decoded for it, spread over all; a third of them also grow a few trees.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> settings = dict(max_new_tokens=8, depth=3, top_ks=(2, 3), trees=())
    >>> needed = estimate_record(pair, {"mine": ["What is 2 + 3?"]}, samples=1, **settings)
    >>> needed.prompts, needed.turns
    (1, 1)
    """
    config = runs.configured(config, RecordConfig, settings)
    record.check(pair, config)
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
    answer_tok = np.mean([length for _, length in texts.values()])

    # 2. the trees of a third of them; the first one is grown twice, as a warm-up
    def grow(number: int) -> dict:
        ids, kept_tok = texts[number]
        return recorder.positions(ids, len(starts[number]), min(kept_tok, PROBE_TOK + 1))

    numbers = [number for number in range(0, len(starts), 3) if texts[number][1] > 1]
    list(map(grow, numbers[:1]))
    begin = time.perf_counter()
    tables = list(map(grow, numbers))
    trees_s = time.perf_counter() - begin
    grown = max(1, sum(len(table["positions"]["context_tok"]) for table in tables))
    # 3. all prompts, from these
    turns = sum(len(item.turns) for item in items)
    positions = turns * (answer_tok - 1)
    size = positions * _written_bytes(tables) / grown + len(items) * TURN_BYTES
    size += turns * min(config.lengths, answer_tok) * DISTRIBUTION_BYTES
    return RecordEstimate(
        pair=f"{pair.name} in {dtype_name(pair.target.dtype)}",
        prompts=len(items),
        turns=turns,
        positions=round(positions),
        megabytes=float(size) / 1e6,
        minutes=float(turns * answer_s + positions * trees_s / grown) / 60,
    )


def _written_bytes(tables: list[dict]) -> int:
    """Bytes on disk of a few prompts' columns."""
    written = 0
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "part.parquet"
        for name in ("positions", "trees", "family"):
            parts = [table[name] for table in tables if table[name]]
            if parts:
                written += write_columns(place, stacked_columns(parts)).stat().st_size
    return written


def checks(names=load.SHIPPED) -> pd.DataFrame:
    """One row per fact: fact, value, state (OK, NOTE for a possible improvement, FAULT)."""
    facts = machine.fingerprint()
    rows = [("CPU", f"{facts['cpu']}, {facts['cores']} usable cores, {facts['system']}", OK)]
    rows.append(("GPU", facts["gpu"] or "none", OK))
    rows.append(("memory", f"{(free_bytes() or np.nan) / GIB:.1f} GiB free", OK))
    # 1. what slows decoding down
    crowded = machine.Neighbours().crowded()
    if crowded:
        rows.append(("load", crowded, NOTE))
    # 2. what is missing
    for name in names:
        try:
            load.load_pair(name)
            rows.append((f"pair {name}", "loads", OK))
        except SpecdecError as error:
            rows.append((f"pair {name}", str(error), FAULT))
    folder = os.environ.get(suites_module.DATA_VARIABLE)
    if folder:
        exists = Path(folder).expanduser().is_dir()
        rows.append(("benchmarks", folder, OK if exists else FAULT))
    # the folder of results may have to be made
    nearest = next(filter(Path.exists, (runs.home(), *runs.home().parents)))
    writable = os.access(nearest, os.W_OK)
    rows.append(("results", str(runs.home()), OK if writable else FAULT))
    return pd.DataFrame(rows, columns=["fact", "value", "state"])
