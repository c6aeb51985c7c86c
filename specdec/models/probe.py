"""Checks whether a model can run trees: first its config, then a probe with one small tree.

The probe runs a tree of five nodes after four tokens, and compares with the unmodified model on each of the tree's paths.
Knows nothing about drafters, policies or acceptance.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec.core.constants import counting
from specdec.core.protocols import TargetForward
from specdec.errors import SpecdecError
from specdec.models.families import cache_has_window, has_window, setting
from specdec.models.kv_cache import CannotJoin, TreeCache
from specdec.models.lean import tried
from specdec.models.tree_attention import TreeMask

INSTEAD = "decode with the model's own generate() or choose another model family"
PATHS = ((0, 1, 3), (0, 2, 4))  # root, its two children, a child of each
DEPTH = (0, 1, 1, 2, 2)


def why_no_tree(model: nn.Module) -> str | None:
    """The sentence that refuses a family, or None. The probe tests what configs do not show."""
    config, name = model.config.get_text_config(), type(model).__name__
    if setting(config, "is_encoder_decoder"):
        return f"{name} is an encoder-decoder; speculative decoding here needs a decoder-only causal LM."
    if model.get_output_embeddings() is None:
        return f"{name} has no language-model head; load it with AutoModelForCausalLM."
    if setting(model.get_input_embeddings(), "weight") is None:
        return f"{name} does not read one text, token by token; speculative decoding here needs a causal LM that does."
    if setting(config, "alibi") or setting(config, "model_type") in ("bloom", "mpt"):
        return f"{name} uses ALiBi, which ties position to cache row and cannot express a tree; {INSTEAD}."
    kinds = set(setting(config, "layer_types", ()))
    if setting(model, "_is_stateful") or kinds & {"linear_attention", "mamba", "recurrent", "conv"}:
        return f"{name} keeps recurrent state, which cannot branch into a tree; {INSTEAD}."
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        return f"{name} has layers of kind {', '.join(sorted(unknown))}, whose masks are not supported; {INSTEAD}."
    return None


def expected_logits(target) -> tuple[Tensor, Tensor]:
    """Logits [5, V] after each node from the unmodified model: given its own path, and given all earlier nodes.

    Refuses a model inside a wrapper that changes its logits.
    """
    prefix, nodes = _tokens(target)
    rows = [torch.cat((prefix, nodes[list(path)], nodes[:2])) for path in PATHS]
    with in_one_sentence(target.model):
        ids = torch.stack((*rows, torch.cat((prefix, nodes))))
        asked = dict(input_ids=ids, position_ids=counting(ids.shape[1], ids.device).expand_as(ids), use_cache=False)
        logits = target.model(**asked).logits
        if not _says(target.given, target.model, asked, logits):
            raise SpecdecError(
                f"{type(target.given).__name__} does not give the logits of the {type(target.model).__name__} inside it, which "
                "is what decoding would run; merge its changes into the weights, or give the model inside it alone."
            )
    logits = logits[:, len(prefix) :].float()
    if not bool(logits.isfinite().all()):
        raise SpecdecError(_not_finite(target.model))
    right = torch.empty_like(logits[-1])
    for row, path in enumerate(PATHS):
        right[list(path)] = logits[row, : len(path)]
    return right, logits[-1]


def _says(given: nn.Module, model: nn.Module, asked: dict, logits: Tensor) -> bool:
    """Whether the wrapper has the logits of the model inside it."""
    if given is model or setting(given, "_orig_mod") is model:
        return True
    said = setting(tried(given, **asked), "logits")
    same = said is not None and said.shape == logits.shape
    return same and _rms(said.float() - logits.float()) <= 1e-2 * float(logits.float().std())


def joins(target) -> bool:
    """Whether sequences side by side in one forward get the same as alone. The model may modify stored values."""
    prefix, nodes = _tokens(target)
    caches = [TreeCache(target.num_layers, 16) for _ in PATHS]
    target.forward(prefix, caches[0])
    target.forward(nodes, caches[1])
    both = TargetForward(target, nodes, caches[0], *_tree(target)), TargetForward(target, prefix[:2], caches[1])
    before = [len(one.cache) for one in both]
    alone = [one.run().logits for one in both]
    for one, rows in zip(both, before, strict=True):
        one.cache.truncate(rows)
    try:
        joined = [rows.logits for rows in target.run_joined(both)]
    except CannotJoin:
        return False
    right = torch.cat(alone).float()
    errors = (torch.cat(joined).float() - right).square().mean(-1).sqrt()
    # The median of the rows: rounding may route one of them to another expert, a large change.
    return bool(errors.median() <= (3e-3 if target.dtype == torch.float32 else 0.05) * right.std())


def _tree(target) -> tuple[Tensor, Tensor]:
    """Depths int64 [5] of the probe's nodes, and ancestors bool [5, 5]."""
    ancestors = torch.eye(5, dtype=torch.bool, device=target.device)
    for path in PATHS:
        ancestors[path[1], path[0]] = ancestors[path[2], list(path)] = True
    return torch.tensor(DEPTH, device=target.device), ancestors


