"""Re-SpS: choose the whole draft tree from the target's hidden state, and keep it for N cycles.

    cycle   0 . . . . N . . . . 2N . .
    asked   |         |         |       state --MLP--> one of 177 trees (total, depth, top_k)
    tree    a a a a a b b b b b c  c c

The state is the target's features at the last accepted token, the reward is the speed of the N
cycles (Eq. 5), and a turn is an episode. PAPER follows the text, OFFICIAL the published code with
all its oddities, OURS what we recommend. Numbers are sections of the fact sheet, [P] marks the
paper and [C] its code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from specdec.core.policy import largest
from specdec.core.records import PLAN, Question
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError, check_name
from specdec.policies.base import Config, Learned, PPOConfig, as_array, changed, check_width

# Numbers in an embedding of all-MiniLM-L6-v2 (1.2)
TEXT_SIZE = 384


def valid_trees(
    totals: Iterable[int], depths: Iterable[int], widths: Iterable[Any], small: bool = False
) -> list[TreeConfig]:
    """The actions, totals outermost, without those where total > width ** (depth - 1) (1.3).

    Trees that exceed their pool are dropped too. small: only these are dropped, and a plain step
    (total 1) counts once. widths: children per node, or (children, nodes expanded per level ...).
    """
    trees: list[TreeConfig] = []
    for total, depth, width in product(totals, depths, widths):
        top_k, *beam = width if isinstance(width, tuple | list) else (width,)
        if total > top_k ** (depth - 1) and not small:
            continue
        if total - 1 > pool_size(depth, top_k, tuple(beam)):
            continue
        # a plain step is the same in every shape
        if small and total == 1 and trees and trees[-1].total_tokens == 1:
            continue
        trees.append(TreeConfig(total, depth, top_k, beam=tuple(beam)))
    return trees


@dataclass
class RespsSettings:
    """Re-SpS's trees, schedule and state.

    state: "concat" the features of all tapped layers unchanged [P]; "official" their mean over
    `layers` if they are layers * hidden_size wide, else cut or zero-padded to hidden_size (1.1)
    [C]; "normalised" layer-normalised, so that no layer dominates (5.3, ours); "text" a sentence
    embedding of the text so far (1.2), see `attach`.
    totals, depths, widths, small: the grid of trees (1.3), see `valid_trees`. interval: N.
    starter: the tree before any action. first_tree: fixed tree of every turn's first cycle, before
    the first action; None asks at once. action_lag: an action applies to the *next* cycle's tree.
    reseed_each_turn: every turn draws the same random numbers (the code resets once per question).
    """

    state: str = "concat"  # 1.1 [P]
    hidden_size: int = 4096  # 1.1 [C]: in every script, whatever the model
    layers: int = 3  # 1.1
    per_layer: bool = False  # 1.1: no normalisation at all
    totals: tuple[int, ...] = (32, 48, 64, 80, 96, 128)  # 1.3
    depths: tuple[int, ...] = (3, 4, 5, 6, 7, 8)  # 1.3
    widths: tuple[Any, ...] = (8, 12, 16, 20, 32)  # 1.3
    small: bool = False  # 1.3: keep small trees that the rule drops
    interval: int = 30  # 1.5
    starter: tuple[int, int, int] = (96, 8, 20)  # 0.4
    first_tree: tuple[int, int, int] | None = None  # 0.4 [C]
    action_lag: bool = False  # 0.3 [C]
    reseed_each_turn: bool = False  # 0.6 [C], exploration included


@dataclass
class RespsPolicy(RespsSettings, Learned):
    """Re-SpS's controller. features_size: the pair's, for states "concat" and "normalised"."""

    features_size: int = 0

    kind = PLAN

    def __post_init__(self) -> None:
        super().__post_init__()
        # 1. actions
        self.trees = valid_trees(self.totals, self.depths, self.widths, self.small)
        if not self.trees:
            raise SpecdecError("no tree of the grid satisfies total <= width ** (depth - 1).")
        self.choices = self.trees
        self.actions = len(self.trees)
        # 2. observations
        sizes = dict.fromkeys(("concat", "normalised"), self.features_size)
        sizes |= {"official": self.hidden_size, "text": TEXT_SIZE}
        self.observation_size = sizes[check_name("state of Re-SpS", self.state, sizes)]
        self._encode: Callable[[Question], Any] | None = None
        # 3. trees in force
        self.plan = self.trees[0]  # a formality: PLAN is always asked
        self._starter = TreeConfig(*self.starter)
        self._tree = self._starter  # never used without a lag
        fixed = [self._starter] if self.action_lag else []
        self._first: TreeConfig | None = None
        if self.first_tree:
            self._first = TreeConfig(*self.first_tree)
            fixed.append(self._first)
        self.limits = largest([*self.trees, *fixed])

    def reset(self) -> None:
        self._tree = self._starter
        if self.reseed_each_turn:
            self._random = np.random.default_rng(self.seed)

    def reseed(self, number: int) -> None:
        if not self.reseed_each_turn:
            super().reseed(number)

    def decides(self, question: Question) -> bool:
        """Every `interval` cycles of a turn, from its first, or second after a fixed first tree."""
        since = question.cycle if self._first is None else question.cycle - 1
        return since >= 0 and since % self.interval == 0

    def otherwise(self, question: Question) -> TreeConfig:
        if self._first is not None and question.cycle == 0:
            return self._first
        return self._tree

    def meaning(self, action: int, question: Question) -> TreeConfig:
        """The tree for this cycle; the chosen one stays until the next decision."""
        before = self._tree
        self._tree = self.trees[action]
        return before if self.action_lag else self._tree

    def observation(self, question: Question) -> np.ndarray:
        """float32 [observation_size]: the target's features at the last accepted token (1.1)."""
        if self.state == "text":
            if self._encode is None:
                return as_array(question.text_state)
            return np.asarray(self._encode(question), dtype=np.float32)
        features = np.zeros(0, dtype=np.float32)
        # a drafter without taps has no features
        with contextlib.suppress(SpecdecError):
            features = as_array(question.features)
        if self.state == "official":
            # the mean of the layers, else cut or zero-padded (1.1 [C])
            state = np.zeros(self.hidden_size, dtype=np.float32)
            if features.size == self.layers * self.hidden_size:
                state[:] = features.reshape(self.layers, -1).mean(axis=0)
            else:
                state[: features.size] = features[: self.hidden_size]
            return state
        check_width(type(self).__name__, features.size, self.features_size)
        if self.state == "concat":
            return features.copy()
        # layer norm without parameters: mean 0 and variance 1
        rows = features.reshape(self.layers if self.per_layer else 1, -1)
        rows = rows - rows.mean(axis=-1, keepdims=True)
        scaled: np.ndarray = rows / np.sqrt(np.square(rows).mean(axis=-1, keepdims=True) + 1e-5)
        return scaled.ravel()

    def attach(self, encode: Callable[[Question], Any]) -> RespsPolicy:
        """encode: question -> [384] numbers of the text so far, which a recording holds already."""
        self._encode = encode
        return self


