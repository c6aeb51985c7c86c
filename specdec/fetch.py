"""From a folder or a hub id to files, models and tokenizers, with one clear sentence for whatever is wrong with them.

Knows nothing about drafters' layouts, pairs or decoding. Downloads were NOT run where this was developed (no network).
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import torch
from torch import nn

from specdec.config import SpecdecError, nearest_name_error

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def first_line(error: Exception) -> str:
    """What an error says, as far as it fits into a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_hub_id(source: str) -> bool:
    """True for owner/name, False for a folder that exists; SpecdecError for what is neither."""
    if Path(source).expanduser().is_dir():
        return False
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source):
        return True
    raise SpecdecError(f"{source!r} is neither a folder nor a hub id of the form owner/name; check the path.")


def placement(dtype: str, device: str) -> tuple[torch.dtype | str, torch.device]:
    """(dtype, device) for `load_model`. "auto" is float32 on a CPU and the checkpoint's own dtype elsewhere."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise SpecdecError(f"unknown device {device!r}; use 'auto', 'cpu' or 'cuda'.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise SpecdecError("this machine has no usable CUDA GPU; use device='cpu' or 'auto'.")
    if dtype == "auto":
        return (torch.float32 if place.type == "cpu" else "auto"), place
    if dtype not in DTYPES:
        raise nearest_name_error("dtype", dtype, ["auto", *DTYPES])
    return DTYPES[dtype], place


def drafter_folder(source: str) -> Path:
    """The folder itself, or the local copy of a hub id's config.json and first weight file."""
    if not is_hub_id(source):
        return Path(source).expanduser()
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(hf_hub_download(source, "config.json")).parent
        for weights in ("model.safetensors", "pytorch_model.bin"):
            try:
                hf_hub_download(source, weights)
                break
            except LocalEntryNotFoundError:  # no network: says nothing about what the hub has
                raise
            except EntryNotFoundError:
                continue
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise SpecdecError(
            f"the drafter {source} cannot be fetched from the hub ({first_line(error)}); check its name, the network "
            "and whether a licence must be accepted there, or give a local folder."
        ) from error
    return folder  # where neither file exists, the reader says so


def load_model(source: str, dtype, device: torch.device, trust_remote_code: bool = False) -> nn.Module:
    """A causal LM with every weight present, in eval mode, with SDPA attention where its family has it."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    settings = dict(dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True)
    if not is_hub_id(source):
        source = str(Path(source).expanduser())
        if any(Path(source).glob("*.safetensors")):  # no pickle instead of a damaged file
            settings["use_safetensors"] = True
    try:
        try:
            model, report = AutoModelForCausalLM.from_pretrained(source, attn_implementation="sdpa", **settings)
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model, report = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager", **settings)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, pickle.UnpicklingError, SafetensorError) as error:
        raise SpecdecError(
            f"the target {source} cannot be loaded as a transformers causal LM: {first_line(error)}"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise SpecdecError(f"the target {source} lacks {', '.join(missing[:5])}; its weights are incomplete.")
    return model.to(device).eval()


def load_tokenizer(source: str, trust_remote_code: bool = False):
    """The tokenizer of a folder or hub id, or None for a folder that has none."""
    from transformers import AutoTokenizer

    if not is_hub_id(source):
        source = str(Path(source).expanduser())
        if not any((Path(source) / name).is_file() for name in TOKENIZER_FILES):
            return None
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        raise SpecdecError(f"the tokenizer of {source} cannot be loaded: {first_line(error)}") from error


def stop_tokens(model: nn.Module) -> frozenset[int]:
    """The ids that end a text: `generation_config.eos_token_id`, which is one id, several or none."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else map(int, ids))
