"""The doctor's judgements on machines that are not here, and the engine's bench on a model of toy size."""

import dataclasses
import re
import time

import pandas as pd
import pytest
import torch

from specdec.core.tree_config import TreeConfig
from specdec.data import suites
from specdec.errors import SpecdecError
from specdec.models.load import load_pair
from specdec.tools import doctor
from specdec.tools import doctor as doctor_module

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
    "bfloat16_share": 0.4,
    "pairs": {"tiny": None, "small": None},
    "reach": [],
    "data_folder": "some/folder",
    "data_files": sorted({suite.file for suite in suites.SUITES.values() if suite.file}),
    "datasets": True,
    "home": "results",
    "home_writable": True,
}
TINY_SHAPE = doctor_module.Reference(32, 48, 7, 2, 64, 32, TreeConfig(6, 2, 3), prompt_tok=5, new_tok=6)


def told(**changes) -> dict[str, str]:
    """Sentence -> kind, for what differs from a healthy machine."""
    usual = doctor.findings(HEALTHY)
    return {text: kind for kind, text in doctor.findings({**HEALTHY, **changes}) if (kind, text) not in usual}


def test_a_healthy_machine_gets_no_complaint():
    assert {kind for kind, _ in doctor.findings(HEALTHY)} == {doctor.FINE}


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"cpu_flags": ["avx2"], "bfloat16_share": 1.7}, "note", "no bfloat16 units.*takes 1.70 of its float32 time"),
        ({"bfloat16_share": 1.1}, "note", "names amx_bf16, avx512_bf16, yet bfloat16 is hardly faster"),
        ({"cpu_flags": ["avx2"]}, "note", "Without AVX-512"),
        ({"gpu": "H100"}, "ok", "A GPU is here"),
        ({"threads": 8}, "note", "8 threads share 4 cores.*OMP_NUM_THREADS=4"),
        ({"load": 7.5}, "note", "busy .load 7.5 on 4 cores"),
        ({"free_gib": 0.7}, "note", "Only 0.7 GiB"),
        ({"pairs": {"tiny": None, "small": "it is gone."}}, "note", "small does not load: it is gone."),
        ({"pairs": {"tiny": "it is gone."}}, "fault", "tiny does not load"),
        ({"data_folder": None}, "note", "embedded suites .* work as they are.*or the hub\\."),
        ({"data_folder": None, "datasets": False}, "note", "pip install 'specdec\\[hub\\]'"),
        ({"data_files": []}, "fault", "holds none of"),
        ({"data_files": ["gsm8k.jsonl"]}, "ok", "found in some/folder: gsm8k.jsonl; .*alpaca.jsonl.* are not there"),
        ({"home_writable": False}, "fault", "cannot be written to results.*SPECDEC_HOME"),
    ],
)
def test_judgements(changes, kind, words):
    found = told(**changes)
    matching = [text for text, one in found.items() if one == kind and re.search(words, text)]
    assert len(matching) == 1, found
    assert matching[0].endswith((".", "float32.", "bfloat16."))


def test_unknown_numbers_are_no_fault():
    assert not told(load=None) and not told(free_gib=None)
    assert "unknown" not in doctor.report({**HEALTHY, "free_gib": None, "memory_gib": None})


def test_faults_come_first():
    text = doctor.report({**HEALTHY, "home_writable": False, "load": 9.0})
    kinds = re.findall(r"^\[(\w+)\]", text, re.MULTILINE)
    assert kinds == sorted(kinds, key=("fault", "note", "ok").index) and kinds[0] == "fault"
    assert "gymnasium missing" in text and "Some CPU, 4 usable cores" in text


def test_what_trees_bring_here_is_told():
    """A note where the probe misses its aim, fine where it does not; the doctor quotes its own bfloat16 share."""
    reach = doctor_module.Reach(
        "small", "bfloat16", (16, 5, 3), 4.4, 1.8, 9.0, 0.4, 1.8, 0.1, 24, 2.0, 0.1, ("avx512_bf16",)
    )
    ((slow, kind),) = told(reach=[reach]).items()
    assert kind == "note" and "take 0.40 of float32's time" in slow
    assert list(told(reach=[dataclasses.replace(reach, speed=2.5)]).values()) == ["ok"]


def test_the_probed_pair_is_timed_in_every_dtype_with_an_aim(monkeypatch):
    monkeypatch.setattr(
        doctor_module, "probe", lambda pair: (pair.name, str(pair.target.dtype), pair.target.device.type)
    )
    found = doctor.facts(pairs=("tiny",), probed="tiny")["reach"]
    assert found == [("tiny", "torch.bfloat16", "cpu"), ("tiny", "torch.float32", "cpu")]
    assert doctor.facts(pairs=("tiny",))["reach"] == [] == doctor.facts(pairs=("tiny",), probed=None)["reach"]


def test_facts_of_this_machine(tmp_path, monkeypatch):
    (tmp_path / "gsm8k.jsonl").write_text("")
    (tmp_path / "other.txt").write_text("")
    monkeypatch.setenv(suites.DATA_VARIABLE, str(tmp_path))
    found = doctor.facts(pairs=("tiny", "no-such-pair"))
    assert set(HEALTHY) <= set(found)
    assert found["data_files"] == ["gsm8k.jsonl"]
    assert found["pairs"]["tiny"] is None and "unknown preset" in found["pairs"]["no-such-pair"]
    assert found["threads"] == torch.get_num_threads() and found["bfloat16_share"] > 0
    assert doctor.report(found).startswith("machine ")


