"""Any unmodified transformers causal LM as the target of speculative decoding.

One forward serves prompt, single token and tree; features are tapped at the inputs of chosen layers.
Families that cannot run trees are refused with a sentence: first by their config, then by a probe, a tree of five nodes after
four tokens, compared with the unmodified model on each of the tree's paths. Knows nothing about drafters, policies or acceptance.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specdec.core.protocols import TargetForward, TargetModel
from specdec.core.tree import counting
from specdec.core.tree_config import check_memory
from specdec.errors import SpecdecError, door
from specdec.models import families, tree_attention
from specdec.models.exclusive import atomic_context, in_one_thread, process_lock, uncompiled
from specdec.models.families import cache_keyword, decoder_of, model_in, position_limit, setting
from specdec.models.kv_cache import CannotJoin, JoinedCache, PagedCache, PagedJoin, PagedMemory, TreeCache
from specdec.models.lean import LeanLayers, LeanModules, tried
from specdec.models.prepacked import PrepackedLinears
from specdec.models.tree_attention import JoinedMask, TreeMask, tree_mask
from specdec.threads import Threads


@dataclass
class Rows:
    """The result of a forward: logits [R, V] of the requested rows, features [T, taps * Ht] of all rows."""

    logits: Tensor
    features: Tensor | None


SMALL_TOK = 4  # as many rows as a cycle
INSTEAD = "decode with the model's own generate() or choose another model family"
PATHS = ((0, 1, 3), (0, 2, 4))  # root, its two children, a child of each
DEPTH = (0, 1, 1, 2, 2)
SETTING = (int, float, str)  # types of a module's plain settings


class Anatomy:
    """A model's modules, their code and plain settings, and the kind and place of every weight, at one moment.

    Later, adapters may be added, layers replaced, weights cast or loaded; fused or packed copies hold only for the model as it was.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> taken = Anatomy(model)
    >>> model[0] = nn.Linear(2, 2)
    >>> taken.holds()
    False
    """

    def __init__(self, model: nn.Module):
        self._modules = list(model.modules())
        self._settings = [  # except `training`, which may be either
            (module.__dict__, name)
            for module in self._modules
            for name, value in module.__dict__.items()
            if type(value) in SETTING
        ]
        self._parts, self._facts = self._now()  # kept alive, so that nothing new gets the identity of a removed object

    def holds(self) -> bool:
        """Whether the model still matches the snapshot."""
        parts, facts = self._now()
        same = len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))
        return same and facts == self._facts

    def _now(self) -> tuple[list[object], list[object]]:
        weights = list(itertools.chain.from_iterable(module._parameters.values() for module in self._modules))
        children = itertools.chain.from_iterable(module._modules.values() for module in self._modules)
        codes = [type(module).forward for module in self._modules]
        facts: list[object] = [(weight.dtype, weight.device) for weight in weights if weight is not None]
        facts += [held.get(name) for held, name in self._settings]
        return [*weights, *children, *codes], facts


class Target(TargetModel):
    """A causal LM, its limits, and forwards over prompts, tokens and trees, of one or several sequences at once.

    model: the transformers model; inside a wrapper (compiled, parallel, with adapters), the inner model runs.
    taps: layer inputs to collect, as indices into Hugging Face's `hidden_states` (L means the final norm's output).

    >>> import specdec, torch
    >>> target = Target(specdec.load_pair("tiny").target.model)
    >>> with target.inference():
    ...     rows = target.forward(torch.tensor([1, 2, 3]), target.new_cache(8))
    >>> rows.logits.shape == (3, target.vocab_size)
    True
    """

    @door
    def __init__(self, model: nn.Module, taps: tuple[int, ...] = ()):
        self.given, self.model, self.taps = model, model_in(model), tuple(taps)
        self._collected: dict[int, Tensor] = {}
        self._derive()

    def refresh(self) -> None:
        """Redo recognition, packing and fusion if the model has changed: an adapter added, layers replaced, weights cast, loaded or
        merged. Inside `inference` the state at its beginning counts."""
        if not tree_attention.has_patched_attention(self.model):
            self._see_changes()
            self._prepacked.renew()

    def _see_changes(self) -> None:
        if not self._anatomy.holds():
            self._derive()

    def _derive(self) -> None:
        model = self.model
        with in_one_sentence(model):
            if reason := why_no_tree(model):
                raise SpecdecError(reason)
            self.config = config = model.config.get_text_config()
            self.num_layers, self.hidden_size = config.num_hidden_layers, config.hidden_size
            head = setting(self.head, "weight")  # a wrapped head may have none
            self.vocab_size = config.vocab_size if head is None else head.shape[0]
            self.embedding, self.position_limit = model.get_input_embeddings(), position_limit(config)
            self._on_several = len({weight.device for weight in model.parameters()}) > 1
            self._probed, self._joins = False, None  # unknown yet: whether sequences can share a forward
            self.prepares_masks = False  # whether layers with attention code of their own need a mask argument
            self._prepacked, self._lean = PrepackedLinears(model), LeanModules(model)
            self._layers = LeanLayers(model, self._prepacked, self._lean)
            self._configs, self._threads = families.attention_configs(model), Threads(model)
            self._anatomy = Anatomy(model)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    @property
    def facts(self) -> tuple:
        """The facts that drafters adapt to; if they change, the target counts as another (modules are equal only to themselves)."""
        return self.device, self.dtype, self.hidden_size, self.num_layers, self.embedding, self.head

    @property
    def threads(self) -> int:
        """CPU threads of its last decoding; before that, torch's number."""
        return self._threads.count or torch.get_num_threads()

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def new_cache(self, capacity: int) -> TreeCache:
        check_memory(f"a key-value cache of {capacity} tokens", capacity * self.cache_bytes_per_tok, self.device)
        return TreeCache(self.num_layers, capacity)

    @property
    def cache_bytes_per_tok(self) -> int:
        """Keys and values of all layers, from the config; this process's share of them."""

        def number(name: str, default: int) -> int:  # some families have a list, one per layer
            value = setting(self.config, name, default)
            return value if isinstance(value, int) else default

        heads = number("num_attention_heads", 1)
        width = number("num_key_value_heads", heads) * number("head_dim", self.hidden_size // heads)
        return 2 * self.num_layers * width * self.dtype.itemsize // setting(self.model, "_tp_size", 1)

    def new_memory(self) -> PagedMemory:
        """Memory for the caches of many sequences that grow row by row together, cheaper than `new_cache` for each."""
        return PagedMemory(self.num_layers)

    @contextlib.contextmanager
    def inference(self, taps: bool = True) -> Iterator[Target]:
        """Inside, the model runs tree attention and collects taps; afterwards it is restored. Probed on first use."""
        with atomic_context(lambda stack: self._enter(stack, self.taps if taps else ())):
            yield self

    def _enter(self, stack: contextlib.ExitStack, taps: tuple[int, ...]) -> None:
        self._see_changes()
        unmasked = tree_mask(tree_attention.active_mask())  # Ctrl-C may come just before a forward resets its own
        guards = in_one_thread(self.model), unmasked, torch.inference_mode(), eval_mode(self.model), uncompiled()
        for context in guards:
            stack.enter_context(context)
        # Inside another target's `inference` the model has passed already, and cannot run unmodified.
        unprobed = not self._probed and not tree_attention.has_patched_attention(self.model)
        expected = expected_logits(self) if unprobed else None
        stack.enter_context(tree_attention.patched_attention(self._configs))
        if unprobed:
            with process_lock(), self._layers.observing(), self._prepacked.observing(), self._lean.observing():
                probe(self, *expected)
            self._probed = True
        stack.callback(self._collected.clear)
        for tap in sorted(set(taps)):
            stack.enter_context(self._hook(tap))
        for context in (self._layers.active(), self._prepacked.active(), self._lean.active()):
            stack.enter_context(context)
        few = torch.zeros(SMALL_TOK, dtype=torch.long, device=self.device)
        stack.enter_context(self._threads.used(lambda: self.forward(few, self.new_cache(SMALL_TOK))))

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
            why = f"layer input {tap} cannot be tapped"
            raise SpecdecError(f"{why}; {type(self.model).__name__} has 0 to {self.num_layers}.")
        if tap == self.num_layers:
            return decoder_of(self.model).register_forward_hook(after_decoder)
        return families.decoder_layers(self.model, self.num_layers)[tap].register_forward_pre_hook(
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

        tokens int64 [T]. A chain (prompt, single token) needs no more; a tree needs depth int64 [T] and ancestors bool
        [T, T]. last_only computes the logits of the last row only. Raises before writing if the cache would overflow.
        """
        cache.require(tokens.shape[0])
        mask = self._mask(TargetForward(self, tokens, cache, depth, ancestors))
        return self.run(tokens, cache, mask, 1 if last_only else 0)

    def run(self, tokens: Tensor, cache: TreeCache, mask: TreeMask, keep: int | Tensor = 0) -> Rows:
        """The forward itself; `mask` gives the rows' positions and visibility, `keep` the rows with logits (`_logits`)."""
        return Rows(self._logits(tokens, cache, mask, keep), self._features())

    def run_together(self, forwards: Sequence[TargetForward]) -> list[Rows]:
        """Several sequences' forwards as one: their rows lie side by side, each attends within its own sequence.

        Nothing is padded, and nothing is written if one of the caches would overflow. A model whose logits differ from those alone
        (for instance because it changes stored keys or values) runs one sequence after the other.
        """
        if self._joins is None and len(forwards) > 1:
            self._joins = joins(self)
        before = [len(one.cache) for one in forwards]
        if self._joins:
            try:
                return self.run_joined(forwards)
            except CannotJoin:
                self._joins = False
                for one, rows in zip(forwards, before, strict=True):
                    one.cache.truncate(rows)
        return [one.run() for one in forwards]

    def run_joined(self, forwards: Sequence[TargetForward]) -> list[Rows]:
        """The joint forward of `run_together`. CannotJoin, with caches partly written, if the model cannot do it."""
        if self.prepares_masks:
            raise CannotJoin("this model's layers attend by themselves, to what the cache gives them")
        caches, counts = [one.cache for one in forwards], [one.tokens.shape[0] for one in forwards]
        for cache, count in zip(caches, counts, strict=True):
            cache.require(count)
        paged = all(isinstance(one, PagedCache) and one.memory is caches[0].memory for one in caches)
        cache = PagedJoin(caches, counts, self.device) if paged else JoinedCache(caches, counts)
        mask = JoinedMask([self._mask(one) for one in forwards], cache.keys_of, at_once=paged)
        ends = list(itertools.accumulate(counts))
        wanted = [
            slice(end - (1 if one.last_only else n), end) for one, n, end in zip(forwards, counts, ends, strict=True)
        ]
        row_numbers = [number for rows in wanted for number in range(rows.start, rows.stop)]
        all_rows = len(row_numbers) == ends[-1]
        keep = 0 if all_rows else torch.tensor(row_numbers, device=self.device)
        logits = self._logits(torch.cat([one.tokens for one in forwards]), cache, mask, keep)
        logits = logits.split([rows.stop - rows.start for rows in wanted])
        features = self._features()
        features = [None] * len(forwards) if features is None else features.split(counts)
        return [Rows(*parts) for parts in zip(logits, features, strict=True)]

    def _mask(self, forward: TargetForward) -> TreeMask:
        """Positions of a forward's rows after its cache's, and their visibility."""
        prefix, depth = len(forward.cache), forward.depth
        if depth is None:
            depth = counting(forward.tokens.shape[0], forward.tokens.device)
        return TreeMask(depth + prefix, prefix, forward.ancestors)

    def _logits(self, tokens: Tensor, cache, mask: TreeMask | JoinedMask, keep: int | Tensor) -> Tensor:
        """Logits [R, V] of the rows to keep: 0 for all, n for the last n, or row numbers."""
        mask.prepared = self.prepares_masks
        with tree_mask(mask):
            output = self.model(
                input_ids=tokens[None],
                position_ids=mask.positions[None],
                use_cache=True,
                logits_to_keep=keep,
                **{cache_keyword(type(self.model)): cache},
            )
        logits = output.logits[0]
        rows = keep if isinstance(keep, Tensor) else slice(-keep, None)
        wanted = len(keep) if isinstance(keep, Tensor) else keep or len(tokens)
        return logits if len(logits) == wanted else logits[rows]  # some families return all rows regardless

    def _features(self) -> Tensor | None:
        if not self._collected:
            return None
        parts = [self._collected[tap][0] for tap in self.taps]
        if self._on_several:
            parts = [part.to(self.device) for part in parts]
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Training mode off inside; afterwards every module gets its own flag back."""
    awake = [module for module in model.modules() if module.training]
    try:
        if awake:
            model.eval()
        yield
    finally:
        for module in awake:
            module.training = True


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
        same = target.given is target.model or setting(target.given, "_orig_mod") is target.model
        said = None if same else setting(tried(target.given, **asked), "logits")
        if said is not None and said.shape == logits.shape:
            same = _rms(said.float() - logits.float()) <= 1e-2 * float(logits.float().std())
        if not same:
            raise SpecdecError(
                f"{type(target.given).__name__} does not give the logits of the {type(target.model).__name__} inside it, which "
                "is what decoding would run; merge its changes into the weights, or give the model inside it alone."
            )
    logits = logits[:, len(prefix) :].float()
    if not bool(logits.isfinite().all()):
        name, weights = type(target.model).__name__, target.model.named_parameters()
        if broken := next((weight for weight, values in weights if not bool(values.isfinite().all())), None):
            why = f"{name} has values in {broken} that are not finite"
            raise SpecdecError(f"{why}; its weights are damaged, fetch them again.")
        why = f"{name} gives logits that are not finite, though its weights are"
        raise SpecdecError(f"{why}; load it in another dtype.")
    right = torch.empty_like(logits[-1])
    for row, path in enumerate(PATHS):
        right[list(path)] = logits[row, : len(path)]
    return right, logits[-1]


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
        if families.has_window(target.config):  # layers with attention code of their own do not report their window
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
        why = f"{name} gives other logits for a tree than for its paths (off by {error / spread:.2g} of the spread)"
        raise SpecdecError(f"{why}: {lacks}; {INSTEAD}.")
    if mask.windows == {None} and families.cache_has_window(target.config):
        raise SpecdecError(f"{name} has a sliding window in its cache alone, which no mask can express; {INSTEAD}.")
    listed = bool(setting(target.config, "layer_types"))
    if mask.widths and not (mask.windows <= mask.widths if listed else mask.windows == mask.widths):
        raise SpecdecError(f"{name} does not say which of its layers have a sliding window; {INSTEAD}.")


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
