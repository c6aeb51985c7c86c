"""Schedules for engines: fitted by replay, written as the engines' own parsers want them, refused where nothing pays.

The rules of the parsers are written down here from their public sources (names in specdec/evaluation/schedule.py); the engines
were not run.
"""

import bisect
import json
import shlex
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml
from fakes.traces import round_costs, synthetic_trace

from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.evaluation.schedule import ENGINES, PLUGINS, Schedule, fit, fit_p_min, write, write_plugin
from specdec.replays.replay import replay
from specdec.tools import cli

# A machine on which rows are free up to 16 and then cost 0.4 ms each: many texts leave no room for drafts.
COSTS = round_costs(
    nodes=(0, 15, 240), verify=(8.0, 8.0, 98.0), step=8.0, expand=(0.3, 0.3), root=(0.5, 0.5), rest_ms=0.0
)
BATCHES = (1, 4, 16, 64)


@pytest.fixture(scope="module")
def trace():
    return synthetic_trace(turns=8, positions=60, depth=5, top_ks=(1,), hit=0.65)


@pytest.fixture(scope="module")
def fitted(trace):
    return fit(trace, COSTS, BATCHES)


def by_batch(schedule: Schedule) -> dict[int, int]:
    return {batch: length for first, last, length in schedule.spans for batch in range(first, last + 1)}


def vllm_lengths(config: dict, most_texts: int) -> list[int]:
    """The length for 1, 2, ... requests as `build_dynamic_sd_schedule_lookup` expands the list; the last one holds beyond."""
    assert set(config) == {"method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"}
    spans, longest = config["num_speculative_tokens_per_batch_size"], config["num_speculative_tokens"]
    assert isinstance(spans, list) and spans and longest > 0 and spans[0][0] == 1
    end, lengths = 0, []
    for first, last, length in spans:
        assert end < first <= last and 0 <= length <= longest
        lengths += [length] * (last - end)
        end = last
    return (lengths + [lengths[-1]] * most_texts)[:most_texts]


def sglang_steps(config: dict, texts: int) -> list[int]:
    """The candidates for so many requests: those of the largest key not above it (AdaptiveStepRouter)."""
    assert all(key.isdigit() and set(entry) == {"candidate_steps"} for key, entry in config.items())
    assert all(type(step) is int and step >= 0 for entry in config.values() for step in entry["candidate_steps"])
    keys = sorted(map(int, config))
    return config[str(keys[max(0, bisect.bisect_right(keys, texts) - 1)])]["candidate_steps"]


def tensorrt_length(config: dict, texts: int) -> int:
    """DecodingBaseConfig of 1.3: keys are the last batch sizes of their lengths; the smallest key has the longest."""
    most = config["max_draft_len"]
    assert config["decoding_type"] == "Eagle3" and most > 0
    assert ("max_concurrency" in config) != ("draft_len_schedule" in config), "they exclude each other"
    lengths = config.get("draft_len_schedule") or {config["max_concurrency"]: most}
    assert lengths[min(lengths)] == most and all(key >= 1 and 0 <= length <= most for key, length in lengths.items())
    return next((lengths[key] for key in sorted(lengths) if texts <= key), 0)


@pytest.mark.filterwarnings("ignore:the cost model")  # measured at fewer rows than 64 texts have
def test_lengths_are_the_fastest_chains_by_replay(trace, fitted):
    assert fitted.table["draft_len"].iloc[0] >= 2 > fitted.table["draft_len"].iloc[-1], fitted.table
    for row in fitted.table.itertuples():
        model = COSTS.batched(row.batch)
        speeds = {n: replay(trace, Static(n + 1, n - 1, 1), model).speedup for n in range(1, 7)} | {0: 1.0}
        assert row.draft_len == max(speeds, key=speeds.get) and row.draft_len in row.candidates
        assert row.speedup == pytest.approx(speeds[row.draft_len])
    assert [last for _, last, _ in fitted.spans][-1] == 64 and sorted(by_batch(fitted)) == list(range(1, 65))
    few = fit(trace, replace(COSTS, ranges={"verify_nodes": (0, 60)}), (64, 1))
    assert few.table["measured"].tolist() == [True, False]


def test_each_engine_reads_the_same_lengths(fitted, tmp_path):
    wanted = by_batch(fitted)
    vllm = shlex.split(write("vllm", fitted, tmp_path, "my drafter"))
    assert vllm[0] == "--speculative-config"
    assert json.loads(vllm[1]) == json.loads((tmp_path / "speculative_config.json").read_text())
    assert dict(enumerate(vllm_lengths(json.loads(vllm[1]), 64), 1)) == wanted
    assert json.loads(vllm[1])["model"] == "my drafter"
    flags = shlex.split(write("sglang", fitted, tmp_path, "d"))
    config = json.loads((tmp_path / "adaptive.json").read_text())
    assert all(wanted[texts] in sglang_steps(config, texts) for texts in wanted)
    steps = int(flags[flags.index("--speculative-num-steps") + 1])
    assert steps in {step for entry in config.values() for step in entry["candidate_steps"]}
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == str(steps + 1)
    assert "--speculative-adaptive" in flags
    path = shlex.split(write("tensorrt-llm", fitted, tmp_path, "d"))[1]
    config = yaml.safe_load(open(path))["speculative_config"]
    assert {texts: tensorrt_length(config, texts) for texts in wanted} == wanted and tensorrt_length(config, 65) == 0


