"""LTD: one small network decides after each draft forward whether to continue, another how many
drafted nodes to verify.

    expand -> continue? -> expand -> continue? -> ... stop -> how many nodes? -> verify
           depth policy                               size policy

Both observe cumulative draft log-probabilities, context length and depth (1.1, 2.1). An episode of
the depth policy is a cycle, the reward at its end the cycle's throughput (1.5); the size policy has
the same reward. They are trained alone, then in turns, each with the other frozen (`ROUNDS`). PAPER
follows the text, OFFICIAL the published code with all its oddities, OURS what we recommend. Numbers
are sections of the fact sheet, [P] marks the paper and [C] its code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from specdec.core.policy import RandomPolicy
from specdec.core.records import EXTEND, PLAN, SIZE, Question
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError, check_fields
from specdec.policies import base
from specdec.policies.base import Config, Learned, PPOConfig, as_array, changed, tree_of

combine = base.combine
# Copies of a scalar among the inputs, which give it weight beside the many scores (1.1, 2.1).
DEPTH_COPIES = 14
SIZE_COPIES = 29
OFFICIAL_SIZES = tuple(range(10, 241, 10))  # 24 sizes (2.2 [C])
PAPER_SIZES = tuple(range(20, 241, 20))  # 12 sizes (2.2 [P])
# Machines differ most for small ones: a CPU's best static tree verifies three nodes.
OUR_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 60, 80, 100, 120, 160, 200, 240)


def _check_tree(policy: DepthPolicy | SizePolicy, question: Question) -> None:
    """Refuse a plan of another beam width or of more depth than the network's inputs hold."""
    plan = question.plan
    same = isinstance(plan, TreeConfig) and plan.top_k == policy.top_k
    if not same or plan.beam != policy.limits.beam or plan.depth > policy.depth:
        why = f"this {type(policy).__name__} reads trees of top_k={policy.top_k}, "
        why += f"beam={policy.limits.beam} and at most depth={policy.depth}"
        raise SpecdecError(f"{why}, but the plan in force is {plan}.")


@dataclass
class DepthSettings:
    """The trees of LTD's depth policy, and when it is asked.

    depth, top_k, beam: the largest tree. total_tokens: verified without a size policy.
    stride: it is asked after stride, 2 * stride, ... expansions. constant_length: the length
    feature is 0.01 for any context. first_depth: expansions of a turn's first tree, for which it is
    not asked. ask_at_zero: also asked before the first expansion, with the previous tree's scores;
    the answer is ignored. from_root: asked there with the root's own scores, with effect.
    """

    depth: int = 12  # 1.2
    top_k: int = 10  # 0
    stride: int = 1  # 1.2: after each forward [P], every third [C]
    total_tokens: int = 61  # 0: 60 nodes and the root
    constant_length: bool = False  # 1.1 [C], a bug there
    first_depth: int | None = None  # 0 [C]
    ask_at_zero: bool = False  # 1.1 [C]
    beam: tuple[int, ...] = ()  # 0: as many as children
    from_root: bool = False  # 1.2: n >= 1


@dataclass
class DepthPolicy(DepthSettings, Learned):
    """LTD's depth policy: newest scores, length and depth -> stop (0) or continue (1)."""

    activation: str = "relu"  # 1.3 [P]

    kind = EXTEND
    actions = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limits = TreeConfig(self.total_tokens, self.depth, self.top_k, beam=self.beam)
        self.plan = self.limits
        self._newest = np.zeros(self.limits.widest * self.top_k, dtype=np.float32)
        self.observation_size = len(self._newest) + 2 * DEPTH_COPIES

    def decides(self, question: Question) -> bool:
        _check_tree(self, question)
        n = question.expansions
        if question.cycle == 0 and self.first_depth is not None:
            return False
        if n == 0:
            return self.ask_at_zero or self.from_root
        return n < self.depth and n % self.stride == 0

    def otherwise(self, question: Question) -> bool:
        """The first expansion always happens; between two queries it continues."""
        if question.cycle == 0 and self.first_depth is not None:
            return question.expansions < self.first_depth
        return question.expansions < self.depth

    def meaning(self, action: int, question: Question) -> bool:
        ignored = question.expansions == 0 and not self.from_root
        return ignored or bool(action)

    def observation(self, question: Question) -> np.ndarray:
        """float32 [top_k**2 + 28] (1.1).

        Newest scores (beam rank x child rank), context / 1000 and n / 10, the latter two 14 times
        each. Levels with fewer scores, the root's or a narrower beam's, are padded with NOWHERE.
        """
        if question.expansions or self.from_root:
            scores = as_array(question.newest_scores)
            missing = len(self._newest) - len(scores)
            self._newest = np.pad(scores, (0, missing), constant_values=base.NOWHERE)
        length = 0.01 if self.constant_length else question.context_tok / 1000
        scalars = np.array([length, question.expansions / 10], np.float32)
        return np.concatenate((self._newest, np.repeat(scalars, DEPTH_COPIES)))


