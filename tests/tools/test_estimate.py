"""Estimated sizes against what is really allocated, what does not fit, and what a whole grid takes, by hand."""

import math

import pytest
import torch
import yaml
from transformers import LlamaForCausalLM

from specdec import machine, runs
from specdec.core.tree_config import TreeConfig
from specdec.costs.profiles import roofline
from specdec.errors import SpecdecError
from specdec.models.heads import HeadsConfig, heads_network, save_heads
from specdec.models.load import PRESETS, load_pair
from specdec.tools import cli
from specdec.tools import estimate as module
from specdec.tools.estimate import GIB, estimate


@pytest.fixture(scope="module")
def tiny():
    return load_pair("tiny", dtype="float32", device="cpu")


def test_weights_and_cache_are_what_the_engine_allocates(tiny):
    modules = (tiny.target.model, tiny.drafter.network)
    real = sum(weight.nbytes for one in modules for weight in one.parameters())
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
    target = sum(weight.nbytes for weight in tiny.target.model.parameters())
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


def test_what_cannot_be_counted_says_why_and_wrong_plans_name_the_key(tmp_path):
    for pair, settings, message in (
        ("tinny", {}, "unknown preset 'tinny'; did you mean 'tiny'"),
        ("./nowhere/at/all", {}, "cannot be read"),
        ("tiny", {"prompt_tok": -5}, "prompt_tok"),
        ("tiny", {"repeats": 0}, "repeats"),
        ("tiny", {"max_new_tokens": 0}, "max_new_tokens"),
        ("tiny", {"drafter": "medusa:/nowhere"}, "nowhere"),
        ("llama-3.1-8b", {"drafter": "lm"}, "name its folder to count it, lm:FOLDER"),
    ):
        pytest.raises(SpecdecError, estimate, pair, **settings).match(message)
    for changes, message in (
        ("- a list", "must be a mapping with machine, pairs, suites and methods"),
        ("machine: {gpu: h100}", "pairs is missing"),
        ({"machine": None}, "machine: should be"),
        ({"machine": {"gpu": "h10"}}, "machine.gpu: unknown gpu 'h10'; did you mean 'h100'"),
        ({"machine": {"gpu": "h100", "gpus": 8}}, "machine.gpus is unknown"),
        (
            {"machine": {"gpu": "h100", "host": "graph"}},
            "machine.host: unknown host 'graph'; did you mean 'graphs'",
        ),
        ({"pairs": []}, "pairs: "),
        (
            {"pairs": ["llama-3.1-9b"]},
            "pairs: unknown preset 'llama-3.1-9b'; did you mean 'llama-3.1-8b'",
        ),
        ({"pairs": ["small", "small"]}, "pairs: an entry occurs twice"),
        ({"suites": {"gsm8k": 0}}, "suites.*gsm8k"),
        ({"suites": ["gsm9k"]}, "suites: unknown suites 'gsm9k'; did you mean 'gsm8k'"),
        ({"seeds": 3}, "seeds: "),
        ({"speed": 3}, "speed is unknown"),
        ({"dtype": "bf16"}, "dtype: unknown dtype 'bf16'; did you mean"),
        ({"methods": {"a": {"tau": 0.5}}}, "methods.a.tau"),
        (
            {"methods": {"a": {"tree": [60, 7]}}},
            "methods.a.tree: a tree is total_tokens, depth and top_k",
        ),
        ({"methods": {"a": {"tree": [60, -1, 10]}}}, "methods.a.tree: "),
        (
            {"methods": {"a": {"drafter": "eagel3", "tree": [2, 0, 1]}}},
            "methods.a.drafter: unknown drafter 'eagel3'",
        ),
        (
            {"methods": {"a": {"drafter": "lm", "tree": [2, 0, 1]}}},
            "methods.a.drafter: a small language model",
        ),
        ({"methods": {"a": {"tau": {"small": 2.0}}}}, "methods.a.tau: unknown tau 'small'"),
        ({"methods": {"a": {"trees": [2, 0, 1]}}}, "methods.a.trees is unknown"),
    ):
        said = pytest.raises(SpecdecError, module.read_plan, written(tmp_path, changes))
        said.match(message)
        assert "plan.yml" in str(said.value) and "\n" not in str(said.value)


PAPERS = machine.checkout() / "notebooks" / "papers_plan.yml"
SMALL = {
    "machine": {"gpu": "a100", "count": 2},
    "pairs": ["llama-3.1-8b"],
    "suites": {"gsm8k": 9, "mt_bench": 4},
    "methods": {"plain": None, "eagle3": {"tree": [60, 7, 10], "tau": 4.0}},
    "warmup_prompts": 1,
}


