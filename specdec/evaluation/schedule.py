"""Draft lengths by batch size in the engines' own form, fitted by replay to a recording and a cost model.

    engine         what is written            its entries                                         checked against
    vllm           speculative_config.json    [from, to, length] of batch sizes                   its main branch, 2026
    sglang         adaptive.json              batch size from which on: lengths to choose from    its main branch, 2026
    tensorrt-llm   speculative_config.yml     batch size up to which: length; above the last, 0   1.3
    llama.cpp      flags only                 the longest draft and the least probability         its main branch, 2026

Sources: vLLM's docs/features/speculative_decoding/dynamic_speculative_decoding.md and v1/spec_decode/dynamic/utils.py; SGLang's
srt/speculative/adaptive_spec_params.py; TensorRT-LLM's llmapi/llm_args.py (1.2 read a key as the batch size from which on);
llama.cpp's tools/server/README.md. The engines themselves were not run here. They draft chains: one child per node.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import yaml

from specdec import runs
from specdec.costs.model import CostModel
from specdec.errors import SpecdecError, check_integer, check_name, door, warn
from specdec.policies import engines
from specdec.replays.replay import replay
from specdec.replays.static_trees import static_grid
from specdec.replays.trace import Trace

FILES = {"vllm": "speculative_config.json", "sglang": "adaptive.json", "tensorrt-llm": "speculative_config.yml"}
ENGINES = (*FILES, "llama.cpp")
PLUGINS = {"vllm": "vllm_proposer", "sglang": "sglang_algorithm"}  # skeletons for an engine's own hooks
BATCHES = (1, 2, 4, 8, 16, 32, 64)
P_MINS = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8)
NOT_RUN = "The names follow the engine's public sources of 2026; the engine itself was not run here."


@dataclass(frozen=True)
class Schedule:
    """The fastest draft length at each batch size; `fit` makes it.

    table: a row per batch size: batch, draft_len (0: plain decoding), speedup over plain decoding, candidates (the lengths that
    are fastest for a suite or for all), measured (whether the costs were measured at so many rows). p_min: as llama.cpp uses it.
    """

    table: pd.DataFrame
    p_min: float = 0.0

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """[(from, to, draft length)] of batch sizes, without gaps; a size between two fitted ones has the larger one's length."""
        return self._merged(self.table["draft_len"])

    @property
    def longest(self) -> int:
        """The longest of the draft lengths."""
        return int(self.table["draft_len"].max())

    def _merged(self, values) -> list[tuple]:
        found: list[tuple] = []
        for batch, value in zip(self.table["batch"].tolist(), values.tolist(), strict=True):
            first = found[-1][1] + 1 if found else 1
            if found and found[-1][2] == value:
                first = found.pop()[0]
            found.append((first, batch, value))
        return found

    def vllm(self, drafter: str) -> dict:
        """The object of --speculative-config."""
        config = {"method": "eagle3", "model": drafter, "num_speculative_tokens": self.longest}
        return config | {"num_speculative_tokens_per_batch_size": [list(span) for span in self.spans]}

    def sglang(self) -> dict:
        """The file of --speculative-adaptive-config; the engine moves among the candidates by acceptance."""
        merged = self._merged(self.table["candidates"])
        return {str(first): {"candidate_steps": list(steps)} for first, _, steps in merged}

    def tensorrt_llm(self, drafter: str) -> dict:
        """The part `speculative_config` of its YAML file. No length may exceed that of the smallest batch size."""
        most = self.spans[0][2] or self.longest
        lengths = {to: min(length, most) for _, to, length in self.spans}
        while not lengths[max(lengths)]:
            lengths.pop(max(lengths))
        config = {"decoding_type": "Eagle3", "max_draft_len": most, "speculative_model": drafter}
        if set(lengths.values()) == {most}:
            return config | {"max_concurrency": max(lengths)}
        if lengths[min(lengths)] != most:
            raise SpecdecError("TensorRT-LLM drafts longest at the smallest batches; leave those without drafts out.")
        return config | {"draft_len_schedule": lengths}


