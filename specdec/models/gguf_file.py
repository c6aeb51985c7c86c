"""GGUF files of Llama models as transformers folders: dequantised to bfloat16 and unpacked once into the user's cache.

Supported is what the `gguf` package and transformers' Llama agree on; anything else in a file is refused, not guessed.
Knows nothing about where a file came from, about drafters or pairs.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.errors import SpecdecError, first_line, warn

UNPACKING = 1  # increase when the same file is to be unpacked differently
TYPES = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
SUPPORTED = f"Llama models without biases, experts and scaled positions are supported, in {', '.join(TYPES)}"
# Fields of a Llama file's shape. More fields (scaled positions, experts) mean another kind of model.
FIELDS = """vocab_size context_length embedding_length block_count feed_forward_length rope.dimension_count rope.freq_base
    attention.head_count attention.head_count_kv attention.key_length attention.value_length
    attention.layer_norm_rms_epsilon""".split()
EMBEDDING = "token_embd.weight"
CONTROL, USER_DEFINED = 3, 4  # kinds of tokens, as a GGUF numbers them


def folder_of(name: str, sha256: str) -> Path:
    """The folder for the unpacked file with this hash."""
    return machine.cache_folder() / "models" / f"{name.lower()}-{sha256[:12]}-v{UNPACKING}"


def unpack_once(path: Path) -> Path:
    """The transformers folder of a GGUF file, created in the user's cache if missing."""
    folder = folder_of(path.stem, machine.file_hash(path))
    return folder if folder.is_dir() else unpack(path, folder)


def unpack(path: Path, folder: Path) -> Path:
    """Write a GGUF file as a folder of config.json, model.safetensors (bfloat16) and its tokenizer; returns the folder.

    SpecdecError for a damaged file or one of another kind, or if the disk is full; then there is no folder.
    """
    reader = read(path)
    _check_kind(reader, path)
    config, tokenizer = _config(reader, path), _tokenizer(reader, path)
    needed = sum(2 * int(tensor.n_elements) for tensor in reader.tensors) + 2**24  # and the tokenizer
    with runs.atomic_folder(folder) as fresh:
        runs.need_space(fresh, needed)
        try:
            save_file(_weights(reader, config, path), fresh / "model.safetensors", {"format": "pt"})
        except SafetensorError as error:
            raise OSError(first_line(error)) from error
        config.save_pretrained(fresh)
        transformers.GenerationConfig(**_end_tokens(reader)).save_pretrained(fresh)
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)
    return folder


def read(path: Path):
    """A GGUFReader of the file; SpecdecError for a damaged file, or without the package gguf."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise SpecdecError("reading GGUF files takes the package gguf; run `python -m pip install gguf`.") from error
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        why = f"{path} cannot be read as GGUF ({first_line(error)})"
        raise SpecdecError(f"{why}; it is cut short, damaged or another kind of file.") from error


def _field(reader, name: str, *default):
    """A field's value, else the default; SpecdecError without both."""
    if name in reader.fields:
        return reader.fields[name].contents()
    if default:
        return default[0]
    raise SpecdecError(f"{Path(reader.data.filename)} lacks the field {name}; {SUPPORTED}.")


def _check_kind(reader, path: Path) -> None:
    architecture = _field(reader, "general.architecture")
    strange = sorted(name for name in reader.fields if name.startswith("llama."))
    strange = [name for name in strange if name.removeprefix("llama.") not in FIELDS]
    types = sorted({tensor.tensor_type.name for tensor in reader.tensors} - set(TYPES))
    if architecture != "llama":
        kind = f"is of the architecture {architecture!r}"
    elif reader.byte_order != "I":
        kind = "was written for machines of the other byte order"
    elif strange or types:
        kind = f"holds {', '.join((types + strange)[:4])}"
    elif not any(tensor.name == EMBEDDING for tensor in reader.tensors):
        kind = f"lacks {EMBEDDING}"
    else:
        return
    raise SpecdecError(f"{path} {kind}; {SUPPORTED}.")


def _config(reader, path: Path):
    def field(name: str, *default):
        return _field(reader, f"llama.{name}", *default)

    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    heads, hidden = field("attention.head_count"), field("embedding_length")
    head_dim = field("attention.key_length", hidden // heads)
    if {head_dim} != {field(name, head_dim) for name in ("attention.value_length", "rope.dimension_count")}:
        raise SpecdecError(f"{path} has heads of several sizes; {SUPPORTED}.")
    return transformers.LlamaConfig(
        vocab_size=shapes[EMBEDDING][-1],
        hidden_size=hidden,
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=field("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base", 10000.0)},
        tie_word_embeddings="output.weight" not in shapes,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        **_end_tokens(reader),
    )


def _end_tokens(reader) -> dict[str, int | None]:
    """The ids of the tokens that begin, end and pad a text, under transformers' names."""
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: _field(reader, f"tokenizer.ggml.{stored}_token_id", None) for name, stored in names.items()}


def _weights(reader, config, path: Path) -> dict[str, torch.Tensor]:
    """The complete state dict of transformers' Llama in bfloat16."""
    import gguf

    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in transformers.LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    stored, weights = {tensor.name: tensor for tensor in reader.tensors}, {}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, shape in tqdm(shapes.items(), desc=f"unpacking {path.name}"):
        own = names.get_name(name, (".weight",))
        if own not in stored or tuple(stored[own].shape[::-1]) != shape:
            raise SpecdecError(f"{path} lacks {own} of the shape {list(shape)}; {SUPPORTED}.")
        tensor = stored.pop(own)
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        weights[name] = interleaved(name, weight, config, back=True).bfloat16().contiguous()
    if stored:
        raise SpecdecError(f"{path} holds {', '.join(sorted(stored)[:4])}; {SUPPORTED}.")
    return weights


def interleaved(name: str, value: torch.Tensor, config, back: bool = False) -> torch.Tensor:
    """Rows of queries and keys as in a GGUF, the two halves of each head's rotary pairs interleaved, or `back` from it."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((count for part, count in heads.items() if part in name), None)
    if count is None:
        return value
    halves = (count, -1, 2) if back else (count, 2, -1)
    return value.view(*halves, value.shape[-1]).transpose(1, 2).reshape(value.shape)


def _tokenizer(reader, path: Path):
    """The file's byte-level BPE tokenizer with its chat template; None, with a warning, if it is of another kind."""

    def field(name: str, *default):
        return _field(reader, f"tokenizer.ggml.{name}", *default)

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    rules = {"gpt-2": byte_level, "smollm": pre_tokenizers.Sequence([digits, byte_level])}  # the file only names one
    kind, rule, begins = field("model", "none"), field("pre", "none"), field("add_bos_token", False)
    if kind != "gpt2" or rule not in rules or begins:
        why = f"the tokenizer of {path.name} ({kind}, {rule}) is of a kind that is not unpacked"
        warn(f"{why}; give one with load_pair(target=..., tokenizer=...).")
        return None
    tokens = field("tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field("merges")]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    made.pre_tokenizer, made.decoder = rules[rule], decoders.ByteLevel()
    kinds = list(enumerate(field("token_type", [])))
    made.add_special_tokens([AddedToken(tokens[number], special=True) for number, kind in kinds if kind == CONTROL])
    made.add_tokens([AddedToken(tokens[number], normalized=False) for number, kind in kinds if kind == USER_DEFINED])
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    numbers = {name: field(f"{stored}_token_id", None) for name, stored in named.items()}
    named = {f"{name}_token": tokens[number] for name, number in numbers.items() if number is not None}
    template = _field(reader, "tokenizer.chat_template", None)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template, **named)
