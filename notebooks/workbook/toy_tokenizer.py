"""Train a byte-level BPE tokenizer with a chat template, as a transformers fast tokenizer.

Every turn is fenced by special tokens, so that the rendering of a longer conversation always continues the rendering of
a shorter one, in characters and in token ids.
"""

from __future__ import annotations

from collections.abc import Iterable

from specdec.errors import SpecdecError

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL = (PAD, BEGIN, END, *(f"<|{role}|>" for role in ROLES))  # <|pad|> is id 0
SMALLEST_VOCABULARY = 256 + len(SPECIAL)

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('unknown role ' ~ message['role']) }}"
    "{%- endif %}"
    "{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int = 1024):
    """A PreTrainedTokenizerFast of exactly `vocab_size` entries, learnt from `texts`.

    Byte-level, so any text round-trips; each digit is its own token, which is what makes arithmetic learnable. `eos` is
    the end-of-turn token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST_VOCABULARY:
        raise SpecdecError(f"vocab_size={vocab_size} cannot hold all bytes; ask for at least {SMALLEST_VOCABULARY}.")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    if core.get_vocab_size() != vocab_size:
        raise SpecdecError(f"the texts yield {core.get_vocab_size()} tokens, not {vocab_size}; give more varied text.")
    names = dict(bos_token=BEGIN, eos_token=END, pad_token=PAD, additional_special_tokens=list(SPECIAL[3:]))
    options = dict(model_max_length=max_length, clean_up_tokenization_spaces=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names, **options)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
