"""The live engine of the cycle: one turn of one prompt, with a target, a drafter and a picker.

Invariant between cycles: the target's cache holds every committed token but the last, which is the next tree's root; the
drafter's cache holds one entry per target feature it has been given. Knows nothing about policies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.core.clock import Clock
from specdec.core.protocols import Drafter, TargetModel
from specdec.core.tree import DraftTree, GrowingTree, Plan, StaticShape, tree_capacity
from specdec.core.tree_config import TreeConfig
from specdec.core.verification import Picker, truncate, verify
from specdec.errors import SpecdecError


class LiveEngine:
    """Implements `cycle.Engine`. Open it inside `target.inference()`; `prefill` must come first.

    limits: the largest tree any answer may ask for; the caches reserve room for it before anything is computed.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        prompt: Tensor,
        max_new_tokens: int,
        limits: TreeConfig,
        picker: Picker,
        stop_tokens: tuple[int, ...] = (),
        clock: Clock | None = None,
        stop_early=None,
    ):
        self.target, self.picker, self.limits = target, picker, limits
        self.max_new_tokens, self.stop_tokens = max_new_tokens, stop_tokens
        self.stop_early = stop_early  # called with ids [T] per new token (transformers' stopping criteria)
        self.clock = clock if clock is not None else Clock(target.device)
        self.prompt_tok = prompt.shape[0]
        longest = self.prompt_tok + max_new_tokens + limits.depth + 2  # the last cycle may overshoot by one path
        self.cache = target.new_cache(longest + limits.total_tokens)
        self.drafting = drafter.session(longest, limits.top_k * max(1, limits.depth))
        self.growing = GrowingTree(tree_capacity(limits.depth, limits.top_k), target.device)
        self._flat = None  # the root's children where more than the beam's were drafted
        self._ids = torch.zeros(longest + 1, dtype=torch.long, device=target.device)
        self._ids[: self.prompt_tok] = prompt
        self._length = self.prompt_tok
        self.tokens: list[int] = []  # new tokens that count
        self.finish_reason: str | None = None
        self.cycles = 0

    # ---- one turn ----------------------------------------------------------------------------------------------------
    def prefill(self) -> int:
        """Run the prompt and pick the first token. Returns kept_tok (0 or 1)."""
        prompt = self._ids[: self.prompt_tok]
        rows = self.target.forward(prompt, self.cache, last_only=True)
        root = self.picker.pick(rows.logits[-1], prompt)
        kept_tok = self._take([root], rows.features)
        self._unseen_tok = self.prompt_tok  # the prompt's second token to the root: one per feature row
        return kept_tok

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    # ---- what the cycle asks for ------------------------------------------------------------------------------------
    @property
    def context_tok(self) -> int:
        """Committed tokens before the root."""
        return self._length - 1

    @property
    def candidates(self) -> int:
        if self._depth_room <= 0:
            return 0
        return self._flat[0].shape[1] if self._is_flat else self.growing.candidates

    @property
    def _is_flat(self) -> bool:
        """Whether the tree so far is the root's children alone, and more of them than the beam holds."""
        return self._flat is not None and self.growing.level == 1

    @property
    def _depth_room(self) -> int:
        """Levels of nodes that still have a position below the target's limit."""
        limit = self.target.position_limit
        return 1 << 30 if limit is None else limit - self._length

    @property
    def most_expansions(self) -> int:
        return self._depth_room - 1

    def root(self, plan: Plan) -> None:
        self._plan = plan
        self._shape = plan if isinstance(plan, StaticShape) else None
        tokens = self._ids[self._length - self._unseen_tok : self._length]
        self.clock.mark()
        flat_nodes = getattr(plan, "flat_nodes", 0)
        children = self.drafting.root(tokens, self._pending, max(plan.top_k, flat_nodes))
        self.clock.lap("draft")
        self._flat = children if flat_nodes else None
        self.growing.restart(self._ids[self._length - 1])
        self._grow(*(part[:, : plan.top_k] for part in children))

    def expand(self) -> None:
        tokens, rows = self.growing.frontier_tokens, self.growing.rows
        self.clock.mark()
        children = self.drafting.expand(tokens, rows, self._plan.top_k)
        self.clock.lap("draft")
        self._grow(*children)

    def _grow(self, tokens: Tensor, log_probs: Tensor) -> None:
        chosen = None if self._shape is None else self._shape.chosen(self.growing.level + 1).to(tokens.device)
        self.growing.grow(tokens, log_probs, self._plan.top_k, chosen)

    def verify(self, verify_nodes: int) -> int:
        whole_shape = self._shape is not None and verify_nodes == self._shape.verify_nodes
        if whole_shape and self.growing.level == self._shape.depth + 1:
            self.tree = self.growing.select(self._shape.kept.to(self.target.device))
        elif self._is_flat:
            tokens, scores = (part[0, :verify_nodes] for part in self._flat)
            self.tree = DraftTree.flat(self._ids[self._length - 1], tokens, scores)
        else:
            self.tree = self.growing.prune(verify_nodes)
        tree, ancestors = self.tree, self.tree.ancestors
        self.clock.mark()
        self._rows = self.target.forward(tree.token, self.cache, tree.depth, ancestors)
        self.clock.lap("verify")
        self.path, self._bonus = verify(tree, self._rows.logits, self.picker, self._ids[: self._length])
        return len(self.path) - 1

    def commit(self) -> int:
        start = self._length - 1
        self.clock.mark()
        self.cache.keep(start, [start + node for node in self.path])
        features = self._rows.features
        if features is not None:
            features = features[torch.tensor(self.path, device=features.device)]
        self.clock.lap("commit")
        accepted = self.tree.token[self.path[1:]].tolist() if len(self.path) > 1 else []
        self.cycles += 1
        return self._take([*accepted, self._bonus], features)

    def _take(self, tokens: list[int], features: Tensor | None) -> int:
        """Commit new tokens, stop where plain decoding would stop. Returns how many of them count."""
        end = self._length + len(tokens)
        self._ids[self._length : end] = torch.tensor(tokens, device=self._ids.device)
        first, self._length, self._pending, self._unseen_tok = self._length, end, features, len(tokens)
        kept = truncate(tokens, self.stop_tokens, self.max_new_tokens - len(self.tokens))
        if self.stop_early is not None:
            for count in range(1, len(kept) + 1):
                if self.stop_early(self._ids[: first + count]):
                    kept, self.finish_reason = kept[:count], "stop"
                    break
        self.tokens += kept
        if kept and kept[-1] in self.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_new_tokens and self.finish_reason is None:
            self.finish_reason = "length"
        return len(kept)

    # ---- what a policy may look at ------------------------------------------------------------------------------------
    @property
    def scores(self) -> Tensor:
        return self.growing.scores

    @property
    def newest_scores(self) -> Tensor:
        return self.growing.newest_scores

    @property
    def features(self) -> Tensor:
        """[F]: the target's features at the last accepted token (the one before the root)."""
        return self._pending[-1]

    @property
    def draft_state(self) -> Tensor:
        """[H]: the drafter's state at the root, once its children are drafted."""
        state = getattr(self.drafting, "root_state", None)
        if state is None:
            raise SpecdecError("this drafter has no state to look at; use a policy without the drafter's state.")
        return state


def check_lengths(prompt_tok: int, max_new_tokens, position_limit: int | None) -> None:
    """Refuse lengths that cannot work, before anything is computed."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise SpecdecError(f"max_new_tokens must be an integer of at least 1, got {max_new_tokens!r}.")
    if prompt_tok < 1:
        raise SpecdecError("the prompt is empty; give at least one token.")
    if position_limit is not None and prompt_tok + max_new_tokens > position_limit:
        raise SpecdecError(
            f"the prompt has {prompt_tok} tokens and {max_new_tokens} more are asked for, but the target's context ends at "
            f"{position_limit}; shorten the prompt or ask for at most {max(0, position_limit - prompt_tok)} tokens."
        )
