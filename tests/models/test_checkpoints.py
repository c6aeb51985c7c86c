"""Reading EAGLE checkpoints: every layout gives the same network, every bad file gives one clear sentence."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import refusals
from fakes.golden import GOLDEN, needs_golden
from fakes.pairs import layer_fields
from fakes.pairs import random_network as network
from safetensors.torch import load_file, save_file

from specdec.errors import SpecdecError
from specdec.models.eagle_files import read_checkpoint, save_drafter
from specdec.models.eagle_network import EagleConfig, EagleNetwork

PLAIN = EagleConfig(32, 48, 4, 2, 64, 24, 32)
FIRST = replace(PLAIN, draft_vocab_size=64, generation=1, num_taps=1, fc_bias=True)


def assert_same(left: EagleNetwork, right: EagleNetwork) -> None:
    assert left.config == right.config and left.state_dict().keys() == right.state_dict().keys()
    for name, value in left.state_dict().items():
        assert torch.equal(value, right.state_dict()[name]), name


def write(
    folder: Path, raw: dict, tensors: dict, name: str = "model.safetensors", zipped: bool = True
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {key: value.contiguous().clone() for key, value in tensors.items()}
    if name.endswith(".bin"):
        torch.save(tensors, folder / name, _use_new_zipfile_serialization=zipped)
    else:
        save_file(tensors, folder / name)
    return folder


def official(config: EagleConfig) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        **layer_fields(config),
        "draft_vocab_size": config.draft_vocab_size,
    }


def renamed(net: EagleNetwork) -> dict:
    return {
        name.replace("midlayer.", "layers.0."): value for name, value in net.state_dict().items()
    }


def read_network(folder: Path) -> EagleNetwork:
    return read_checkpoint(folder).network()


def refusal(folder: Path) -> str:
    sentence = refusals.refusal(read_network, folder)
    assert sentence.endswith(".")
    return sentence


SWITCHED = replace(
    PLAIN,
    **dict(
        taps=(2, 4, 5),
        norm_before_residual=True,
        norm_output=True,
        attention_bias=True,
        query_key_norm=True,
    ),
    **dict(fc_norm="each", own_embedding=True, head_dim=16, rope_theta=1e6, target_hidden_size=40),
)
SGLANG_FIELDS = {  # without an embedding in the file the target's is used; layer outputs are counted
    **dict(
        architectures=["LlamaForCausalLMEagle3"], fc_norm=True, norm_output=True, rope_theta=500000
    ),
    **dict(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, target_hidden_size=32),
}
LAYOUTS = {  # layout: config, config.json
    "official": (PLAIN, official(PLAIN)),
    "sglang": (
        replace(PLAIN, taps=(3, 5, 6), fc_norm="each", norm_output=True, rope_theta=5e5),
        official(PLAIN) | SGLANG_FIELDS,
    ),
    "eagle1": (FIRST, layer_fields(FIRST)),  # no `bias` field: it is true
    "eagle1, biases": (
        replace(FIRST, fc_bias=False, attention_bias=True),
        {**layer_fields(FIRST), "bias": False, "qkv_bias": True},
    ),
    # The first stage ignores both biases, and so does the engine.
    "griffin": (
        replace(FIRST, griffin=True),
        {**layer_fields(FIRST), "bias": False, "qkv_bias": True},
    ),
}


@pytest.mark.parametrize(
    "file", [("model.safetensors",), ("pytorch_model.bin", True), ("pytorch_model.bin", False)]
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read(tmp_path, name, file):
    (config, raw), layout = LAYOUTS[name], name.partition(",")[0]
    net = network(config)
    extras = {
        "verifier_lm_head.weight": torch.ones(3),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    tensors = dict(net.state_dict()) if layout in ("official", "sglang") else renamed(net)
    tensors |= extras if layout == "speculators" else {}
    checkpoint = read_checkpoint(
        write(tmp_path, {"architectures": ["LlamaForCausalLM"]} | raw, tensors, *file)
    )
    assert checkpoint.layout == layout and checkpoint.config == config
    assert_same(checkpoint.network(), net)
    if layout == "official":
        assert checkpoint.doubts == ()
    if layout == "sglang":
        assert set(checkpoint.doubts) == {
            "taps",
            "norm_output",
            "norm_before_residual",
            "rope_theta",
        }
    if layout == "speculators":
        assert named_target(tmp_path) == "owner/target"
    if layout == "griffin":
        assert tensors["layers.0.mlp.down_proj.weight"].shape == (64, 48)
        parts = (
            "fc. post_attention_layernorm. mlp.input_layernorm. mlp.up_proj. mlp.down_proj.".split()
        )
        fusion = {f"fc.{part}weight" for part in parts} | {"fc.fc.bias"}
        assert {name for name in tensors if name.startswith("fc.")} == fusion
        del tensors["fc.mlp.up_proj.weight"]
        assert "lacks fc.mlp.up_proj.weight" in refusal(write(tmp_path / "cut", raw, tensors))


def test_what_config_json_says_otherwise_or_leaves_out(tmp_path):
    config = replace(PLAIN, draft_vocab_size=64)
    net = network(config)
    weights = {
        name: value for name, value in net.state_dict().items() if name not in ("d2t", "t2d")
    }
    loaded = read_network(write(tmp_path, official(config), weights))
    assert_same(loaded, net)
    assert bool(loaded.t2d.all()) and not bool(loaded.d2t.any())
    net = network(PLAIN)
    for fields, theta in (
        ({}, 1e4),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_scaling": None}, 1e4),
    ):
        assert (
            read_network(
                write(tmp_path, official(PLAIN) | fields, net.state_dict())
            ).config.rope_theta
            == theta
        )
    raw = {
        **official(PLAIN),
        "truncated_vocab_size": 24,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": []},
    }
    del raw["draft_vocab_size"]
    assert read_network(write(tmp_path, raw, net.state_dict())).config == PLAIN
    four = replace(PLAIN, num_taps=4, fc_norm="joint")
    raw = {**official(four), "num_aux_hidden_states": 4, "eagle_config": {"norm_before_fc": True}}
    state = network(four).state_dict()
    assert read_network(write(tmp_path, raw, state)).config == four
    del state["input_norm.weight"]
    assert "lacks input_norm.weight" in refusal(write(tmp_path, raw, state))
    raw = speculators(
        PLAIN, eagle_aux_hidden_state_layer_ids=[1, 23, 44]
    )  # outputs of a 48-layer target
    with pytest.warns(UserWarning, match="look like layer outputs"):
        assert read_network(write(tmp_path, raw, renamed(net))).config.taps == (1, 23, 44)


def test_shards_and_bad_config_files(tmp_path):
    net = network(PLAIN)
    state = dict(net.state_dict())
    first = {name: state.pop(name) for name in ("fc.weight", "d2t")}
    write(tmp_path, official(PLAIN), first, "a.safetensors")
    write(tmp_path, official(PLAIN), state, "b.safetensors")
    index = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(state, "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(read_network(tmp_path), net)
    (tmp_path / "b.safetensors").unlink()
    assert "b.safetensors is missing" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "../secret.safetensors"}})
    )
    assert "lies outside" in refusal(tmp_path)
    write(tmp_path, {}, STATE)
    for text, words in (("{", "cannot be read as JSON"), ("[]", "should be an object, got []")):
        (tmp_path / "config.json").write_text(text)
        assert words in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "no config.json" in refusal(tmp_path)
    assert "no drafter folder" in refusal(tmp_path / "nowhere")


def test_save_and_read_again(tmp_path):
    for config in [
        PLAIN,
        replace(PLAIN, taps=(1, 4, 6), norm_before_residual=True, norm_output=True, rope_theta=3e4),
        replace(PLAIN, fc_norm="each", query_key_norm=True, attention_bias=True, head_dim=12),
        replace(PLAIN, fc_norm="joint", fc_bias=True, own_embedding=True, num_taps=2, taps=(2, 3)),
        replace(
            PLAIN, draft_vocab_size=64, generation=1, num_taps=1, fc_bias=True, attention_bias=True
        ),
        replace(PLAIN, generation=1, num_taps=1, fc_bias=True, griffin=True),
    ]:
        net = network(config)
        folder = save_drafter(net, tmp_path / "new" / "drafter", bos_token_id=3)
        assert sorted(path.name for path in folder.iterdir()) == [
            "config.json",
            "model.safetensors",
        ]
        assert json.loads((folder / "config.json").read_text())["bos_token_id"] == 3
        loaded = read_network(folder)
        assert loaded.config == config
        assert_same(loaded, net)
        half = save_drafter(net, tmp_path / "half", torch.bfloat16)
        stored = load_file(half / "model.safetensors")
        assert stored["fc.fc.weight" if config.griffin else "fc.weight"].dtype == torch.bfloat16
        if config.generation == 3:
            assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool


def test_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    folder = save_drafter(network(PLAIN), tmp_path / "drafter")
    before = (folder / "model.safetensors").read_bytes()

    def full_disk(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specdec.models.eagle_files.save_file", full_disk)
    pytest.raises(SpecdecError, save_drafter, network(PLAIN, seed=1), folder).match("No space left")
    assert (folder / "model.safetensors").read_bytes() == before
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_does_not_run(tmp_path, zipped):
    proof = tmp_path / "the-code-ran"
    folder = write(tmp_path / "drafter", official(PLAIN), {}, "pytorch_model.bin")
    payload = {"fc.weight": torch.zeros(2), "bomb": refusals.Bomb(proof)}
    torch.save(payload, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    message = refusal(folder)
    assert "pickle with code" in message and "safetensors" in message
    assert not proof.exists()
    torch.load(
        folder / "pytorch_model.bin", weights_only=False
    )  # the very file does run code when it is allowed to
    assert proof.exists()
    proof.unlink()
    # A bare pickle, without torch's container.
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(refusals.Bomb(proof), protocol=2))
    refusal(folder)
    assert not proof.exists()


STATE = dict(network(PLAIN).state_dict())
MOVED = torch.cat((STATE["d2t"][:-1], STATE["d2t"][-1:] + 64))
DEEPER = renamed(network(PLAIN)) | {"layers.1.mlp.up_proj.weight": torch.ones(2, 2)}
TAP_IDS = "eagle_aux_hidden_state_layer_ids"
LACKING = "norm.weight", "d2t", "midlayer.mlp.up_proj.weight", "t2d"
FOREIGN = {
    "Medusa": ["0.0.linear.weight", "0.1.weight"],
    "Hydra": ["hydra_mlp.0.1.linear.weight"],
    "not an EAGLE drafter": ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"],
}


def test_bad_weights_and_settings_get_one_sentence(tmp_path):
    for words, tensors, raw in [
        *(
            (f"lacks {name};", {k: v for k, v in STATE.items() if k != name}, {})
            for name in LACKING
        ),
        ("extra.weight", STATE | {"extra.weight": torch.ones(1)}, {}),
        ("lacks embed_tokens.weight", STATE, {"target_hidden_size": 32}),
        ("more than one drafter layer", DEEPER, speculators(PLAIN)),
        ("fc.weight has shape (32, 96)", STATE, {"hidden_size": 16}),
        ("lm_head.weight has shape (23, 32)", STATE | {"lm_head.weight": torch.ones(23, 32)}, {}),
        (
            "norm.weight holds values that are not finite",
            STATE | {"norm.weight": torch.full((32,), torch.nan)},
            {},
        ),
        ("quantised", STATE | {"lm_head.weight": torch.ones(24, 32, dtype=torch.int8)}, {}),
        ("ids instead of offsets", STATE | {"d2t": STATE["d2t"] + torch.arange(24)}, {}),
        ("vocabulary map", STATE | {"d2t": MOVED}, {}),
        ("t2d marks", STATE | {"t2d": ~STATE["t2d"]}, {}),
        *(
            (family, {name: torch.ones(2, 2) for name in names}, {})
            for family, names in FOREIGN.items()
        ),
        ("no draft_vocab_size", STATE, {"draft_vocab_size": None}),
        ("hidden_size", STATE, {"hidden_size": "32"}),
        ("num_attention_heads", STATE, {"num_attention_heads": 0}),
        ("'gelu'", STATE, {"hidden_act": "gelu"}),
        ("rope_scaling", STATE, {"rope_scaling": [1]}),
        *(
            (repr(kind), STATE, {"rope_scaling": {"type": kind}})
            for kind in ("linear", "dynamic", "llama3", "yarn")
        ),
        ("exceeds vocab_size", STATE, {"draft_vocab_size": 65}),
        ("Medusa", STATE, {"medusa_num_heads": 3}),
        ("last hidden state", STATE, {"eagle_config": {"use_aux_hidden_state": False}}),
        (f"{TAP_IDS}: should be a valid array", STATE, {TAP_IDS: "2,4"}),
        ("'mlp'", STATE, {"speculators_model_type": "mlp"}),
        (
            "must say norm_before_residual",
            renamed(network(PLAIN)),
            speculators(PLAIN, norm_before_residual=None),
        ),
        ("lacks fc_norm.0.weight", STATE, {"fc_norm": True}),
    ]:
        assert words in refusal(write(tmp_path, official(PLAIN) | raw, tensors))


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_files(tmp_path, file):
    path = write(tmp_path, official(PLAIN), STATE, file) / file
    whole = path.read_bytes()
    for damaged in (
        whole[: len(whole) // 2],
        whole[:5],
        b"",
        b"\xff" * 4000,
        whole[:-1] if "safe" in file else b"x",
    ):
        path.write_bytes(damaged)
        assert "truncated or corrupt" in refusal(tmp_path)
    path.unlink()
    assert "no weights" in refusal(tmp_path)
    torch.save([torch.ones(2)], tmp_path / "pytorch_model.bin")
    assert "plain table of tensors" in refusal(tmp_path)


@needs_golden
@pytest.mark.parametrize(
    "name", ["drafter", "variants/full_vocab", "variants/narrow_hidden", "variants/rope_theta_500k"]
)
def test_golden_files(tmp_path, name):
    folder = GOLDEN / name
    checkpoint = read_checkpoint(folder)
    net = checkpoint.network()
    assert checkpoint.layout == "official"
    assert net.config.rope_theta == (500000.0 if "500k" in name else 10000.0)
    assert net.config.own_embedding == ("narrow" in name) and net.config.target_hidden_size == 64
    for file in ("config.json", "pytorch_model.bin"):
        shutil.copy(folder / file, tmp_path)
    assert_same(read_network(tmp_path), net)  # both formats hold the same