def made(*lengths: int, batches=(1, 8, 64)) -> Schedule:
    table = pd.DataFrame({"batch": batches, "draft_len": lengths, "speedup": 1.1, "measured": True})
    return Schedule(table.assign(candidates=[(length,) for length in lengths]))


def test_tensorrt_llm_takes_a_cutoff_or_a_schedule_that_falls():
    assert made(3, 3, 0).tensorrt_llm("d")["max_concurrency"] == 8 and made(2, 2, 2).spans == [(1, 64, 2)]
    assert made(3, 4, 1).tensorrt_llm("d")["draft_len_schedule"] == {1: 3, 8: 3, 64: 1}, "no length above the first"
    with pytest.raises(SpecdecError, match="leave those without drafts out"):
        made(0, 2, 1).tensorrt_llm("d")


def test_llama_cpp_gets_one_length_and_a_least_probability(trace, fitted):
    found = fit_p_min(trace, COSTS, fitted)
    flags = shlex.split(write("llama.cpp", found, "unused", "drafter.gguf"))
    assert flags[::2] == ["-md", "--spec-type", "--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min"]
    assert float(flags[-1]) == found.p_min and found.table["speedup"][0] >= fitted.table["speedup"][0] - 1e-9
    without = synthetic_trace(top_ks=(1,), trees=False)
    with pytest.warns(UserWarning, match="--spec-draft-p-min stays 0"):
        assert fit_p_min(without, COSTS, fit(without, COSTS, (1,))).p_min == 0


def test_the_skeletons_follow_the_schedule(fitted, tmp_path, monkeypatch):
    assert set(PLUGINS) < set(ENGINES)
    names = {}
    exec(write_plugin("vllm", fitted, tmp_path).read_text(), names)
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=3))
    texts = np.array([[5, 6, 7, 8, 5, 6, 0], [1, 2, 3, 4, 0, 0, 0]])
    assert names["Proposer"](config).propose([[6], [4]], np.array([6, 4]), texts) == [
        [7, 8, 5][: by_batch(fitted)[2]],
        [],
    ]
    assert {n: names["length_for"](n) for n in range(1, 65)} == by_batch(fitted)
    registered, seen = {}, []

    def register(name, **options):
        return lambda factory: registered.update({name: (factory, options)}) or factory

    worker = type("EAGLEWorkerV2", (), {"adaptive_controller": SimpleNamespace(_activate=seen.append)})
    held = {"eagle_worker_v2": dict(EAGLEWorkerV2=worker), "spec_registry": dict(CustomSpecAlgo=object)}
    held |= {"spec_info": dict(SpeculativeAlgorithm=SimpleNamespace(register=register))}
    for package in ("sglang", "sglang.srt", "sglang.srt.speculative"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for name, values in held.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, f"sglang.srt.speculative.{name}", module)
    exec(write_plugin("sglang", fitted, tmp_path).read_text(), {})
    factory, options = registered["SPECDEC"]
    made_worker = factory(None)()
    made_worker.on_verify_complete_cpu([1, 2], batch_size=2)
    made_worker.activate_step_by_batch(64)
    assert options["spec_class"]().is_eagle3() and made_worker.accepted == (1, 2) and seen == [by_batch(fitted)[64]]


def test_bad_input_is_told_in_a_sentence(trace, tmp_path, capsys):
    slow, copying = round_costs(verify=(4.0, 60.0, 900.0)), synthetic_trace(top_ks=(1,))
    copying.copies = {"levels": 4, "forwards": True}
    for call, told in (
        (lambda: fit(trace, slow), "serve without speculation"),
        (lambda: fit(trace, COSTS, ()), "at least one batch size"),
        (lambda: fit(trace, COSTS, (0,)), "batches"),
        (lambda: fit(synthetic_trace(top_ks=(3,)), COSTS), "was not recorded"),
        (lambda: fit(copying, COSTS), "also copies"),
        (lambda: write_plugin("llama.cpp", made(1, 1, 1), tmp_path), "engine with a skeleton"),
        (lambda: write("trtllm", made(1, 1, 1), tmp_path, "d"), "unknown engine"),
    ):
        with pytest.raises(SpecdecError, match=told):
            call()
    assert cli.main(["schedule", "vllm", "--trace", "nowhere", "--drafter", "d", "--out", str(tmp_path)]) == 2
    assert "no finished recording in nowhere" in capsys.readouterr().err