# what the paper's text has and its code has not
_OF_ALGORITHM_2 = (
    "trees are drafted to their full depth, also where Algorithm 2 stops at TT candidates",
    "the buffer fills over several questions; in Appendix B each question's end clears it",
)


@dataclass(unsafe_hash=True)
class RespsConfig(Config, RespsSettings):
    """Everything in which paper, code and our version differ: the policy, and its training.

    reward: "mean_of_ratios" of new_tok / s over the interval's cycles (Eq. 5), "ratio_of_sums" of
    them, or "lagrangian", new_tok - lambda * time with lambda the current throughput.
    timed: the laps of a cycle that its time includes. terminal: every interval is an episode, a
    contextual bandit; otherwise a turn is one. start_in_reward: cycles before a turn's first
    action count for its first interval. junk_zero: after a turn's first interval there is a
    transition of one cycle with an all-zero observation. push_partial: keep an interval that is
    cut short by the turn's end. select: keep the checkpoint that is fastest on part "tune", not the
    last. prompts: the suites whose training part is used; () for all recorded ones. deviations: how
    training here differs from `name`.
    """

    policy_class = RespsPolicy
    name: str = "paper"
    temperature: float | None = 1.5  # 2.4, Table 4
    while_training: dict[str, Any] = field(  # 1.5, 2.3
        default_factory=lambda: {"interval": 10, "temperature": None}
    )
    reward: str = "mean_of_ratios"  # 1.4
    # 0.2: the code excludes drafting and committing
    timed: tuple[str, ...] = ("draft", "policy", "verify", "commit", "host")
    terminal: bool = False  # 0.5 [C]
    start_in_reward: bool = False  # 1.5 [C]
    junk_zero: bool = False  # 1.5 [C]
    push_partial: bool = False  # 1.5: Algorithm 2 drops it, the code does not
    select: bool = False
    prompts: tuple[str, ...] = ("mt_bench", "alpaca")  # 3.2
    deviations: tuple[str, ...] = (
        "chat questions of mt_bench and alpaca in place of ShareGPT's and UltraChat's",
        "advantages are normalised over each minibatch of 32, not over the 64 of an update",
        "with envs=8 an update's 64 transitions are 8 of each of 8 texts, not 64 in a row; envs=1"
        " makes them so",
        "{decisions:,} decisions on {questions:,} questions, read again and again; in the paper one"
        " pass over 4,000",
        *_OF_ALGORITHM_2,
    )
    # 2.2, Table 4: maximum entropy, on which scripts and table agree; [64, 64] in Table 5
    ppo: PPOConfig = PPOConfig(
        n_steps=64,
        batch_size=32,
        n_epochs=4,
        learning_rate=3e-4,
        gamma=0.95,
        gae_lambda=0.9,
        ent_coef=0.1,
        pi=(128, 128),
        vf=(128, 128),
        total_steps=55_000,  # 2.3: 4,000 questions of about 14 intervals
    )

    def policy(self, features_size: int, training: bool = False) -> Any:  # type: ignore[override]
        return super().policy(training, features_size=features_size)


