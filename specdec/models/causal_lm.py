"""A transformers causal LM from a folder or the hub, for targets and for drafters: complete, of its own files, without code.

Knows nothing about presets, devices or what the model is for.
"""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path

from torch import nn

from specdec import stored
from specdec.errors import SpecdecError, first_line


def read_causal_lm(source: str | Path, what: str, again: str = "", **settings) -> nn.Module:
    """The model with every weight present, with SDPA attention where its family has it.

    source: a folder, or a hub id. what: "the target" or "the drafter", for errors; again: what to do about one, for the end
    of the sentence. settings: of `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    folder = Path(source)
    if folder.is_dir():
        _check_files(folder, f"fetch {what} again")
        if any(folder.glob("*.safetensors")):  # no pickle instead of a damaged file
            settings["use_safetensors"] = True
    settings["output_loading_info"] = True
    try:
        try:
            model, report = AutoModelForCausalLM.from_pretrained(str(source), attn_implementation="sdpa", **settings)
        except ValueError as error:
            if "scaled_dot_product_attention" not in str(error):
                raise
            model, report = AutoModelForCausalLM.from_pretrained(str(source), attn_implementation="eager", **settings)
    except Exception as error:  # a config.json that is wrong fails in every way there is
        pickled = isinstance(error, pickle.UnpicklingError)
        if pickled and any(stored.is_code(path, error) for path in folder.glob("*.bin")):
            reason = "is a pickle with code in it, which was not run; ask for safetensors"
            raise SpecdecError(f"{what} {source} {reason}.") from None
        raise SpecdecError(
            f"{what} {source} cannot be loaded as a transformers causal LM: {first_line(error)}{again}"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise SpecdecError(f"{what} {source} lacks {', '.join(missing[:5])}; its weights are incomplete.")
    return model


def _check_files(folder: Path, advice: str) -> None:
    """SpecdecError for files elsewhere, and for sizes in config.json that take long to refuse."""
    from safetensors import SafetensorError, safe_open

    for path in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
        stored.inside(folder, path.name, advice)
    for index in folder.glob("*.index.json"):
        stored.shards_of(index, advice)
    path = folder / "config.json"
    layers = stored.read_json(path, stored.TargetFile, advice).get("num_hidden_layers") if path.is_file() else None
    weights = 0
    for shard in folder.glob("*.safetensors"):
        # What is damaged is left to loading, which says what is wrong.
        with contextlib.suppress(SafetensorError, OSError), safe_open(shard, "pt") as tensors:
            weights += len(tensors.keys())
    if layers and weights and layers > weights:
        raise SpecdecError(f"{path} asks for {layers} layers, but its files hold {weights} weights; {advice}.")
