"""A transformers causal LM as the target of speculative decoding.

One forward serves prompt, single token and tree. A tree is an attention mask: transformers takes a
mask of four dimensions as it is, so the model runs unmodified. Layers with a sliding window get
their own, built from positions. Features are tapped at the inputs of chosen layers by hooks.
A model that cannot run trees is refused on first use, by a probe.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from specdec.core.protocols import TargetForward, TargetModel
from specdec.core.tree import additive, causal
from specdec.core.tree_config import check_memory
from specdec.errors import SpecdecError, door, first_line
from specdec.models.kv_cache import JoinedCache, TreeCache, aligned

INSTEAD = "decode with the model's own generate() or choose another model family"
FULL = "full_attention"
SLIDING = "sliding_attention"
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


@dataclass
class Rows:
    """Logits [R, V] of the requested rows of a forward, and features [T, taps * Ht]."""

    logits: Tensor
    features: Tensor | None


@dataclass
class TreeMask:
    """Which rows see which in one forward of T new rows after `prefix` cached ones.

    positions int64 [T]: of the new rows; cached row i sits at position i. ancestors bool [T, T]:
    row i sees new row j; None: causal. drawn int64 [D]: positions of cached rows between the prefix
    and the new ones, which are not all visible; `ancestors` is then bool [T, D + T].
    """

    positions: Tensor
    prefix: int
    ancestors: Tensor | None = None
    drawn: Tensor | None = None

    def visible(self, window: int | None = None) -> Tensor:
        """bool [T, M]: ancestry, cut by a sliding window (seen if query - key < window)."""
        count = len(self.positions)
        device = self.positions.device
        among = causal(count, device) if self.ancestors is None else self.ancestors
        mask = F.pad(among, (self.prefix, 0), value=True)
        if window is not None:
            drawn = self.positions[:0] if self.drawn is None else self.drawn
            prefix = torch.arange(self.prefix, device=device)
            keys = torch.cat((prefix, drawn, self.positions))
            mask = mask & (self.positions[:, None] - keys < window)
        return mask

    def is_plain(self, window: int | None) -> bool:
        """Whether transformers' causal mask does: a single row or a prompt, uncut by a window."""
        count = len(self.positions)
        if window is not None and self.prefix + count > window:
            return False
        return self.ancestors is None and (self.prefix == 0 or count == 1)


