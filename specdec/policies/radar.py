"""RADAR: after each draft call an LSTM reads the best path scores and decides to continue or stop.

    draft call 1 -> s_1 -> LSTM -> continue -> draft call 2 -> s_2 -> LSTM -> ... -> stop -> verify
                            |  memory  -------------------------->  |

The state s_t holds the 10 largest cumulative log-probabilities of the level drafted last (Eq. 1),
an episode is a cycle, and the reward is -alpha per continue and beta * L / l at the stop (Eq. 4).
The network is the published one, with its names and shapes, in numpy; its memory lasts one cycle.
`training.radar` learns the weights. (RADAR, arXiv 2512.14069.) Numbers are sections of the fact
sheet.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np

from specdec.core.records import EXTEND, Question
from specdec.core.tree_config import TREES, TreeConfig
from specdec.errors import SpecdecError, check_fields, check_name
from specdec.policies.base import NOWHERE, Config, Learned, as_array

Memory = tuple[np.ndarray, np.ndarray]
STATE = 10  # scores per state
HIDDEN = 128  # width of the LSTM and of the head
ACTIONS = 2
STOP, CONTINUE = 0, 1
# Questions per cycle: after draft calls 1 to 7; the eighth is the last.
DECISIONS = 7
SHAPES = {
    "lstm.weight_ih_l0": (4 * HIDDEN, STATE),
    "lstm.weight_hh_l0": (4 * HIDDEN, HIDDEN),
    "lstm.bias_ih_l0": (4 * HIDDEN,),
    "lstm.bias_hh_l0": (4 * HIDDEN,),
    "mlp.0.weight": (HIDDEN, HIDDEN + STATE),
    "mlp.0.bias": (HIDDEN,),
    "mlp.3.weight": (ACTIONS, HIDDEN),
    "mlp.3.bias": (ACTIONS,),
}


class LstmNetwork:
    """LSTM(10 -> 128) and a head on [its output, the state], one step at a time in float32."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        if {name: array.shape for name, array in arrays.items()} != SHAPES:
            raise SpecdecError(f"these are not RADAR's weights; expected {SHAPES}.")
        weights = {name: np.ascontiguousarray(arrays[name], dtype=np.float32) for name in SHAPES}
        self._arrays = weights
        # One matrix for both inputs; gates i, f, o halved, so that a single tanh suffices:
        # sigmoid(x) = tanh(x / 2) / 2 + 1/2.
        half = np.repeat(np.array([0.5, 0.5, 1.0, 0.5], np.float32), HIDDEN)
        both = np.hstack((weights["lstm.weight_hh_l0"], weights["lstm.weight_ih_l0"]))
        self._gates = np.ascontiguousarray(half[:, None] * both)
        self._gate_bias = half * (weights["lstm.bias_ih_l0"] + weights["lstm.bias_hh_l0"])
        self._joined = np.zeros(HIDDEN + STATE, dtype=np.float32)

    def step(self, state: np.ndarray, memory: Memory | None = None) -> tuple[np.ndarray, Memory]:
        """state float32 [10] -> logits float32 [2] (stop, continue), and (h, c) [128] each."""
        weights = self._arrays
        joined = self._joined
        joined[HIDDEN:] = state
        joined[:HIDDEN] = 0 if memory is None else memory[0]
        # 1. the LSTM's cell
        gates = np.tanh(self._gates @ joined + self._gate_bias).reshape(4, HIDDEN)
        enter = gates[0] * 0.5 + 0.5
        forget = gates[1] * 0.5 + 0.5
        leave = gates[3] * 0.5 + 0.5
        cell = enter * gates[2]
        if memory is not None:
            cell = forget * memory[1] + cell
        hidden = leave * np.tanh(cell)
        # 2. the head, on its output and the state
        joined[:HIDDEN] = hidden
        inner = np.maximum(weights["mlp.0.weight"] @ joined + weights["mlp.0.bias"], 0)
        return weights["mlp.3.weight"] @ inner + weights["mlp.3.bias"], (hidden, cell)

    def arrays(self) -> dict[str, np.ndarray]:
        return dict(self._arrays)


@dataclasses.dataclass
class RadarSettings:
    """RADAR's tree and its inputs: depth 7, beam 10, 60 tokens in all (section 4).

    half_inputs: round the scores to float16 first. flat_nodes: first tokens in the tree of a single
    draft call; None keeps 10. Levels with fewer than 10 scores are padded with NOWHERE.
    """

    half_inputs: bool = False  # 2 [C]: scores are cast to float16
    flat_nodes: int | None = None
    total_tokens: int = 60  # 3
    top_k: int = STATE  # 3
    beam: tuple[int, ...] = ()  # 3: as many as children


@dataclasses.dataclass
class RadarPolicy(RadarSettings, Learned):
    """Answers EXTEND after draft calls 1 to 7: one more level, or stop.

    temperature: 1.0 draws, as the paper's code does.
    """

    activation: str = "relu"  # of the head; the LSTM's are fixed

    kind = EXTEND
    actions = ACTIONS
    observation_size = STATE

    def __post_init__(self) -> None:
        super().__post_init__()
        flat_nodes = self.flat_nodes or 0
        self.limits = TreeConfig(self.total_tokens, DECISIONS, self.top_k, flat_nodes, self.beam)
        self.plan = self.limits
        self._memory: Memory | None = None

    def observation(self, question: Question) -> np.ndarray:
        """float32 [10]: the best log-probabilities of the level drafted last (Eq. 1)."""
        return best_scores(as_array(question.newest_scores), self.half_inputs, self.limits)

    def answer(self, question: Question) -> bool:
        if question.expansions == 0:  # the memory lasts one cycle
            self._memory = None
        return bool(super().answer(question))

    def logits(self, observation: np.ndarray) -> np.ndarray:
        """float32 [2]: stop, continue. Advances the memory by one step."""
        logits: np.ndarray
        logits, self._memory = self.trained_network().step(observation, self._memory)
        return logits

    def meaning(self, action: int, question: Question) -> bool:
        return action == CONTINUE

    def build_network(self, arrays: dict[str, np.ndarray]) -> LstmNetwork:
        return LstmNetwork(arrays)


