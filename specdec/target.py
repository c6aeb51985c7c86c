"""Any unmodified transformers causal LM as the target of speculative decoding.

One forward serves prompt, single token and tree; features are tapped at the inputs of chosen layers on the way. Families that
cannot carry a tree are refused with a sentence. Knows nothing about drafters, policies or acceptance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.attention import Visibility, borrowed, visibility
from specdec.cache import TreeCache
from specdec.config import SpecdecError
from specdec.packing import PackedLinears


@dataclass
class Rows:
    """What one target forward leaves behind: logits [R, V] of the rows asked for, features [T, taps * Ht] of all rows."""

    logits: Tensor
    features: Tensor | None


class Target:
    """A causal LM, its limits, and forwards over prompts, tokens and trees. Batch size is one.

    taps: layer inputs to collect, as indices into Hugging Face's `hidden_states` (L means the final norm's output).
    """

    def __init__(self, model: nn.Module, taps: tuple[int, ...] = ()):
        self.model = model
        config = model.config.get_text_config()
        self.config = config
        self.num_layers = config.num_hidden_layers
        self.hidden_size = config.hidden_size
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.embedding = model.get_input_embeddings()
        self.taps = tuple(taps)
        self.position_limit = position_limit(config)
        reason = why_no_tree(model)
        if reason:
            raise SpecdecError(reason)
        self._collected: dict[int, Tensor] = {}
        self._probed = False
        self._packed = PackedLinears(model)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def new_cache(self, capacity: int) -> TreeCache:
        return TreeCache(self.num_layers, capacity)

    @contextlib.contextmanager
    def lent(self, taps: bool = True) -> Iterator[Target]:
        """The model runs tree attention and collects taps inside; it is handed back untouched. Probed on first use."""
        training = self.model.training
        with borrowed(self.model), torch.inference_mode():
            self.model.eval()
            try:
                if not self._probed:
                    with self._packed.observing():
                        self._probe()
                    self._probed = True
                with self._hooks(self.taps if taps else ()), self._packed.active():
                    yield self
            finally:
                self.model.train(training)

    @contextlib.contextmanager
    def _hooks(self, taps: tuple[int, ...]) -> Iterator[None]:
        handles = []
        try:
            for tap in sorted(set(taps)):
                handles.append(self._hook(tap))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._collected.clear()

    def _hook(self, tap: int):
        """Collect `hidden_states[tap]`: a layer's input, or the final norm's output for tap L."""
        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model.base_model

        def before_layer(module, args, kwargs):
            self._collected[tap] = args[0] if args else kwargs["hidden_states"]

        def after_decoder(module, args, output):
            self._collected[tap] = output[0]

        if tap == self.num_layers:
            return decoder.register_forward_hook(after_decoder)
        return decoder_layers(self.model, self.num_layers)[tap].register_forward_pre_hook(before_layer, with_kwargs=True)

    def forward(
        self,
        tokens: Tensor,
        cache: TreeCache,
        depth: Tensor | None = None,
        ancestors: Tensor | None = None,
        last_only: bool = False,
    ) -> Rows:
        """One forward over T new rows after the cache's; their keys and values are appended to it.

        tokens int64 [T]. A chain (prompt, single token) needs no more; a tree gives depth int64 [T] and ancestors bool
        [T, T]. last_only computes the logits of the last row alone. Raises before writing if the cache would overflow.
        """
        prefix, count = len(cache), tokens.shape[0]
        cache.require(count)
        offsets = torch.arange(count, device=tokens.device) if depth is None else depth
        positions = offsets + prefix
        with visibility(Visibility(positions, prefix, ancestors)):
            output = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
            )
        return Rows(output.logits[0], self._features())

    def _features(self) -> Tensor | None:
        if not self._collected:
            return None
        parts = [self._collected[tap][0] for tap in self.taps]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def _probe(self) -> None:
        """Five tokens as a tree and as paths must agree: catches any family whose attention does not obey the mask."""
        token = torch.tensor([1, 2, 3, 2, 1], device=self.device).clamp(max=self.vocab_size - 1)
        depth = torch.tensor([0, 1, 1, 2, 2], device=self.device)
        parents = (-1, 0, 0, 1, 2)
        ancestors = torch.eye(5, dtype=torch.bool, device=self.device)
        for node, parent in enumerate(parents):
            if parent >= 0:
                ancestors[node] |= ancestors[parent]
        try:
            cache = self.new_cache(16)
            self.forward(token[:3], cache)
            tree = self.forward(token, cache, depth, ancestors).logits.float()
            for leaf in (3, 4):
                path = ancestors[leaf].nonzero().flatten()
                cache.truncate(3)
                chain = self.forward(token[path], cache).logits.float()
                self._compare(tree[path], chain)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise SpecdecError(
                f"{type(self.model).__name__} cannot run tree attention ({type(error).__name__}: {error}); "
                "use a model family that supports transformers' AttentionInterface."
            ) from error

    def _compare(self, tree: Tensor, chain: Tensor) -> None:
        # Low precision rounds blocks of different sizes differently; a wrong mask is off by tenths of the spread.
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        error = float((tree - chain).abs().max() / chain.std().clamp(min=1e-6))
        if not error <= tolerance:
            raise SpecdecError(
                f"{type(self.model).__name__} does not obey a tree mask (a branch changes its neighbour by {error:.2g} of "
                "the logits' spread); decode with autoregress() or choose another model family."
            )


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers, found by its length."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise SpecdecError(f"{type(model).__name__} has no list of {num_layers} decoder layers to tap features from.")


def why_no_tree(model: nn.Module) -> str | None:
    """The sentence that refuses a family, or None. What configs do not reveal is left to the probe."""
    config, name = model.config.get_text_config(), type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder; speculative decoding here needs a decoder-only causal LM."
    alibi = getattr(config, "alibi", False) or getattr(config, "model_type", "") in ("bloom", "mpt")
    if alibi:
        return f"{name} uses ALiBi, which ties position to cache row and cannot express a tree; use autoregress()."
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or kinds & {"linear_attention", "mamba", "recurrent", "conv"}:
        return f"{name} keeps recurrent state, which cannot branch into a tree; use autoregress()."
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        return f"{name} has layers of kind {', '.join(sorted(unknown))}, whose masks this engine does not build."
    return None


def position_limit(config) -> int | None:
    """Largest number of positions the model may see without changing meaning, or None.

    `dynamic` and `longrope` pick their frequencies from the longest position in sight: once a draft peeks across the
    boundary, committed keys no longer fit. So the boundary is the limit for them.
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type", kind.get("type")) in ("dynamic", "longrope"):
            original = kind.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            limit = min(x for x in (original, limit) if x)
    return limit
