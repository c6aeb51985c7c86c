"""Pairs: loading from folders, models and presets, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from fakes.families import state_of
from fakes.pairs import random_network
from fakes.refusals import refusal
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

import specdec
from specdec.core.pair import Pair
from specdec.models import drafters, load
from specdec.models.eagle_files import read_checkpoint, save_drafter
from specdec.models.eagle_network import EagleConfig
from specdec.models.load import SHIPPED, load_drafter, load_pair
from specdec.models.target import Target

WORDS = ["<pad>", "<s>", "</s>", "the", "fox", "runs"]
DRAFTER = EagleConfig(32, 48, 4, 2, 64, 24, 32)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FOX = [{"role": "user", "content": "Tell me about a fox."}]


def tokenizer() -> PreTrainedTokenizerFast:
    ids = {word: i for i, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    """A folder with target/ (random weights, a tokenizer) and drafter/."""
    folder = tmp_path_factory.mktemp("some-pair")
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(**SIZES, **ids, num_hidden_layers=8, max_position_embeddings=256)
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    tokenizer().save_pretrained(folder / "target")
    save_drafter(random_network(DRAFTER), folder / "drafter")
    return folder


@pytest.fixture(scope="module")
def pair(places) -> Pair:
    return load_pair(target=places / "target", drafter=places / "drafter")


def test_a_pair_from_folders(pair, places, capfd):
    assert pair.name.startswith("some-pair")
    assert pair.stop_tokens == {2}
    assert pair.target.dtype == torch.float32
    assert pair.target.device.type == "cpu"
    assert pair.target.model.config._attn_implementation == "sdpa"
    assert not pair.target.model.training
    assert pair.drafter.taps == pair.target.taps == (2, 4, 5)
    stored = load_file(places / "drafter" / "model.safetensors")
    assert torch.equal(pair.drafter.network.state_dict()["fc.weight"], stored["fc.weight"])
    logging.enable_progress_bar()
    load_pair(target=places / "target", drafter=places / "drafter")
    assert "Loading weights" not in capfd.readouterr().err
    assert logging.is_progress_bar_enabled()


def test_a_loaded_model_is_left_alone(places):
    model = LlamaForCausalLM.from_pretrained(places / "target").eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = state_of(model)
    other = load_pair(target=model, drafter=places / "drafter", tokenizer=places / "target")
    assert other.target.model is model
    assert other.tokenizer is not None
    assert load_pair(target=model).tokenizer is None
    assert load_pair(target=model).drafter is None
    assert load_drafter(places / "drafter", model).target.model is model
    specdec.decode(other, [3, 4], specdec.Static(8, 2, 2), max_new_tokens=4)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert state_of(model) == hooks
    assert "keeps its dtype" in refusal(load_pair, target=model, dtype="bfloat16")


def test_targets_in_a_training_folder_and_without_sdpa(places, tmp_path):
    out = Path(shutil.copytree(places, tmp_path / "out"))
    pair = load_pair(target=out, drafter=out)
    assert pair.name == "out"
    assert pair.drafter is not None
    shutil.rmtree(out / "drafter")
    assert "has no config.json" in refusal(load_pair, target=out, drafter=out)
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
    for data in (b"", (places / "target" / "model.safetensors").read_bytes()[:2000]):
        weights.write_bytes(data)
        assert "cannot be loaded" in refusal(load_pair, target=folder)
    weights.unlink()
    assert "cannot be loaded" in refusal(load_pair, target=folder)
    torch.save(state, folder / "pytorch_model.bin")
    model = load_pair(target=folder).target.model
    assert torch.equal(model.state_dict()[name], state[name])
    (folder / "tokenizer.json").write_text("{")
    assert "tokenizer of" in refusal(load_pair, target=folder)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(load_pair, target=folder)


def test_precision_and_stop_tokens(places, tmp_path):
    folder = Path(shutil.copytree(places / "target", tmp_path / "t"))
    for stops, expected in ((None, set()), (5, {5}), ([2, 7], {2, 7})):
        for name in ("generation_config.json", "config.json"):
            settings = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(settings | {"eos_token_id": stops}))
        assert load_pair(target=folder).stop_tokens == expected
    for dtype in ("bfloat16", "float16"):
        parts = {"target": places / "target", "drafter": places / "drafter"}
        pair = load_pair(**parts, dtype=dtype, device="cpu")
        fused = pair.drafter.network.state_dict()["fc.weight"]
        assert pair.target.dtype == fused.dtype == getattr(torch, dtype)


def test_drafters_that_do_not_fit_and_an_own_embedding_that_differs(pair, tmp_path):
    network = random_network(replace(DRAFTER, own_embedding=True))
    model = pair.target.model
    different = load_drafter(save_drafter(network, tmp_path / "different"), model)
    assert different.config.own_embedding
    assert different.embedding is different.network.embed_tokens
    network.embed_tokens.weight.copy_(pair.target.embedding.weight)
    same = load_drafter(save_drafter(network, tmp_path / "same"), model)
    assert not same.config.own_embedding
    assert same.embedding is pair.target.embedding
    assert not hasattr(same.network, "embed_tokens")
    for change, words in (
        ({"target_hidden_size": 40}, "features of width 40"),
        ({"hidden_size": 64}, "brings no embedding"),
        ({"vocab_size": 65}, "vocabulary of 65 exceeds the target's 64"),
        ({"taps": (2, 4, 9)}, "do not all exist in a target of 8 layers"),
    ):
        config = replace(DRAFTER, **({"target_hidden_size": 32} | change))
        folder = save_drafter(random_network(config), tmp_path / words)
        assert words in refusal(load_drafter, folder, Target(model))
    shallow = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=5))
    own = save_drafter(random_network(DRAFTER), tmp_path / "own")
    assert "at least 7 layers" in refusal(load_drafter, own, shallow)


def test_drafters_by_kind(places, monkeypatch):
    monkeypatch.setattr(load, "shipped_folder", lambda name: places)
    own = load_pair("tiny")
    assert own.name == "tiny"
    assert own.tokenizer is not None
    weights = own.drafter.network.state_dict()["fc.weight"]
    for drafter in ("eagle3", f"eagle3:{places / 'drafter'}"):
        network = load_pair("tiny", drafter=drafter).drafter.network
        assert torch.equal(network.state_dict()["fc.weight"], weights)
    kind = drafters.Kind("none:at_all", "other", mark="other_heads")
    monkeypatch.setitem(drafters.KINDS, "other", kind)
    assert "no other drafter ships" in refusal(load_pair, "tiny", drafter="other")
    assert drafters.kind_of({"other_heads": 3}) == "other"
    assert drafters.kind_of({}) == "eagle3"
    monkeypatch.setitem(drafters.KINDS, "free", drafters.Kind("none:at_all"))
    assert "has no weights" in refusal(load_drafter, "free:x/y", own.target)
    monkeypatch.setattr(load, "shipped_folder", lambda name: Path("nowhere"))
    assert "install specdec again" in refusal(load_pair, "small")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_drafters_agree_with_their_targets(name):
    pair = load_pair(name)
    out = specdec.decode(pair, FOX, specdec.Static(16, 3, 4), max_new_tokens=48)
    assert out.tokens == specdec.autoregress(pair, FOX, max_new_tokens=48).tokens
    assert sum(row.accepted_tok for row in out.rows) > len(out.rows) / 2


NOWHERE = [
    ("vicuna-13b", load_pair, ["vicuna13b"], {}),
    ("'small'", load_pair, ["smal"], {}),
    ("not both", load_pair, [], {}),
    ("not both", load_pair, ["tiny"], {"target": "x/y"}),
    ("give either", load_pair, [], {"drafter": "eagle3"}),
    ("neither a folder", load_pair, ["tiny"], {"drafter": "no-such-folder"}),
    ("neither a folder", load_pair, [], {"target": "/no/such/folder"}),
    ("cannot be loaded", load_pair, [], {"target": "owner/no-such-target"}),
    ("is empty", load_pair, ["tiny"], {"drafter": " "}),
    ("bfloat16", load_pair, ["tiny"], {"dtype": "bf16loat"}),
    ("unknown device", load_pair, ["tiny"], {"device": "abacus"}),
    ("tokenizer", load_pair, ["tiny"], {"tokenizer": 3}),
    ("is empty", load_drafter, [""], {}),
    ("neither a folder", load_drafter, ["no-such-folder"], {}),
    ("cannot be fetched", load_drafter, ["owner/no-such-drafter"], {}),
    ("eagle3:FOLDER", load_drafter, ["eagle3"], {}),
    ("'eagle3'", load_drafter, ["eagle2:folder"], {}),
]


@pytest.mark.parametrize(("words", "call", "names", "settings"), NOWHERE)
def test_names_that_lead_nowhere(pair, words, call, names, settings):
    if call is load_drafter:
        names = [*names, pair.target]
    if "tokenizer" in settings:
        settings = {**settings, "target": pair.target.model}
        names = []
    assert words in refusal(call, *names, **settings)


def test_hub_falls_back_to_the_pickle(places, tmp_path, monkeypatch):
    requests = []
    errors = [huggingface_hub.errors.EntryNotFoundError]

    def download(repository, name):
        requests.append((repository, name))
        if not (tmp_path / name).is_file():
            raise errors[-1](name)
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    shutil.copy(places / "drafter" / "config.json", tmp_path)
    torch.save(load_file(places / "drafter" / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert load.drafter_folder("owner/name") == tmp_path
    names = [name for _, name in requests]
    assert names == ["config.json", "model.safetensors", "pytorch_model.bin"]
    (tmp_path / "pytorch_model.bin").unlink()
    assert "has no weights" in refusal(lambda: read_checkpoint(load.drafter_folder("owner/name")))
    # no network: says nothing about what the hub has
    errors.append(huggingface_hub.errors.LocalEntryNotFoundError)
    assert "cannot be fetched from the hub" in refusal(load.drafter_folder, "owner/name")


def test_a_pair_is_loaded_again_from_its_source(places):
    pair = load_pair(target=places / "target", drafter=places / "drafter")
    again = load.load_again(**load.source_of(pair))
    assert again.name == pair.name
    ours = pair.drafter.network.state_dict()
    for name, value in again.drafter.network.state_dict().items():
        assert torch.equal(value, ours[name])
    described = {**load.source_of(pair)["described"], "target": "another"}
    assert "different" in refusal(load.load_again, pair.source, described)
    assert "in memory" in refusal(load.source_of, load_pair(target=pair.target.model))
