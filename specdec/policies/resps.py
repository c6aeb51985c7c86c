"""Re-SpS: choose the whole draft tree from the target's own hidden state, and keep it for several cycles.

    cycle     0 . . . . . . . . N . . . . . . . . 2N . .
    asked     |                 |                 |         state --MLP--> one of 177 trees (total_tokens, depth, top_k)
    tree      a a a a a a a a a b b b b b b b b b c  c c

The network reads the target's features at the last accepted token. The tree is kept for N cycles, so that the overhead is
small; every turn starts anew. PAPER follows the text, OFFICIAL the published code with all its oddities, OURS what we
recommend. Numbers are sections of the fact sheet, [P] marks the paper and [C] its code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from specdec.core.policy import largest
from specdec.core.records import PLAN, Question
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError, check_name
from specdec.policies.base import Config, Learned, PPOConfig, Seeing, as_array, changed

STATES = ("concat", "official", "normalised", "text")
TEXT_SIZE = 384  # numbers in an embedding of all-MiniLM-L6-v2 (1.2)


def valid_trees(
    totals: Iterable[int], depths: Iterable[int], widths: Iterable[Any], small: bool = False
) -> list[TreeConfig]:
    """The actions, in order: totals outermost, widths innermost, without those where total > width ** (depth - 1) (1.3).

    So the paper's 6 x 6 x 5 grid loses three of its 180 trees. With narrower beams some trees that satisfy the rule exceed
    their pool; these are dropped too. small: only these are dropped, and a plain step (total 1) counts once.
    widths: children per node, or (children, nodes expanded on each level ...) for a separate beam.
    """
    shapes = [tuple(width) if isinstance(width, tuple | list) else (width,) for width in widths]
    trees = [
        TreeConfig(total, depth, width, beam=tuple(beam))
        for total, depth, (width, *beam) in product(totals, depths, shapes)
        if (small or total <= width ** (depth - 1)) and total - 1 <= pool_size(depth, width, tuple(beam))
    ]
    plain = [tree for tree in trees if tree.total_tokens == 1]
    return [tree for tree in trees if not small or tree not in plain[1:]]


@dataclass
class RespsSettings(Seeing):
    """Re-SpS's trees, schedule and state. Numbers are sections of the fact sheet, [P] paper, [C] code.

    state: "concat" the features of all tapped layers unchanged [P]; "official" their mean over `layers` if they are
    layers * hidden_size wide, else cut or zero-padded to hidden_size (1.1) [C]; "normalised" layer-normalised, so that
    no layer dominates (5.3, ours); "text" a sentence embedding of the text so far (1.2), see `attach`.
    totals, depths, widths, small: the grid of total_tokens, depth and top_k (1.3), see `valid_trees`.
    interval: N, cycles per action (1.5). starter: the tree before any action.
    first_tree: fixed tree of every turn's first cycle (0.4, 1.3), before the first action; None asks at once.
    action_lag: an action applies to the *next* cycle's tree; its own cycle still runs the previous tree (0.3).
    reseed_each_turn: the draws of every turn use the same random numbers (0.6; the code resets once per question).
    early_break: drafting stops at the level with total_tokens candidates (Algorithm 2, line 25).
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
    early_break: bool = False  # Algorithm 2 [P]; the code drafts to the full depth