def written(tmp_path, changes: dict | str):
    path = tmp_path / "plan.yml"
    path.write_text(changes if isinstance(changes, str) else yaml.safe_dump(SMALL | changes))
    return path


def priced(tmp_path, **changes):
    return module.price(module.read_plan(written(tmp_path, changes)))


def test_hours_by_hand(tmp_path):
    """7.5e9 weights are read per step, 10 + 5 x 2 turns of 512 tokens, a cycle of 8 levels brings 4 tokens."""
    found = priced(tmp_path)
    weights = 8_030_261_248 - 128256 * 4096
    eagle3 = module.shapes_of("llama-3.1-8b", "eagle3")[1]
    drafting = float(sum(weight.numel() for weight in eagle3.parameters()))
    gpu = dict(bandwidth_gb_per_s=2039, tflop_per_s=312, launch_ms_per_layer=0.5, draft_host_ms=0.9)
    costs = roofline(float(weights), drafting, layers=32, hidden=4096, kv_frac=0.25, **gpu)
    read = float(costs.verify_ms(511, 256))
    turn_ms = (
        2 * read + 512 * float(costs.step_ms(768)) + 128 * float(costs.cycle_ms(10, 7, 59, 768))
    )
    assert found.gpu_hours == pytest.approx(20 * turn_ms / 3.6e6)
    assert found.hours == pytest.approx(10 * turn_ms / 3.6e6), (
        "two GPUs, two shards of ten turns each"
    )
    row = found.table.iloc[0]
    assert (row["gpus"], row["shards"]) == (1, 2)
    held = 2 * (weights + 128256 * 4096 + drafting)
    assert held / GIB < row["gib_per_gpu"] < held / GIB + 2
    assert held / 1e9 < row["storage_gb"] < held / 1e9 + 0.1


def test_axes_multiply_large_targets_take_several_gpus_and_training_is_stated(tmp_path):
    once = priced(tmp_path)
    more = priced(tmp_path, temperatures=[0.0, 1.0], seeds=[0, 1, 2])
    assert more.gpu_hours == pytest.approx(6 * once.gpu_hours) and more.table["shards"].sum() == 12
    both = priced(tmp_path, pairs=["llama-3.1-8b", "deepseek-r1-8b"])
    assert both.gpu_hours == pytest.approx(2 * once.gpu_hours)
    slower = priced(
        tmp_path, methods=SMALL["methods"] | {"nothing accepted": {"tree": [60, 7, 10]}}
    )
    assert slower.gpu_hours > 2 * once.gpu_hours and slower.table["shards"].sum() == 2
    named = priced(tmp_path, suites=["gsm8k", "mt_bench"])
    assert named.gpu_hours == pytest.approx(once.gpu_hours * (81 + 81 * 2) / (10 + 5 * 2))
    large = priced(tmp_path, pairs=["llama-3.3-70b"], machine={"gpu": "h100", "count": 4})
    row = large.table.iloc[0]
    assert row["gpus"] == 4 and 2 * row["gib_per_gpu"] > module.USED_FRAC * 80e9 / GIB, (
        "two would be too few"
    )
    assert large.hours == pytest.approx(large.gpu_hours / 4)  # one shard after the other
    one = pytest.raises(
        SpecdecError, priced, tmp_path, pairs=["llama-3.3-70b"], machine={"gpu": "h100"}
    )
    one.match("llama-3.3-70b needs 1.. GiB in bfloat16, and 1 h100 hold 67")
    pairs = ["llama-3.1-8b", "llama-3.3-70b"]
    trained = {"tree": [60, 7, 10], "training_gpu_hours": 30}
    by_pair = {
        "tree": [60, 7, 10],
        "training_gpu_hours": {"llama-3.3-70b": 200},
        "tau": {"llama-3.1-8b": 4.0},
    }
    methods = {"ltd": trained, "ppow": by_pair}
    found = priced(tmp_path, pairs=pairs, methods=methods, machine={"gpu": "h100", "count": 8})
    assert (
        found.training_gpu_hours == 2 * 30 + 200 and "260 GPU hours of training" in found.sentence
    )


def test_the_papers_grid(capsys):
    assert "specdec estimate --plan notebooks/papers_plan.yml" in PAPERS.read_text()
    assert cli.main(["estimate", "--plan", str(PAPERS)]) == 0
    said = capsys.readouterr().out
    read = module.read_plan(PAPERS)
    assert (
        len(read.pairs) == 5
        and len(read.suites) == 9
        and len(read.methods) >= 12
        and read.machine.count == 8
    )
    shards = math.prod(map(len, (read.pairs, read.suites, read.temperatures, read.seeds)))
    assert f"{shards} shards on 8 h100 (eager)" in said and "not measured" in said
    assert all(pair in said for pair in read.pairs)