# Possible inputs of the size policy (Table 6).
PARTS = ("scores", "length", "depth", "hidden", "entropy")
OBSERVATIONS: dict[str, tuple[str, ...]] = {
    "P+L": ("scores", "length"),
    "P+D": ("scores", "depth"),
    "P+D+L": ("scores", "length", "depth"),
    "+hidden": ("scores", "length", "depth", "hidden"),
    "+entropy": ("scores", "length", "depth", "entropy"),
}


@dataclass
class SizeSettings:
    """The choices and inputs of LTD's size policy.

    sizes: verify_nodes per action. depth, top_k, beam: the largest tree that the inputs hold.
    drafted: depth of its trees without a depth policy; None for the largest. parts: its inputs, in
    the order of PARTS. features_size: the pair's, for the part "hidden". exponentiated:
    probabilities, whose padding 0 means impossible and not certain. best: only so many scores, best
    first; 0: all, in creation order. first_nodes: size of a turn's first tree, not asked for.
    """

    sizes: tuple[int, ...] = PAPER_SIZES  # 2.2 [P]
    depth: int = 12  # 2.1
    top_k: int = 10  # 0
    drafted: int | None = 12
    parts: tuple[str, ...] = OBSERVATIONS["P+D+L"]  # 2.1, Table 6
    features_size: int = 0
    exponentiated: bool = False  # 2.1; 6.3 for ours
    best: int = 0  # 2.1: all scores; 6.3 for ours
    first_nodes: int | None = None  # 0 [C]
    beam: tuple[int, ...] = ()  # 0: as many as children


@dataclass
class SizePolicy(SizeSettings, Learned):
    """LTD's size policy: all scores of the pool, length and depth -> one of `sizes`."""

    activation: str = "relu"  # 1.3 [P]

    kind = SIZE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts[:1] != ("scores",) or not set(self.parts) <= set(PARTS):
            raise SpecdecError(f"parts begin with 'scores', of {PARTS}; got {self.parts!r}.")
        # 1. actions and trees
        self.choices = self.sizes
        self.actions = len(self.sizes)
        largest_size = max(*self.sizes, self.first_nodes or 0)
        drafted = self.depth if self.drafted is None else self.drafted
        self.limits = tree_of(largest_size, self.depth, self.top_k, self.beam)
        self.plan = tree_of(largest_size, drafted, self.top_k, self.beam)
        # 2. inputs
        pool = self.limits.pool_size
        self._scores = min(self.best or pool, pool)
        widths = {"length": SIZE_COPIES, "depth": SIZE_COPIES, "hidden": self.features_size}
        widths["entropy"] = 1 + self.depth * self.top_k
        self.observation_size = self._scores + sum(widths[part] for part in self.parts[1:])

    def decides(self, question: Question) -> bool:
        _check_tree(self, question)
        return question.cycle > 0 or self.first_nodes is None

    def otherwise(self, question: Question) -> int:
        return min(self.first_nodes or 0, int(question.largest))

    def meaning(self, action: int, question: Question) -> int:
        return min(self.sizes[action], int(question.largest))

    def observation(self, question: Question) -> np.ndarray:
        """float32 [observation_size]: scores padded with 0, then the parts one by one (2.1).

        1268 numbers for the paper's: 1210 scores, then 29 lengths, 29 depths.
        """
        scores = as_array(question.scores)
        values = scores[: self._scores]
        if self.best:
            values = np.sort(scores)[::-1][: len(values)]
        if self.exponentiated:
            values = np.exp(values)
        inputs = [values, np.zeros(self._scores - len(values))]
        for part in self.parts[1:]:
            if part == "length":
                inputs.append(np.full(SIZE_COPIES, question.context_tok / 1000))
            elif part == "depth":
                inputs.append(np.full(SIZE_COPIES, question.expansions / 10))
            elif part == "entropy":
                nats = child_entropies(scores, self.top_k)
                inputs.append(np.pad(nats, (0, 1 + self.depth * self.top_k - len(nats))))
            else:
                inputs.append(as_array(question.features))
                base.check_width(type(self).__name__, inputs[-1].size, self.features_size)
        return np.concatenate(inputs, dtype=np.float32)


