"""A few chats, and a random target that can read them: a Llama of seven layers and a tokenizer."""

import functools

import pandas as pd
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.data.suites import prompt_digest

WORDS = ("wood", "iron", "rain", "salt", "wool", "corn")
CHATS = [
    [
        {"role": "user", "content": f"Say {word}."},
        {"role": "assistant", "content": f"{word} " * 4 + "and no more."},
    ]
    for word in WORDS
]
SPECIAL = ["<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
# A rendering of a longer chat continues that of a shorter one, in characters and in tokens.
CHAT_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}"
    "{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ eos_token }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def chat_tokenizer(texts, vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of these texts, with a chat template; each digit is a token."""
    core = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, level])
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = dict(special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, **options))
    names = dict(pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2])
    names["additional_special_tokens"] = SPECIAL[3:]
    options = dict(model_max_length=1024, clean_up_tokenization_spaces=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names, **options)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@functools.cache
def chat_target(kind=LlamaForCausalLM, config=LlamaConfig, **fields):
    """(model, tokenizer); `fields` go into the model's config. Nothing is trained."""
    texts = [message["content"] for chat in CHATS for message in chat] * 20
    tokenizer = chat_tokenizer(texts, 270)
    ids = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(3)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48)
    sizes |= dict(num_hidden_layers=7, num_attention_heads=2, num_key_value_heads=1)
    sizes |= dict(initializer_range=0.2, max_position_embeddings=128)
    return kind(config(**sizes, **ids, **fields)).eval(), tokenizer


def weights_of(folder) -> dict[str, torch.Tensor]:
    """Of a drafter that was trained."""
    return load_file(folder / "model.safetensors")


def same_weights(one, other) -> bool:
    """Whether the drafters in two folders are equal."""
    expected = weights_of(other)
    return all(torch.equal(value, expected[name]) for name, value in weights_of(one).items())


def curve_of(out_dir) -> pd.DataFrame:
    """The training curve of a drafter, but for its times."""
    table = pd.read_parquet(out_dir / "drafter_training" / "loss.parquet")
    return table.drop(columns="elapsed_s")


def held_out(prompt: str) -> bool:
    """True for the eighth of all first user turns that only tests may see (by its sha256)."""
    return prompt_digest(prompt)[0] % 8 == 0