# --- the engine's bench -----------------------------------------------------------------------------------------------


def test_ratios_are_medians_of_ratios_within_a_round():
    """A round in which everything takes ten times as long changes no ratio."""
    slow = pd.Series([1.0, 10.0, 1.0])
    table = pd.DataFrame({"generate_ms": 2 * slow, "autoregress_ms": slow, "decode_ms": 4 * slow, "cycle_ms": 9 * slow})
    table = table.assign(outside_frac=[0.02, 0.04, 0.03], tau=1.0)
    found = doctor_module.ratios(table)
    assert found["cycle_steps"] == pytest.approx((4.5, 4.5, 4.5))
    assert found["autoregress_speed"] == pytest.approx((2, 2, 2)) and found["decode_speed"] == pytest.approx((0.5,) * 3)
    assert found["outside_frac"] == pytest.approx((0.03, 0.02, 0.04))


def test_rounds_measure_the_three_ways(monkeypatch):
    pair = doctor_module.reference_pair(torch.float32, TINY_SHAPE)
    table = doctor_module.rounds(pair, [[1, 2, 3], [4, 5, 6]], TINY_SHAPE.tree, new_tok=6, count=2, progress=False)
    assert table["round"].tolist() == [0, 1]
    assert (table[["generate_ms", "autoregress_ms", "decode_ms", "cycle_ms"]] > 0).all(axis=None)
    assert table["tau"].between(1, 3).all()
    shares = table[["draft_frac", "verify_frac", "outside_frac"]]  # medians of noisy milliseconds: they need not add up
    assert shares.gt(0).all(axis=None) and shares.lt(1).all(axis=None) and shares.sum(axis=1).between(0.5, 1.5).all()


def test_generate_and_the_engine_agree_on_the_reference_pair():
    pair = doctor_module.reference_pair(torch.float32, TINY_SHAPE)
    ids = torch.tensor([[1, 2, 3]])
    theirs = pair.target.model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, 3:].tolist()
    from specdec.core.decode import decode

    assert decode(pair, [1, 2, 3], max_new_tokens=6).tokens == theirs


def test_processor_time_needs_one_thread(monkeypatch):
    pair = doctor_module.reference_pair(torch.float32, TINY_SHAPE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(SpecdecError, match="one thread"):
        doctor_module.rounds(pair, [[1]], TINY_SHAPE.tree, cpu_time=True)


def test_the_reference_pair_is_the_stated_shape():
    shape = doctor_module.Reference()
    pair = doctor_module.reference_pair(torch.bfloat16)
    config = pair.target.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (512, 1408, 12)
    assert (config.num_attention_heads, config.vocab_size, shape.tree) == (8, 4096, TreeConfig(60, 5, 10))
    assert pair.drafter.config.draft_vocab_size == 1024 and pair.target.dtype == torch.bfloat16
    assert not pair.stop_tokens


def test_benchmark_rows_and_their_printed_form(monkeypatch):
    monkeypatch.setattr(doctor_module, "Reference", lambda: TINY_SHAPE)
    monkeypatch.setenv(doctor_module.SHARED_VARIABLE, "nowhere")  # so that the shipped tiny pair stands in
    rounds = doctor_module.rounds
    monkeypatch.setattr(doctor_module, "rounds", lambda *a, **o: rounds(*a, **{**o, "new_tok": 6}))
    before = torch.get_num_threads()
    table = doctor_module.benchmark(("float32",), count=1, threads=1, progress=False)
    assert torch.get_num_threads() == before
    assert table["pair"].unique().tolist() == ["reference shape", "tiny"]
    asked = table.set_index(["pair", "figure"])["asked"]
    assert asked["reference shape", "cycle_steps"] == doctor_module.ASKED["float32"] and pd.isna(
        asked["tiny", "decode_speed"]
    )
    shown = doctor.figures(table)
    assert shown["asked"].tolist()[:3] == ["<= 4.00", "<= 5.0 %", ">= 1.15"] and shown["asked"].tolist()[3:] == [""] * 4
    assert shown["median"].str.match(r"^\d+\.\d+( %)?$").all()
    assert shown["official engine"].tolist() == ["4.50", *[""] * 6]


def test_the_curve_varies_nodes_and_context_only():
    pair = doctor_module.reference_pair(torch.float32, TINY_SHAPE)
    rows = doctor_module.curve(pair, nodes=(2, 8, 40), contexts=(6, 12), cycles=3, progress=False)
    assert set(rows["verified_tok"]) == {3, 9, 41}
    assert set(rows["draft_calls"]) == {6} and set(rows["top_k"]) == {10}
    assert rows.groupby(["context", "verified_tok"]).size().between(1, 4).all()


def test_the_tiny_pair_stands_in_for_the_golden_one(monkeypatch):
    monkeypatch.setenv(doctor_module.SHARED_VARIABLE, "nowhere")
    assert doctor_module.golden_folder() is None
    pair, prompts = doctor_module.host_bound_pair()
    assert pair.name == "tiny" and prompts == [pair.ids_of(prompt) for prompt in prompts]
    assert time.perf_counter() and load_pair("tiny").target.vocab_size == pair.target.vocab_size
