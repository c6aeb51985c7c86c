"""The scale is what the rows say: a run on a laptop cannot call itself anything else."""

import pandas as pd
import pytest

from specdec import machine, runs
from specdec.report import provenance


def finished(pair: str, suites, *, device: str, gpu=None, monkeypatch=None, **config) -> runs.Run:
    """A run like the bench's: rows of `suites`, measured with `pair` on `device`."""
    if monkeypatch is not None:
        monkeypatch.setattr(machine, "torch_state", lambda: {"threads": 1, "gpu": gpu})
    described = {"pair": pair, "dtype": "float16", "device": device}
    run = runs.start("evaluate", {"pair": described, "seed": 3, "temperature": 0.0, **config})
    rows = [(suite, f"{suite}-{number}", "plain") for suite in suites for number in range(2)]
    run.write_table("prompts", pd.DataFrame(rows, columns=["suite", "prompt", "method"]))
    return run.finish()


@pytest.mark.parametrize(
    ("pair", "suites", "device", "scale"),
    [
        ("llama-3.1-8b", ["gsm8k", "mt_bench"], "cuda", "paper"),
        ("llama-3.1-8b", ["gsm8k", "laptop/mt_bench"], "cuda", "reduced"),
        ("llama-3.1-8b", [], "cuda", "reduced"),
        ("llama-3.1-8b", ["gsm8k"], "cpu", "laptop"),
        ("smollm2", ["laptop/gsm8k"], "cpu", "laptop"),
        ("small", ["gsm8k"], "cuda", "toy"),
        ("my model", ["toy/gsm8k"], "cpu", "toy"),
    ],
)
def test_the_scale_is_a_fact_of_pair_device_and_suites(
    home, monkeypatch, pair, suites, device, scale
):
    gpu = "a GPU" if device == "cuda" else None
    run = finished(pair, suites, device=device, gpu=gpu, monkeypatch=monkeypatch)
    origin = provenance.of([run])
    assert origin.scale == scale
    assert origin.label == f"{scale} scale: {pair} float16 on {'GPU' if gpu else 'CPU'}"
    row = origin.rows[0]
    assert (
        row["suites"] == sorted(suites)
        and row["seeds"] == [3]
        and row["prompts"] == (2 * len(suites) or None)
    )


def test_several_sources_are_as_small_as_the_smallest_whatever_the_budget(home):
    # scale="paper" chooses budgets; what was measured stays what it was
    given = {"scale": "paper", "pair": "smollm2", "dtype": "float32"}
    run = runs.start("train", {"parameters": given}, scale="paper")
    assert provenance.of([run]).label.startswith("laptop scale: smollm2 float32 on CPU")
    pairs = ("smollm2", "small")
    origin = provenance.of([finished(pair, ["laptop/gsm8k"], device="cpu") for pair in pairs])
    assert origin.scale == "toy"
    both = "laptop scale: smollm2 float16 on CPU; toy scale: small float16 on CPU"
    assert origin.label == both, "a larger row is not called by the smallest's scale"
    assert "prompts written for this workbook, seed 3" in origin.caption
    nothing = provenance.of([])
    assert (nothing.label, nothing.scale) == ("nothing measured here", "none")
    busy = finished("small", ["toy/nq"], device="cpu").finish(crowded=True)
    assert provenance.of([busy]).label.endswith("; disturbed by other processes: no result")


def test_a_notebook_says_what_it_read(home):
    # pooled rows are no suite; the recording and the costs that a notebook read count as its own
    given = {"scale": "laptop", "pair": "smollm2", "dtype": "float32", "seeds": [0, 1]}
    run = runs.start("train", {"parameters": given})
    rows = {"suite": ["laptop/nq", "all"], "method": "ours", "seed": [0, 0]}
    run.write_table("compared", pd.DataFrame(rows))
    recorded = {"pair": "smollm2", "dtype": "float32", "device": "cpu"}
    recorded |= {"suite": ["laptop/nq"], "prompts": 12}
    runs.write_json(run.path("recording.json"), recorded)
    runs.write_json(run.path("costs.json"), {"name": "this machine"})
    (row,) = provenance.of([run]).rows
    assert (row["suites"], row["prompts"], row["seeds"]) == (["laptop/nq"], 12, [0, 1])
    assert "time from the costs of this machine" in provenance.of([run]).caption


def test_captions_count_what_is_shown_and_not_the_run(home):
    run = finished("smollm2", ["gsm8k", "nq", "alpaca"], device="cpu")
    table = pd.DataFrame({"suite": ["gsm8k", "nq", "all"], "prompts": [2, 3, 5]})
    assert "2 suites, 2 to 5 prompts a row" in provenance.of([run], table).caption
    table = pd.DataFrame({"prompts": [1.0, None]})
    assert "1 prompt a row" in provenance.of([run], table).caption
    assert "suite" not in provenance.of([run]).caption