class Target(TargetModel):
    """A causal LM, its limits, and forwards over prompts, tokens and trees of several sequences.

    model: the transformers model, or a wrapper around it; never changed. taps: indices into
    `hidden_states`, collected by hooks (L: after the final norm).

    >>> import specdec, torch
    >>> target = Target(specdec.load_pair("tiny").target.model)
    >>> with target.inference():
    ...     rows = target.forward(torch.tensor([1, 2, 3]), target.new_cache(8))
    >>> rows.logits.shape == (3, target.vocab_size)
    True
    """

    @door
    def __init__(self, model: nn.Module, taps: tuple[int, ...] = ()):
        self.model: Any = model_in(model)
        self.taps = tuple(taps)
        self._collected: dict[int, Tensor] = {}
        self._probed = False
        check_family(self.model)
        self.refresh()

    def refresh(self) -> None:
        """Read the model's modules again: another embedding or head, another number of layers."""
        self.config: Any = self.model.config.get_text_config()
        self.num_layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.position_limit = position_limit(self.config)
        self.embedding: nn.Module = self.model.get_input_embeddings()
        self.head: nn.Module = self.model.get_output_embeddings()
        # a wrapped head may not say its size
        self.vocab_size: int = setting(self.head, "out_features", self.config.vocab_size)
        self.kinds = set(setting(self.config, "layer_types", ()))
        self.window: int | None = setting(self.config, "sliding_window")
        if self.kinds and SLIDING not in self.kinds:
            self.window = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def end_tokens(self) -> frozenset[int]:  # type: ignore[override]
        """The ids that end a text: `generation_config.eos_token_id`, one id, several or none."""
        ids = setting(setting(self.model, "generation_config"), "eos_token_id", [])
        return frozenset(ids if isinstance(ids, list | tuple) else [ids])

    @property
    def facts(self) -> tuple[Any, ...]:
        """What drafters adapt to; if it changes, they bind to the target again."""
        return self.device, self.dtype, self.num_layers, self.embedding, self.head

    @property
    def cache_bytes_per_tok(self) -> int:
        """Keys and values of all layers, from the config."""
        heads: int = setting(self.config, "num_attention_heads", 1)
        width: int = setting(self.config, "head_dim", self.hidden_size // heads)
        heads = setting(self.config, "num_key_value_heads", heads)
        return 2 * self.num_layers * heads * width * self.dtype.itemsize

    def new_cache(self, capacity: int) -> TreeCache:
        """Room for the keys and values of `capacity` tokens of one sequence."""
        what = f"a key-value cache of {capacity} tokens"
        check_memory(what, capacity * self.cache_bytes_per_tok, self.device)
        return TreeCache(self.num_layers, capacity)

    @contextlib.contextmanager
    def inference(self, taps: bool = True) -> Iterator[Target]:
        """Inside, the model is in eval mode, uncompiled, and its taps are collected. It may nest.

        SpecdecError for a second thread, and on first use for a model that cannot run trees.
        """
        lock = _locks.setdefault(self.model, threading.RLock())
        if not lock.acquire(blocking=False):
            raise SpecdecError("this model decodes in another thread; wait, or load a second pair.")
        with contextlib.ExitStack() as stack:
            stack.callback(lock.release)
            self.refresh()
            stack.enter_context(torch.inference_mode())
            # a tensor that names no device is the host's, whatever the caller's default
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            if torch.is_autocast_enabled(self.device.type):  # a pair decodes in its own dtype
                stack.enter_context(torch.autocast(self.device.type, enabled=False))
            # afterwards every module gets its own flag back
            for module in self.model.modules():
                if module.training:
                    stack.callback(setattr, module, "training", True)
            self.model.eval()
            # trees change shape every cycle, and each new shape would be compiled
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            if not self._probed:
                probe(self)
                self._probed = True
            stack.callback(self._collected.clear)
            for tap in sorted(set(self.taps)) if taps else ():
                stack.enter_context(self._hook(tap))
            yield self

    def _hook(self, tap: int) -> Any:
        """Collect `hidden_states[tap]`: a layer's input, or the final norm's output for tap L."""

        def before_layer(module: nn.Module, args: Any, kwargs: Any) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            assert states.ndim == 3, "features are one state per token"
            self._collected[tap] = states

        def after_decoder(module: nn.Module, args: Any, output: Any) -> None:
            self._collected[tap] = output[0]

        if tap == self.num_layers:
            return decoder_of(self.model).register_forward_hook(after_decoder)
        layer = decoder_layers(self.model, self.num_layers)[tap]
        return layer.register_forward_pre_hook(before_layer, with_kwargs=True)

    def forward(
        self,
        tokens: Tensor,
        cache: TreeCache,
        depth: Tensor | None = None,
        ancestors: Tensor | None = None,
        last_only: bool = False,
    ) -> Rows:
        """One forward over T new rows after the cache's; their keys and values are appended to it.

        tokens int64 [T]. A tree needs depth int64 [T] and ancestors bool [T, T] too.
        """
        mask = self._mask(TargetForward(self, tokens, cache, depth, ancestors))
        return self.run(tokens, cache, mask, int(last_only))

    def run(self, tokens: Tensor, cache: TreeCache, mask: TreeMask, keep: int | Tensor = 0) -> Rows:
        """The forward itself. keep: rows with logits, 0 for all, n for the last n, or numbers."""
        logits = self._logits(tokens[None], mask.positions[None], self._masks([mask]), cache, keep)
        features = self._features()
        return Rows(logits[0], None if features is None else features[0])

    def run_together(self, forwards: Sequence[TargetForward]) -> list[Rows]:
        """Several sequences' forwards, those of about the same length as one padded batch."""
        groups: dict[int, list[int]] = {}
        for number, forward in enumerate(forwards):
            # at most as many rows of padding as of tokens
            length = (len(forward.tokens) - 1).bit_length()
            groups.setdefault(length, []).append(number)
        results: dict[int, Rows] = {}
        for numbers in groups.values():
            batch = [forwards[number] for number in numbers]
            results.update(zip(numbers, self._run_batch(batch), strict=True))
        return [results[number] for number in range(len(forwards))]

    def _run_batch(self, forwards: Sequence[TargetForward]) -> list[Rows]:
        if len(forwards) == 1:
            return [forwards[0].run()]
        # 1. tokens and positions side by side, padded on the right with the first position
        masks = [self._mask(forward) for forward in forwards]
        counts = [len(forward.tokens) for forward in forwards]
        pad = nn.utils.rnn.pad_sequence
        tokens = pad([forward.tokens for forward in forwards], batch_first=True)
        positions = pad([mask.positions for mask in masks], batch_first=True)
        # 2. one forward; every sequence keeps its own new rows
        cache = JoinedCache([forward.cache for forward in forwards], counts)
        logits = self._logits(tokens, positions, self._masks(masks), cache, 0)
        features = self._features()
        # 3. what belongs to each sequence
        results = []
        for number, (forward, count) in enumerate(zip(forwards, counts, strict=True)):
            first = count - 1 if forward.last_only else 0
            of_rows = None if features is None else features[number, :count]
            results.append(Rows(logits[number, first:count], of_rows))
        return results

    def _mask(self, forward: TargetForward) -> TreeMask:
        """Positions of a forward's rows after its cache's, and their visibility."""
        prefix = len(forward.cache)
        depth = forward.depth
        if depth is None:
            depth = torch.arange(len(forward.tokens), device=forward.tokens.device)
        return TreeMask(depth + prefix, prefix, forward.ancestors)

    def _masks(self, masks: Sequence[TreeMask]) -> Any:
        """The model's `attention_mask`: None, an additive one [B, 1, T, M], or one per kind."""
        if len(masks) == 1 and masks[0].is_plain(self.window):
            return None
        if SLIDING in self.kinds:
            return {FULL: self._additive(masks, None), SLIDING: self._additive(masks, self.window)}
        return self._additive(masks, self.window)

    def _additive(self, masks: Sequence[TreeMask], window: int | None) -> Tensor:
        # finite, so that a row of padding, which sees nothing, has a softmax
        hidden = torch.finfo(self.dtype).min
        parts = [additive(mask.visible(window), self.dtype, hidden) for mask in masks]
        rows, keys = (max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True))
        for number, part in enumerate(parts):
            room = (0, keys - part.shape[1], 0, rows - part.shape[0])
            parts[number] = F.pad(part, room, value=hidden)
        return aligned(torch.stack(parts)[:, None])

    def _logits(
        self, tokens: Tensor, positions: Tensor, mask: Any, cache: Any, keep: int | Tensor
    ) -> Tensor:
        """Logits [B, R, V] of the rows to keep."""
        kind: Any = type(self.model)
        inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
        inputs |= {"use_cache": True, "logits_to_keep": keep, cache_keyword(kind): cache}
        logits: Tensor = self.model(**inputs).logits
        # some families return all rows regardless
        if not isinstance(keep, Tensor):
            logits = logits[:, -keep:]
        elif logits.shape[1] != len(keep):
            logits = logits[:, keep]
        return logits

    def _features(self) -> Tensor | None:
        """Taps [B, T, taps * Ht]; layers may be on several devices."""
        if not self._collected:
            return None
        return torch.cat([self._collected[tap].to(self.device) for tap in self.taps], dim=-1)


