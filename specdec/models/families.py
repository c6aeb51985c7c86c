"""Differences between transformers' model families: config fields, argument names, where the layers are.

Transformers' configs and models have no common base class: a field may be missing in a family, or be None. So they are read
only here and through `setting`. Knows nothing about trees, caches or drafters.
"""

from __future__ import annotations

import functools
import inspect

import transformers
from torch import nn

from specdec.errors import SpecdecError


def model_in(given: nn.Module) -> nn.Module:
    """The transformers model inside a wrapper (compiled, parallel, adapted, or any module), or the model itself."""
    model = next(
        (module for module in given.modules() if isinstance(module, transformers.PreTrainedModel)),
        given,
    )
    if not hasattr(model, "get_output_embeddings") or not hasattr(
        setting(model, "config"), "get_text_config"
    ):
        why = f"{type(given).__name__} is no transformers causal LM and holds none"
        raise SpecdecError(f"{why}; load it with AutoModelForCausalLM.")
    return model


def setting(owner, name: str, default=None):
    """A field of a transformers config, module or tokenizer; the default if it is missing or None.

    If layers differ in it, so that a config refuses to give one value, the largest.
    """
    try:
        value = getattr(owner, name, None)
    except RuntimeError:
        value = max((getattr(layer, name) for layer in owner.per_layer_config), default=None)
    return default if value is None else value


@functools.cache
def cache_keyword(module: type) -> str:
    """The name of a transformers module's cache argument: "cache" from 5.24 on, "past_key_values" before."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def attention_configs(model: nn.Module) -> list:
    """The distinct configs by which a model's modules choose their attention."""
    configs = {
        id(config): config
        for module in model.modules()
        if (config := setting(module, "config")) is not None
    }
    return [config for config in configs.values() if hasattr(config, "_attn_implementation")]


def decoder_of(model: nn.Module) -> nn.Module:
    """The text decoder inside a causal LM (a model with a vision tower has more than one stack of layers)."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers, found by its length."""
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise SpecdecError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers to tap features from."
    )


def cache_has_window(config) -> bool:
    """Whether transformers' own cache for this model drops distant tokens in any layer."""
    return any(
        setting(layer, "is_sliding") for layer in transformers.DynamicCache(config=config).layers
    )


def position_limit(config) -> int | None:
    """Largest number of positions the model may see without changing behaviour, or None.

    `longrope` picks its frequencies from the longest visible position: once a draft crosses the boundary, committed keys no
    longer fit. So the boundary is the limit. (For `dynamic` it is max_position_embeddings itself.)
    """
    limit, rope = setting(config, "max_position_embeddings"), setting(config, "rope_parameters", {})
    limit = (
        None if limit is not None and limit < 0 else limit
    )  # a negative value means no limit in some families
    kinds = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type") == "longrope":
            limit = min(x for x in (kind.get("original_max_position_embeddings"), limit) if x)
    return limit


def end_tokens(model: nn.Module) -> frozenset[int]:
    """The ids that end a text: `generation_config.eos_token_id`, which is one id, several or none."""
    ids = setting(setting(model, "generation_config"), "eos_token_id", [])
    ids = ids if isinstance(ids, list | tuple) else [ids]
    if not all(type(token) is int for token in ids):
        why = "eos_token_id of the target's generation settings must be one id or a list of them"
        raise SpecdecError(f"{why}, got {ids!r}.")
    return frozenset(ids)
