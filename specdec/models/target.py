"""Any unmodified transformers causal LM as the target of speculative decoding.

One forward serves prompt, single token and tree; features are tapped at the inputs of chosen layers on the way.
Families that cannot carry a tree are refused with a sentence. Knows nothing about drafters, policies or acceptance.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.errors import SpecdecError
from specdec.models.kv_cache import TreeCache
from specdec.models.prepacked import PrepackedLinears
from specdec.models.tree_attention import TreeMask, has_patched_attention, patched_attention, tree_mask

INSTEAD = "decode with the model's own generate() or choose another model family"
PROBE_PATHS = ((0, 1, 3), (0, 2, 4))  # root, its two children, a child of each


@dataclass
class Rows:
    """What one forward leaves behind: logits [R, V] of the rows asked for, features [T, taps * Ht] of all rows."""

    logits: Tensor
    features: Tensor | None


class Target:
    """A causal LM, its limits, and forwards over prompts, tokens and trees. Batch size is one.

    taps: layer inputs to collect, as indices into Hugging Face's `hidden_states` (L means the final norm's output).
    """

    def __init__(self, model: nn.Module, taps: tuple[int, ...] = ()):
        reason = why_no_tree(model)
        if reason:
            raise SpecdecError(reason)
        self.model = model
        config = model.config.get_text_config()
        self.config = config
        self.num_layers = config.num_hidden_layers
        self.hidden_size = config.hidden_size
        self.vocab_size = model.get_output_embeddings().weight.shape[0]
        self.embedding = model.get_input_embeddings()
        self.taps = tuple(taps)
        self.position_limit = position_limit(config)
        self._collected: dict[int, Tensor] = {}
        self._probed = False
        self._prepacked = PrepackedLinears(model)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def new_cache(self, capacity: int) -> TreeCache:
        return TreeCache(self.num_layers, capacity)

    @contextlib.contextmanager
    def inference(self, taps: bool = True) -> Iterator[Target]:
        """The model runs tree attention and collects taps inside; it is handed back untouched. Probed on first use."""
        with torch.inference_mode(), evaluating(self.model):
            # Inside another target's `inference` the model has passed already, and cannot be run by itself.
            probe = not self._probed and not has_patched_attention(self.model)
            expected = self._expected() if probe else None
            with patched_attention(self.model):
                if probe:
                    with self._prepacked.observing():
                        self._probe(*expected)
                    self._probed = True
                with self._hooks(self.taps if taps else ()), self._prepacked.active():
                    yield self

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

        def before_layer(module, args, kwargs):
            states = args[0] if args else kwargs["hidden_states"]
            if states.ndim != 3:
                shape = "x".join(map(str, states.shape))
                raise SpecdecError(
                    f"{type(self.model).__name__} hands its layers hidden states of shape {shape} instead of [1, T, H]; "
                    "no features can be tapped, choose a drafter that needs none."
                )
            self._collected[tap] = states

        def after_decoder(module, args, output):
            self._collected[tap] = output[0]

        if not 0 <= tap <= self.num_layers:
            raise SpecdecError(
                f"layer input {tap} cannot be tapped; {type(self.model).__name__} has 0 to {self.num_layers}."
            )
        if tap == self.num_layers:
            return decoder_of(self.model).register_forward_hook(after_decoder)
        return decoder_layers(self.model, self.num_layers)[tap].register_forward_pre_hook(
            before_layer, with_kwargs=True
        )

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
        return self._run(tokens, cache, TreeMask(offsets + prefix, prefix, ancestors), last_only)

    def _run(self, tokens: Tensor, cache: TreeCache, state: TreeMask, last_only: bool = False) -> Rows:
        with tree_mask(state):
            output = self.model(
                input_ids=tokens[None],
                position_ids=state.positions[None],
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

    # ---- the probe: a tree of five nodes after four tokens, against the model by itself ------------------------------
    def _probe_tokens(self) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(1, 10, device=self.device) * self.vocab_size // 11
        return tokens[:4], tokens[4:]

    def _expected(self) -> tuple[Tensor, Tensor]:
        """Logits [5, V] after each node from the untouched model: given its own path, and given all earlier nodes."""
        prefix, nodes = self._probe_tokens()
        rows = [torch.cat((prefix, nodes[list(path)], nodes[:2])) for path in PROBE_PATHS]
        with self._explained():
            logits = self.model(input_ids=torch.stack((*rows, torch.cat((prefix, nodes)))), use_cache=False).logits
        logits = logits[:, len(prefix) :].float()
        right = torch.empty_like(logits[-1])
        for row, path in enumerate(PROBE_PATHS):
            right[list(path)] = logits[row, : len(path)]
        return right, logits[-1]

    def _probe(self, right: Tensor, blurred: Tensor) -> None:
        """Run the probe's tree; refuse any family whose layers do not obey the mask, the positions or the cache."""
        name, (prefix, nodes) = type(self.model).__name__, self._probe_tokens()
        depth, ancestors = nodes.new_tensor([0, 1, 1, 2, 2]), torch.eye(5, dtype=torch.bool, device=self.device)
        for path in PROBE_PATHS:
            ancestors[path[1], path[0]] = ancestors[path[2], list(path)] = True
        cache, state = self.new_cache(64), TreeMask(depth + len(prefix), len(prefix), ancestors)
        with self._explained():
            self.forward(prefix, cache)
            if len(cache) != len(prefix):
                raise SpecdecError(f"{name} does not keep its keys and values in the cache it is given; {INSTEAD}.")
            logits = self._run(nodes, cache, state).logits.float()
        error, spread = rms(logits - right), rms(right - right.mean(-1, keepdim=True))
        # Low precision rounds blocks of other sizes otherwise, but how much a mask bug changes is known: `blurred`.
        tolerance = 3e-3 * spread if self.dtype == torch.float32 else max(0.01 * spread, rms(blurred - right) / 4)
        if not error <= tolerance:
            raise SpecdecError(
                f"{name} gives other logits for a tree than for its paths (off by {error / spread:.2g} of the spread): "
                f"its attention does not obey a tree mask; {INSTEAD}."
            )
        told = bool(getattr(self.config, "layer_types", None))
        if state.widths and not (state.windows <= state.widths if told else state.windows == state.widths):
            raise SpecdecError(f"{name} does not say which of its layers have a sliding window; {INSTEAD}.")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Whatever a model raises that was not made for this becomes one sentence."""
        try:
            yield
        except (SpecdecError, torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".rstrip(".")
            raise SpecdecError(
                f"{type(self.model).__name__} cannot run tree attention ({reason}); {INSTEAD}."
            ) from error


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Training switched off inside; every module gets its own flag back."""
    awake = [module for module in model.modules() if module.training]
    try:
        if awake:
            model.eval()
        yield
    finally:
        for module in awake:
            module.training = True


