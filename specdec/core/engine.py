"""The live engine of the cycle: one turn of one prompt, with a pair and a picker.

Invariant between cycles: the target's cache holds every committed token but the last, which is the next tree's root. The
drafter's cache holds one entry per target feature it was given; features of plain steps wait for the next root pass.

An engine holds one prompt. Several prompts use several engines whose forwards run together (`together.py`): their rows lie
side by side in one product, without padding, and every turn keeps its own tree, length and policy.

Knows nothing about policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from specdec.core.clock import Clock
from specdec.core.pair import Pair
from specdec.core.protocols import DraftForward, Step, TargetForward, finish
from specdec.core.text import Text
from specdec.core.tree import DraftTree, GrowingTree, Merged, Pool, StaticShape, Trie
from specdec.core.tree_config import Plan, TreeConfig
from specdec.core.verification import Picker, truncate
from specdec.errors import SpecdecError


class LiveEngine:
    """Implements `cycle.Engine`. Everything but the constructor runs inside `inference`; `prefill` comes first.

    prompt: int64 [T]. limits: the largest tree a policy may ask for; the caches reserve room for it at once.
    stop_early: called with ids [T] after every new token; True ends the text (transformers' stopping criteria).
    """

    def __init__(
        self,
        pair: Pair,
        prompt: Tensor,
        max_new_tokens: int,
        limits: TreeConfig,
        picker: Picker,
        stop_tokens: tuple[int, ...] = (),
        clock: Clock | None = None,
        stop_early: Callable[[Tensor], bool] | None = None,
    ):
        self.pair, self.target = pair, (target := pair.target)
        self.drafter, self.picker, self.limits = pair.needed_drafter(), picker, limits
        self.max_new_tokens, self.stop_tokens, self.stop_early = max_new_tokens, stop_tokens, stop_early
        self.clock = clock if clock is not None else Clock(target.device)
        self.prompt_tok = prompt.shape[0]
        self.forwards, copied_levels, self.extra_rows = self.drafter.forwards, self.drafter.copied_levels, 0
        # the last cycle may overshoot by one path
        longest = self.prompt_tok + max_new_tokens + max(limits.depth + 1, copied_levels) + 1
        self.cache = target.new_cache(longest + limits.total_tokens + self.drafter.extra_rows)
        self.drafting = self.drafter.session(longest, limits.widest * max(1, limits.depth))
        self.growing = GrowingTree(target.device)
        self._flat: tuple[Tensor, Tensor] | None = None  # the root's children, if there are more than the beam takes
        self._copies, self._copied, self._copied_at = bool(copied_levels), Trie(), -1
        self._merged: Merged | None = None
        self._text = Text()  # read only where a policy asks for repetitions
        self._ids = torch.zeros(longest + 1, dtype=torch.long, device=target.device)
        self._ids[: self.prompt_tok] = prompt
        self._length = self.prompt_tok  # of prompt and text so far
        self.tokens: list[int] = []  # new tokens that count
        # features of the last commits; the drafter has not read those of `_unread_tok` yet. None without taps
        self._pending: list[Tensor | None] = []
        self._unread_tok = 0
        self._first_draft: tuple[Tensor, Tensor] | None = None  # the root's likeliest child and its log-probability
        self.finish_reason: str | None = None
        self.cycles = 0

    def inference(self) -> AbstractContextManager[None]:
        """The pair ready to decode; outside this block the models behave as usual."""
        return self.pair.inference()

    def prefill(self) -> int:
        """Run the prompt and pick the first token. Returns kept_tok (0 or 1)."""
        return finish(self.prefilling())

    def prefilling(self) -> Step[int]:
        """`prefill` that yields its forward to the driver."""
        prompt = self._ids[: self.prompt_tok]
        rows = yield TargetForward(self.target, prompt, self.cache, last_only=True)
        first = self.picker.pick(rows.logits[-1], prompt)
        kept_tok = self._take([first], torch.tensor([first]), rows.features)
        self._unread_tok = self.prompt_tok  # the prompt's second token to the root: one per feature row
        return kept_tok

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def context_tok(self) -> int:
        """Committed tokens before the root."""
        return self._length - 1

    @property
    def candidates(self) -> int:
        """Drafted nodes so far; 0 where none of them has a position below the target's limit."""
        if self.most_expansions < 0:
            return 0
        if (flat := self._flat_now) is not None:
            return flat[0].shape[1]
        return self.growing.candidates if self.merged is None else len(self.merged) - 1

    @property
    def copied(self) -> Trie:
        """Candidates at this position that need no forward."""
        if self._copies and self._copied_at != self._length:
            found = self.drafting.copied(self._ids[: self._length])
            self._copied, self._copied_at = found.within(self.most_expansions + 1), self._length
        return self._copied

    @property
    def merged(self) -> Merged | None:
        """Drafted and copied candidates together; None if all were drafted, or if the plan chooses one kind."""
        if self._shape is not None or self._flat_now is not None or not (self._plan.verify_nodes and len(self._copied)):
            return None
        if self._merged is None or self._merged.size != self.growing.size:
            self._merged = Merged(Pool(*self.growing.as_lists()), self._copied)
        return self._merged

    @property
    def _flat_now(self) -> tuple[Tensor, Tensor] | None:
        """The root's children, if they are the whole tree so far and more than the beam holds."""
        return self._flat if self.growing.level == 1 else None

    @property
    def most_expansions(self) -> int:
        """Levels below the root's children that fit below the target's context limit; -1: not even those children fit.

        At most what the drafter can draft.
        """
        limit, deepest = self.target.position_limit, self.drafter.deepest
        room = 1 << 30 if limit is None else limit - self._length - 1
        return room if deepest is None else min(room, deepest)

    def root(self, plan: Plan) -> Step[None]:
        self._plan, self._flat, self._merged, self._first_draft = plan, None, None, None
        self._shape = plan if isinstance(plan, StaticShape) and self.forwards else None
        self.growing.restart(self._ids[self._length - 1])
        if self._copies and plan.verify_nodes:
            self.clock.mark()
            assert self.copied is self._copied  # looked up here, so that it is timed as drafting
            self.clock.lap("draft")
        if not (plan.drafted and self.forwards):
            return
        tokens = self._ids[self._length - self._unread_tok : self._length]  # up to the root, one per row of features
        pending = [features for features in self._pending if features is not None]  # all of them, or none
        features = torch.cat(pending) if len(pending) > 1 else next(iter(pending), None)
        flat_nodes = 0 if self._shape else plan.flat_nodes
        self.clock.mark()
        most = max(plan.top_k, flat_nodes)
        children = yield DraftForward(self.drafter, self.drafting, "root", (tokens, features), most)
        self.clock.lap("draft")
        self._unread_tok = 0
        self._flat, self._first_draft = children if flat_nodes else None, (children[0][0, 0], children[1][0, 0])
        self._grow(*(part[:, : plan.top_k] for part in children))

    def expand(self) -> Step[None]:
        _, rows, tokens, _ = self.growing.frontier
        self.clock.mark()
        children = yield DraftForward(self.drafter, self.drafting, "expand", (tokens, rows), self._plan.top_k)
        self.clock.lap("draft")
        self._grow(*children)

    def _grow(self, tokens: Tensor, log_probs: Tensor) -> None:
        level = self.growing.level
        chosen = None if self._shape is None else self._shape.on(tokens.device)[0][level]
        self.growing.grow(tokens, log_probs, None if self._shape else self._plan.beam_at(level), chosen)

    def verify(self, verify_nodes: int) -> Step[int]:
        tree = self.tree = self._tree(verify_nodes)
        rows = self._beside(tree)
        self.clock.mark()
        self._rows = yield TargetForward(self.target, rows[0], self.cache, *rows[1:])
        self.clock.lap("verify")
        logits = self._rows.logits
        if self.extra_rows:
            self.drafting.learn(logits[len(tree) :])
            logits = logits[: len(tree)]
        self.path, self._picked = self.picker.walk(tree, logits, self._ids[: self._length])
        return len(self.path) - 1

    def _beside(self, tree: DraftTree) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, depths and ancestors of the tree's rows and of the drafter's window, whose rows see only the root of the tree."""
        window = self.drafting.window(self.most_expansions + 1)
        self.extra_rows = 0 if window is None else len(window[0])
        if window is None:
            return tree.token, tree.depth, tree.ancestors
        count, (tokens, depth, sees) = len(tree), window
        seen = torch.zeros(count + len(tokens), count + len(tokens), dtype=torch.bool, device=tokens.device)
        seen[:count, :count], seen[count:, count:], seen[:, 0] = tree.ancestors, sees, True
        return torch.cat((tree.token, tokens)), torch.cat((tree.depth, depth)), seen

    def _tree(self, verify_nodes: int) -> DraftTree:
        """The drafted nodes to verify: the planned shape if it is complete, else the best nodes."""
        shape = self._shape
        if shape is not None and verify_nodes == shape.verify_nodes and self.growing.level == shape.depth + 1:
            return self.growing.select(shape.on(self.target.device)[1])
        if (flat := self._flat_now) is not None:
            tokens, scores = (part[0, :verify_nodes] for part in flat)
            return DraftTree.flat(self._ids[self._length - 1], tokens, scores)
        if self.merged is not None and verify_nodes:
            return self.merged.best(verify_nodes, self.target.device)
        return self.growing.prune(verify_nodes)

    def commit(self) -> int:
        start = self._length - 1
        self.clock.mark()
        path, picked = torch.tensor([self.path, self._picked]).to(self._ids.device)  # the cycle's only upload
        self.cache.keep(start, [start + node for node in self.path], path + start)
        features = self._rows.features
        if features is not None:
            features = features.index_select(0, path)
        self.clock.lap("commit")
        self.cycles += 1
        if self._first_draft is not None and self.drafter.claims is not None and self.picker.is_greedy:
            self.drafter.claims.count(*self._first_draft, self._picked[0])
        return self._take(self._picked, picked, features)

    def _take(self, tokens: list[int], ids: Tensor, features: Tensor | None) -> int:
        """Commit new tokens, also given as `ids`; stop where plain decoding would. Returns how many of them count."""
        start, end = self._length, self._length + len(tokens)
        self._ids[start:end] = ids
        self._length = end
        self._pending = [*(self._pending if self._unread_tok else ()), features]
        self._unread_tok += len(tokens)
        counted = truncate(tokens, self.stop_tokens, self.max_new_tokens - len(self.tokens))
        if self.stop_early is not None:
            for count in range(1, len(counted) + 1):
                if self.stop_early(self._ids[: start + count]):
                    counted, self.finish_reason = counted[:count], "stop"
                    break
        self.tokens += counted
        if counted and counted[-1] in self.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_new_tokens and self.finish_reason is None:
            self.finish_reason = "length"
        return len(counted)

    @property
    def scores(self) -> Tensor:
        return self.growing.scores if self.growing.level else torch.tensor(self.copied.scores)

    @property
    def copied_scores(self) -> tuple[float, ...]:
        return tuple(self.copied.scores)

    @property
    def newest_scores(self) -> Tensor:
        return self.growing.newest_scores

    @property
    def features(self) -> Tensor:
        """[F]: the target's features at the last accepted token (the one before the root)."""
        if not self._pending or (features := self._pending[-1]) is None:
            raise SpecdecError("this drafter taps no target features; use a policy that does not need them.")
        return features[-1]

    @property
    def draft_state(self) -> Tensor:
        """[H]: the drafter's state at the root, available once its children are drafted."""
        state = self.drafting.root_state
        if state is None:
            raise SpecdecError("this drafter has no state to read; use a policy that does not need it.")
        return state

    @property
    def matched(self) -> tuple[float, float]:
        self._text.grow_to(self._ids[: self._length])
        count, token = self._text.repeats()
        if self._unread_tok:  # nothing is drafted here yet: the tree is that of the position before
            return float(count), 0.0
        tokens, scores = self.growing.first_level
        there = tokens.tolist()
        return float(count), math.exp(scores[there.index(token)]) if token in there else 0.0

    @property
    def text_state(self) -> Tensor:
        raise SpecdecError("only recordings can hold an embedding of the text; use a policy that does not need one.")