def released(folder: Path) -> dict[str, RadarPolicy]:
    """A policy for each file of published weights (.pt) in `folder`, by the file's name."""
    import torch

    policies = {}
    for path in sorted(Path(folder).glob("*.pt")):
        # only tensors are read, no code
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        weights = {name: as_array(tensor) for name, tensor in tensors.items()}
        policies[path.stem] = OFFICIAL.policy()
        policies[path.stem].network = LstmNetwork(weights)
    if not policies:
        raise SpecdecError(f"{folder} holds no .pt; give the folder of RADAR's released weights.")
    return policies


def best_scores(
    newest: np.ndarray, half: bool = False, tree: TreeConfig = TREES["eagle3"]
) -> np.ndarray:
    """The 10 largest of `newest` [..., M], descending, padded with NOWHERE: float32 [..., 10]."""
    width = newest.shape[-1]
    if width < min(STATE, tree.top_k):
        raise SpecdecError(f"RADAR reads {STATE} scores of a level; plan top_k={tree.top_k}.")
    if width < STATE:
        padding = [(0, 0)] * (newest.ndim - 1) + [(0, STATE - width)]
        newest = np.pad(newest, padding, constant_values=NOWHERE)
    best = np.sort(newest, axis=-1)[..., : -STATE - 1 : -1]
    if half:
        best = best.astype(np.float16)
    return best.astype(np.float32, copy=False)


@dataclasses.dataclass(unsafe_hash=True)
class RadarConfig(Config, RadarSettings):
    """How RADAR decides, and its training. [P] paper, [C] code.

    objective: "ratio" rewards beta * L / l at the stop and -alpha per continue (Eq. 4).
    "lagrangian" rewards L - rate * l with the rate of the policy so far (Dinkelbach 1967), which
    maximises E[L] / E[l]. gradient: "sampled" draws one trajectory and one L per row (REINFORCE,
    no baseline); "exact" sums over all stops; "advantage" pushes every decision towards the better
    side, in proportion to the difference. select_by: keep the epoch with the lowest held-out
    "surrogate" loss or the highest held-out "throughput". exact: use recorded distributions of
    lengths, drawn anew at every visit; False: every position with the one length of its text;
    None: the former if available. prompts: the suites whose training part is used; () for all.
    deviations: how training here differs from `name`.
    """

    policy_class = RadarPolicy
    name: str = "paper"
    temperature: float | None = 1.0  # 2 [C]: an action is drawn; [P] leaves it open
    flat_nodes: int | None = 59  # 3: the tree of a single draft call holds so many first tokens
    objective: str = "ratio"  # 1, Eq. 4; 6 for ours
    gradient: str = "sampled"  # 1, Eq. 7; 6: sampling only adds variance
    alpha: float = 0.02  # 1: of the model shipped for Llama-3.1-8B
    gamma: float = 0.99  # 1, Eq. 5
    count_bonus: bool = False  # 6: L leaves the bonus token out, L + 1 is what decoding yields
    select_by: str = "surrogate"  # 1, 6
    exact: bool | None = None  # 3, Eqs. 8-10
    split_by: str = "cycle"  # 3; 6: neighbouring cycles are then on both sides
    learning_rate: float = 1e-4  # 1 [P], with cosine decay
    weight_decay: float = 1e-4  # 1 [C], as all that follows
    batch: int = 64
    epochs: int = 100
    # ours: added to the first logit of CONTINUE, so that deep stops are tried early
    continue_bias: float = 0.0
    prompts: tuple[str, ...] = ("mt_bench",)  # 3
    deviations: tuple[str, ...] = (
        "prompts of mt_bench in place of ShareGPT's",
        "{rows:,} cycles of {questions:,} questions, with {lengths}; in the paper 188,408 with"
        " exact distributions",
    )

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("batch", "epochs"), (1, math.inf))
        check_fields(self, continue_bias=(-math.inf, math.inf), gamma=(1e-9, 1.0), **counts)
        check_name("objective", self.objective, ("ratio", "lagrangian"))
        check_name("gradient", self.gradient, ("sampled", "exact", "advantage"))
        check_name("select_by", self.select_by, ("surrogate", "throughput"))

    @property
    def tree(self) -> TreeConfig:
        """The deepest tree, as drafted after the second call."""
        return TreeConfig(self.total_tokens, DECISIONS, self.top_k, beam=self.beam)


PAPER = RadarConfig()
OFFICIAL = dataclasses.replace(PAPER, name="official", half_inputs=True)
OURS = dataclasses.replace(
    PAPER,
    name="ours",
    temperature=None,
    flat_nodes=None,
    objective="lagrangian",
    gradient="advantage",
    alpha=0.0,
    gamma=1.0,
    count_bonus=True,
    select_by="throughput",
    exact=False,  # single lengths are plentiful, and its gradient takes their mean anyway
    split_by="prompt",
    learning_rate=1e-3,
    weight_decay=0.0,
    batch=128,
    epochs=30,
    continue_bias=1.0,
    prompts=(),
    deviations=(),
)
CONFIGS = {"paper": PAPER, "official": OFFICIAL, "ours": OURS}
