"""A few chats, and a random target that can read them: a Llama of seven layers with a tokenizer and a chat template."""

import functools

import pandas as pd
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.data.suites import prompt_digest

from workbook.toy_tokenizer import train_tokenizer

CHATS = [
    [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"{word} " * 4 + "and no more."}]
    for word in ("wood", "iron", "rain", "salt", "wool", "corn")
]


@functools.cache
def chat_target(kind=LlamaForCausalLM, config=LlamaConfig, **fields):
    """(model, tokenizer); `fields` go into the model's config. Nothing is trained."""
    texts = [message["content"] for chat in CHATS for message in chat] * 20
    tokenizer = train_tokenizer(texts, 270)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(3)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=7)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, initializer_range=0.2, max_position_embeddings=128)
    return kind(config(**sizes, **ids, **fields)).eval(), tokenizer


def weights_of(folder) -> dict[str, torch.Tensor]:
    """Of a drafter that was trained."""
    return load_file(folder / "model.safetensors")


def same_weights(one, other) -> bool:
    """Whether the drafters in two folders are equal."""
    return all(torch.equal(value, weights_of(other)[name]) for name, value in weights_of(one).items())


def curve_of(out_dir) -> pd.DataFrame:
    """The training curve of a drafter, but for its times."""
    return pd.read_parquet(out_dir / "drafter_training" / "loss.parquet").drop(columns="elapsed_s")


def held_out(prompt: str) -> bool:
    """True for the eighth of all first user turns that only tests may see (by sha256 of the normalised text)."""
    return prompt_digest(prompt)[0] % 8 == 0
