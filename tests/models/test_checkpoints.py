"""Reading EAGLE checkpoints: every layout gives the same network, every bad file gives one clear sentence."""

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import refusals
from fakes.pairs import layer_fields
from fakes.refusals import Bomb
from safetensors.torch import load_file, save_file

from specdec.errors import SpecdecError
from specdec.models.eagle.checkpoints import named_target, read_checkpoint, save_drafter
from specdec.models.eagle.network import EagleConfig, EagleNetwork, network_of

SHARED = Path(os.environ.get("SPECDEC_SHARED", Path(__file__).resolve().parents[3] / "shared"))
GOLDEN = SHARED / "golden"
PLAIN = EagleConfig(32, 48, 4, 2, 64, 24, 32)


def network(config: EagleConfig = PLAIN, seed: int = 0) -> EagleNetwork:
    """Random weights everywhere, norms included, and a scattered draft vocabulary."""
    torch.manual_seed(seed)
    net = network_of(config)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if config.generation == 3 or config.is_reduced:
        chosen = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        net.d2t.copy_(chosen - torch.arange(len(chosen)))
        net.t2d.zero_()[chosen] = True
    return net.requires_grad_(False)


def outputs(net: EagleNetwork) -> list[torch.Tensor]:
    """Everything a reading can change: the fused state, one layer without attention, what is fed back, the logits."""
    config = net.config
    generator = torch.Generator().manual_seed(7)
    width = config.feature_size if config.generation == 3 else config.hidden_size
    features = torch.randn(5, width, generator=generator)
    embedded = torch.randn(5, config.hidden_size, generator=generator)
    fused = net.fuse(features)
    x, residual = net.attention_input(embedded, fused)
    queries, keys, values = net.project(x)
    hidden = net.finish(queries.flatten(1), residual)
    fed_back = net.feed_back(hidden)
    results = [fused, x, queries, keys, values, hidden, fed_back]
    return [*results, net.head(hidden)] if config.generation == 3 else results


def assert_same(left: EagleNetwork, right: EagleNetwork) -> None:
    for name, value in left.state_dict().items():
        assert torch.equal(value, right.state_dict()[name]), name
    for a, b in zip(outputs(left), outputs(right), strict=True):
        assert torch.equal(a, b)


def write(folder: Path, raw: dict, tensors: dict, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {key: value.contiguous().clone() for key, value in tensors.items()}
    torch.save(tensors, folder / name) if name.endswith(".bin") else save_file(tensors, folder / name)
    return folder


def official(config: EagleConfig) -> dict:
    return {"architectures": ["LlamaForCausalLM"], **layer_fields(config), "draft_vocab_size": config.draft_vocab_size}


def speculators(config: EagleConfig, **fields) -> dict:
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "transformer_layer_config": {"model_type": "llama", **layer_fields(config)},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "owner/target"}},
        **fields,
    }


def renamed(net: EagleNetwork) -> dict:
    return {name.replace("midlayer.", "layers.0."): value for name, value in net.state_dict().items()}


def read_network(folder: Path) -> EagleNetwork:
    return read_checkpoint(folder).network()


def refusal(folder: Path) -> str:
    sentence = refusals.refusal(read_network, folder)
    assert sentence.endswith(".")
    return sentence


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_official(tmp_path, name):
    net = network()
    checkpoint = read_checkpoint(write(tmp_path, official(PLAIN), net.state_dict(), name))
    assert checkpoint.layout == "official" and checkpoint.doubts == ()
    assert checkpoint.config == PLAIN
    assert_same(checkpoint.network(), net)


def test_old_pickle_format(tmp_path):
    net = network()
    write(tmp_path, official(PLAIN), {})
    (tmp_path / "model.safetensors").unlink()
    torch.save(dict(net.state_dict()), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_same(read_network(tmp_path), net)


def test_sglang_counts_layer_outputs(tmp_path):
    config = replace(PLAIN, taps=(3, 5, 6), fc_norm="each", norm_output=True, rope_theta=5e5)
    net = network(config)
    raw = {**official(config), "architectures": ["LlamaForCausalLMEagle3"], "fc_norm": True, "norm_output": True}
    raw |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, "rope_theta": 500000}
    raw |= {"target_hidden_size": 32}  # without an embedding in the file the target's is used
    checkpoint = read_checkpoint(write(tmp_path, raw, net.state_dict()))
    assert checkpoint.layout == "sglang" and checkpoint.config == config
    assert set(checkpoint.doubts) == {"taps", "norm_output", "norm_before_residual", "rope_theta"}
    assert_same(checkpoint.network(), net)


