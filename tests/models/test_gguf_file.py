"""GGUF files become transformers folders with the same logits; whatever else a file holds is refused in one sentence."""

import json
import os
import resource
import shutil
import struct
import sys

import gguf
import numpy as np
import pytest
import torch
from fakes.gguf_files import TOKENS, llama, nothing_is_left, write_gguf
from fakes.refusals import refusal
from safetensors.torch import load_file

from specdec import machine
from specdec.models import gguf_file
from specdec.models.load import load_pair

MESSAGES = [{"role": "user", "content": "the 1200"}]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """(path, the weights inside) of a model in the three quantisations of the real file."""
    path = tmp_path_factory.mktemp("gguf") / "Tiny-Llama.gguf"
    return path, write_gguf(path, llama())


def test_the_folder_gives_the_files_logits_settings_ends_and_tokenizer(file, tmp_path):
    path, kept = file
    pair = load_pair(target=path)
    model = llama()
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(
        {name: value.bfloat16().float() for name, value in kept.items()}, strict=False
    )
    assert not torch.equal(
        model.model.layers[0].mlp.up_proj.weight, fresh["model.layers.0.mlp.up_proj.weight"]
    )
    ids = torch.randint(len(TOKENS), (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, logits = model(ids).logits, pair.target.model(ids).logits
        unlike = llama()(ids).logits
    assert torch.equal(logits, expected) and (logits - unlike).abs().max() > 0.01
    pair = load_pair(target=file[0])
    config, own = pair.target.config, llama().config
    for name in "hidden_size intermediate_size num_hidden_layers num_key_value_heads vocab_size head_dim".split():
        assert getattr(config, name) == getattr(own, name)
    assert config.rope_parameters == own.rope_parameters and config.rms_norm_eps == pytest.approx(
        own.rms_norm_eps
    )
    assert config.tie_word_embeddings and pair.target.position_limit == 128
    assert pair.stop_tokens == {2} and pair.drafter is None and pair.name.startswith("tiny-llama-")
    words = [TOKENS[number] for number in pair.ids_of("the the 1200", raw=True)]
    assert words == [
        "the",
        "Ġthe",
        "Ġ",
        "1",
        "2",
        "0",
        "0",
    ]  # never "12", although there is such a token
    words = [TOKENS[number] for number in pair.ids_of(MESSAGES)]
    assert (
        words[:2] == ["<|im_start|>", "u"]
        and words[-2:] == ["t", "Ċ"]
        and words.count("<|im_start|>") == 2
    )
    assert pair.text_of(pair.ids_of(MESSAGES)) == "user\nthe 1200\nassistant\n"
    write_gguf(tmp_path / "model.gguf", llama(), fields={"tokenizer.ggml.pre": "gpt-2"})
    ids = load_pair(target=tmp_path / "model.gguf").ids_of("1200", raw=True)
    assert [TOKENS[number] for number in ids] == ["12", "0", "0"]


@pytest.mark.parametrize("kind", "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0".split())
def test_every_quantisation_is_read(tmp_path, kind):
    model = llama(tied=False)
    kept = write_gguf(tmp_path / "model.gguf", model, matrices=kind, embedding=kind)
    folder = gguf_file.unpack(tmp_path / "model.gguf", tmp_path / "folder")
    unpacked = load_file(folder / "model.safetensors")
    assert unpacked.keys() == kept.keys() == model.state_dict().keys()
    for name, weight in unpacked.items():
        assert torch.equal(weight, kept[name].bfloat16()), name
        steps = {"Q4": 16, "Q5": 32}.get(
            kind[:2], 256
        )  # of a quantised weight between its smallest and its largest
        assert (weight.float() - model.state_dict()[name]).abs().max() < 8 / steps, name


@pytest.mark.parametrize("name", gguf_file.TYPES)
def test_every_type_that_is_promised_is_known_to_the_library(name):
    kind = gguf.GGMLQuantizationType[name]
    size = gguf.quant_shape_to_byte_shape((3, 256), kind)
    assert gguf.dequantize(np.ones(size, np.uint8), kind).shape == (3, 256)


def test_a_file_is_unpacked_once(file, cache, monkeypatch):
    path, _ = file
    folder = gguf_file.unpack_once(path)
    assert folder.parent == cache / "models" and machine.file_hash(path)[:12] in folder.name
    with monkeypatch.context() as patch:
        patch.setattr(gguf_file, "read", None)  # whoever reads again fails
        assert gguf_file.unpack_once(path) == folder
        patch.setattr(gguf_file, "UNPACKING", gguf_file.UNPACKING + 1)
        pytest.raises(TypeError, gguf_file.unpack_once, path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "delete it to have it unpacked again" in refusal(load_pair, target=path)
    shutil.rmtree(weights.parent)
    assert load_pair(target=path).target.num_layers == 8


def test_files_that_are_cut_short_or_others(file, tmp_path, cache):
    path, _ = file
    content = path.read_bytes()
    for size in [
        0,
        3,
        4,
        20,
        23,
        24,
        200,
        *range(1000, len(content) - 32, 4999),
        len(content) - 33,
    ]:
        short = tmp_path / "short.gguf"
        short.write_bytes(content[:size])
        sentence = refusal(load_pair, target=short)
        assert (
            "cut short, damaged or another kind of file" in sentence or "is supported" in sentence
        ), size
    assert nothing_is_left(cache)
    for content in (
        b"no model",
        b"PK\x03\x04" + bytes(500),
        struct.pack("<II", 0x46554747, 99) + bytes(500),
    ):
        (tmp_path / "other.gguf").write_bytes(content)
        assert "cannot be read as GGUF" in refusal(load_pair, target=tmp_path / "other.gguf")
    assert "there is no file" in refusal(load_pair, target=tmp_path / "none.gguf")
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    (
        writer.write_header_to_file(),
        writer.write_kv_data_to_file(),
        writer.write_tensors_to_file(),
        writer.close(),
    )
    assert "other byte order" in refusal(load_pair, target=tmp_path / "big.gguf")


def test_foreign_models_are_refused_and_a_foreign_tokenizer_is_left_out_with_a_warning(
    tmp_path, cache
):
    for changes, words in [
        (dict(arch="qwen3"), "is of the architecture 'qwen3'"),
        (dict(fields={"llama.rope.scaling.type": "yarn"}), "holds llama.rope.scaling.type"),
        (dict(fields={"llama.expert_count": 8}), "holds llama.expert_count"),
        (dict(fields={"llama.block_count": None}), "lacks the field llama.block_count"),
        (dict(fields={"llama.rope.dimension_count": 8}), "heads of several sizes"),
        (dict(without=["blk.1.ffn_up.weight"]), "lacks blk.1.ffn_up.weight"),
        (dict(without=["token_embd.weight"]), "lacks token_embd.weight"),
        (
            dict(fields={"llama.feed_forward_length": 128}),
            "lacks blk.0.ffn_gate.weight of the shape [128, 64]",
        ),
        (dict(fields={"llama.block_count": 7}), "holds blk.7.attn_k.weight"),
        (dict(more={"rope_freqs.weight": np.ones(8, np.float32)}), "holds rope_freqs.weight"),
        (dict(more={"blk.0.attn_q.bias": np.ones(64, np.float32)}), "holds blk.0.attn_q.bias"),
        (dict(more={"extra.weight": np.ones(8, np.float64)}), "holds F64"),
    ]:
        write_gguf(tmp_path / "foreign.gguf", llama(), **changes)
        sentence = refusal(load_pair, target=tmp_path / "foreign.gguf")
        assert words in sentence and ("Llama models" in sentence and "Q4_1" in sentence)
        assert nothing_is_left(cache)
    for fields in [
        {"pre": "llama-bpe"},
        {"model": "llama"},
        {"add_bos_token": True},
        {"model": None},
    ]:
        fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
        write_gguf(tmp_path / "model.gguf", llama(), fields=fields)
        with pytest.warns(UserWarning, match="kind that is not unpacked; give one with"):
            pair = load_pair(target=tmp_path / "model.gguf")
        assert pair.tokenizer is None and "has no tokenizer" in refusal(pair.ids_of, "the")


def test_a_full_disk_and_a_missing_library_are_seen_beforehand(file, cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        assert "pip install gguf" in refusal(load_pair, target=file[0])
    monkeypatch.setattr(
        shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10**9, 10**9 - 5, 5)
    )
    sentence = refusal(load_pair, target=file[0])
    assert "MB are needed and 0 MB are free" in sentence and "set SPECDEC_CACHE" in sentence
    assert nothing_is_left(cache)


@pytest.mark.parametrize("most_bytes", [1000, 60_000])
def test_a_write_that_fails_leaves_no_folder(file, cache, most_bytes):
    path, _ = file
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, limits[1]))
    try:
        sentence = refusal(gguf_file.unpack_once, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "cannot write" in sentence and nothing_is_left(cache)
    # What a killed process left is passed over, and swept after an hour.
    folder = gguf_file.folder_of(path.stem, machine.file_hash(path))
    old, young = (folder.with_name(f".{folder.name}.{number}.tmp") for number in (1, 2))
    for half in (old, young):
        half.mkdir(parents=True)
        (half / "model.safetensors").write_bytes(b"half")
    os.utime(old, (0, 0))
    assert gguf_file.unpack_once(path) == folder and json.loads(
        (folder / "config.json").read_text()
    )
    assert not old.exists() and young.exists() and load_pair(target=path).target.num_layers == 8
