"""The parts that check and time a GPU, tried on the processor, and on a machine that has little."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from specdec.costs.profiles import prices
from specdec.errors import SpecdecError
from specdec.tools import gpu

MISSING = "pydantic annotated_types gguf stable_baselines3 gymnasium pandas pyarrow scipy"
MISSING += " matplotlib seaborn IPython papermill"
BARE = """
import sys
sys.modules.update(dict.fromkeys({missing!r}.split()))
from specdec.tools import gpu
for part in ("check", "latencies", "live"):
    gpu.main([part, "cpu", "tiny"])
"""


@pytest.fixture(autouse=True)
def nothing_shared(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.setenv("SPECDEC_SHARED", str(tmp_path))


def test_texts_and_speeds_on_the_processor(monkeypatch):
    rows = gpu.run("check", "cpu", "tiny")
    assert [row["step"] for row in rows] == ["tiny float32", "tiny bfloat16"]
    # two trees, alone and with others, greedy and sampled
    assert all(row["ok"] and row["texts"] == 8 and not row["failed"] for row in rows)
    assert rows[0]["near_ties"] == 0 and rows[0]["default_tree"] == "6,2,3"
    row = gpu.speeds("tiny", "cpu")
    assert row["plain cycles"] == 1 and row["plain ms"] > 0
    assert 0 < row["60,7,10 cycles"] < row["8,3,3 cycles"] < 1
    monkeypatch.setattr(gpu, "load_pair", None)  # what was done is not done again
    assert gpu.run("check", "cpu", "tiny") == rows


def test_prices_of_random_weights_are_a_cost_model():
    (row,) = gpu.run("latencies", "cpu", "tiny")
    costs = prices(row["costs"])
    assert costs.kind == "calibrated" and costs.nodes == gpu.TINY.nodes
    assert costs.widths == gpu.TINY.top_ks and row["step_ms"] == round(costs.step, 2) > 0
    facts = [costs.machine[name] for name in ("shape", "eager", "dtype", "torch")]
    assert facts == ["tiny", True, costs.dtype, torch.__version__] and costs.dtype == "float32"
    assert costs.ranges == {"verify_nodes": (0, 5), "expansions": (0, 3)}
    tables = {one["step"]: one for one in gpu.run("predicted", shape="tiny")}
    assert tables["H100, graphs"]["plain"] == pytest.approx(6.8, abs=0.01)
    assert tables["data sheet, graphs"]["plain"] == pytest.approx(5.16, abs=0.01)
    assert tables["H100, eager"]["cycle 60,7,10"] == pytest.approx(37.63, abs=0.01)
    here = tables["here, tiny, eager"]
    assert here["draft level"] == round(float(costs.expand_ms(10, 1024)), 2)
    assert here["cycle 6,4,1"] == round(float(costs.cycle_ms(1, 4, 5, 1024)), 2)
    prices("h100-llama-3.1-8b-eager").save(gpu.place("costs-tiny"))
    assert gpu.run("predicted", shape="tiny")[-1]["cycle 60,7,10"] == pytest.approx(37.63, abs=0.01)


def test_a_step_that_fails_is_written_down_and_tried_again(monkeypatch):
    done = []

    def step(name, *arguments):
        done.append(arguments[-1])
        if arguments[-1] == "bfloat16" and len(done) < 3:
            raise RuntimeError("CUDA error: misaligned address")
        return {"texts": 1}

    monkeypatch.setattr(gpu, "texts", step)
    first, second = gpu.run("check", "cpu", "tiny")
    assert first["ok"] and second["error"] == "RuntimeError: CUDA error: misaligned address"
    assert not second["ok"] and gpu.main(["check", "cpu", "tiny"]) == 0
    assert done == ["float32", "bfloat16", "bfloat16"]
    # other code measures again
    monkeypatch.setattr(gpu.machine, "code_hash", lambda: "other")
    assert gpu.main(["check", "cpu", "tiny"]) == 0 and len(done) == 5


def test_another_text_is_found(monkeypatch):
    monkeypatch.setattr(gpu, "autoregress", lambda *_, **__: SimpleNamespace(tokens=[1, 2, 3]))
    assert gpu.texts("tiny", "cpu", "float32")["failed"] == 8


def test_without_a_gpu_one_sentence_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in [("check",), ("live", "cpu"), ("latencies", "cuda", "tiny")]:
        with pytest.raises(SpecdecError, match="torch finds none"):
            gpu.run(*arguments)
    assert gpu.main([]) == 2 and "latencies" in capsys.readouterr().err


def test_torch_and_transformers_are_enough(tmp_path):
    script = BARE.format(missing=MISSING)
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    for part, fine in (("check", [True, True]), ("latencies", [False]), ("live", [True])):
        steps = json.loads((tmp_path / "runs" / "gpu" / f"{part}.json").read_text())["steps"]
        assert [step["ok"] for step in steps.values()] == fine, steps
    # what was measured there is fitted here
    assert {row["step"] for row in gpu.run("predicted", shape="tiny")} >= {"here, tiny, eager"}
    assert prices(gpu.place("costs-tiny")).machine["shape"] == "tiny"
