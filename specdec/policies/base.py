"""Shared parts of policies: settings in files, a small network in numpy, one config per system.

    question --observation--> float32 [I] --network--> logits [A] --choose--> action --> answer

A system's file defines the observation, the meaning of its actions, and configs of all in which
paper, code and our version differ: PAPER, OFFICIAL, OURS.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pkgutil
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from safetensors.numpy import load_file, save_file
from torch import Tensor

from specdec import machine, runs, stored
from specdec.core.policy import Chain, Policy
from specdec.core.records import Question
from specdec.core.tree_config import Plan, TreeConfig, pool_size
from specdec.errors import SpecdecError, check_fields, check_name, warn

C = TypeVar("C")
Q = TypeVar("Q", bound=Policy)
L = TypeVar("L", bound="Learned")
SCHEMA = 1
WEIGHTS = "policy.safetensors"
ADVICE = "train it again"
# A log-probability below that of any draft: it pads levels with fewer scores.
NOWHERE = np.float32(-20.0)
# A policy that gives one answer in so many cycles is effectively constant.
COLLAPSED_FRAC = 0.99


class Network:
    """A multi-layer perceptron in numpy: a framework takes hundreds of microseconds per call.

    weights[i]: float32 [out, in]. biases[i]: float32 [out]. The last layer is linear.
    """

    def __init__(self, weights: Any, biases: Any, activation: str = "tanh"):
        self.activation = check_name("activation", activation, ("tanh", "relu"))
        self.weights = [np.ascontiguousarray(weight, dtype=np.float32) for weight in weights]
        self.biases = [np.ascontiguousarray(bias, dtype=np.float32) for bias in biases]
        self.width = int(self.weights[0].shape[1])  # of its inputs

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        """observation float32 [I] or [B, I] -> outputs float32 [A] or [B, A]."""
        hidden: np.ndarray = observation
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = hidden @ weight.T + bias
            hidden = np.tanh(hidden) if self.activation == "tanh" else np.maximum(hidden, 0)
        return hidden @ self.weights[-1].T + self.biases[-1]

    def arrays(self) -> dict[str, np.ndarray]:
        arrays = {}
        for number, weight in enumerate(self.weights):
            arrays[f"weight.{number}"] = weight
            arrays[f"bias.{number}"] = self.biases[number]
        return arrays

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], activation: str) -> Network:
        layers = range(len(arrays) // 2)
        weights = [arrays[f"weight.{number}"] for number in layers]
        return cls(weights, [arrays[f"bias.{number}"] for number in layers], activation)


def check_width(name: str, width: int, trained: int) -> None:
    """SpecdecError if a policy gets `width` inputs and was trained for another number."""
    if trained != width:
        why = f"this {name} reads {trained} numbers, but the pair gives {width}"
        raise SpecdecError(f"{why}: it was trained for another pair; train one for this.")


def as_array(tensor: Tensor) -> np.ndarray:
    """A tensor of any device and type as a float32 array."""
    return tensor.float().cpu().numpy()


def tree_of(most_nodes: int, depth: int, top_k: int, beam: tuple[int, ...] = ()) -> TreeConfig:
    """The tree of at most so many nodes, root excluded, within what its pool can offer."""
    nodes = min(most_nodes, pool_size(depth, top_k, tuple(beam)))
    return TreeConfig(nodes + 1, depth, top_k, beam=tuple(beam))


@dataclasses.dataclass
class Rule(Policy):
    """A policy that consists of its settings (dataclass fields) and can be saved and loaded.

    trained_for: pair, costs, config and choices, written by training or tuning; elsewhere the
    policy warns.
    """

    def __post_init__(self) -> None:
        self.trained_for: dict[str, Any] = {}

    def with_settings(self, **changes: Any) -> Self:
        """The same policy with other settings."""
        return dataclasses.replace(self, **changes).with_weights(self)

    def with_weights(self, trained: Self) -> Self:
        """This policy with what `trained` has learned."""
        self.trained_for = dict(trained.trained_for)
        return self

    def settings(self) -> dict[str, Any]:
        """Every field, as JSON types."""
        settings = runs.plain(self)
        del settings["class"]
        return settings

    def save(self, folder: Path) -> Path:
        """Write policy.json and the weights, if it has any, into `folder`; returns it."""
        folder = Path(folder)
        record = {"schema": SCHEMA, "class": type(self).__name__, "settings": self.settings()}
        record["trained_for"] = self.trained_for
        # policy.json holds a hash of the weights, so they are written first
        sealed = (WEIGHTS,) if isinstance(self, Learned) else ()
        if isinstance(self, Learned):
            arrays = self.trained_network().arrays()
            if not all(np.isfinite(array).all() for array in arrays.values()):
                why = f"the weights of this {type(self).__name__} are not finite"
                raise SpecdecError(f"{why}, so it is not saved; train with a lower learning rate.")
            with runs.atomic(folder / WEIGHTS) as temporary:
                save_file(arrays, temporary)
        runs.write_json(folder / "policy.json", record, sealed)
        return folder

    def warn_elsewhere(self, **here: object) -> None:
        """Warn if a fact of `here` (pair=..., costs=...) is not what it was trained for."""
        for name, value in here.items():
            trained = self.trained_for.get(name, value)
            if trained != value:
                why = f"this {type(self).__name__} was trained for {name} {trained!r}"
                warn(f"{why} and runs with {value!r}; train or re-calibrate it before judging it.")


@dataclasses.dataclass
class Learned(Rule):
    """Answers one kind of question by the logits of a network over `actions` actions.

    A subclass adds settings as fields and defines what follows them. plan, limits: for questions
    that it does not answer, and the largest tree it can ask for. temperature: None answers with the
    arg-max; a number draws from softmax(logits / temperature).
    """

    temperature: float | None = None
    seed: int = 0
    activation: str = "tanh"

    kind = ""  # PLAN, EXTEND or SIZE, the question it answers
    actions = 0
    observation_size = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature is not None and not self.temperature > 0:
            raise SpecdecError(f"temperature must be above 0 or None, got {self.temperature!r}.")
        self.asks = frozenset({self.kind})
        self.choices = (False, True)
        self.plan: Plan = TreeConfig()
        self.limits: TreeConfig = TreeConfig()
        self.network: Any = None  # a Network, or another class that has `arrays` too
        self.outputs: np.ndarray | None = None  # of its last decision, for display
        self._random = np.random.default_rng(self.seed)

    def with_weights(self, trained: Self) -> Self:
        self.network = trained.network
        return super().with_weights(trained)

    def reseed(self, number: int) -> None:
        """Seed draws with `seed` and this number: a turn is the same live and replayed."""
        self._random = np.random.default_rng((self.seed, number))

    def decides(self, question: Question) -> bool:
        """Whether the network decides; else `otherwise` does."""
        return True

    def otherwise(self, question: Question) -> Any: ...

    def observation(self, question: Question) -> np.ndarray:
        """float32 [observation_size]."""
        raise NotImplementedError

    def meaning(self, action: int, question: Question) -> Any:
        """The answer that an action stands for."""

    def answer(self, question: Question) -> Any:
        if not self.decides(question):
            return self.otherwise(question)
        return self.meaning(self.choose(self.observation(question)), question)

    def trained_network(self) -> Any:
        """The network; SpecdecError if there is none."""
        if self.network is None:
            why = f"this {type(self).__name__} has no network yet"
            raise SpecdecError(f"{why}; train it or load a trained one.")
        return self.network

    def build_network(self, arrays: dict[str, np.ndarray]) -> Any:
        return Network.from_arrays(arrays, self.activation)

    def fill_at_random(self, hidden: tuple[int, ...], seed: int = 0) -> Self:
        """This policy with random weights: an answer takes as long as with learned ones."""
        random = np.random.default_rng(seed)
        widths = (self.observation_size, *hidden, self.actions)
        shapes = list(zip(widths[1:], widths, strict=False))
        weights = [random.normal(0, 1 / shape[1] ** 0.5, shape) for shape in shapes]
        biases = [np.zeros(width) for width in widths[1:]]
        self.network = Network(weights, biases, self.activation)
        return self

    def logits(self, observation: np.ndarray) -> np.ndarray:
        """float32 [actions]."""
        network = self.trained_network()
        check_width(type(self).__name__, observation.shape[-1], network.width)
        return network(observation)

    def choose(self, observation: np.ndarray) -> int:
        """The action for an observation: arg-max, or a draw if a temperature is set."""
        logits = self.logits(observation)
        self.outputs = logits
        if self.temperature is None:
            return int(logits.argmax())
        # the arg-max of logits + Gumbel noise is a draw from their softmax
        noise = self._random.gumbel(size=logits.shape)
        return int((logits / self.temperature + noise).argmax())


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """PPO's hyperparameters. Names and defaults follow stable-baselines3.

    n_steps: decisions per rollout, over all environments. total_steps: of the whole training.
    """

    n_steps: int = 2048
    batch_size: int = 64
    n_epochs: int = 10
    learning_rate: float = 3e-4
    # part of the training in which the learning rate rises from 0; it may then fall to 0
    warmup_frac: float = 0.0
    linear_decay: bool = False
    clip_range: float = 0.2
    gamma: float = 0.99
    gae_lambda: float = 0.95
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    # hidden widths of actor and critic
    pi: tuple[int, ...] = (64, 64)
    vf: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    total_steps: int = 100_000
    # by running mean and deviation, folded into the exported network
    normalise_observations: bool = False
    normalise_reward: bool = False

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("n_steps", "batch_size", "n_epochs", "total_steps"), (1, math.inf))
        check_fields(self, gamma=(0.0, 1.0), gae_lambda=(0.0, 1.0), **counts)


def chose(policy: Q, choice: str, part: str, value: object = "") -> Q:
    """Note in the policy that a choice was made on a part of the prompts."""
    row = {"choice": choice, "part": part, "value": str(value)}
    for member in policy.policies:
        log = [*member.trained_for.get("choices", ()), row]
        member.trained_for = {**member.trained_for, "choices": log}
    return policy


def choices_of(policy: Policy) -> list[dict[str, Any]]:
    """The log that `chose` wrote, each row once."""
    rows: list[dict[str, Any]] = []
    for member in policy.policies:
        for row in member.trained_for.get("choices", ()):
            if row not in rows:
                rows.append(row)
    return rows


def named(config: C | str, configs: dict[str, C], system: str) -> C:
    """`config` itself, or the config of that name in `configs`."""
    if isinstance(config, str):
        return configs[check_name(f"preset of {system}", config, configs)]
    return config


def changed(config: C, changes: dict[str, Any]) -> C:
    """A copy of `config` with other values; "ppo.gamma" names the field gamma of the field ppo.

    >>> changed(PPOConfig(), {"gamma": 0.9}).gamma
    0.9
    """
    values: dict[str, Any] = {}
    fields = list(getattr(config, "__dict__", ())) or ["none"]
    for name, value in changes.items():
        field, _, inner = name.partition(".")
        check_name(f"field of {type(config).__name__}", field, fields)
        if inner:
            value = changed(values.get(field, getattr(config, field)), {inner: value})
        values[field] = value
    return dataclasses.replace(config, **values)  # type: ignore[type-var]  # any dataclass


def setting(option: str, example: str, text: str) -> tuple[str, Any]:
    """(name, value) of NAME=VALUE. The value is JSON, else text, such as fc_norm=each."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise SpecdecError(f"{option} takes name=value such as {example}, not {text!r}.")
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    return name.strip(), tuple(parsed) if isinstance(parsed, list) else parsed


