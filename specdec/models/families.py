"""Differences between transformers' model families: fields, argument names, where the layers are.

Transformers' configs and models have no common base class: a field may be missing in a family, or
be None. So they are read only here and through `setting`.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import transformers
from torch import nn

from specdec.errors import SpecdecError


def model_in(model: nn.Module) -> nn.Module:
    """The transformers model inside a wrapper (compiled, with adapters), or the model itself."""
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            model = module
            break
    if not hasattr(setting(model, "config"), "get_text_config"):
        raise SpecdecError(f"{type(model).__name__} is no transformers causal LM and holds none.")
    return model


def setting(owner: Any, name: str, default: Any = None) -> Any:
    """A field of a transformers config, module or tokenizer; the default if missing or None.

    If layers differ in it, so that a config refuses to give one value, the largest.
    """
    try:
        value = getattr(owner, name, None)
    except RuntimeError:
        value = max((getattr(layer, name) for layer in owner.per_layer_config), default=None)
    return default if value is None else value


@functools.cache
def cache_keyword(module: Any) -> str:
    """The name of a module's cache argument: "cache" from transformers 5.24 on."""
    names = inspect.signature(module.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def decoder_of(model: Any) -> Any:
    """The text decoder inside a causal LM (with a vision tower it has several stacks of layers)."""
    if hasattr(model, "get_decoder"):
        model = model.get_decoder()
    else:
        model = model.base_model
    return model


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers, found by its length."""
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise SpecdecError(f"{type(model).__name__} has no list of {num_layers} decoder layers.")


def cache_has_window(config: Any) -> bool:
    """Whether transformers' own cache for this model drops distant tokens in any layer."""
    layers = transformers.DynamicCache(config=config).layers
    return any(setting(layer, "is_sliding") for layer in layers)


def position_limit(config: Any) -> int | None:
    """Largest number of positions the model may see without changing behaviour, or None."""
    limit: int = setting(config, "max_position_embeddings", -1)
    rope = setting(config, "rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        # beyond it the frequencies change, and committed keys no longer fit
        limit = rope.get("original_max_position_embeddings") or limit
    # a negative number means no limit in some families
    return None if limit < 0 else limit


def end_tokens(model: nn.Module) -> frozenset[int]:
    """The ids that end a text: `generation_config.eos_token_id`, one id, several or none."""
    ids = setting(setting(model, "generation_config"), "eos_token_id", [])
    return frozenset(ids if isinstance(ids, list | tuple) else [ids])
