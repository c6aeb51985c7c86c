"""The live engine of the cycle: one turn of one prompt, with a pair and a picker.

Invariant between cycles: the target's cache holds every committed token but the last, which is the
next tree's root. The drafter's cache holds one entry per target feature it was given; features of
plain steps wait for the next root pass.

Several prompts use several engines whose forwards run together (`decode.drive`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from specdec.core.clock import Clock
from specdec.core.pair import Pair
from specdec.core.protocols import DraftForward, Step, TargetForward, finish
from specdec.core.records import Generation
from specdec.core.tree import DraftTree, GrowingTree, Merged, StaticShape, Trie
from specdec.core.tree_config import Plan, TreeConfig
from specdec.core.verification import Picker, truncate
from specdec.errors import SpecdecError


class LiveEngine:
    """Implements `cycle.Engine`. Its steps run inside `inference`; `prefill` comes first.

    prompt: int64 [T]. limits: the largest tree a policy may ask for; caches reserve room for it.
    stop_early: called with ids [T] after every new token; True ends the text.
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
        self.pair = pair
        self.target = target = pair.target
        self.drafter = drafter = pair.needed_drafter()
        self.picker = picker
        self.limits = limits
        self.max_new_tokens = max_new_tokens
        self.stop_tokens = stop_tokens
        self.stop_early = stop_early
        self.clock = clock or Clock(target.device)
        self.forwards = drafter.forwards
        self.extra_rows = 0

        # 1. room for prompt and text; the last cycle may overshoot by one path
        self.prompt_tok = prompt.shape[0]
        path_tok = max(limits.depth + 1, drafter.copied_levels) + 1
        longest = self.prompt_tok + max_new_tokens + path_tok
        self.cache = target.new_cache(longest + limits.total_tokens + drafter.extra_rows)
        self.drafting = drafter.session(longest, limits.widest * max(1, limits.depth))

        # 2. the text: prompt and committed tokens, of which `tokens` are new and count
        self._ids = torch.zeros(longest + 1, dtype=torch.long, device=target.device)
        self._ids[: self.prompt_tok] = prompt
        self._length = self.prompt_tok
        self.tokens: list[int] = []
        self.generation = Generation(self.tokens, self.prompt_tok, finish_reason="unfinished")
        self.cycles = 0

        # 3. features [A, F] of the last commits, of which `_unread_tok` are new to the drafter
        self._pending: list[Tensor | None] = []
        self._unread_tok = 0

        # 4. the tree of the current cycle
        self.growing = GrowingTree(target.device)
        # the root's children, while there are more of them than the beam takes
        self._flat: tuple[Tensor, Tensor] | None = None
        self._copied = Trie()
        self._copied_at = -1
        self._merged: Merged | None = None

    def inference(self) -> AbstractContextManager[None]:
        """The pair ready to decode; outside this block the models behave as usual."""
        return self.pair.inference()

    def prefill(self) -> int:
        """Run the prompt and pick the first token. Returns kept_tok (0 or 1)."""
        return finish(self.prefilling())

    def prefilling(self) -> Step[int]:
        prompt = self._ids[: self.prompt_tok]
        rows = yield TargetForward(self.target, prompt, self.cache, last_only=True)
        first = self.picker.pick(rows.logits[-1], prompt)
        kept_tok = self._take([first], torch.tensor([first]), rows.features)
        # one token per row of features: from the prompt's second token to the root
        self._unread_tok = self.prompt_tok
        return kept_tok

    # The four steps of a cycle, in their order.

    def root(self, plan: Plan) -> Step[None]:
        """Begin a tree and draft the root's children from the tokens committed last."""
        # 1. a tree of the root alone
        self._plan = plan
        self._shape = plan if isinstance(plan, StaticShape) and self.forwards else None
        self._flat = None
        self._merged = None
        self.growing.restart(self._ids[self._length - 1])

        # 2. candidates copied from the text, looked up here so that they are timed as drafting
        if self.drafter.copied_levels and plan.verify_nodes:
            self.clock.mark()
            self._look_up_copies()
            self.clock.lap("draft")
        if not (plan.drafted and self.forwards) or self.most_expansions < 0:
            return

        # 3. the drafter reads the new tokens, each with the target's features before it
        tokens = self._ids[self._length - self._unread_tok : self._length]
        pending = [features for features in self._pending if features is not None]
        inputs = (tokens, torch.cat(pending) if pending else None)
        self.clock.mark()
        children = yield DraftForward(
            self.drafter, self.drafting, "root", inputs, max(plan.top_k, plan.flat_nodes)
        )
        self.clock.lap("draft")
        self._unread_tok = 0

        # 4. its likeliest tokens become the first level
        if plan.flat_nodes:
            self._flat = children
        self._grow(*children)

    def expand(self) -> Step[None]:
        """One draft forward over the frontier adds a level."""
        if self._flat is not None:
            tokens, log_probs = (rows[:, : self._plan.top_k] for rows in self._flat)
            self._flat = None
            self.growing.restart(self._ids[self._length - 1])
            self._grow(tokens, log_probs)
        _, rows, tokens, _ = self.growing.frontier
        self.clock.mark()
        children = yield DraftForward(
            self.drafter, self.drafting, "expand", (tokens, rows), self._plan.top_k
        )
        self.clock.lap("draft")
        self._grow(*children)

    def verify(self, verify_nodes: int) -> Step[int]:
        """One target forward over the tree, and the walk along its picks. Returns accepted_tok."""
        # 1. the tree's rows see their ancestors; a drafter's window is beside them
        tree = self.tree = self._tree(verify_nodes)
        tokens, depth, ancestors = self._with_window(tree)

        # 2. logits and features after every row
        self.clock.mark()
        self._rows = yield TargetForward(self.target, tokens, self.cache, depth, ancestors)
        self.clock.lap("verify")
        logits = self._rows.logits
        if self.extra_rows:
            self.drafting.learn(logits[len(tree) :])
            logits = logits[: len(tree)]

        # 3. walk from the root while a child carries the picked token
        self.path, self._picked = self.picker.walk(tree, logits, self._ids[: self._length])
        return len(self.path) - 1

    def commit(self) -> int:
        """The accepted path stays in the cache, its tokens and the bonus join the text."""
        start = self._length - 1
        self.clock.mark()
        # the cycle's only upload
        path, picked = torch.tensor([self.path, self._picked]).to(self._ids.device)
        self.cache.keep(start, [start + node for node in self.path], path + start)
        features = self._rows.features
        if features is not None:
            features = features.index_select(0, path)
        self.clock.lap("commit")
        self.cycles += 1
        return self._take(self._picked, picked, features)

    def _take(self, tokens: list[int], ids: Tensor, features: Tensor | None) -> int:
        """Commit new tokens, also given as `ids`. Returns how many count, as in plain decoding."""
        # 1. the text grows; features that the drafter has not read yet are kept
        start = self._length
        self._length = start + len(tokens)
        self._ids[start : self._length] = ids
        if not self._unread_tok:
            self._pending = []
        self._pending.append(features)
        self._unread_tok += len(tokens)

        # 2. the tokens that count end at a stop token, a criterion or the limit
        counted = truncate(tokens, self.stop_tokens, self.max_new_tokens - len(self.tokens))
        if self.stop_early is not None:
            for count in range(1, len(counted) + 1):
                if self.stop_early(self._ids[: start + count]):
                    counted = counted[:count]
                    self.generation.finish_reason = "stop"
                    break
        self.tokens += counted
        if counted and counted[-1] in self.stop_tokens:
            self.generation.finish_reason = "stop"
        elif len(self.tokens) >= self.max_new_tokens and not self.finished:
            self.generation.finish_reason = "length"
        return len(counted)

    # What the steps are made of.

    def _grow(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Add a level: the best nodes by score are expanded next, or those that a shape lists."""
        level = self.growing.level
        if self._shape is None:
            self.growing.grow(tokens, log_probs, self._plan.beam_at(level))
        else:
            expanded, _ = self._shape.on(tokens.device)
            self.growing.grow(tokens, log_probs, None, expanded[level])

    def _tree(self, verify_nodes: int) -> DraftTree:
        """The drafted nodes to verify: the planned shape if it is complete, else the best nodes."""
        shape = self._shape
        if shape is not None and verify_nodes == shape.verify_nodes:
            if self.growing.level == shape.depth + 1:
                return self.growing.select(shape.on(self.target.device)[1])
        if self.merged is not None and verify_nodes:
            return self.merged.best(verify_nodes, self.target.device)
        return self.growing.prune(verify_nodes)

    def _with_window(self, tree: DraftTree) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, depths and ancestors of the tree's rows and of the drafter's window."""
        window = self.drafting.window(self.most_expansions + 1)
        if window is None:
            self.extra_rows = 0
            return tree.token, tree.depth, tree.ancestors
        tokens, depth, sees = window
        self.extra_rows = len(tokens)
        nodes = len(tree)
        rows = nodes + len(tokens)
        ancestors = torch.zeros(rows, rows, dtype=torch.bool, device=tokens.device)
        ancestors[:nodes, :nodes] = tree.ancestors
        ancestors[nodes:, nodes:] = sees
        ancestors[:, 0] = True  # the window sees only the root of the tree
        return torch.cat((tree.token, tokens)), torch.cat((tree.depth, depth)), ancestors

    def _look_up_copies(self) -> Trie:
        """Candidates that need no forward; the drafter is asked once at each position."""
        if self.drafter.copied_levels and self._copied_at != self._length:
            self._copied = self.drafting.copied(self._ids[: self._length])
            # the longest copies must end before the last position
            if self.most_expansions + 1 < self.drafter.copied_levels:
                self._copied = Trie()
            self._copied_at = self._length
        return self._copied

    @property
    def merged(self) -> Merged | None:
        """Drafted and copied candidates together; None if the plan chooses one kind alone."""
        if self._shape is not None or self._flat is not None:
            return None
        if not (self._plan.verify_nodes and len(self._copied)):
            return None
        if self._merged is None or self._merged.size != self.growing.size:
            tree = self.growing.whole()
            drafted = (tree.token.tolist(), tree.parent.tolist(), tree.score.tolist())
            self._merged = Merged(*drafted, self._copied)
        return self._merged

    # The state that the cycle and policies read (`records.View`).

    @property
    def finished(self) -> bool:
        return self.generation.finish_reason != "unfinished"

    @property
    def context_tok(self) -> int:
        """Committed tokens before the root."""
        return self._length - 1

    @property
    def most_expansions(self) -> int:
        """Levels below the root's children that fit into target and drafter; -1: not even those."""
        limits = (self.target.position_limit, self.drafter.position_limit)
        room = min(limit or 1 << 30 for limit in limits) - self._length - 1
        if self.drafter.deepest is not None:
            room = min(room, self.drafter.deepest)
        return room

    @property
    def candidates(self) -> int:
        """Drafted nodes so far; 0 where none has a position below the target's limit."""
        if self.most_expansions < 0:
            return 0
        if self.merged is not None:
            return len(self.merged) - 1
        return self.growing.candidates

    @property
    def scores(self) -> Tensor:
        if not self.growing.level:
            return torch.tensor(self._look_up_copies().scores)
        return self.growing.scores

    @property
    def newest_scores(self) -> Tensor:
        return self.growing.newest_scores

    @property
    def copied_scores(self) -> tuple[float, ...]:
        return tuple(self._look_up_copies().scores)

    @property
    def features(self) -> Tensor:
        """[F]: the target's features at the last accepted token (the one before the root)."""
        if self._pending[-1] is None:
            raise SpecdecError("this drafter taps no target features; use another policy.")
        return self._pending[-1][-1]

    @property
    def draft_state(self) -> Tensor:
        """[H]: the drafter's state at the root, available once its children are drafted."""
        if self.drafting.root_state is None:
            raise SpecdecError("this drafter has no state to read; use another policy.")
        return self.drafting.root_state

    @property
    def text_state(self) -> Tensor:
        raise SpecdecError("only recordings hold an embedding of the text; use another policy.")
