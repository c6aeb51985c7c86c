"""Drafters for serving engines: the names and shapes their loaders ask for, the same drafter read back, flags, refusals."""

import json
import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import gguf
import pytest
import torch
from fakes.gguf_files import write_tokens
from fakes.pairs import random_network
from safetensors.torch import load_file
from transformers import LlamaConfig

from specdec.core.decode import decode
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.models import gguf_file
from specdec.models.eagle_files import read_checkpoint, save_drafter
from specdec.models.eagle_drafter import EagleDrafter
from specdec.models.eagle_export import (
    ENGINES,
    UNSUPPORTED,
    ServedTarget,
    export,
    read_gguf,
    serve_command,
)
from specdec.models.eagle_network import EagleConfig
from specdec.models.load import load_pair, shipped_folder

# What the engines' loaders hold for a drafter of one layer, once a file's names have been put into theirs.
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
LAYER = "self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj".split()
LAYER += "input_layernorm post_attention_layernorm hidden_norm".split()
MODEL = {f"model.layers.0.{name}.weight" for name in LAYER} | {
    "model.fc.weight",
    "model.norm.weight",
}
VLLM = MODEL | {"lm_head.weight", "draft_id_to_target_id"}
SGLANG = MODEL | {"lm_head.weight", "hot_token_id"}
SMALL = EagleConfig(64, 96, 4, 2, 100, 40, 64, head_dim=16, taps=(2, 4, 5))


def gguf_with(tokens: int, folder):
    return write_tokens(folder / "target.gguf", tokens)


def drafter_in(folder, config: EagleConfig = SMALL):
    return save_drafter(random_network(config), folder, torch.bfloat16)


def target_of(config: EagleConfig, gguf_file=None) -> ServedTarget:
    fields = dict(
        hidden_size=config.target_hidden_size, num_hidden_layers=8, vocab_size=config.vocab_size
    )
    return ServedTarget(
        "org/model", SimpleNamespace(**fields, architectures=["SomeForCausalLM"]), gguf_file
    )


def fused(name: str) -> str:
    """A file's name as vLLM's and SGLang's tables of stacked parameters turn it."""
    name = re.sub("^midlayer", "layers.0", name)
    part = name.split(".")[-2]
    name = name.replace(part, FUSED.get(part, part))
    return name if name.startswith("lm_head") else f"model.{name}"


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_written_drafts_the_same(engine, tiny, tmp_path):
    served = ServedTarget(
        "org/tiny", tiny.target.config, gguf_with(tiny.target.vocab_size, tmp_path)
    )
    export(shipped_folder("tiny") / "drafter", engine, tmp_path, served, TreeConfig(5, 3, 1))
    if engine == "llama.cpp":
        again = EagleDrafter(read_gguf(tmp_path / "drafter.gguf").float(), tiny.target)
    else:
        again = load_pair(
            target=shipped_folder("tiny") / "target", drafter=tmp_path, dtype="float32"
        ).drafter
    assert again.taps == tiny.drafter.taps
    features = torch.randn(
        5, tiny.drafter.network.config.feature_size, generator=torch.Generator().manual_seed(1)
    )
    ours, theirs = tiny.drafter.network, again.network
    assert torch.equal(ours.head(ours.fuse(features)), theirs.head(theirs.fuse(features)))
    out = decode(tiny, "What is 2 + 3?", Static(8, 3, 3), 24)
    other = decode(replace(tiny, drafter=again), "What is 2 + 3?", Static(8, 3, 3), 24)
    assert [row.accepted_tok for row in out.rows] == [row.accepted_tok for row in other.rows]
    assert sum(row.accepted_tok for row in out.rows) > 0


