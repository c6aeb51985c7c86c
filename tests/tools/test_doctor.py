"""The doctor's table of facts on machines that are not here, and its table of times on planted rows and small models."""

import pandas as pd
import pytest
import torch

from specdec.core.decode import decode
from specdec.core.pair import Pair
from specdec.core.tree_config import TreeConfig
from specdec.data import suites
from specdec.errors import SpecdecError
from specdec.evaluation import bench
from specdec.models.load import load_pair
from specdec.tools import doctor

HEALTHY = {
    "system": "Linux x86_64",
    "cpu": "Some CPU",
    "cpu_flags": ["amx_bf16", "avx512_bf16", "avx512f", "avx2"],
    "cores": 4,
    "memory_gib": 16.0,
    "free_gib": 12.0,
    "gpu": None,
    "threads": 4,
    "omp_num_threads": "4",
    "python": "3.11.7",
    "versions": {"torch": "2.13.0", "gymnasium": None},
    "commit": "abc",
    "dirty": False,
    "load": 0.3,
    "pairs": {"tiny": None, "small": None},
    "limits": {"small": ["It drafts 8 of its target's 16 tokens."], "tiny": []},
    "wheels": {"smollm2": "unpacked in the cache; its drafter ships"},
    "data_folder": "some/folder",
    "data_files": ["gsm8k.jsonl"],
    "home": "results",
    "home_writable": True,
    "waits_badly": False,
    "crowded": "",
}
TINY_SHAPE = doctor.Reference(32, 48, 7, 2, 64, 32, TreeConfig(6, 2, 3), prompt_tok=5, new_tok=6)


@pytest.fixture(scope="module")
def tiny_shape():
    return doctor.reference_pair(torch.float32, TINY_SHAPE)


def test_what_is_wrong_is_marked_and_nothing_else():
    for changes, fact, state in (
        ({}, None, None),
        ({"cpu_flags": [], "gpu": "H100"}, None, None),  # a GPU makes the processor unimportant
        ({"load": None, "free_gib": None, "memory_gib": None}, None, None),  # what is not known is no fault
        ({"cpu_flags": ["avx2"]}, "CPU flags", doctor.NOTE),
        ({"threads": 8}, "threads", doctor.NOTE),
        ({"crowded": "others use the cores"}, "load", doctor.NOTE),
        ({"waits_badly": True}, "threads", doctor.NOTE),
        ({"free_gib": 0.7}, "memory", doctor.NOTE),
        ({"pairs": {"tiny": None, "small": "it is gone."}}, "pair small", doctor.NOTE),
        ({"pairs": {"tiny": "it is gone."}}, "pair tiny", doctor.FAULT),
        ({"wheels": {"smollm2": None}}, "pair smollm2", doctor.NOTE),
        ({"data_folder": None, "data_files": []}, "benchmarks", doctor.NOTE),
        ({"data_files": []}, "benchmarks", doctor.FAULT),
        ({"home_writable": False}, "results", doctor.FAULT),
    ):
        checks = doctor.checks({**HEALTHY, **changes}).set_index("fact")
        marked = checks["state"] != doctor.OK
        assert checks.loc[marked, "state"].to_dict() == ({fact: state} if fact else {})
        assert (checks["hint"].str.len() > 0).equals(marked)
        assert checks.loc["CPU", "value"] == "Some CPU, 4 usable cores, Linux x86_64"
        assert checks.loc["drafter of small", "value"] == "It drafts 8 of its target's 16 tokens."
        assert "drafter of tiny" not in checks.index
        assert "gymnasium missing" in checks.loc["versions", "value"]


def test_facts_of_this_machine(tmp_path, monkeypatch):
    (tmp_path / "gsm8k.jsonl").write_text("")
    (tmp_path / "other.txt").write_text("")
    monkeypatch.setenv(suites.DATA_VARIABLE, str(tmp_path))
    facts = doctor.facts(pairs=("tiny", "no-such-pair"))
    assert set(HEALTHY) <= set(facts)
    assert facts["data_files"] == ["gsm8k.jsonl"]
    assert facts["pairs"]["tiny"] is None and "unknown preset" in facts["pairs"]["no-such-pair"]
    assert set(facts["wheels"]) == {"smollm2"} and facts["limits"]["no-such-pair"] == []
    assert "own tokens" in facts["limits"]["tiny"][0] and "draft steps" in facts["limits"]["smollm2"][1]
    assert facts["threads"] == torch.get_num_threads() and facts["home_writable"]
    assert doctor.checks(facts)["state"].isin([doctor.OK, doctor.NOTE]).all()


# tokens, forwards after the prompt's, and milliseconds of one round: plain steps take 10 ms, generate's tokens 15 ms; a
# cycle of the small tree takes 5 + 12 + 1 ms and brings 3 tokens, one of the large tree twice the time and 4 tokens.
PLANTED = pd.DataFrame(
    [
        ("plain", 0, 13, 12, 0, 130.0, 10.0, 120.0, 0.0, 0.0, 0.0, 0.0, 0),
        ("generate", 0, 13, 12, 0, 195.0, 0.0, 195.0, 0.0, 0.0, 0.0, 0.0, 0),
        ("lookup", 0, 13, 12, 0, 104.0, 0.0, 104.0, 0.0, 0.0, 0.0, 0.0, 0),
        ("8/3/3", 0, 13, 12, 4, 82.0, 10.0, 72.0, 20.0, 48.0, 3.6, 72.0, 12),
        ("60/7/10", 0, 13, 12, 3, 118.0, 10.0, 108.0, 30.0, 60.0, 9.0, 108.0, 12),
    ],
    columns=[
        *("method", "repeat", "new_tok", "steps", "cycles", "total_ms", "prefill_ms", "decode_ms"),
        *("draft_ms", "verify_ms", "host_ms", "cycle_ms", "cycle_tok"),
    ],
)
MILLISECONDS = [name for name in PLANTED if name.endswith("_ms")]


