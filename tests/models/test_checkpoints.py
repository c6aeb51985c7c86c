"""Reading EAGLE checkpoints: every layout gives the same network, every bad file one sentence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import refusals
from fakes.pairs import layer_fields
from fakes.pairs import random_network as network
from safetensors.torch import load_file, save_file

from specdec.models.eagle_files import read_network, save_drafter
from specdec.models.eagle_network import EagleConfig, EagleNetwork

PLAIN = EagleConfig(32, 48, 4, 2, 64, 24, 32)
FIRST = replace(PLAIN, draft_vocab_size=64, generation=1, num_taps=1, fc_bias=True)
OFFICIAL = {**layer_fields(PLAIN), "draft_vocab_size": 24}


def assert_same(left: EagleNetwork, right: EagleNetwork) -> None:
    assert left.config == right.config
    assert left.state_dict().keys() == right.state_dict().keys()
    for name, value in left.state_dict().items():
        assert torch.equal(value, right.state_dict()[name]), name


def write(folder: Path, raw: dict, tensors: dict, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {key: value.contiguous().clone() for key, value in tensors.items()}
    if name.endswith(".bin"):
        torch.save(tensors, folder / name)
    else:
        save_file(tensors, folder / name)
    return folder


def refusal(folder: Path) -> str:
    return refusals.refusal(read_network, folder)


# without an embedding in the file the target's is used; layer outputs are counted
SGLANG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "fc_norm": True,
    "rope_theta": 500000,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
    "target_hidden_size": 32,
}
LAYOUTS = {
    "official": (PLAIN, OFFICIAL),
    "sglang": (replace(PLAIN, taps=(3, 5, 6), fc_norm="each", rope_theta=5e5), OFFICIAL | SGLANG),
    "eagle1": (FIRST, layer_fields(FIRST)),  # no `bias` field: it is true
    "eagle1, biases": (
        replace(FIRST, fc_bias=False, attention_bias=True),
        layer_fields(FIRST) | {"bias": False, "qkv_bias": True},
    ),
    # The first stage ignores both biases, and so does the engine.
    "griffin": (
        replace(FIRST, griffin=True),
        layer_fields(FIRST) | {"bias": False, "qkv_bias": True},
    ),
}


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read(tmp_path, name, file):
    config, raw = LAYOUTS[name]
    net = network(config)
    tensors = {}
    for part, value in net.state_dict().items():
        tensors[part if config.generation == 3 else part.replace("midlayer", "layers.0")] = value
    tensors["target_model.lm_head.weight"] = torch.ones(3)
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    assert_same(read_network(write(tmp_path, raw, tensors, file)), net)


def test_what_config_json_says_otherwise_or_leaves_out(tmp_path):
    config = replace(PLAIN, draft_vocab_size=64)
    net = network(config)
    weights = dict(net.state_dict())
    del weights["d2t"], weights["t2d"]
    loaded = read_network(write(tmp_path, OFFICIAL | {"draft_vocab_size": 64}, weights))
    assert_same(loaded, net)
    for fields, theta in (
        ({}, 1e4),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_scaling": None}, 1e4),
    ):
        folder = write(tmp_path, OFFICIAL | fields, STATE)
        assert read_network(folder).config.rope_theta == theta


def test_shards_and_bad_config_files(tmp_path):
    rest = dict(STATE)
    first = {name: rest.pop(name) for name in ("fc.weight", "d2t")}
    write(tmp_path, OFFICIAL, first, "model-00001-of-00002.safetensors")
    write(tmp_path, OFFICIAL, rest, "model-00002-of-00002.safetensors")
    assert_same(read_network(tmp_path), network(PLAIN))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "q_proj" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read as JSON" in refusal(tmp_path)


SAVED = [
    PLAIN,
    replace(PLAIN, taps=(1, 4, 6), rope_theta=3e4),
    replace(PLAIN, fc_norm="each", attention_bias=True, head_dim=12),
    replace(PLAIN, fc_bias=True, own_embedding=True, num_taps=2, taps=(2, 3)),
    replace(FIRST, attention_bias=True),
    replace(PLAIN, generation=1, num_taps=1, fc_bias=True, griffin=True),
]


@pytest.mark.parametrize("config", SAVED)
def test_save_and_read_again(tmp_path, config):
    net = network(config)
    folder = save_drafter(net, tmp_path / "new" / "drafter", bos_token_id=3)
    assert json.loads((folder / "config.json").read_text())["bos_token_id"] == 3
    assert_same(read_network(folder), net)
    half = save_drafter(net, tmp_path / "half", torch.bfloat16)
    stored = load_file(half / "model.safetensors")
    assert stored["fc.fc.weight" if config.griffin else "fc.weight"].dtype == torch.bfloat16
    if config.generation == 3:
        assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool


def test_code_in_a_pickle_does_not_run(tmp_path):
    proof = tmp_path / "the-code-ran"
    folder = write(tmp_path / "drafter", OFFICIAL, {}, "pytorch_model.bin")
    payload = {"fc.weight": torch.zeros(2), "bomb": refusals.Bomb(proof)}
    torch.save(payload, folder / "pytorch_model.bin")
    assert "more than tensors" in refusal(folder)
    assert not proof.exists()


STATE = dict(network(PLAIN).state_dict())
ONES = torch.ones(2, 2)
BAD_WEIGHTS = [
    ("extra.weight", {"extra.weight": ONES}),
    ("size mismatch for lm_head.weight", {"lm_head.weight": torch.ones(23, 32)}),
    ("not finite", {"norm.weight": torch.full((32,), torch.nan)}),
    ("quantised", {"lm_head.weight": torch.ones(24, 32, dtype=torch.int8)}),
    ("vocabulary map", {"d2t": STATE["d2t"] + torch.arange(24)}),
    ("norm.weight", {"norm.weight": None}),
    ("not an EAGLE drafter", {"fc.weight": None}),
]
BAD_SETTINGS = [
    ("draft_vocab_size", {"draft_vocab_size": None}),
    ("hidden_size", {"hidden_size": "32"}),
    ("hidden_size", {"hidden_size": 0}),
    ("vocab_size", {"vocab_size": True}),
    ("rope_scaling", {"rope_scaling": [2]}),
    ("'gelu'", {"hidden_act": "gelu"}),
    ("norm_output", {"norm_output": True}),
    ("'yarn'", {"rope_scaling": {"rope_type": "yarn"}}),
    ("fc_norm.0.weight", {"fc_norm": True}),
    ("sliding_window 64", {"sliding_window": 64}),
    ("layer_types", {"layer_types": ["sliding_attention"]}),
    ("final_logit_softcapping", {"final_logit_softcapping": 30.0}),
    ("attention_sinks True", {"attention_sinks": True}),
    ("attention_multiplier", {"attention_multiplier": 1.0}),
    ("residual_multiplier", {"residual_multiplier": 0.2}),
]
# what configurations of other families say without an effect
HARMLESS = {
    "sliding_window": 131072,
    "use_sliding_window": False,
    "layer_types": ["full_attention"],
    "attn_logit_softcapping": None,
    "embedding_multiplier": 1.0,
}


def test_bad_weights_and_settings_get_one_sentence(tmp_path):
    for words, change in BAD_WEIGHTS:
        tensors = {name: value for name, value in (STATE | change).items() if value is not None}
        assert words in refusal(write(tmp_path, OFFICIAL, tensors))
    for words, change in BAD_SETTINGS:
        assert words in refusal(write(tmp_path, OFFICIAL | change, STATE))
    assert_same(read_network(write(tmp_path, OFFICIAL | HARMLESS, STATE)), network(PLAIN))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_files(tmp_path, file):
    path = write(tmp_path, OFFICIAL, STATE, file) / file
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"\xff" * 4000):
        path.write_bytes(damaged)
        assert "damaged" in refusal(tmp_path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "git lfs pull" in refusal(tmp_path)
    path.unlink()
    assert "no weights" in refusal(tmp_path)
    torch.save([torch.ones(2)], tmp_path / "pytorch_model.bin")
    assert "more than tensors" in refusal(tmp_path)
