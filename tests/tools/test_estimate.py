"""Estimated sizes against what is really allocated, what does not fit, and what cannot be counted."""

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec import runs
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.models.heads import HeadsConfig, heads_network, save_heads
from specdec.models.load import PRESETS, load_pair
from specdec.tools import estimate as module
from specdec.tools.estimate import GIB, estimate


@pytest.fixture(scope="module")
def tiny():
    return load_pair("tiny", dtype="float32", device="cpu")


def test_weights_and_cache_are_what_the_engine_allocates(tiny):
    modules = (tiny.target.model, tiny.drafter.network)
    real = sum(4 * module.parameters(network) for network in modules)
    assert (
        estimate("tiny", dtype="float32").weights_gib * GIB
        == estimate(tiny).weights_gib * GIB
        == real
    )
    assert estimate("tiny", dtype="bfloat16").weights_gib * GIB == real / 2
    tree = TreeConfig(20, 4, 5)
    needed = estimate(tiny, max_new_tokens=30, prompt_tok=50, tree=tree)
    rows = 50 + 30 + 4 + 2 + 20
    cache = tiny.target.new_cache(rows)
    with tiny.target.inference(taps=False):
        tiny.target.forward(torch.tensor([1, 2, 3]), cache)
    held = [
        value
        for layer in cache.layers
        for value in vars(layer).values()
        if isinstance(value, torch.Tensor)
    ]
    session = tiny.drafter.session(rows - 20, 20)
    assert needed.cache_gib * GIB == pytest.approx(
        sum(t.nbytes for t in held) + session.store.nbytes, rel=0.02
    )


def test_published_targets_and_drafters_have_their_published_sizes():
    # 8.03, 70.6, 13.0, 8.19, 14.8 and 32.8 billion parameters, drafters of up to a few percent on top.
    # Llama-3.1-8B keeps 128 KiB per token in bfloat16; its drafter one layer more.
    sizes = {"llama-3.1-8b": 8.03, "llama-3.3-70b": 70.6, "vicuna-13b": 13.0}
    for name, billions in (
        sizes | {"qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8}
    ).items():
        weights = estimate(name, dtype="bfloat16", device="cpu").weights_gib * GIB / 2e9
        assert billions < weights < 1.07 * billions, name
    assert all(preset.shape for preset in PRESETS.values())
    with torch.device("meta"):
        small = LlamaForCausalLM(module.shapes_of("smollm2")[0])
    assert sum(weight.numel() for weight in small.parameters()) == 134_515_008  # its card: 135M
    assert module.shapes_of("llama-3.1-8b", "griffin")[1].config.griffin

    assert (
        estimate("llama-3.1-8b", dtype="bfloat16", device="cpu").cache_kib_per_tok == 128 * 33 / 32
    )
    for kind, sizes in SIZES.items():
        network = module.shapes_of("llama-3.1-8b", kind)[1]
        weights = sum(weight.numel() for weight in network.parameters()) if network else 0
        assert (weights, module.kept_per_tok(network)) == sizes, kind


LLAMA, DRAFT = 4096, 32_000
EAGLE3 = (
    3 * LLAMA * LLAMA
    + 2 * LLAMA * 6144
    + 4096 * LLAMA
    + 3 * 14336 * LLAMA
    + DRAFT * LLAMA
    + 4 * LLAMA
)
SIZES = {  # of the published drafters for Llama-3.1-8B by hand: weights, and numbers kept per token
    "eagle3": (EAGLE3, 2048),
    "hybrid": (EAGLE3, 2048),
    "eagle1": (2 * LLAMA**2 + LLAMA + LLAMA * 6144 + LLAMA**2 + 3 * 14336 * LLAMA + LLAMA, 2048),
    "medusa": (5 * (LLAMA**2 + LLAMA + LLAMA * 128256), 0),
    "hydra": (2 * (2 + 3 + 4 + 5) * LLAMA**2 + 2 * 4 * LLAMA + 4 * 128256 * (LLAMA + 1), 0),
    "prompt_lookup": (0, 0),
    "suffix": (0, 0),
    "lookahead": (0, 0),
}


def test_a_drafter_of_a_folder_is_counted_as_it_is(tiny, tmp_path):
    tiny.target.config.save_pretrained(tmp_path)
    needed = estimate(str(tmp_path), dtype="float32", device="cpu")
    target = 4 * module.parameters(tiny.target.model)
    assert needed.weights_gib * GIB > target, "a drafter of the published form is counted as well"
    config = tiny.target.config
    heads = HeadsConfig(
        config.hidden_size, config.vocab_size, config.vocab_size, 2, projections="target"
    )
    network = heads_network(heads)
    save_heads(network, tmp_path / "heads")
    tiny.target.model.save_pretrained(tmp_path / "lm")
    runs.write_json(
        tmp_path / "lm/config.json",
        {**runs.read_json(tmp_path / "lm/config.json"), "draft_lm": True},
    )
    for name in ("heads", "lm", "suffix"):
        source = name if name == "suffix" else str(tmp_path / name)
        loaded = load_pair("tiny", drafter=source, dtype="float32", device="cpu")
        counted, here = (
            estimate(pair, drafter=source, dtype="float32") for pair in ("tiny", loaded)
        )
        assert (counted.weights_gib, counted.cache_gib) == (here.weights_gib, here.cache_gib), name


def test_time_by_probe_and_by_roofline_of_what_fits(tiny, monkeypatch):
    needed = estimate("llama-3.1-8b", dtype="float32", device="cpu", free_gib=20.0)
    assert (
        not needed.fits
        and needed.needed_gib > 30
        and "20.0 GiB are free; take bfloat16" in needed.sentence
    )
    assert estimate("llama-3.1-8b", dtype="bfloat16", device="cpu", free_gib=20.0).fits
    assert estimate("tiny", device="cpu").fits
    suites = {"a": ["Hello.", "And now?"], "b": ["Why?"]}
    once = estimate(tiny, suites, max_new_tokens=10)
    assert (once.how, once.prompts, set(once.seconds)) == ("probe", 3, {"autoregressive", "tree"})
    assert "3 turns take at most" in once.sentence
    assert estimate(tiny, suites, max_new_tokens=10, repeats=4).prompts == 12
    assert 1e8 < module.bandwidth("cpu", mib=8) < 1e13
    monkeypatch.setattr(module, "bandwidth", lambda device: 1e10)
    tree = TreeConfig(60, 6, 10)
    settings = dict(dtype="bfloat16", device="cpu", tree=tree, max_new_tokens=100, free_gib=20.0)
    needed = estimate("llama-3.1-8b", {"a": ["Hello."]}, **settings)
    forward = needed.weights_gib * GIB / 1e10
    assert needed.how == "roofline" and "at least" in needed.sentence
    assert needed.seconds["autoregressive"] == pytest.approx(100 * forward)
    assert needed.seconds["tree"] == pytest.approx(100 * forward / 8)


def test_what_cannot_be_counted_says_why():
    for pair, settings, message in (
        ("tinny", {}, "unknown preset 'tinny'; did you mean 'tiny'"),
        ("./nowhere/at/all", {}, "cannot be read"),
        ("tiny", {"prompt_tok": -5}, "prompt_tok"),
        ("tiny", {"repeats": 0}, "repeats"),
        ("tiny", {"max_new_tokens": 0}, "max_new_tokens"),
        ("tiny", {"drafter": "medusa:/nowhere"}, "nowhere"),
        ("llama-3.1-8b", {"drafter": "lm"}, "name its folder, lm:FOLDER"),
    ):
        pytest.raises(SpecdecError, estimate, pair, **settings).match(message)
