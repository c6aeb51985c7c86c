"""A target and a drafter whose forwards have few shapes and memory that never moves, ready to be recorded (`recorded.py`).

    tokens, depth, ancestors ──▶ padded to a power of two ──▶ whole cache under a mask ──▶ the first rows of what comes out

Every number that changes (rows filled, position, real rows) is a tensor, so that no Python decides anything in a replay; the
cache is told afterwards how many rows were filled. Memory comes from a pool: the next turn finds the recordings of the last.
Padded rows are written behind the real ones, see the root and are seen by nobody.

Longer prompts, and several sequences together, run as without fixed shapes. Knows nothing about policies or files.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from specdec.core.constants import additive, causal, counting
from specdec.core.forwards import DraftForward
from specdec.errors import SpecdecError
from specdec.models.eagle.drafter import EagleDrafter, EagleSession, attended, keys_and_tables
from specdec.models.eagle.network import EagleNetwork
from specdec.models.kv_cache import TreeCache
from specdec.models.recorded import INSTEAD, Pool, Recorded, Weights
from specdec.models.target import Rows, Target
from specdec.models.tree_attention import TreeMask

MOST_ROWS, MOST_ROOT_ROWS = 128, 16  # rows of the target's forward and of a drafter's root pass
LEAST_CAPACITY = 256


def padded(count: int) -> int:
    """The power of two that a count is padded to."""
    return 1 << (count - 1).bit_length()


# ---- the target ----------------------------------------------------------------------------------------------------------
class FixedMask(TreeMask):
    """n rows over a whole cache, of which `count` are real. All but keys are inputs of the forward.

    keys: int64 [capacity], 0, 1, ...; depth int64 [n], ancestors bool [n, n], row 0 being the root of all; prefix and count
    int64 [].
    """

    def __init__(self, keys: Tensor, depth: Tensor, ancestors: Tensor, prefix: Tensor, count: Tensor):
        number = keys[: len(depth)]
        real = number < count
        super().__init__(depth * real + prefix, prefix, ancestors & real | (number == 0))
        self.keys, self.rows = keys, number + prefix  # rows: where the new ones are written

    def visible(self, window: int | None) -> Tensor:
        """bool [n, capacity]."""
        seen = (self.keys < self.prefix).expand(len(self.rows), -1).index_copy(1, self.rows, self.ancestors)
        if window is not None:
            positions = self.keys.index_copy(0, self.rows, self.positions)
            seen &= self.positions[:, None] - positions < window
        return seen

    def is_causal(self, window: int | None) -> bool:
        return False


class LentCache(TreeCache):
    """A cache over the layers of a pooled one, `storage`, which is larger; beside those lie the recordings that use them."""

    def __init__(self, pool: Pool, num_layers: int, capacity: int):
        size = padded(max(LEAST_CAPACITY, capacity + MOST_ROWS // 2))  # behind a tree there is room for padding
        self.storage, self.recorded = pool.lend(self, size, lambda: (TreeCache(num_layers, size), {}))
        Cache.__init__(self, layers=self.storage.layers)
        self.capacity = capacity
        with torch.inference_mode():
            self.storage.clear()


class FixedTarget(Target):
    """A `Target` whose forwards of up to 128 rows have fixed shapes, over caches of its own `new_cache`.

    What a forward over a tree returns is overwritten by the next one; rows of `last_only` are the caller's.

    >>> import specdec, torch
    >>> target = FixedTarget(specdec.load_pair("tiny").target.model)
    >>> with target.inference():
    ...     rows = target.forward(torch.tensor([1, 2, 3]), target.new_cache(8))
    >>> rows.logits.shape == (3, target.vocab_size)
    True
    """

    def __init__(self, model: nn.Module, taps: tuple[int, ...] = ()):
        super().__init__(model, taps)
        self._pool, self._weights, self._tapping, self._replays = Pool(), Weights(model), False, False
        self._weights.moved()

    def new_cache(self, capacity: int) -> LentCache:
        return LentCache(self._pool, self.num_layers, capacity)

    @contextlib.contextmanager
    def inference(self, taps: bool = True) -> Iterator[FixedTarget]:
        """As `Target.inference`. On first use replays are shown to give what plain forwards give."""
        before = self._tapping
        with super().inference(taps):
            try:
                self._tapping = before or taps
                if self._weights.moved():
                    self._pool = Pool()
                if not self._replays:
                    self._check_replays()
                    self._replays = True
                yield self
            finally:
                self._tapping = before

    def _check_replays(self) -> None:
        """Refuse a model that keeps a length of its own: recorded at one, it would be wrong at the next."""
        tokens = torch.arange(1, 8, device=self.device) * self.vocab_size // 9
        cache = LentCache(Pool(), self.num_layers, len(tokens))
        replayed = torch.cat([self.forward(token, cache, last_only=True).logits for token in tokens.split(1)]).float()
        right = super().forward(tokens, TreeCache(self.num_layers, len(tokens))).logits.float()
        error, spread = (float(x.square().mean().sqrt()) for x in (replayed - right, right - right.mean(-1, True)))
        if not error <= (3e-3 if self.dtype == torch.float32 else 0.25) * spread:
            raise SpecdecError(
                f"{type(self.model).__name__} gives other logits when a forward is replayed at another length (off by "
                f"{error / spread:.2g} of the spread); {INSTEAD}."
            )

    def forward(self, tokens: Tensor, cache: TreeCache, depth=None, ancestors=None, last_only: bool = False) -> Rows:
        """As `Target.forward`, which runs longer prompts and other caches."""
        count, device = tokens.shape[0], tokens.device
        if count > MOST_ROWS or not isinstance(cache, LentCache):
            return super().forward(tokens, cache, depth, ancestors, last_only)
        cache.require(count)
        depth = counting(count, device) if depth is None else depth
        ancestors = causal(count, device) if ancestors is None else ancestors
        recorded = self._recorded(cache, padded(count))
        logits, features = recorded(tokens=tokens, depth=depth, ancestors=ancestors, prefix=len(cache), count=count)
        cache.extend(count)
        features = None if features is None else features[:count]
        if last_only:  # a prompt's features are looked at until the first tree has been verified
            return Rows(logits[count - 1 : count].clone(), None if features is None else features.clone())
        return Rows(logits[:count], features)

    def _recorded(self, cache: LentCache, rows: int) -> Recorded:
        key, storage = (self._weights.version, rows, self.taps if self._tapping else ()), cache.storage
        if key not in cache.recorded:
            number = functools.partial(torch.zeros, dtype=torch.long, device=self.device)
            inputs = dict(tokens=number(rows), depth=number(rows), prefix=number(()), count=number(()))
            inputs["ancestors"] = torch.zeros(rows, rows, dtype=torch.bool, device=self.device)
            keys = torch.arange(storage.capacity, device=self.device)

            def forward(tokens: Tensor, **where: Tensor) -> tuple[Tensor, Tensor | None]:
                mask = FixedMask(keys, **where)
                with storage.writing_at(mask.rows):
                    return self._logits(tokens, storage, mask, 0), self._features()

            cache.recorded[key] = Recorded(forward, self.device, **inputs)
        return cache.recorded[key]


# ---- the drafter ---------------------------------------------------------------------------------------------------------
class FixedDrafter(EagleDrafter):
    """An `EagleDrafter` whose sessions have fixed shapes; several of them take turns."""

    def __init__(self, network: EagleNetwork, target: Target):
        super().__init__(network, target)
        self.pool = Pool()
        self.weights = Weights(network, self.embedding, target.model.get_output_embeddings())
        self.weights.moved(self.config, self.prepacked)

    def session(self, context_tok: int, tree_tok: int) -> FixedSession:
        return FixedSession(self, context_tok, tree_tok)

    def inference(self):
        if self.weights.moved(self.config, self.prepacked):
            self.pool = Pool()
        return super().inference()

    def run_together(self, forwards: Sequence[DraftForward]) -> list[tuple[Tensor, Tensor]]:
        return [one.run() for one in forwards]


class DraftMemory:
    """Where the sessions of one size draft: keys and values, and of the newest nodes what they see and their states.

    seen bool [widest, rows], states [widest, state size]: row i is that of node i of the last draft forward.
    """

    def __init__(self, drafter: FixedDrafter, rows: int, widest: int):
        config, device, dtype = drafter.config, drafter.target.device, drafter.target.dtype
        self.drafter, self.recorded = drafter, {}
        self.store, self.tables = keys_and_tables(drafter, rows)
        self.keys = torch.arange(rows, device=device)
        self.seen = torch.zeros(widest, rows, dtype=torch.bool, device=device)
        self.states = torch.zeros(widest, config.state_size, dtype=dtype, device=device)

    def root(self, top_k: int, tokens: Tensor, features: Tensor, start: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        """Children of the last of `count` lasting rows, written from row `start` on; and its state [1, H]."""
        rows = self.keys[: len(tokens)] + start
        states = self._step(tokens, self.drafter.network.fuse(features), rows, rows, self.keys <= rows[:, None])
        state = states.index_select(0, count - 1)
        return *self.drafter.children(state, top_k), state

    def level(self, top_k: int, tokens: Tensor, rows: Tensor, start: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """Children of a level's nodes, written from row `start` on; the nodes' states, and what they see."""
        number = self.keys[: len(tokens)]
        seen = self.seen.index_select(0, rows).index_copy(1, number + start, number[:, None] == number)
        hidden = self.drafter.network.feed_back(self.states.index_select(0, rows))
        states = self._step(tokens, hidden, number + start, position.expand(len(tokens)), seen)
        return *self.drafter.children(states, top_k), states, seen

    def _step(self, tokens: Tensor, hidden: Tensor, rows: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        mask = additive(seen, self.store.dtype)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            for stored, new in zip(self.store, (k, v), strict=True):
                stored.index_copy_(1, rows, new.transpose(0, 1))
            return attended(q, *self.store, mask)

        cos, sin = self.tables.index_select(1, positions)
        return self.drafter.layer(tokens, hidden, cos, sin, attend)


class FixedSession(EagleSession):
    """An `EagleSession` in pooled memory. Children are the caller's: trees keep those of every level."""

    def __init__(self, drafter: FixedDrafter, context_tok: int, tree_tok: int):
        rows = max(LEAST_CAPACITY, context_tok + 2 * tree_tok + MOST_ROOT_ROWS)  # with room for padding
        size = padded(rows), padded(max(MOST_ROWS, tree_tok))
        self.memory: DraftMemory = drafter.pool.lend(self, size, lambda: DraftMemory(drafter, *size))
        self.tree_tok = tree_tok
        super().__init__(drafter, context_tok, tree_tok)

    def _reserve(self, rows: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            return self.memory.store.zero_(), self.memory.tables

    def root(self, tokens: Tensor, features: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        count, memory = len(tokens), self.memory
        if count > MOST_ROOT_ROWS:
            children = super().root(tokens, features, top_k)
        else:
            given = dict(tokens=tokens, features=features, start=self._begin(count), count=count)
            *children, state = self._run(memory.root, top_k, padded(count), given)
            self.stepped("root", state.clone())
            children = [part[:, :top_k].clone() for part in children]
        memory.states[:1] = self._hidden
        torch.lt(memory.keys, self.length, out=memory.seen[0])
        return tuple(children)

    def expand(self, tokens: Tensor, rows: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        width, drawn, memory = len(tokens), self._drawn, self.memory
        assert drawn + width <= self.tree_tok, f"{drawn + width} drafted rows, but room was made for {self.tree_tok}"
        given = dict(tokens=tokens, rows=rows, start=self.length + drawn, position=self.length + self._level)
        *children, states, seen = self._run(memory.level, top_k, padded(width), given)
        memory.states[: len(states)], memory.seen[: len(seen)] = states, seen
        self._drawn, self._level = drawn + width, self._level + 1
        return tuple(part[:width, :top_k].clone() for part in children)

    def _run(self, function: Callable, top_k: int, rows: int, given: dict) -> tuple[Tensor, ...]:
        """`function` over `rows` padded rows; of children a power of two, as far as there are so many."""
        memory, drafter = self.memory, self.drafter
        most = max(top_k, min(padded(top_k), drafter.config.draft_vocab_size))
        key = (drafter.weights.version, function.__name__, rows, most)
        if key not in memory.recorded:
            shapes = {name: (rows, *x.shape[1:]) if isinstance(x, Tensor) else () for name, x in given.items()}
            like = {name: x if isinstance(x, Tensor) else memory.keys for name, x in given.items()}
            inputs = {name: like[name].new_zeros(shape) for name, shape in shapes.items()}
            memory.recorded[key] = Recorded(functools.partial(function, most), memory.keys.device, **inputs)
        return memory.recorded[key](**given)