def child_entropies(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Entropies in nats [1 + n * top_k] of the drafts at the root and every expanded node.

    In beam order. Sums over the drafted children only, since no more are known.
    scores: float32 [pool].
    """
    root = scores[:top_k]
    levels = scores[top_k:].reshape(-1, top_k * top_k)
    # the parents of each level are the best top_k of the level before, best first
    beams = np.sort(levels[:-1], axis=1)[:, -top_k:]
    parents = np.concatenate((np.sort(root)[None], beams))[: len(levels), ::-1]
    log_probs = levels.reshape(-1, top_k) - parents.reshape(-1, 1)
    log_probs = np.concatenate((root[None], log_probs))
    entropies: np.ndarray = -(np.exp(log_probs) * log_probs).sum(axis=1)
    return entropies


class RandomDepth(RandomPolicy):
    """Drafts 1..depth expansions at random while the size policy learns alone (3.2 [P])."""

    def __init__(self, learner: SizePolicy, seed: int = 0):
        limits = learner.limits
        depths = range(1, limits.depth + 1)
        self.plans = [tree_of(limits.verify_nodes, n, limits.top_k, limits.beam) for n in depths]
        super().__init__(self.plans[-1], seed, asks=(PLAN,))

    def answer(self, question: Question) -> TreeConfig:
        return self._random.choice(self.plans)


class Round(NamedTuple):
    """One training: `learner`, "depth" or "size", learns while the latest `frozen` answers.

    frozen None: it learns alone. A later round continues from its weights; its steps start over.
    """

    name: str
    learner: str
    frozen: str | None = None


def _order(*learners: str) -> tuple[Round, ...]:
    """Each alone, then these in turns, each beside the frozen other one."""
    rounds = [Round("iter0", "size"), Round("iter0", "depth")]
    for number, learner in enumerate(learners, 1):
        frozen = "depth" if learner == "size" else "size"
        rounds.append(Round(f"iter{number}", learner, frozen))
    return tuple(rounds)


# Sections 4 and 6.1 of the paper contradict each other; its tables follow 6.1 (3.3).
# Its LTD is iter2 or iter3, by model.
ORDERS = {"6.1": _order("size", "depth", "size"), "4": _order("depth", "size", "depth", "size")}
ROUNDS = ORDERS["6.1"]
_PPO = PPOConfig(  # 1.4 [P]
    n_steps=2048,
    batch_size=256,
    n_epochs=20,
    learning_rate=1e-3,
    warmup_frac=0.01,
    linear_decay=True,
    gamma=0.999,
    ent_coef=0.01,
    pi=(1024,),
    vf=(1024, 256),
    activation="relu",
    total_steps=1_000_000,
)


@dataclass(unsafe_hash=True)
class DepthConfig(Config, DepthSettings):
    """The depth policy's settings, those that differ in training, and its PPO."""

    policy_class = DepthPolicy
    while_training: dict[str, Any] = field(default_factory=dict)
    ppo: PPOConfig = _PPO


@dataclass(unsafe_hash=True)
class SizeConfig(Config, SizeSettings):
    """The size policy's settings, those that differ in training, and its PPO."""

    policy_class = SizePolicy
    drafted: int | None = 8  # Tables 2 and 4
    while_training: dict[str, Any] = field(default_factory=lambda: {"drafted": None})  # 3.2
    # 2.3; Table 10 compares pi of (1024,), (1024, 256) and (1024, 512, 256).
    # Episodes of one step: gamma has no effect.
    ppo: PPOConfig = replace(_PPO, pi=(1024, 256), gamma=0.9, total_steps=100_000)


@dataclass(frozen=True)
class LtdConfig:
    """Everything in which paper, code and our version differ.

    reward: "throughput", "accepted" tokens, "time_cost" (Table 2), or "lagrangian",
    new_tok - lambda * time. timed: the laps of a cycle that its time includes. random_depth:
    alone, the size policy drafts at random depths. select: keep the checkpoint that is fastest on
    part "tune", not the last one. prompts: the suites whose training part is used; () for all
    recorded ones. deviations: how training here differs from `name`.
    """

    name: str = "paper"
    depth: DepthConfig = DepthConfig()  # noqa: RUF009  frozen
    size: SizeConfig = SizeConfig()  # noqa: RUF009  frozen
    rounds: tuple[Round, ...] = ROUNDS  # 3.3
    reward: str = "throughput"  # 1.5
    timed: tuple[str, ...] = ("draft", "verify", "commit", "host")  # 1.6: not the policies' own
    random_depth: bool = True  # 3.2: [P]; the code always drafts 12 deep
    select: bool = True  # 3.3 [P]; the code keeps the last
    prompts: tuple[str, ...] = ("humaneval",)  # 3.1
    deviations: tuple[str, ...] = (
        "the frozen partner's own calls do not count as time; in the paper they lie inside T"
        " (1.6, 2.4)",
        "the training part of humaneval, {questions:,} prompts and not all 80",
        "{decisions:,} decisions over all rounds; in the paper 1,000,000 per round of depth and"
        " 100,000 of size",
    )

    def __post_init__(self) -> None:
        check_fields(self)


PAPER = LtdConfig()
_SCRIPT: dict[str, Any] = dict(n_steps=128, batch_size=64, n_epochs=1, learning_rate=3e-4)
_SCRIPT |= dict(gamma=0.99, ent_coef=0.0, activation="tanh")
OFFICIAL = changed(
    PAPER,
    {
        "name": "official",
        "depth.stride": 3,  # trees 3, 6, 9 or 12 deep
        "depth.constant_length": True,
        "depth.total_tokens": 60,
        "depth.first_depth": 8,
        "depth.while_training": dict(
            stride=1, constant_length=False, total_tokens=61, first_depth=5, ask_at_zero=True
        ),
        "depth.ppo": replace(PAPER.depth.ppo, **_SCRIPT, total_steps=100_000),
        "size.sizes": OFFICIAL_SIZES,
        "size.first_nodes": 59,
        "size.ppo": replace(PAPER.size.ppo, **_SCRIPT),
        "random_depth": False,
        "select": False,
        "deviations": (
            *PAPER.deviations,
            "the first tree of a turn of the size policy's training is as deep as the others, not 5"
            " (3.1)",
        ),
    },
)
# Observations normalised: 1.020 and 1.039 of the tuned tree in place of 1.033 and 1.013 after
# iter3 (two seeds; small, 20,480 and 10,240 decisions a round, replayed, answers free), .97 and
# .96 in place of .93 and .92 after iter0.
_OUR_PPO: dict[str, Any] = dict(gamma=1.0, n_epochs=10, learning_rate=3e-4)
_OUR_PPO |= dict(pi=(256, 64), vf=(256, 64), normalise_observations=True)
OURS = changed(
    PAPER,
    {
        "name": "ours",
        "depth.ppo": replace(PAPER.depth.ppo, **_OUR_PPO, total_steps=200_000),
        "size.sizes": OUR_SIZES,
        "size.drafted": None,
        "size.exponentiated": True,
        "size.best": 240,
        "size.while_training": {},
        "size.ppo": replace(PAPER.size.ppo, **_OUR_PPO),
        "reward": "lagrangian",
        "timed": ("draft", "policy", "verify", "commit", "host"),
        "prompts": (),
        "deviations": (),
    },
)
CONFIGS = {"paper": PAPER, "official": OFFICIAL, "ours": OURS}
# The paper's wide networks and 20 epochs are too slow for two cores: all rounds of one seed take
# at most 10 minutes.
_SHORT = {"depth.ppo.total_steps": 61_440, "size.ppo.total_steps": 20_480}
LAPTOP = {**CONFIGS, "paper": changed(PAPER, _SHORT)}
