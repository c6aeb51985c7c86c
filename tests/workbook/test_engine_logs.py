"""Logs of engines: the same cycles from every file that holds them, what totals give, and refusals of the rest."""

import json

import numpy as np
import pandas as pd
import pytest

from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.replays.replay import replay

from workbook import chains, engine_logs


@pytest.fixture
def paths(tmp_path):
    return engine_logs.write_made_up(tmp_path)


def test_every_file_gives_the_same_acceptance_and_both_logs_the_same_cycles(paths):
    vllm, aiperf = (engine_logs.read_cycles(paths[name]) for name in ("vLLM's responses", "AIPerf's records"))
    pd.testing.assert_frame_equal(vllm.drop(columns="ms"), aiperf.drop(columns="ms"))
    assert vllm["ms"].isna().all() and aiperf["ms"].between(5, 20).all()
    tables = [engine_logs.acceptance(path).astype(float) for path in paths.values()]
    for table in tables:
        pd.testing.assert_frame_equal(table, tables[0])
    accepted = vllm["accepted_tok"].to_numpy()
    assert tables[0]["mean_tok"][0] == pytest.approx(1 + accepted.mean())
    assert tables[0]["accepted_frac"].tolist() == pytest.approx([(accepted >= level).mean() for level in (1, 2, 3, 4)])
    assert tables[0]["given_before_frac"][1] == pytest.approx((accepted >= 2).sum() / (accepted >= 1).sum())


def test_a_log_becomes_a_recording_that_accepts_as_much_where_its_cycles_begin(paths):
    cycles = engine_logs.read_cycles(paths["AIPerf's records"])
    trace = engine_logs.carried(cycles, "made up")
    again = replay(trace, Static(5, 3, 1), chains.h100(1, 4), keep_cycles=True).cycles
    assert again["accepted_tok"].tolist() == cycles["accepted_tok"].tolist()
    assert set(trace.turns["part"]) == {"tune", "test"} and (trace.turns["prompt_tok"] == 60).all()
    cut = engine_logs.carried(cycles.assign(new_tok=9), "made up")
    assert (cut.turns["positions"] == 8).all()
    for column, value, sentence in (("new_tok", 10**6, "of no listed cycle"), ("prompt_tok", np.nan, "export usage")):
        with pytest.raises(SpecdecError, match=sentence):
            engine_logs.carried(cycles.assign(**{column: value}), "made up")


def test_totals_and_damaged_files_are_refused_in_a_sentence(paths, tmp_path):
    path = paths["vLLM's responses"]
    whole = json.loads(path.read_text().splitlines()[0])
    drafting = whole["metrics"]["speculative_decoding"]

    def read(change, how=engine_logs.read_cycles):
        record = json.loads(json.dumps(whole))
        changed = record["metrics"]["speculative_decoding"] | change
        record["metrics"]["speculative_decoding"] = {key: value for key, value in changed.items() if value is not None}
        (tmp_path / "one.jsonl").write_text(json.dumps(record))
        return how(tmp_path / "one.jsonl")

    summary = {"per_step_accepted": None, "per_step_drafted": None}
    with pytest.raises(SpecdecError, match="line 1 holds totals of a request, no cycles"):
        read(summary)
    assert read(summary, engine_logs.acceptance)["cycles"][0] == drafting["num_spec_steps"]
    more = {"per_step_drafted": [0] * drafting["num_spec_steps"]}
    for change in ({"num_accepted_draft_tokens": 1}, {"acceptance_histogram": [1]}, more, {"per_step_accepted": [1]}):
        with pytest.raises(SpecdecError, match="contradict each other"):
            read(change)
    with pytest.raises(SpecdecError, match="no response of vLLM"):
        read({"acceptance_histogram": None})
    with pytest.raises(SpecdecError, match="totals of all requests"):
        engine_logs.read_cycles(paths["vLLM's counters"])
    (tmp_path / "other.txt").write_text(
        '{"usage": {}}\n{"spec_decode_acceptance": {}, "metadata": {"benchmark_phase": "warmup"}}'
    )
    for how, sentence in (
        (engine_logs.acceptance, "counts no drafts"),
        (engine_logs.read_cycles, "no request that drafted"),
    ):
        with pytest.raises(SpecdecError, match=sentence):
            how(tmp_path / "other.txt")
    (tmp_path / "other.txt").write_text("x")
    with pytest.raises(SpecdecError, match="line 1: not valid JSON"):
        engine_logs.read_cycles(tmp_path / "other.txt")