class Config:
    """Base of a controller's training config: its policy's settings, and how it learns.

    Subclasses inherit their policy's settings, so that a setting has one default and one
    explanation. while_training: settings that differ then; the activation is that of `ppo`.
    """

    policy_class: ClassVar[type[Rule]]

    def __post_init__(self) -> None:
        check_fields(self, interval=(1, math.inf), stride=(1, math.inf))

    def policy(self, training: bool = False, **settings: Any) -> Any:
        """The policy as it decodes or, training, as it learns; `settings` override its fields."""
        fields = vars(self)
        names = [field.name for field in dataclasses.fields(self.policy_class)]
        shared = {name: fields[name] for name in names if name in fields}
        if "ppo" in fields:
            shared["activation"] = fields["ppo"].activation
        if training:
            shared.update(fields["while_training"])
        return self.policy_class(**{**shared, **settings})


def shipped_folder(name: str) -> Path:
    """The folder of the shipped policy PAIR/POLICY; it may not exist."""
    pair, _, policy = name.partition("/")
    return Path(__file__).parents[1] / "weights" / pair / "policies" / policy


def policy_folder(folder: Path | str) -> Path:
    """`folder`, as commands print it, or that of a shipped policy PAIR/POLICY."""
    place = runs.placed(folder)
    shipped = shipped_folder(str(folder))
    return shipped if shipped.is_dir() and not place.exists() else place


