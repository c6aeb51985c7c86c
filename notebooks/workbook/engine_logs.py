"""Speculative decoding as engines log it: cycles where a file holds them, and otherwise only what follows from its totals.

    file                                      per request                               gives
    vLLM's responses, level "detailed"        drafted and accepted tokens per cycle     cycles, acceptance
    AIPerf's profile_export.jsonl             the same, and the time between chunks     cycles with their time, acceptance
    either, level "summary"                   a histogram of accepted tokens            acceptance
    vLLM's counters, from /metrics            nothing: totals of all requests           acceptance

Sources: vLLM 0.29 to 0.32, docs/features/speculative_decoding/acceptance_metrics.md (`--per-request-spec-decode-metrics`, which is
experimental there: "its shape may change") and vllm/v1/spec_decode/metrics.py; AIPerf 0.13, src/aiperf/common/models/
spec_decode_models.py and docs/tutorials (`--export-level records`). A response or record is one line of JSON. Cycles are listed
where they begin, and cycles without drafts are in no file.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from specdec import stored
from specdec.errors import SpecdecError
from specdec.replays.form import trace_of
from specdec.replays.trace import Trace

COUNTER = re.compile(r'^vllm:spec_decode_(\w+?)(?:_total)?(?:\{(?:.*position="(\d+)")?.*\})? ([0-9.e+]+)$', re.M)
ADVICE = "take it from vLLM 0.29 or AIPerf 0.13, or later ones of the same form"


def _requests(path: Path) -> Iterator[tuple[str, dict, dict]]:
    """(where, what the engine counted, prompt_tok, new_tok and chunk_ms) of every request that drafted."""
    for number, line in enumerate(stored.read_text(path, ADVICE).splitlines(), 1):
        where = f"{path}, line {number}"
        record = stored.json_line(line, where, ADVICE)
        try:
            metrics, found = record.get("metrics") or {}, record.get("spec_decode_acceptance")
            if found is None:  # a response of vLLM
                found, usage = metrics.get("speculative_decoding"), record.get("usage") or {}
                about = {"prompt_tok": usage.get("prompt_tokens"), "new_tok": usage.get("completion_tokens")}
            elif record["metadata"].get("benchmark_phase") == "warmup" or record.get("error"):
                continue
            else:
                values = {
                    name: (metrics.get(name) or {}).get("value")
                    for name in ("input_sequence_length", "inter_chunk_latency")
                }
                about = {"prompt_tok": values["input_sequence_length"], "new_tok": found.get("completion_tokens")}
                about["chunk_ms"] = values["inter_chunk_latency"]
            if found and found["num_spec_steps"]:
                histogram = found["acceptance_histogram"]  # a list, or by number of accepted tokens
                pairs = histogram.items() if isinstance(histogram, dict) else enumerate(histogram)
                found = found | {"histogram": {int(length): int(count) for length, count in pairs}}
                _check(found, where)
                yield where, found, about
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SpecdecError(
                f"{where} is no response of vLLM and no record of AIPerf ({error!r}); {ADVICE}."
            ) from error


def _check(found: dict, where: str) -> None:
    counts, steps = found["histogram"], found["num_spec_steps"]
    right = sum(counts.values()) == steps
    right &= sum(length * count for length, count in counts.items()) == found["num_accepted_draft_tokens"]
    accepted, drafted = (found.get(f"per_step_{kind}") for kind in ("accepted", "drafted"))
    if accepted is not None:
        right &= len(accepted) == len(drafted) == steps and all(
            0 <= a <= d for a, d in zip(accepted, drafted, strict=True)
        )
        right &= sum(accepted) == found["num_accepted_draft_tokens"]
    if not right:
        raise SpecdecError(f"{where}: its histogram, totals and cycles contradict each other; {ADVICE}.")


def read_cycles(path: Path | str) -> pd.DataFrame:
    """One row per cycle: turn, cycle, drafted_tok, accepted_tok, ms, prompt_tok, new_tok (of the whole turn).

    ms: time between two chunks of AIPerf's client, where there is one per cycle; else NaN. SpecdecError for files that hold totals.
    """
    if COUNTER.search(stored.read_text(Path(path), ADVICE)):
        raise SpecdecError(f"{path} holds totals of all requests, no cycles; read its `acceptance`.")
    tables = []
    for turn, (where, found, about) in enumerate(_requests(Path(path))):
        if found.get("per_step_accepted") is None:
            why = "holds totals of a request, no cycles; start vLLM with --per-request-spec-decode-metrics detailed"
            raise SpecdecError(f"{where} {why}, or read its `acceptance`.")
        cycles = {"drafted_tok": found["per_step_drafted"], "accepted_tok": found["per_step_accepted"]}
        table = pd.DataFrame(cycles).assign(turn=turn, prompt_tok=about["prompt_tok"], new_tok=about["new_tok"])
        times = about.get("chunk_ms") or []
        tables.append(table.assign(cycle=table.index, ms=times if len(times) == len(table) else np.nan))
    if not tables:
        raise SpecdecError(f"{path} holds no request that drafted; {ADVICE}.")
    order = ["turn", "cycle", "drafted_tok", "accepted_tok", "ms", "prompt_tok", "new_tok"]
    return pd.concat(tables, ignore_index=True)[order]


def acceptance(path: Path | str) -> pd.DataFrame:
    """One row per level from 1: cycles, accepted_frac (of them, at least so many tokens), given_before_frac, mean_tok per cycle.

    path: any of the files. A level that a cycle did not draft counts as not accepted, as in vLLM's own rates.
    """
    counters: dict[str, dict[int, float]] = {}
    for name, position, value in COUNTER.findall(stored.read_text(Path(path), ADVICE)):
        own = counters.setdefault(name, {})
        own[int(position or 0)] = own.get(int(position or 0), 0.0) + float(value)  # summed over engines
    if "num_drafts" in counters:
        reached = [counters["num_drafts"][0]]
        reached += [count for _, count in sorted(counters.get("num_accepted_tokens_per_pos", {}).items())]
    else:
        histograms = pd.DataFrame([found["histogram"] for _, found, _ in _requests(Path(path))]).sum()
        every = histograms.reindex(range(int(max(histograms.index, default=0)) + 1), fill_value=0)
        reached = every[::-1].cumsum()[::-1].tolist()
    if len(reached) < 2 or not reached[0]:
        raise SpecdecError(f"{path} counts no drafts by position; {ADVICE}.")
    shares = [after / reached[0] for after in reached]
    rows = [(n, reached[0], own, own / before if before else np.nan, sum(shares))
            for n, (before, own) in enumerate(itertools.pairwise(shares), 1)]  # fmt: skip
    return pd.DataFrame(rows, columns=["level", "cycles", "accepted_frac", "given_before_frac", "mean_tok"])


def carried(cycles: pd.DataFrame, pair: str) -> Trace:
    """A recording of chains from `read_cycles`' table, if lengths are carried on: 5 accepted are followed by lengths 5, 4, 3, 2, 1.

    The files say nothing about positions inside blocks, and a cycle that accepted all its drafts might have accepted more. So
    chains no longer than the drafted ones are judged, and `chains.drawn_anew` gives the other extreme. The first half of the
    turns is the part "tune". SpecdecError where cycles without drafts are missing, since their positions are unknown.
    """
    turns, lengths = [], []
    for turn, own in cycles.groupby("turn", sort=False):
        given = np.concatenate([np.arange(n + 1, 0, -1) for n in own["accepted_tok"]])
        prompt_tok, new_tok = own[["prompt_tok", "new_tok"]].iloc[0]
        if not (prompt_tok or 0) > 0 or not (new_tok or 0) > 0:
            raise SpecdecError(
                f"request {turn} says nothing about its tokens, so its positions are unknown; export usage."
            )
        if (missing := int(new_tok) - 1 - len(given)) > 0:
            raise SpecdecError(
                f"{missing} tokens of request {turn} are of no listed cycle, so its positions are unknown."
            )
        lengths.append(given[: int(new_tok) - 1])  # the first token is the prefill's; a stop may cut the last cycle
        part = "tune" if turn < cycles["turn"].max() / 2 else "test"
        turns.append({"suite": "log", "prompt": f"log/{turn}", "turn": 0, "part": part, "prompt_tok": int(prompt_tok)})
    return trace_of(pd.DataFrame(turns), lengths, pair)


def write_made_up(folder: Path, seed: int = 0, requests: int = 8, drafts: int = 4) -> dict[str, Path]:
    """One small file of each form with the same cycles at random, for trials without an engine: name -> path."""
    draw, lines, records = np.random.default_rng(seed), [], []
    every = [np.minimum(draw.geometric(0.4, 20) - 1, drafts) for _ in range(requests)]
    for own in every:
        counts, total = np.bincount(own, minlength=drafts + 1).tolist(), int(own.sum())
        found = {"num_spec_steps": len(own), "num_accepted_draft_tokens": total, "num_draft_tokens": drafts * len(own)}
        found |= {"per_step_accepted": own.tolist(), "per_step_drafted": [drafts] * len(own), "num_spec_tokens": drafts}
        new_tok, times = total + len(own) + 1, draw.normal(12, 1, len(own)).round(2).tolist()
        usage = {"prompt_tokens": 60, "completion_tokens": new_tok}
        lines.append({"usage": usage, "metrics": {"speculative_decoding": found | {"acceptance_histogram": counts}}})
        metrics = {
            "input_sequence_length": {"value": 60, "unit": "tokens"},
            "inter_chunk_latency": {"value": times, "unit": "ms"},
        }
        sparse = {str(length): count for length, count in enumerate(counts) if count}
        found |= {"engine": "vllm", "acceptance_histogram": sparse, "completion_tokens": new_tok}
        records.append(
            {"metadata": {"benchmark_phase": "profiling"}, "metrics": metrics, "spec_decode_acceptance": found}
        )
    total = np.concatenate(every)
    counted = [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {len(total)}.0']
    counted += [f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{n}"}} {(total > n).sum()}.0'
                for n in range(drafts)]  # fmt: skip
    texts = {"vLLM's responses": ("responses.jsonl", lines), "AIPerf's records": ("profile_export.jsonl", records)}
    paths = {}
    for name, (file, rows) in (texts | {"vLLM's counters": ("metrics.txt", counted)}).items():
        paths[name] = Path(folder) / file
        paths[name].write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return paths
