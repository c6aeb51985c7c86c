"""Pairs: loading from folders, models and presets, and what is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes.families import state_of
from fakes.pairs import random_network
from fakes.refusals import Bomb, refusal
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

import specdec
from specdec.core.pair import Pair
from specdec.models import load, pairs
from specdec.models.eagle_files import save_drafter
from specdec.models.eagle_network import EagleConfig
from specdec.models.load import SHIPPED, load_drafter, load_pair
from specdec.models.target import Target

DRAFTER = EagleConfig(32, 48, 4, 2, 64, 24, 32)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FOX = [{"role": "user", "content": "Tell me about a fox."}]


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """A folder with target/ (random weights, a tokenizer) and drafter/."""
    folder = tmp_path_factory.mktemp("some-pair")
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(**SIZES, **ids, num_hidden_layers=8, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(load.shipped_folder("tiny") / "target" / name, folder / "target")
    save_drafter(random_network(DRAFTER), folder / "drafter")
    return folder


@pytest.fixture(scope="module")
def pair(places) -> Pair:
    return load_pair(target=places / "target", drafter=places / "drafter")


@pytest.fixture
def own(home, monkeypatch):
    """A user in a folder with a pair of theirs, `mine`."""
    monkeypatch.setattr(pairs, "_pairs", {})
    monkeypatch.chdir(home)
    for part in ("target", "drafter"):
        shutil.copytree(load.shipped_folder("tiny") / part, home / "mine" / part)
    return home / "mine"


def test_a_pair_from_folders(pair, places):
    assert pair.name.startswith("some-pair")
    assert pair.stop_tokens == pair.current_stops() == {2}
    assert pair.target.dtype == torch.float32
    assert pair.target.model.config._attn_implementation == "sdpa"
    assert not pair.target.model.training
    assert pair.drafter.taps == pair.target.taps == (2, 4, 5)
    stored = load_file(places / "drafter" / "model.safetensors")
    assert torch.equal(pair.drafter.network.state_dict()["fc.weight"], stored["fc.weight"])
    half = load_pair(target=places / "target", drafter=places / "drafter", dtype="float16")
    assert half.target.dtype == half.drafter.network.state_dict()["fc.weight"].dtype
    moved = load_pair(target=places / "target", device="meta").target.model
    assert {weight.device.type for weight in moved.parameters()} == {"meta"}


def test_a_loaded_model_is_left_alone(places):
    model = LlamaForCausalLM.from_pretrained(places / "target").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = state_of(model)
    pair = load_pair(target=model, drafter=places / "drafter", tokenizer=places / "target")
    assert pair.target.model is model
    assert pair.tokenizer is not None
    specdec.decode(pair, [3, 4], specdec.Static(8, 2, 2), max_new_tokens=4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert state_of(model) == state
    plain = load_pair(target=model)
    assert plain.tokenizer is None
    assert plain.drafter is None
    assert "keeps its dtype" in refusal(load_pair, target=model, dtype="bfloat16")


def test_targets_in_a_training_folder_and_without_sdpa(places, tmp_path):
    out = Path(shutil.copytree(places, tmp_path / "out"))
    pair = load_pair(target=out, drafter=out)
    assert pair.name == "out"
    assert pair.drafter is not None
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    config = GptOssConfig(**SIZES, **experts, num_hidden_layers=2, eos_token_id=2, pad_token_id=0)
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    assert load_pair(target=tmp_path).target.model.config._attn_implementation == "eager"


def test_damaged_targets(places, tmp_path):
    folder = Path(shutil.copytree(places / "target", tmp_path / "t"))
    weights = folder / "model.safetensors"
    state = load_file(weights)
    name = "model.layers.3.mlp.up_proj.weight"
    fewer = {key: value for key, value in state.items() if key != name}
    save_file(fewer, weights, {"format": "pt"})
    assert f"lacks {name};" in refusal(load_pair, target=folder)
    weights.write_bytes((places / "target" / "model.safetensors").read_bytes()[:2000])
    assert "cannot be loaded" in refusal(load_pair, target=folder)
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "git lfs pull" in refusal(load_pair, target=folder)
    weights.unlink()
    bomb = Bomb(tmp_path / "ran")
    torch.save({"model.norm.weight": torch.ones(32), "bomb": bomb}, folder / "pytorch_model.bin")
    assert "cannot be loaded" in refusal(load_pair, target=folder)
    assert not (tmp_path / "ran").exists()
    torch.save(state, folder / "pytorch_model.bin")
    model = load_pair(target=folder).target.model
    assert torch.equal(model.state_dict()[name], state[name])
    (folder / "tokenizer.json").write_text("{")
    assert "tokenizer of" in refusal(load_pair, target=folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(load_pair, target=folder)


def test_drafters_that_do_not_fit_and_an_own_embedding(pair, tmp_path):
    network = random_network(replace(DRAFTER, own_embedding=True))
    model = pair.target.model
    different = load_drafter(save_drafter(network, tmp_path / "different"), model)
    assert different.embedding is different.network.embed_tokens
    for change, words in (
        ({"target_hidden_size": 40}, "pair it with the target"),
        ({"hidden_size": 64, "head_dim": 8}, "pair it with the target"),
        ({"vocab_size": 65}, "vocabulary of 65"),
        ({"taps": (2, 4, 9)}, "of a target of 8 layers"),
    ):
        config = replace(DRAFTER, **({"target_hidden_size": 32} | change))
        folder = save_drafter(random_network(config), tmp_path / str(change))
        assert words in refusal(load_drafter, folder, Target(model))
    shallow = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=5))
    drafter = save_drafter(random_network(DRAFTER), tmp_path / "drafter")
    assert "at least 7 layers" in refusal(load_drafter, drafter, shallow)


def test_drafters_by_kind(places, monkeypatch):
    monkeypatch.setattr(pairs, "shipped_folder", lambda name: places)
    pair = load_pair("tiny")
    weights = pair.drafter.network.state_dict()["fc.weight"]
    for drafter in ("eagle3", f"eagle3:{places / 'drafter'}", places):
        network = load_pair("tiny", drafter=drafter).drafter.network
        assert torch.equal(network.state_dict()["fc.weight"], weights)
    assert "no griffin drafter ships" in refusal(load_pair, "tiny", drafter="griffin")
    assert type(load_pair("tiny", drafter="lookahead").drafter).__name__ == "LookaheadDrafter"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_drafters_agree_with_their_targets(name):
    pair = load_pair(name)
    out = specdec.decode(pair, FOX, specdec.Static(16, 3, 4), max_new_tokens=48)
    assert out.tokens == specdec.autoregress(pair, FOX, max_new_tokens=48).tokens
    assert sum(row.accepted_tok for row in out.rows) > len(out.rows) / 2


NOWHERE = [
    ("vicuna-13b", load_pair, ["vicuna13b"], {}),
    ("not both", load_pair, [], {}),
    ("not both", load_pair, ["tiny"], {"target": "x/y"}),
    ("neither a folder", load_pair, ["tiny"], {"drafter": "no-such-folder"}),
    ("cannot be loaded", load_pair, [], {"target": "owner/no-such-target"}),
    ("bfloat16", load_pair, ["tiny"], {"dtype": "bf16loat"}),
    ("unknown device", load_pair, ["tiny"], {"device": "abacus"}),
    ("cannot be fetched", load_drafter, ["owner/no-such-drafter"], {}),
    ("eagle3:FOLDER", load_drafter, ["eagle3"], {}),
    ("'eagle3'", load_drafter, ["eagle2:folder"], {}),
]


def test_names_that_lead_nowhere(pair):
    for words, call, names, settings in NOWHERE:
        if call is load_drafter:
            names = [*names, pair.target]
        assert words in refusal(call, *names, **settings)


def test_a_pair_is_loaded_again_from_its_source(places):
    pair = load_pair(target=places / "target", drafter=places / "drafter")
    again = load.load_again(**load.source_of(pair))
    assert again.name == pair.name
    ours = pair.drafter.network.state_dict()
    for name, value in again.drafter.network.state_dict().items():
        assert torch.equal(value, ours[name])
    source = load.source_of(pair)
    source["described"]["weights"] = "others"
    assert "other weights" in refusal(load.load_again, **source)
    assert "in memory" in refusal(load.source_of, load_pair(target=pair.target.model))


def test_a_folder_stands_for_its_pair(own, monkeypatch):
    assert pairs.named("mine") == pairs.named(str(own)) == pairs.named("mine/target") == "mine"
    shutil.copytree(own, own.parent / "small-one")
    monkeypatch.chdir("/")
    assert pairs.named("small-one") == "small-one", "below the home of results"
    assert pairs.named("HuggingFaceTB/SmolLM2-135M-Instruct") == "smollm2-hub"
    assert pairs.named("a/b") == "b"
    (own.parent / "other" / "mine").mkdir(parents=True)
    assert "rename" in refusal(pairs.named, str(own.parent / "other" / "mine"))
    assert "no folder" in refusal(pairs.named, "no/such/place")
    assert "'mine'" in refusal(load_pair, "mien")
    assert "no medusa drafter ships" in refusal(load_pair, "mine", drafter="medusa")


def test_a_folders_pair_is_loaded_and_loaded_again(own):
    ids = [3, 4, 5]
    pair = load_pair("mine", dtype="float32")
    tokens = specdec.decode(pair, ids, specdec.Static(8, 3, 2), max_new_tokens=8).tokens
    assert pair.name == "mine"
    assert tokens == specdec.autoregress(load_pair("tiny"), ids, max_new_tokens=8).tokens
    assert load_pair(target="mine").drafter is None
    assert load.at_hand("mine")
    source = load.source_of(pair)
    # another machine
    pairs._pairs.clear()
    assert load.load_again(**source).name == "mine"
    assert load_pair("mine", drafter="hybrid").drafter.network is not None, "its own weights"


def test_presets_stand_for_targets():
    assert load_pair(target="tiny").drafter is None
    assert load.target_place("smollm2-hub") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert load.at_hand("tiny") and not load.at_hand("smollm2-hub")
