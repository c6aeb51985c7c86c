"""A tiny Llama model as a GGUF file, written with the library's own writer."""

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fakes.pairs import spread

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *map(chr, range(33, 127)), "Ġ", "Ċ", "th", "the", "Ġthe", "12"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
HEADS, KEY_VALUE_HEADS = 4, 2


def llama() -> LlamaForCausalLM:
    """A Llama with random weights whose rows are multiples of a quantisation block."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        max_position_embeddings=128,
        num_hidden_layers=8,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )
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
    config = model.config
    # 1. sizes and tokenizer
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    # 2. the weights
    stored_weights = {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        theirs = names.get_name(name, (".weight",))
        if name == "lm_head.weight":
            continue
        values = weight.numpy()
        kind = gguf.GGMLQuantizationType.Q4_1
        if values.ndim == 1:
            kind = gguf.GGMLQuantizationType.F32
        elif theirs == "token_embd.weight":
            kind = gguf.GGMLQuantizationType.Q8_0
        stored = gguf.quantize(values, kind)
        stored_weights[name] = torch.tensor(gguf.dequantize(stored, kind))
        for part, heads in (("q_proj", HEADS), ("k_proj", KEY_VALUE_HEADS)):
            stored = interleaved(stored, heads) if part in name else stored
        writer.add_tensor(theirs, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored_weights
