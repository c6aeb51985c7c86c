"""Estimated sizes against what is really allocated, and times from a probe or a data sheet."""

from types import SimpleNamespace

import pytest
import torch

from specdec import machine
from specdec.core.tree_config import TreeConfig
from specdec.models.load import PRESETS, load_pair
from specdec.tools import estimate as module
from specdec.tools.estimate import GIB, estimate


@pytest.fixture(scope="module")
def tiny():
    return load_pair("tiny", dtype="float32", device="cpu")


def test_weights_and_cache_are_what_the_engine_allocates(tiny):
    networks = (tiny.target.model, tiny.drafter.network)
    real = sum(4 * module.parameters(network) for network in networks)
    assert estimate("tiny", dtype="float32").weights_gib * GIB == real
    assert estimate(tiny).weights_gib * GIB == real
    assert estimate("tiny", dtype="bfloat16").weights_gib * GIB == real / 2
    tree = TreeConfig(20, 4, 5)
    rows = module.PROMPT_TOK + 30 + 4 + 2 + 20
    cache = tiny.target.new_cache(rows)
    with tiny.target.inference(taps=False):
        tiny.target.forward(torch.tensor([1, 2, 3]), cache)
    held = tiny.drafter.session(rows - 20, 20).store.nbytes
    for layer in cache.layers:
        for value in vars(layer).values():
            if isinstance(value, torch.Tensor):
                held += value.nbytes
    needed = estimate(tiny, max_new_tokens=30, tree=tree)
    assert needed.cache_gib * GIB == pytest.approx(held, rel=0.02)
    # 241 rows of logits, also in float32, of states, of inner states and of attention
    wide = estimate("llama-3.1-8b", dtype="bfloat16", device="cpu", tree=TreeConfig(241, 8, 10))
    row_bytes = 128256 * (2 + 8) + 2 * (8 * 4096 + 3 * 14336 + 1024 + 128 + 8 + 2 + 241)
    assert wide.activations_gib * GIB == pytest.approx(241 * row_bytes)


# billions of parameters of targets; drafters add up to a few percent
TARGETS = {"llama-3.1-8b": 8.03, "llama-3.3-70b": 70.6, "vicuna-13b": 13.0}
TARGETS.update({"qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8})
LLAMA, DRAFT = 4096, 32_000
LAYER = LLAMA * LLAMA + 3 * 14336 * LLAMA
EAGLE3 = 3 * LLAMA * LLAMA + 2 * LLAMA * 6144 + LAYER + DRAFT * LLAMA + 4 * LLAMA
# of the published drafters for Llama-3.1-8B by hand: weights, and numbers kept per token
DRAFTERS = {"eagle3": (EAGLE3, 2048), "hybrid": (EAGLE3, 2048), "suffix": (0, 0)}


def test_published_targets_and_drafters_have_their_published_sizes():
    for name, billions in TARGETS.items():
        weights = estimate(name, dtype="bfloat16", device="cpu").weights_gib * GIB / 2e9
        assert billions < weights < 1.07 * billions, name
    assert all(preset.shape for preset in PRESETS.values())
    for kind, sizes in DRAFTERS.items():
        network = module.shapes_of("llama-3.1-8b", kind)[1]
        weights = sum(weight.numel() for weight in network.parameters()) if network else 0
        assert (weights, module.kept_per_tok(network)) == sizes, kind
    # 128 KiB per token in bfloat16 for 32 layers
    config = module.shapes_of("llama-3.1-8b")[0]
    assert 2 * module.kept_per_tok(SimpleNamespace(config=config)) == 128 * 1024


def test_time_by_probe_and_by_data_sheet(tiny):
    texts = {"a": ["Hello.", "And now?"], "b": ["Why?"]}
    once = estimate(tiny, texts, max_new_tokens=10)
    assert (once.prompts, set(once.seconds)) == (3, {"autoregressive", "tree"})
    assert "3 turns take up to" in once.sentence
    assert estimate(tiny, texts, max_new_tokens=10, repeats=4).prompts == 12
    needed = estimate("llama-3.1-8b", {"a": ["Hello."]}, max_new_tokens=100, gpu="a100")
    forward_s = needed.weights_gib * GIB / (module.GPUS["a100"][0] * 1e9) + 32 * 0.5e-3
    assert needed.seconds["autoregressive"] == pytest.approx(100 * forward_s, rel=0.1)
    assert needed.seconds["tree"] == needed.seconds["autoregressive"]
    small = estimate("llama-3.1-8b", gpu="t4")
    assert not small.fits and "are free; take bfloat16" in small.sentence


def test_checks_find_a_wrong_folder(monkeypatch, home):
    monkeypatch.setenv("SPECDEC_DATA", str(home / "nowhere"))
    checks = module.checks(names=("tiny", "nothing")).set_index("fact")
    assert checks.loc["benchmarks", "state"] == module.FAULT
    assert checks.loc["pair tiny", "state"] == module.OK
    assert checks.loc["pair nothing", "state"] == module.FAULT
    assert checks.loc["results", "value"] == str(home)
    assert checks.loc["GPU"].tolist() == [machine.fingerprint()["gpu"] or "none", module.OK]
