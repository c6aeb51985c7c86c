"""Tiny Llama models as GGUF files, written with the library's own writer."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fakes.pairs import spread

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *map(chr, range(33, 127)), "Ġ", "Ċ", "th", "the", "Ġthe", "12"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADS, KEY_VALUE_HEADS = 4, 2


def llama() -> LlamaForCausalLM:
    """A Llama with random weights whose rows are multiples of a quantisation block."""
    sizes = {
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_VALUE_HEADS,
    }
    rope = {"rope_type": "default", "rope_theta": 50000.0}
    config = LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_parameters=rope)
    model = LlamaForCausalLM(config).eval()
    spread(model, seed=5, scale=1.0)
    return model


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key projection as a GGUF holds them: per head row 0, size/2, 1, ..."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """Write a tied `model` as Q4_1 and Q8_0; returns the state dict that the file holds."""
    writer = gguf.GGUFWriter(path, "llama")
    stored_weights = {}
    _write_fields(writer, model.config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        own = names.get_name(name, (".weight",))
        if name == "lm_head.weight":
            continue
        values = weight.numpy()
        kind = gguf.GGMLQuantizationType.Q4_1
        if values.ndim == 1:
            kind = gguf.GGMLQuantizationType.F32
        elif own == "token_embd.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
        stored = gguf.quantize(values, kind)
        stored_weights[name] = torch.tensor(gguf.dequantize(stored, kind))
        for part, heads in (("q_proj", HEADS), ("k_proj", KEY_VALUE_HEADS)):
            stored = interleaved(stored, heads) if part in name else stored
        writer.add_tensor(own, stored, raw_dtype=kind)
    _finish(writer)
    return stored_weights


def _finish(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_fields(writer, config) -> None:
    usual = {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KEY_VALUE_HEADS,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.freq_base": config.rope_parameters["rope_theta"],
        "llama.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    adders = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        bool: writer.add_bool,
    }
    for name, value in usual.items():
        adders.get(type(value), writer.add_array)(name, value)


def write_tokens(path: Path, tokens: int) -> Path:
    """A GGUF file of a tokenizer alone, with so many tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([f"token {number}" for number in range(tokens)])
    writer.add_token_types([1] * tokens)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)
    _finish(writer)
    return path


def nothing_is_left(cache: Path) -> bool:
    """No file or folder, not even half of one, lies where models are unpacked."""
    return not (cache / "models").exists() or not any((cache / "models").iterdir())