def probe(target, right: Tensor, blurred: Tensor) -> None:
    """Refuse any family whose layers ignore the mask, the positions or the cache. right, blurred: `expected_logits`."""
    try:
        _check(target, right, blurred)
    except SpecdecError:
        if has_window(target.config):  # layers with attention code of their own do not report their window
            raise
        target.prepares_masks = True
        try:
            return _check(target, right, blurred)
        except SpecdecError:
            target.prepares_masks = False
        raise


def _check(target, right: Tensor, blurred: Tensor) -> None:
    name, (prefix, nodes) = type(target.model).__name__, _tokens(target)
    depth, ancestors = _tree(target)
    cache = TreeCache(target.num_layers, 64)
    mask = TreeMask(depth + len(prefix), len(prefix), ancestors)
    with in_one_sentence(target.model):
        target.forward(prefix, cache)
        if len(cache) != len(prefix):
            raise SpecdecError(f"{name} does not keep its keys and values in the cache it is given; {INSTEAD}.")
        logits = target.run(nodes, cache, mask).logits.float()
    error, spread = _rms(logits - right), _rms(right - right.mean(-1, keepdim=True))
    # Low precision rounds blocks of other sizes differently, but the effect of a mask bug is known: `blurred`.
    tolerance = 3e-3 * spread if target.dtype == torch.float32 else max(0.01 * spread, _rms(blurred - right) / 4)
    if not error <= tolerance:
        takes = "position_ids" in inspect.signature(type(target.model).forward).parameters
        lacks = "its attention does not obey a tree mask" if takes else "it takes no position_ids, which a tree needs"
        raise SpecdecError(
            f"{name} gives other logits for a tree than for its paths (off by {error / spread:.2g} of the spread): "
            f"{lacks}; {INSTEAD}."
        )
    if mask.windows == {None} and cache_has_window(target.config):
        raise SpecdecError(f"{name} has a sliding window in its cache alone, which no mask can express; {INSTEAD}.")
    listed = bool(setting(target.config, "layer_types"))
    if mask.widths and not (mask.windows <= mask.widths if listed else mask.windows == mask.widths):
        raise SpecdecError(f"{name} does not say which of its layers have a sliding window; {INSTEAD}.")


def _not_finite(model: nn.Module) -> str:
    name, weights = type(model).__name__, model.named_parameters()
    broken = next((weight for weight, values in weights if not bool(values.isfinite().all())), None)
    if broken is None:
        return f"{name} gives logits that are not finite, though its weights are; load it in another dtype."
    return f"{name} has values in {broken} that are not finite; its weights are damaged, fetch them again."


def _tokens(target) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(1, 10, device=target.device) * target.vocab_size // 11
    return tokens[:4], tokens[4:]


def _rms(x: Tensor) -> float:
    """Root mean square."""
    return float(x.square().mean().sqrt())


@contextlib.contextmanager
def in_one_sentence(model: nn.Module) -> Iterator[None]:
    """Turns any exception of an unsupported model into one sentence."""
    try:
        yield
    except (SpecdecError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise SpecdecError(f"{type(model).__name__} cannot run tree attention ({reason}); {INSTEAD}.") from error