@pytest.mark.parametrize("fc_norm", ["each", "joint"])
def test_speculators_with_every_switch(tmp_path, fc_norm):
    config = replace(
        PLAIN,
        taps=(2, 4, 5),
        norm_before_residual=True,
        norm_output=True,
        attention_bias=True,
        query_key_norm=True,
        fc_norm=fc_norm,
        own_embedding=True,
        head_dim=16,
        rope_theta=1e6,
        target_hidden_size=40,
    )
    net = network(config)
    layer = {**layer_fields(config), "model_type": "qwen3", "attention_bias": True, "head_dim": 16}
    layer |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    raw = speculators(
        config, transformer_layer_config=layer, norm_output=True, target_hidden_size=40, norm_before_fc=True
    )
    raw |= {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    extras = {"verifier_lm_head.weight": torch.ones(3), "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    checkpoint = read_checkpoint(write(tmp_path, raw, renamed(net) | extras))
    assert checkpoint.layout == "speculators" and named_target(tmp_path) == "owner/target"
    assert checkpoint.config == config
    assert_same(checkpoint.network(), net)


def test_eagle1(tmp_path):
    config = replace(PLAIN, draft_vocab_size=64, generation=1, num_taps=1, fc_bias=True)
    net = network(config)
    raw = {"architectures": ["LlamaForCausalLM"], **layer_fields(config)}  # no `bias` field: it is true
    checkpoint = read_checkpoint(write(tmp_path, raw, renamed(net)))
    assert checkpoint.layout == "eagle1" and checkpoint.config == config
    assert_same(checkpoint.network(), net)
    config = replace(config, fc_bias=False, attention_bias=True)
    net = network(config)
    folder = write(tmp_path, {**raw, "bias": False, "qkv_bias": True}, renamed(net))
    assert_same(read_network(folder), net)


def test_griffin(tmp_path):
    config = replace(PLAIN, draft_vocab_size=64, generation=1, num_taps=1, fc_bias=True, griffin=True)
    net = network(config)
    raw = {"architectures": ["LlamaForCausalLM"], **layer_fields(config), "bias": False, "qkv_bias": True}
    tensors = renamed(net)
    assert tensors["layers.0.mlp.down_proj.weight"].shape == (64, 48)
    parts = "fc.weight fc.bias post_attention_layernorm.weight mlp.input_layernorm.weight mlp.up_proj.weight".split()
    assert {name.removeprefix("fc.") for name in tensors if name.startswith("fc.")} == {*parts, "mlp.down_proj.weight"}
    checkpoint = read_checkpoint(
        write(tmp_path, raw, tensors)
    )  # the first stage ignores qkv_bias, and so does the engine
    assert checkpoint.layout == "griffin" and checkpoint.config == config
    assert_same(checkpoint.network(), net)
    del tensors["fc.mlp.up_proj.weight"]
    with pytest.raises(SpecdecError, match=r"lacks fc\.mlp\.up_proj\.weight"):
        read_network(write(tmp_path / "cut", raw, tensors))


def test_full_vocabulary_needs_no_map(tmp_path):
    config = replace(PLAIN, draft_vocab_size=64)
    net = network(config)
    weights = {name: value for name, value in net.state_dict().items() if name not in ("d2t", "t2d")}
    loaded = read_network(write(tmp_path, official(config), weights))
    assert_same(loaded, net)
    assert bool(loaded.t2d.all()) and not bool(loaded.d2t.any())


def test_rope_base_is_its_own(tmp_path):
    net = network()
    for fields, theta in (
        ({}, 1e4),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
        ({"rope_scaling": None}, 1e4),
    ):
        assert read_network(write(tmp_path, official(PLAIN) | fields, net.state_dict())).config.rope_theta == theta
    for kind in ("linear", "dynamic", "llama3", "yarn"):
        write(tmp_path, official(PLAIN) | {"rope_scaling": {"type": kind, "factor": 2.0}}, net.state_dict())
        assert repr(kind) in refusal(tmp_path)


def test_fields_that_writers_name_differently(tmp_path):
    net = network()
    raw = {**official(PLAIN), "truncated_vocab_size": 24, "eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}
    del raw["draft_vocab_size"]
    assert read_network(write(tmp_path, raw, net.state_dict())).config == PLAIN
    four = replace(PLAIN, num_taps=4, fc_norm="joint")
    raw = {**official(four), "num_aux_hidden_states": 4, "eagle_config": {"norm_before_fc": True}}
    state = network(four).state_dict()
    assert read_network(write(tmp_path, raw, state)).config == four
    del state["input_norm.weight"]
    assert "lacks input_norm.weight" in refusal(write(tmp_path, raw, state))
    raw = official(PLAIN) | {"fc_norm": True}
    assert "lacks fc_norm.0.weight" in refusal(write(tmp_path, raw, net.state_dict()))


def test_suspicious_tap_ids_warn(tmp_path):
    net = network()
    raw = speculators(PLAIN, eagle_aux_hidden_state_layer_ids=[1, 23, 44])  # outputs of a 48-layer target
    with pytest.warns(UserWarning, match="look like layer outputs"):
        assert read_network(write(tmp_path, raw, renamed(net))).config.taps == (1, 23, 44)


def test_shards(tmp_path):
    net = network()
    state = dict(net.state_dict())
    first = {name: state.pop(name) for name in ("fc.weight", "d2t")}
    write(tmp_path, official(PLAIN), first, "a.safetensors")
    write(tmp_path, official(PLAIN), state, "b.safetensors")
    index = dict.fromkeys(first, "a.safetensors") | dict.fromkeys(state, "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(read_network(tmp_path), net)
    (tmp_path / "b.safetensors").unlink()
    assert "b.safetensors is missing" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    assert "lies outside" in refusal(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        replace(PLAIN, taps=(1, 4, 6), norm_before_residual=True, norm_output=True, rope_theta=3e4),
        replace(PLAIN, fc_norm="each", query_key_norm=True, attention_bias=True, head_dim=12),
        replace(
            PLAIN, fc_norm="joint", fc_bias=True, own_embedding=True, target_hidden_size=48, num_taps=2, taps=(2, 3)
        ),
        replace(PLAIN, draft_vocab_size=64, generation=1, num_taps=1, fc_bias=True, attention_bias=True),
        replace(PLAIN, generation=1, num_taps=1, fc_bias=True, griffin=True),
    ],
)
def test_save_and_read_again(tmp_path, config):
    net = network(config)
    folder = save_drafter(net, tmp_path / "new" / "drafter", bos_token_id=3)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
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
    folder = save_drafter(network(), tmp_path / "drafter")
    before = (folder / "model.safetensors").read_bytes()

    def full_disk(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(SpecdecError, match="No space left"):
        save_drafter(network(seed=1), folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_does_not_run(tmp_path, zipped):
    proof = tmp_path / "the-code-ran"
    folder = write(tmp_path / "drafter", official(PLAIN), {}, "pytorch_model.bin")
    payload = {"fc.weight": torch.zeros(2), "bomb": Bomb(proof)}
    torch.save(payload, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    message = refusal(folder)
    assert "pickle with code" in message and "safetensors" in message
    assert not proof.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)  # the very file does run code when it is allowed to
    assert proof.exists()
    proof.unlink()
    (folder / "pytorch_model.bin").write_bytes(
        pickle.dumps(Bomb(proof), protocol=2)
    )  # a bare pickle, without torch's container
    refusal(folder)
    assert not proof.exists()


def test_missing_and_left_over_weights(tmp_path):
    state = dict(network().state_dict())
    for name in ("norm.weight", "d2t", "midlayer.mlp.up_proj.weight", "t2d"):
        fewer = {key: value for key, value in state.items() if key != name}
        assert f"lacks {name};" in refusal(write(tmp_path, official(PLAIN), fewer))
    assert "extra.weight" in refusal(write(tmp_path, official(PLAIN), state | {"extra.weight": torch.ones(1)}))
    assert "lacks embed_tokens.weight" in refusal(write(tmp_path, official(PLAIN) | {"target_hidden_size": 32}, state))
    deeper = renamed(network()) | {"layers.1.mlp.up_proj.weight": torch.ones(2, 2)}
    assert "more than one drafter layer" in refusal(write(tmp_path, speculators(PLAIN), deeper))


def test_weights_that_do_not_fit(tmp_path):
    state = dict(network().state_dict())
    assert "fc.weight has shape (32, 96)" in refusal(write(tmp_path, official(PLAIN) | {"hidden_size": 16}, state))
    wrong = state | {"lm_head.weight": torch.ones(23, 32)}
    assert "lm_head.weight has shape (23, 32)" in refusal(write(tmp_path, official(PLAIN), wrong))
    wrong = state | {"norm.weight": torch.full((32,), float("nan"))}
    assert "norm.weight holds values that are not finite" in refusal(write(tmp_path, official(PLAIN), wrong))
    wrong = state | {"lm_head.weight": torch.ones(24, 32, dtype=torch.int8)}
    assert "quantised" in refusal(write(tmp_path, official(PLAIN), wrong))


def test_vocabulary_map_is_checked(tmp_path):
    state = dict(network().state_dict())
    ids = state["d2t"] + torch.arange(24)
    assert "ids instead of offsets" in refusal(write(tmp_path, official(PLAIN), state | {"d2t": ids}))
    moved = state["d2t"].clone()
    moved[-1] += 64
    assert "vocabulary map" in refusal(write(tmp_path, official(PLAIN), state | {"d2t": moved}))
    assert "t2d marks" in refusal(write(tmp_path, official(PLAIN), state | {"t2d": ~state["t2d"]}))


def test_config_sentences(tmp_path):
    state = network().state_dict()
    write(tmp_path, official(PLAIN), state)
    for raw, words in (
        ({"draft_vocab_size": None}, "no draft_vocab_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"draft_vocab_size": 65}, "exceeds vocab_size"),
        ({"medusa_num_heads": 3}, "Medusa"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "last hidden state"),
        ({"eagle_aux_hidden_state_layer_ids": "2,4"}, "eagle_aux_hidden_state_layer_ids: should be a valid array"),
        ({"speculators_model_type": "mlp"}, "'mlp'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(official(PLAIN) | raw))
        assert words in refusal(tmp_path)
    raw = speculators(PLAIN)
    del raw["norm_before_residual"]
    assert "must say norm_before_residual" in refusal(write(tmp_path, raw, renamed(network())))
    for text, words in (("{", "cannot be read as JSON"), ("[]", "should be an object, got []")):
        (tmp_path / "config.json").write_text(text)
        assert words in refusal(tmp_path)
    (tmp_path / "config.json").unlink()
    assert "no config.json" in refusal(tmp_path)
    assert "no drafter folder" in refusal(tmp_path / "nowhere")


def test_damaged_files(tmp_path):
    folder = write(tmp_path, official(PLAIN), network().state_dict())
    whole = (folder / "model.safetensors").read_bytes()
    for damaged in (whole[:-1], whole[:1000], whole[:5], b"", b"\xff" * 4000):
        (folder / "model.safetensors").write_bytes(damaged)
        assert "truncated or corrupt" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)
    write(tmp_path, official(PLAIN), network().state_dict(), "pytorch_model.bin")
    whole = (folder / "pytorch_model.bin").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 4000):
        (folder / "pytorch_model.bin").write_bytes(damaged)
        assert "truncated or corrupt" in refusal(folder)
    torch.save([torch.ones(2)], folder / "pytorch_model.bin")
    assert "plain table of tensors" in refusal(folder)


@pytest.mark.parametrize(
    ("names", "family"),
    [
        (["0.0.linear.weight", "0.1.weight"], "Medusa"),
        (["hydra_mlp.0.1.linear.weight"], "Hydra"),
        (["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"], "not an EAGLE drafter"),
    ],
)
def test_other_families_are_named(tmp_path, names, family):
    assert family in refusal(write(tmp_path, official(PLAIN), {name: torch.ones(2, 2) for name in names}))


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden vectors beside the checkout")
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
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shutil.copy(folder / "pytorch_model.bin", tmp_path)
    assert_same(read_network(tmp_path), net)  # both formats hold the same