def load_policy(folder: Path | str) -> Any:
    """The policy in a folder written by `save` or a training, or a shipped one, PAIR/POLICY.

    LTD's two policies are returned as one. SpecdecError for a missing, damaged or foreign one.

    >>> load_policy("small/ours-float32").trained_for["pair"]
    'small'
    """
    place = policy_folder(folder)
    # a training writes into policy/, and LTD's two policies into depth/ and size/ there
    for candidate in (place, place / "policy"):
        if (candidate / "policy.json").is_file():
            return _load_one(candidate)
        if all((candidate / part / "policy.json").is_file() for part in ("depth", "size")):
            return combine(_load_one(candidate / "depth"), _load_one(candidate / "size"))
    shipped = shipped_folder("*").parents[1].glob("*/policies/*/")
    names = ", ".join(sorted(f"{path.parts[-3]}/{path.name}" for path in shipped))
    why = f"there is no policy {folder}: no policy.json in it"
    raise SpecdecError(f"{why}; give the folder of a training, or one that ships: {names}.")


def combine(depth_policy: Any, size_policy: Any) -> Chain:
    """LTD: the depth policy grows the tree, the size policy prunes it."""
    same = depth_policy.top_k == size_policy.top_k and depth_policy.beam == size_policy.beam
    if not same or depth_policy.depth > size_policy.depth:
        why = "the size policy cannot see all trees of the depth policy"
        raise SpecdecError(f"{why}; give both one top_k, depth.")
    return Chain(depth_policy, size_policy)