@dataclass
class RespsPolicy(RespsSettings, Learned):
    """Re-SpS's controller (kind PLAN). features_size: width of the pair's features, needed by "concat" and "normalised"."""

    features_size: int = 0

    kind = PLAN

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("state of Re-SpS", self.state, STATES)
        if self.state in ("concat", "normalised"):
            if self.features_size < 1 or self.per_layer and self.features_size % self.layers:
                raise SpecdecError(f"state={self.state!r} needs features_size, the width of {self.layers} layers.")
        assert self.interval >= 1, self.interval
        self.trees = valid_trees(self.totals, self.depths, self.widths, self.small)
        if not self.trees:
            raise SpecdecError("no tree of the grid satisfies total <= width ** (depth - 1); widen or deepen the grid.")
        if self.early_break:
            pools = {tree: [1 + pool_size(n, tree.top_k, tree.beam) for n in range(tree.depth)] for tree in self.trees}
            self.trees = [replace(one, depth=sum(pool < one.total_tokens for pool in pools[one])) for one in self.trees]
        self.choices, self.actions = self.trees, len(self.trees)
        sizes = {"official": self.hidden_size, "text": TEXT_SIZE}
        self.observation_size = sizes.get(self.state, self.features_size) + self.seen
        self.plan = self.trees[0]  # a formality: PLAN is always asked
        self._starter = TreeConfig(*self.starter)
        self._first = TreeConfig(*self.first_tree) if self.first_tree else None
        fixed = filter(None, (self._first, self._starter if self.action_lag else None))
        self.limits = largest([*self.trees, *fixed])
        self._tree = self._starter  # never used without a lag
        self._encode: Callable[[str], Any] | None = None
        self._read: Callable[[Question], str] = str

    def reset(self) -> None:
        self._tree = self._starter
        if self.reseed_each_turn:
            self._random = np.random.default_rng(self.seed)

    def reseed(self, number: int) -> None:
        if not self.reseed_each_turn:
            super().reseed(number)

    def decides(self, question: Question) -> bool:
        """Every `interval` cycles of a turn, from its first on, or from its second if the first tree is fixed."""
        since = question.cycle - (self._first is not None)
        return since >= 0 and since % self.interval == 0

    def otherwise(self, question: Question) -> TreeConfig:
        return self._first if self._first is not None and question.cycle == 0 else self._tree

    def meaning(self, action: int, question: Question) -> TreeConfig:
        """The tree for this cycle; the chosen one is kept until the next decision. Call once per decision."""
        before, self._tree = self._tree, self.trees[action]
        return before if self.action_lag else self._tree

    def observation(self, question: Question) -> np.ndarray:
        """float32 [observation_size]."""
        return self.beside(self._state_of(question), question)

    def _state_of(self, question: Question) -> np.ndarray:
        if self.state == "text":
            return self._embedding(question)
        try:
            features = None if question.features is None else as_array(question.features)
        except SpecdecError:  # a drafter without taps
            features = None
        if self.state == "official":
            return official_state(features, self.hidden_size, self.layers)
        if features is None or features.size != self.features_size:
            width = 0 if features is None else features.size
            raise SpecdecError(f"this RespsPolicy reads {self.features_size} features, but the pair gives {width}.")
        if self.state == "concat":
            return features.copy()
        return normalised(features.reshape(self.layers if self.per_layer else 1, -1)).ravel()

    def attach(self, encode: Callable[[str], Any], read: Callable[[Question], str]) -> RespsPolicy:
        """Provide the two helpers of state "text" for decoding; they are not saved. Returns the policy.

        encode: text -> [384] numbers, such as `experiments.sentences.sentence_encoder()`. read: question -> the text so far. The
        code cuts it after 256 word pieces, so that its state barely changes during a turn (1.2). Recordings with embeddings need
        no helpers.
        """
        self._encode, self._read = encode, read
        return self

    def _embedding(self, question: Question) -> np.ndarray:
        if self._encode is not None:
            vector = np.asarray(self._encode(self._read(question)), dtype=np.float32)
        else:
            try:
                vector = as_array(question.text_state)
            except AttributeError:
                why = "state='text' needs an encoder to decode"
                raise SpecdecError(f"{why}; call policy.attach(encode, read).") from None
        assert vector.shape == (TEXT_SIZE,), f"the encoder must return {TEXT_SIZE} numbers for one text"
        return vector


def official_state(features: np.ndarray | None, hidden_size: int, layers: int = 3) -> np.ndarray:
    """The code's state from features float32 [F] -> [hidden_size] (1.1 [C]): mean of the layers, else cut or zero-padded."""
    state = np.zeros(hidden_size, dtype=np.float32)
    if features is not None and features.size == layers * hidden_size:
        state[:] = features.reshape(layers, hidden_size).mean(axis=0)
    elif features is not None:
        state[: features.size] = features[:hidden_size]
    return state


def normalised(rows: np.ndarray) -> np.ndarray:
    """Layer norm without parameters: each row of float32 [R, C] with mean 0 and variance 1."""
    rows = rows - rows.mean(axis=-1, keepdims=True)
    scaled: np.ndarray = rows / np.sqrt(np.square(rows).mean(axis=-1, keepdims=True) + 1e-5)
    return scaled