def rms(x: Tensor) -> float:
    """Root mean square."""
    return float(x.square().mean().sqrt())


def decoder_of(model: nn.Module) -> nn.Module:
    """The text decoder inside a causal LM (a model with a vision tower has more than one stack of layers)."""
    return model.get_decoder() if hasattr(model, "get_decoder") else model.base_model


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of decoder layers, found by its length."""
    for module in decoder_of(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise SpecdecError(f"{type(model).__name__} has no list of {num_layers} decoder layers to tap features from.")


def why_no_tree(model: nn.Module) -> str | None:
    """The sentence that refuses a family, or None. What configs do not reveal is left to the probe."""
    config, name = model.config.get_text_config(), type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder; speculative decoding here needs a causal LM that is a decoder alone."
    if model.get_output_embeddings() is None:
        return f"{name} has no language-model head; load it with AutoModelForCausalLM."
    alibi = getattr(config, "alibi", False) or getattr(config, "model_type", "") in ("bloom", "mpt")
    if alibi:
        return f"{name} uses ALiBi, which ties position to cache row and cannot express a tree; {INSTEAD}."
    kinds = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or kinds & {"linear_attention", "mamba", "recurrent", "conv"}:
        return f"{name} keeps recurrent state, which cannot branch into a tree; {INSTEAD}."
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        return f"{name} has layers of kind {', '.join(sorted(unknown))}, whose masks are not built here; {INSTEAD}."
    return None


def position_limit(config) -> int | None:
    """Largest number of positions the model may see without changing meaning, or None.

    `longrope` picks its frequencies from the longest position in sight: once a draft peeks across the boundary, committed
    keys no longer fit. So the boundary is the limit. (For `dynamic` it is max_position_embeddings itself.)
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = rope.values() if rope and all(isinstance(v, dict) for v in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type") == "longrope":
            limit = min(x for x in (kind.get("original_max_position_embeddings"), limit) if x)
    return limit