PAPER = RespsConfig()
OFFICIAL = replace(
    PAPER,
    name="official",
    state="official",
    # 1.3: 96 *drafted* nodes and the root; with the lag two cycles run the starter
    first_tree=(97, 8, 20),
    action_lag=True,
    reseed_each_turn=True,
    timed=("policy", "verify"),
    terminal=True,
    start_in_reward=True,
    junk_zero=True,
    push_partial=True,
    deviations=PAPER.deviations[: -len(_OF_ALGORITHM_2)],
)
# 5.3. With normalise_observations .977 of the tuned tree in place of .981 (three seeds; small,
# 20,480 decisions, replayed).
OURS = replace(
    PAPER,
    name="ours",
    state="normalised",
    per_layer=True,
    interval=10,  # as in training
    temperature=None,
    reward="lagrangian",
    push_partial=True,
    select=True,
    prompts=(),
    deviations=(),
    ppo=replace(
        PAPER.ppo,
        n_steps=512,
        batch_size=128,
        n_epochs=10,
        linear_decay=True,
        ent_coef=0.01,
        total_steps=60_000,
        normalise_reward=True,
    ),
)
CONFIGS = {"paper": PAPER, "official": OFFICIAL, "ours": OURS}
# The standard variant, for which table and scripts disagree (2.2, 2.4).
_STANDARD = {"ppo.gamma": 0.99, "ppo.gae_lambda": 0.95, "ppo.ent_coef": 0.01}
STANDARD = {
    "paper": changed(PAPER, {"temperature": 1.0, **_STANDARD}),
    "official": changed(OFFICIAL, {"temperature": None, "ppo.ent_coef": 0.01}),
    "ours": OURS,
}
VARIANTS = {"max_entropy": CONFIGS, "standard": STANDARD}
