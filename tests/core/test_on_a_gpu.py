"""What a GPU's attention would refuse, found without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.gpu import stand_in

import specdec

TESTS = Path(__file__).resolve().parents[1]
PROMPTS = [list(range(5, 25)), list(range(40, 71)), [7, 8, 9]]
CORE = [f"core/test_{name}.py" for name in ("cycle", "decode", "together", "tries")]
MODELS = [f"models/test_{name}.py" for name in ("golden", "drafting", "block", "ngrams")]


@pytest.mark.parametrize("files", [CORE, MODELS], ids=["core", "models"])
def test_decoding_as_on_a_gpu_passes_the_same_tests(files):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "fakes.gpu", *files]
    paths = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    options = dict(cwd=TESTS, env={**os.environ, "PYTHONPATH": paths}, text=True)
    done = subprocess.run(command, capture_output=True, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


# bfloat16 rounds other orders of sums differently, so near-ties may fall either way
@pytest.mark.parametrize("name", ["tiny", "small"])
def test_bfloat16_on_a_gpu_decodes(name, monkeypatch):
    stand_in(monkeypatch)
    pair = specdec.load_pair(name, dtype="bfloat16", device="cpu")
    options = dict(max_new_tokens=8, stop_tokens=(), temperature=1.0, seed=3, top_p=0.95)
    many = specdec.decode_many(pair, PROMPTS, specdec.Static(12, 4, 3), **options)
    assert [len(text.tokens) for text in many] == [8, 8, 8]