@door
def fit(trace: Trace, costs: CostModel, batches: Sequence[int] = BATCHES) -> Schedule:
    """The fastest chain on the recording at each of `batches`, by `costs.batched`. SpecdecError if none beats plain decoding.

    The recording must hold chains (top_k 1, or a family).

    >>> import specdec
    >>> from specdec.costs.profiles import profile
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> small = dict(depth=3, top_ks=(1,), trees=(), max_new_tokens=8, progress=False)
    >>> trace = specdec.record(pair, {"mine": ["What is 2 + 3?"]}, **small)
    >>> found = fit(trace, profile("roofline-a100-llama-8b-eager"), batches=(1, 256))
    >>> found.spans[0][0], found.spans[-1][1], found.longest >= 1
    (1, 256, True)
    """
    sizes = sorted({check_integer("batches", batch, 1) for batch in batches})
    if not sizes:
        raise SpecdecError("a schedule needs at least one batch size.")
    if trace.copies:
        why = "the recorded drafter also copies from the text, which a chain's length does not tell"
        raise SpecdecError(f"{why}; record it alone.")
    rows, longest = [], min(trace.depth_of(1) + 1, trace.most_nodes)
    for batch in sizes:
        model = costs.batched(batch)
        grid = static_grid(trace, model, range(2, max(longest, 1) + 2), top_ks=[1], beams=[()], by="suite")
        chains = grid[grid["total_tokens"] == grid["depth"] + 2]
        best, speedup = _fastest(chains)
        candidates = {best, *(_fastest(own)[0] for _, own in chains.groupby("suite"))}
        rows.append((batch, best, speedup, tuple(sorted(candidates)), bool(model.measured("verify_nodes", [best]))))
    table = pd.DataFrame(rows, columns=["batch", "draft_len", "speedup", "candidates", "measured"])
    if not table["draft_len"].any():
        why = f"by the costs {costs.name!r} no draft is faster than plain decoding at batch sizes {sizes}"
        raise SpecdecError(f"{why}; serve without speculation.")
    return Schedule(table)


def _fastest(chains: pd.DataFrame) -> tuple[int, float]:
    """(draft length, speedup) of the fastest of these rows of `static_grid`, or of plain decoding."""
    sums = chains.groupby("total_tokens")[["plain_ms", "time_ms"]].sum()
    speeds = sums["plain_ms"] / sums["time_ms"]
    return (int(speeds.idxmax()) - 1, float(speeds.max())) if speeds.max() > 1 else (0, 1.0)


def fit_p_min(trace: Trace, costs: CostModel, schedule: Schedule) -> Schedule:
    """The schedule for llama.cpp: one draft length and the least probability, the fastest by replay of its rule.

    Without recorded scores of chains the probability stays 0, with a warning.
    """
    model = dataclasses.replace(costs.batched(int(schedule.table["batch"][0])), question_ms=0.0)
    tried = itertools.product(sorted({schedule.longest, trace.depth_of(1) + 1}), P_MINS)
    rules = {one: engines.rule("llamacpp_p_min", most_levels=one[0], p_min=one[1]) for one in tried}
    try:
        speedup, (levels, p_min) = max((replay(trace, rule, model).speedup, one) for one, rule in rules.items())
    except SpecdecError as error:
        warn(f"--spec-draft-p-min stays 0: {error}")
        return schedule
    return Schedule(schedule.table[:1].assign(draft_len=levels, speedup=speedup, candidates=[(levels,)]), p_min)


def write(engine: str, schedule: Schedule, out: Path, drafter: str) -> str:
    """Write the engine's file into the folder `out`; returns the flags that use it. drafter: folder or hub id to serve."""
    check_name("engine", engine, ENGINES)
    out, longest = Path(out), str(schedule.longest)
    if engine == "llama.cpp":
        words = ["-md", drafter, "--spec-type", "draft-eagle3", "--spec-draft-n-max", longest]
        return shlex.join([*words, "--spec-draft-n-min", "0", "--spec-draft-p-min", f"{schedule.p_min:g}"])
    path = out / FILES[engine]
    if engine == "vllm":
        config = schedule.vllm(drafter)
        runs.write_json(path, config)
        return shlex.join(["--speculative-config", json.dumps(config)])
    if engine == "sglang":
        runs.write_json(path, schedule.sglang())
        words = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", drafter]
        words += ["--speculative-eagle-topk", "1", "--speculative-num-steps", longest]
        words += ["--speculative-num-draft-tokens", str(schedule.longest + 1)]
        return shlex.join([*words, "--speculative-adaptive", "--speculative-adaptive-config", str(path)])
    config = {"speculative_config": schedule.tensorrt_llm(drafter)}
    runs.write_text(path, yaml.safe_dump(config, sort_keys=False))
    return shlex.join(["--config", str(path)])


def write_plugin(engine: str, schedule: Schedule, out: Path) -> Path:
    """Write a class for the engine's own hook with this schedule: a skeleton to change. SpecdecError for an engine without one."""
    name = PLUGINS[check_name("engine with a skeleton", engine, PLUGINS)]
    text = Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8")
    return runs.write_text(Path(out) / f"{name}.py", text.replace("SPANS = []", f"SPANS = {schedule.spans}"))