def check_family(model: Any) -> None:
    """Refuse what the probe would not notice or could not name."""
    config = model.config.get_text_config()
    unknown = set(setting(config, "layer_types", ())) - {FULL, SLIDING}
    window = setting(config, "sliding_window")
    reason = ""
    if setting(config, "is_encoder_decoder") or model.get_output_embeddings() is None:
        reason = "is no decoder with a language-model head"
    elif unknown:
        reason = f"has layers of kind {', '.join(sorted(unknown))}, which cannot branch into a tree"
    elif setting(model, "_is_stateful"):
        reason = "keeps recurrent state, which cannot branch into a tree"
    elif setting(config, "window_size") or (window is None and cache_has_window(config)):
        reason = "has a sliding window of its own kind, which no mask expresses"
    if reason:
        raise SpecdecError(f"{type(model).__name__} {reason}; {INSTEAD}.")


def probe(target: Target) -> None:
    """Refuse a model whose layers ignore the mask, the positions or the cache.

    A tree of five nodes after four tokens, a root with two children and a child of each, is
    compared with both of its paths alone.
    """
    name = type(target.model).__name__
    device = target.device
    tokens = torch.arange(1, 10, device=device) * target.vocab_size // 11
    prefix = tokens[:4]
    nodes = tokens[4:]
    left = torch.tensor([0, 1, 3], device=device)
    right = torch.tensor([0, 2, 4], device=device)
    ancestors = torch.eye(5, dtype=torch.bool, device=device)
    for path in (left, right):
        ancestors[path[1:], 0] = True
        ancestors[path[2], path[1]] = True
    try:
        # 1. the paths by themselves, and the first nodes in a row, as if no mask were obeyed
        ids = torch.stack([torch.cat((prefix, nodes[path])) for path in (left, right)])
        ids = torch.cat((ids, tokens[None, :7]))
        positions = torch.arange(7, device=device).expand_as(ids)
        output = target.model(input_ids=ids, position_ids=positions, use_cache=False)
        alone = output.logits[:, 4:].float()
        # 2. the tree
        cache = TreeCache(target.num_layers, 16)
        target.run(prefix, cache, TreeMask(positions[0, :4], 0))
        depth = torch.tensor((0, 1, 1, 2, 2), device=device) + 4
        tree = target.run(nodes, cache, TreeMask(depth, 4, ancestors)).logits.float()
    except (SpecdecError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        why = f"cannot run tree attention ({first_line(error)})"
        raise SpecdecError(f"{name} {why}; {INSTEAD}.") from error
    # 3. both must agree; low precision rounds blocks of other sizes differently
    if not alone.isfinite().all():
        raise SpecdecError(f"{name} gives logits that are not finite; load it in another dtype.")
    together = torch.stack((tree[left], tree[right]))
    distance = float((together - alone[:2]).square().mean().sqrt())
    spread = float(alone[:2].std())
    blurred = float((alone[2] - alone[0]).square().mean().sqrt())
    allowed = 3e-3 * spread
    if target.dtype != torch.float32:
        allowed = max(0.02 * spread, blurred / 4)
    if not distance <= allowed:
        raise SpecdecError(f"{name}'s attention does not obey a tree mask; {INSTEAD}.")


# Differences between model families. Transformers' configs and models have no common base class: a
# field may be missing in a family, or be None. So they are read only here and through `setting`.


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
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


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