def test_the_fastest_tree_is_counted_in_plain_steps():
    slow = PLANTED.assign(repeat=1, **{name: 10 * PLANTED[name] for name in MILLISECONDS})
    sums = pd.concat([PLANTED, slow]).set_index(["method", "repeat"])
    costs = doctor.fastest(sums, ["8/3/3", "60/7/10"])
    assert costs["tree"] == "8/3/3" and costs["tau"] == 3
    steps = [costs[f"{part}_steps"] for part in ("draft", "verify", "rest")]
    assert steps == pytest.approx([0.5, 1.2, 0.1]) and costs["plain_ms"] == pytest.approx(55)
    assert [costs[name] for name in ("speed", "speed_low", "speed_high")] == pytest.approx([130 / 82] * 3)
    assert costs["prefill_frac"] == pytest.approx(10 / 82) and costs["host_frac"] == pytest.approx(0.05)
    assert costs["generate_cycle"] == pytest.approx(18 / 15)
    assert (costs["generate_speed"], costs["lookup_speed"]) == pytest.approx((130 / 195, 130 / 104))


def test_costs_of_a_real_pair(home):
    pair = load_pair("tiny", dtype="float32")
    trees = (TreeConfig(8, 3, 3), TreeConfig(60, 7, 10))
    costs = doctor.cycle_costs(pair, doctor.suite_prompts(pair, ("toy/gsm8k", "toy/alpaca")), trees, 12, rounds=2)
    assert (costs["pair"], costs["dtype"]) == ("tiny", "float32") and costs["tree"] in {"8/3/3", "60/7/10"}
    assert 1 <= costs["tau"] <= int(costs["tree"].split("/")[1]) + 2
    times = ("plain_ms", "draft_steps", "verify_steps", "rest_steps", "generate_cycle", "host_frac", "speed_low")
    times += ("generate_speed", "lookup_speed")
    assert not list((home / "runs").glob("*/evaluate-*")), "nothing is written"
    assert min(costs[name] for name in times) > 0 and costs["speed_low"] <= costs["speed"] <= costs["speed_high"]


def test_the_reference_pair_is_the_stated_shape_and_its_curve_varies_two_things_only(tiny_shape, monkeypatch):
    shape = doctor.Reference()
    pair = doctor.reference_pair(torch.bfloat16)
    config = pair.target.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (512, 1408, 12)
    assert (config.num_attention_heads, config.vocab_size, shape.tree) == (8, 4096, TreeConfig(60, 5, 10))
    assert pair.drafter.config.draft_vocab_size == 1024 and pair.target.dtype == torch.bfloat16
    assert not pair.stop_tokens
    ids = torch.tensor([[1, 2, 3]])
    theirs = tiny_shape.target.model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, 3:].tolist()
    assert decode(tiny_shape, [1, 2, 3], max_new_tokens=6).tokens == theirs
    rows = doctor.curve(tiny_shape, nodes=(2, 8, 40), contexts=(6, 12), cycles=3, progress=False)
    assert set(rows["verified_tok"]) == {3, 9, 41}
    assert set(rows["draft_calls"]) == {6} and set(rows["top_k"]) == {10}
    assert rows.groupby(["context", "verified_tok"]).size().between(1, 4).all()
    alone = Pair(tiny_shape.target, None)
    pytest.raises(SpecdecError, doctor.cycle_costs, alone, [[1, 2]]).match("no cycle to time")
    pytest.raises(SpecdecError, doctor.cycle_costs, tiny_shape, [[1, 2]], ()).match("no cycle to time")
    pytest.raises(SpecdecError, doctor.suite_prompts, tiny_shape, ("toy/gsm9k",)).match("did you mean")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    pytest.raises(SpecdecError, doctor.curve, tiny_shape, cpu_time=True).match("one thread")


def test_the_benchmark_has_a_row_per_pair_and_dtype(monkeypatch):
    monkeypatch.setattr(doctor, "Reference", lambda: TINY_SHAPE)
    counters, timed = [], bench.decode_rounds
    monkeypatch.setattr(doctor, "TREES", (TreeConfig(4, 2, 1),))
    monkeypatch.setattr(doctor, "suite_prompts", lambda pair: [[1, 2, 3]])
    monkeypatch.setattr(bench, "decode_rounds", lambda *a, **o: counters.append(o["cpu_time"]) or timed(*a, **o))
    before = torch.get_num_threads()
    table = doctor.benchmark(pairs=("tiny",), reference=True, threads=1, cpu_time=True)
    assert torch.get_num_threads() == before and counters == [True] * 4
    rows = list(zip(table["pair"], table["dtype"], strict=True))
    assert rows == [(pair, dtype) for dtype in doctor.DTYPES for pair in ("reference shape", "tiny")]
    for name, cycles in doctor.OFFICIAL_CYCLE.items():  # of the reference shape alone
        assert table[name].isna().tolist() == [False, True] * 2
        assert table[name].dropna().tolist() == list(cycles.values())
    assert set(table.columns) - set(table.select_dtypes("number")) == {"pair", "dtype", "tree"}