def test_vllm_and_sglang_find_every_name_query_rows_are_interleaved_and_flags_those_of_the_tree(
    tmp_path,
):
    export(drafter_in(tmp_path / "d"), "vllm", tmp_path / "o", target_of(SMALL))
    names = set(load_file(tmp_path / "o" / "model.safetensors")) - {"t2d"}
    assert {"draft_id_to_target_id" if name == "d2t" else fused(name) for name in names} == VLLM
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    method = config["speculators_config"]["proposal_methods"][0]
    assert (
        method["speculative_tokens"] == 3
        and config["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    )
    assert config["speculators_model_type"] == "eagle3" and config[
        "eagle_aux_hidden_state_layer_ids"
    ] == [2, 4, 5]
    layer = LlamaConfig(**config["transformer_layer_config"])
    assert (layer.hidden_size, layer.head_dim, layer.num_hidden_layers) == (64, 16, 1)
    assert layer.rope_parameters["rope_theta"] == 10000.0
    export(drafter_in(tmp_path / "d"), "sglang", tmp_path / "o", target_of(SMALL))
    names = set(load_file(tmp_path / "o" / "model.safetensors")) - {"t2d"}
    assert {"hot_token_id" if name == "d2t" else fused(name) for name in names} == SGLANG
    config = json.loads((tmp_path / "o" / "config.json").read_text())
    assert (
        config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 40
    )
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4], (
        "it adds one to each"
    )
    assert not config["tie_word_embeddings"]
    rows = torch.arange(64.0)[:, None].expand(64, 3)
    there = gguf_file.interleaved("midlayer.self_attn.q_proj.weight", rows, SMALL)
    assert there[:4, 0].tolist() == [0, 8, 1, 9] and there[16, 0] == 16
    assert torch.equal(gguf_file.interleaved("x.q_proj.weight", there, SMALL, back=True), rows)
    target, out = target_of(SMALL, tmp_path / "t.gguf"), tmp_path / "o"
    words = shlex.split(serve_command("vllm", out, target, TreeConfig(6, 4, 1)))
    wanted = {"method": "eagle3", "model": str(out), "num_speculative_tokens": 5}
    assert words[:3] == ["vllm", "serve", "org/model"] and json.loads(words[4]) == wanted
    assert "--spec-draft-n-max 5" in serve_command("llama.cpp", out, target, TreeConfig(6, 4, 1))
    words = serve_command("sglang", out, target, TreeConfig(60, 7, 10))
    assert "num-steps 8 --speculative-eagle-topk 10 --speculative-num-draft-tokens 60" in words


@pytest.mark.parametrize("fc_norm", [None, "joint"])
def test_llama_cpp_finds_every_name_and_shape(fc_norm, tmp_path):
    config = replace(
        SMALL, fc_norm=fc_norm, norm_before_residual=True, rms_norm_eps=1e-6, rope_theta=5e5
    )
    target = target_of(config, gguf_with(100, tmp_path))
    export(drafter_in(tmp_path / "d", config), "llama.cpp", tmp_path / "o", target)
    reader = gguf.GGUFReader(tmp_path / "o" / "drafter.gguf")
    block = {
        "attn_norm": [64],
        "attn_norm_2": [64],
        "attn_q": [128, 64],
        "attn_k": [128, 32],
        "attn_v": [128, 32],
    }
    block |= {
        "attn_output": [64, 64],
        "ffn_norm": [64],
        "ffn_gate": [64, 96],
        "ffn_up": [64, 96],
        "ffn_down": [96, 64],
    }
    asked = {f"blk.0.{name}.weight": shape for name, shape in block.items()}
    asked |= {
        "fc.weight": [192, 64],
        "output_norm.weight": [64],
        "output.weight": [64, 40],
        "d2t": [40],
    }
    asked |= {"enc.output_norm.weight": [192]} if fc_norm else {}
    assert {tensor.name: tensor.shape.tolist() for tensor in reader.tensors} == asked
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert (
        kinds["d2t"] == "I64"
        and kinds["output_norm.weight"] == "F32"
        and kinds["fc.weight"] == "BF16"
    )
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "eagle3" and fields["eagle3.target_layers"] == [
        2,
        4,
        5,
    ]
    assert fields["eagle3.norm_before_residual"] is True and fields["eagle3.norm_before_fc"] is (
        fc_norm == "joint"
    )
    names = ("head_count", "head_count_kv", "key_length", "value_length")
    assert [fields[f"eagle3.attention.{name}"] for name in names] == [4, 2, 16, 16]
    assert len(fields["tokenizer.ggml.tokens"]) == 100 and fields["tokenizer.ggml.pre"] == "smollm"
    ids = next(tensor for tensor in reader.tensors if tensor.name == "d2t").data
    network = read_checkpoint(tmp_path / "d").network()
    assert network.t2d[torch.tensor(ids)].all(), "ids of the target, not offsets"


def test_what_a_loader_has_no_name_for_and_cannot_draft_is_refused(tmp_path, monkeypatch):
    for engine, field in [(one, field) for one in ENGINES for field in UNSUPPORTED[one]]:
        config = replace(SMALL, **{field: UNSUPPORTED[engine][field][0]})
        given = (
            drafter_in(tmp_path / "d", config),
            engine,
            tmp_path / "o",
            target_of(config, gguf_with(100, tmp_path)),
        )
        pytest.raises(SpecdecError, export, *given).match("cannot load this drafter")
        assert not (tmp_path / "o").exists()
    folder, target = drafter_in(tmp_path / "d"), target_of(SMALL)
    wide = replace(
        target, config=SimpleNamespace(hidden_size=96, num_hidden_layers=8, vocab_size=100)
    )
    for (engine, served, *tree), words in (
        (("vlm", target), "unknown engine 'vlm'; did you mean 'vllm'"),
        (("llama.cpp", target), "name the target's file with --gguf"),
        (
            ("llama.cpp", replace(target, gguf=gguf_with(90, tmp_path))),
            "knows 90 tokens and the drafter 100",
        ),
        (("vllm", wide), "the target's hidden size is 96"),
        (
            ("vllm", target, TreeConfig(8, 3, 3)),
            "drafts chains; give a tree of one child per node, such as 5,3,1",
        ),
        (("sglang", target, TreeConfig(8, 5, 3, beam=(2, 1))), "leave the beam"),
        (("sglang", target, TreeConfig(3, 3, 1)), "a chain of depth 3 has 5 tokens"),
    ):
        pytest.raises(SpecdecError, export, folder, engine, tmp_path / "o", served, *tree).match(
            words
        )
    one = replace(SMALL, generation=1, num_taps=1, taps=(8,), draft_vocab_size=100)
    with pytest.raises(SpecdecError, match="only EAGLE-3 is exported"):
        export(drafter_in(tmp_path / "one", one), "vllm", tmp_path / "o", target)
    monkeypatch.setattr(
        gguf_file,
        "interleaved",
        lambda name, value, config, back=False: value.flip(0) if back else value,
    )
    with pytest.raises(SpecdecError, match="reads back otherwise"):
        export(
            drafter_in(tmp_path / "d"),
            "llama.cpp",
            tmp_path / "o",
            target_of(SMALL, gguf_with(100, tmp_path)),
        )