def _load_one(folder: Path) -> Any:
    """The policy of one policy.json. Warns about costs from another machine."""
    # 1. the class and its settings; a file can only name a class of this folder
    path = folder / "policy.json"
    record = stored.read_json(path, stored.PolicyFile, ADVICE, SCHEMA)
    classes: dict[str, type[Rule]] = {}
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f"specdec.policies.{file.name}")
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, Rule):
                classes[name] = kind
    name = check_name(f"policy in {path}", record["class"], classes)
    where = f"{path}, settings of {name}"
    policy = stored.checked(classes[name], record["settings"], where, ADVICE)
    # 2. the weights
    if isinstance(policy, Learned):
        weights = stored.check_file(record, folder, WEIGHTS, ADVICE)
        policy.network = policy.build_network(load_file(weights))
    policy.trained_for = record["trained_for"]
    # 3. costs are named after a machine: name@machine
    priced_for = getattr(policy, "priced_for", "")
    costs = priced_for or policy.trained_for.get("costs", "")
    if costs and costs.partition("@")[2] != machine.short_name(machine.speed_facts()):
        advice = "run specdec.training.value.reprice on it" if priced_for else "train it"
        why = f"the policy in {folder} uses the costs {costs!r} of another machine"
        warn(f"{why}; the text stays right, but for speed {advice} here.")
    return policy