ALL_LAPS = ("draft", "policy", "verify", "commit", "host")


@dataclass(unsafe_hash=True)
class RespsConfig(Config, RespsSettings):
    """Everything in which paper, code and our version differ: the policy's settings, and its training.

    reward: "mean_of_ratios" of new_tok / s over the interval's cycles (Eq. 5), "ratio_of_sums" of them, or "lagrangian",
    new_tok - lambda * time with lambda the current throughput.
    timed: the laps of a cycle that its time includes.
    terminal: every interval is an episode, a contextual bandit; otherwise a turn is one.
    start_in_reward: cycles before a turn's first action count for its first interval.
    junk_zero: after a turn's first interval there is a transition of one cycle with an all-zero observation.
    push_partial: keep an interval that is cut short by the turn's end.
    clear_buffer: a turn's end drops transitions that have not yet filled PPO's buffer (Appendix B).
    select: keep the checkpoint that is fastest on part "tune", not the last one.
    prompts: the suites whose training part is used; () for all recorded ones.
    deviations: how training here differs from `name`; see `base.deviations_of`.
    """

    name: str = "paper"
    temperature: float | None = 1.5  # 2.4, Table 4
    while_training: dict[str, Any] = field(default_factory=lambda: {"interval": 10, "temperature": None})  # 1.5, 2.3
    reward: str = "mean_of_ratios"  # 1.4
    timed: tuple[str, ...] = ALL_LAPS  # 0.2: the code excludes drafting and committing
    terminal: bool = False  # 0.5 [C]
    start_in_reward: bool = False  # 1.5 [C]
    junk_zero: bool = False  # 1.5 [C]
    push_partial: bool = False  # 1.5: Algorithm 2 drops it, the code does not
    clear_buffer: bool = False  # Appendix B [P]: only answers of 64 intervals then fill a buffer of 64
    select: bool = False
    prompts: tuple[str, ...] = ("mt_bench", "alpaca")  # 3.2
    deviations: tuple[str, ...] = (
        "chat questions of mt_bench and alpaca in place of ShareGPT's and UltraChat's",
        "advantages are normalised over each minibatch of 32, not over the 64 of an update",
        "with envs=8 an update's 64 transitions are 8 of each of 8 texts, not 64 in a row; envs=1 makes them so",
        "early_break=False: trees are drafted to their full depth, also where Algorithm 2 stops at TT candidates",
        "clear_buffer=False: the buffer fills over several questions; in Appendix B each question's end clears it",
        "{decisions} decisions on {questions} questions, read again and again; in the paper one pass over 4,000",
    )
    ppo: PPOConfig = PPOConfig(  # 2.2, Table 4: maximum entropy, on which scripts and table agree; [64, 64] in Table 5
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

    def policy(self, features_size: int, training: bool = False) -> RespsPolicy:
        """The policy as it decodes or, training, as it learns. features_size: width of the pair's features."""
        return self.made(RespsPolicy, training, features_size=features_size)


PAPER = RespsConfig()
OFFICIAL = replace(
    PAPER,
    name="official",
    state="official",
    first_tree=(97, 8, 20),  # 1.3: 96 *drafted* nodes and the root, in the first tree only
    action_lag=True,  # with first_tree two cycles run the starter
    reseed_each_turn=True,
    timed=("policy", "verify"),
    terminal=True,
    start_in_reward=True,
    junk_zero=True,
    push_partial=True,
    deviations=tuple(line for line in PAPER.deviations if "=False:" not in line),  # of Algorithm 2, not of the code
)
OURS = replace(  # 5.3
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
    # With normalise_observations .977 of the tuned tree in place of .981 (three seeds; small, 20,480 decisions, replayed).
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
STANDARD = {
    "paper": changed(PAPER, {"temperature": 1.0, "ppo.gamma": 0.99, "ppo.gae_lambda": 0.95, "ppo.ent_coef": 0.01}),
    "official": changed(OFFICIAL, {"temperature": None, "ppo.ent_coef": 0.01}),
    "ours": OURS,
}
VARIANTS = {"max_entropy": CONFIGS, "standard": STANDARD}
