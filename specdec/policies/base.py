"""Shared parts of policies: settings in files, a small network in numpy, the meaning of actions, one config per system.

    question --observation--> float32 [I] --network--> logits [A] --choose--> action --meaning--> answer

A system's file defines the observation, the meaning of its actions, and a frozen config of everything in which paper, code
and our version differ: PAPER, OFFICIAL, OURS.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from specdec import machine, runs, stored
from specdec.core.policy import Chain, Policy
from specdec.core.records import Question
from specdec.core.text import LONGEST
from specdec.core.tree_config import Plan, TreeConfig, pool_size
from specdec.errors import SpecdecError, check_fields, check_name, door, first_line, nearest_name_error, warn

P = TypeVar("P", bound="Rule")
C = TypeVar("C")
Q = TypeVar("Q", bound=Policy)
L = TypeVar("L", bound="Learned")
SCHEMA, WEIGHTS = 1, "policy.safetensors"
NOWHERE = np.float32(-20.0)  # a log-probability below that of any draft: pads levels with fewer scores
COLLAPSED_FRAC = 0.99  # a policy that gives one answer this often is effectively constant
BESIDE = {"copies": 2}  # what published systems may see beside their own observation, and how many numbers it is
# Renamed settings in older files.
RENAMED = {"first_look": "first_evaluation", "patience_tok": "continue_bonus_tok"}


class Network:
    """A multi-layer perceptron in numpy. weights[i]: float32 [out, in]; biases[i]: float32 [out]; the last layer is linear.

    For one small vector at a time numpy takes a few microseconds where a framework takes hundreds.
    """

    def __init__(self, weights: Iterable[np.ndarray], biases: Iterable[np.ndarray], activation: str = "tanh"):
        self.activation = check_name("activation", activation, ("tanh", "relu"))
        self.weights = [np.ascontiguousarray(weight, dtype=np.float32) for weight in weights]
        self.biases = [np.ascontiguousarray(bias, dtype=np.float32) for bias in biases]
        sizes = [*(weight.shape[1:] for weight in self.weights[1:]), self.biases[-1].shape]
        if not all(w.shape[:1] == b.shape == size for w, b, size in zip(self.weights, self.biases, sizes, strict=True)):
            raise SpecdecError("weights and biases of a network's layers must fit each other; train it again.")

    @property
    def width(self) -> int:
        """I, the width of its training inputs."""
        return int(self.weights[0].shape[1])

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        """observation float32 [I] or [B, I] -> outputs float32 [A] or [B, A]."""
        hidden: np.ndarray = observation
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = hidden @ weight.T + bias
            hidden = np.tanh(hidden, out=hidden) if self.activation == "tanh" else np.maximum(hidden, 0, out=hidden)
        return hidden @ self.weights[-1].T + self.biases[-1]

    def arrays(self) -> dict[str, np.ndarray]:
        weights = {f"weight.{i}": weight for i, weight in enumerate(self.weights)}
        return weights | {f"bias.{i}": bias for i, bias in enumerate(self.biases)}

    @classmethod
    def from_arrays(cls, arrays: dict[str, np.ndarray], activation: str) -> Network:
        layers = range(len(arrays) // 2)
        return cls([arrays[f"weight.{i}"] for i in layers], [arrays[f"bias.{i}"] for i in layers], activation)


def check_width(name: str, given: int, trained: int | None) -> None:
    """SpecdecError if a policy gets another pair's inputs: `given` numbers instead of the `trained` ones (None: any)."""
    if trained not in (None, given):
        why = f"this {name} reads {trained} numbers, but here are {given}: it was trained for another pair"
        raise SpecdecError(f"{why}; train one for this.")


def as_array(tensor: Tensor) -> np.ndarray:
    """A tensor of any device and type as a float32 array."""
    return tensor.float().cpu().numpy()


def repetitions(question: Question) -> np.ndarray:
    """float32 [2]: how much of the text's end stands earlier in it (1: all that is compared), and the probability that the
    drafter gives to the token that followed there (0 before it has drafted)."""
    matched, probability = question.matched
    return np.array([matched / LONGEST, probability], np.float32)


@dataclasses.dataclass
class Seeing:
    """What a published system's network sees beside its own observation, a setting of policy and config.

    sees: () for nothing, as published; ("copies",) for the text's repetitions, as ours may (`policies.value.SEES`).
    """

    sees: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the policy that inherits from this as well
        if (
            not self.sees
        ):  # the class has it too: who sees nothing more keeps the fingerprint from before there was more
            del self.sees

    @property
    def seen(self) -> int:
        """How many numbers that adds to the observation."""
        return sum(BESIDE[check_name("what a system sees", name, BESIDE)] for name in self.sees)

    def beside(self, observation: np.ndarray, question: Question, copies: int = 1) -> np.ndarray:
        """The observation and what is seen beside it, each number `copies` times."""
        return np.concatenate((observation, np.repeat(repetitions(question), copies))) if self.sees else observation


def tree_of(most_nodes: int, depth: int, top_k: int, beam: tuple[int, ...] = ()) -> TreeConfig:
    """The tree of at most so many nodes, root excluded, within what its pool can offer."""
    return TreeConfig(min(most_nodes, pool_size(depth, top_k, tuple(beam))) + 1, depth, top_k, beam=tuple(beam))


@dataclasses.dataclass
class Rule(Policy):
    """A policy that consists of its settings (dataclass fields); it can be saved and loaded and records what it was chosen for.

    trained_for: pair, costs, config and choices, written by training or tuning; elsewhere the policy warns.
    Only classes of this folder are known by name (`classes`), so a file cannot name any other.
    """

    classes: ClassVar[dict[str, type[Rule]]] = {}

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.__module__.startswith("specdec.policies."):
            Rule.classes[cls.__name__] = cls

    def __post_init__(self) -> None:
        self.trained_for: dict[str, Any] = {}

    def with_settings(self, **changes: Any) -> Self:
        """The same policy with other settings."""
        other = dataclasses.replace(self, **changes)
        other.trained_for = dict(self.trained_for)
        return other

    def settings(self) -> dict[str, Any]:
        """Every field, as JSON types."""
        return {field.name: runs.plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def save(self, folder: Path) -> Path:
        """Write policy.json, with a seal over what was learned, into `folder`; returns it."""
        folder, record = Path(folder), {"schema": SCHEMA, "class": type(self).__name__, "settings": self.settings()}
        weights = [WEIGHTS] if isinstance(self, Learned) else []
        runs.write_json(folder / "policy.json", {**record, "trained_for": self.trained_for}, weights)
        return folder

    def warn_elsewhere(self, **here: object) -> None:
        """Warn if a fact of `here` (pair=..., costs=...) differs from what the policy was trained for."""
        for name, value in here.items():
            trained = self.trained_for.get(name)
            if trained is not None and trained != value:
                why = f"this {type(self).__name__} was trained for {name} {trained!r} and runs with {value!r}"
                warn(f"{why}; train or re-calibrate it before judging it.")


@dataclasses.dataclass
class Learned(Rule):
    """Answers one kind of question by the logits of a network over `actions` actions. Subclasses add fields (settings).

    A subclass defines:
            kind                 PLAN, EXTEND or SIZE, the question it answers
        observation_size     I, what the network sees: `observation(question)` -> float32 [I]
            actions              A, number of choices: `meaning(action, question)` -> the answer
            plan, limits         used for questions it does not answer, and the largest tree it can ask for (set in __post_init__)
    If it does not decide every question (a stride, a kept answer), also
            decides, otherwise   whether the network decides `question`, and the answer otherwise

    temperature: None answers with the arg-max, a number draws from softmax(logits / temperature) with `seed`.
    """

    temperature: float | None = None
    seed: int = 0
    activation: str = "tanh"

    kind = ""  # set by subclasses; plain class attributes, not settings
    actions = 0
    observation_size = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature is not None and not self.temperature > 0:
            raise SpecdecError(f"temperature must be above 0, or None for the arg-max; got {self.temperature!r}.")
        self.asks, self.choices = frozenset({self.kind}), (False, True)
        self.plan: Plan = TreeConfig()
        self.limits: TreeConfig = TreeConfig()
        self.network: Any = None  # a Network, or another one that has `arrays` too
        self.outputs: np.ndarray | None = None  # of the network at its last decision, for display
        self._random = np.random.default_rng(self.seed)

    def with_settings(self, **changes: Any) -> Self:
        """The same trained policy with other settings."""
        return dataclasses.replace(self, **changes).with_weights(self)

    def with_weights(self, trained: Learned) -> Self:
        """This policy with the learned weights of `trained`."""
        self.network, self.trained_for = trained.network, dict(trained.trained_for)
        return self

    def reseed(self, number: int) -> None:
        """Seed further draws with `seed` and this number: a turn's answers are the same live and replayed."""
        self._random = np.random.default_rng((self.seed, number))

    def decides(self, question: Question) -> bool:
        return True

    def otherwise(self, question: Question) -> Any:
        raise NotImplementedError

    def observation(self, question: Question) -> np.ndarray:
        raise NotImplementedError

    def meaning(self, action: int, question: Question) -> Any:
        raise NotImplementedError

    def answer(self, question: Question) -> Any:
        if not self.decides(question):
            return self.otherwise(question)
        return self.meaning(self.choose(self.observation(question)), question)

    def trained_network(self) -> Any:
        """The network; SpecdecError if there is none."""
        if self.network is None:
            raise SpecdecError(f"this {type(self).__name__} has no network yet; train it or load a trained one.")
        return self.network

    def fill_at_random(self, hidden: tuple[int, ...], seed: int = 0) -> Self:
        """This policy with random weights: the time of an answer does not depend on the weights."""
        random = np.random.default_rng(seed)
        sizes = [self.observation_size, *hidden, self.actions]
        weights = [random.normal(0, 1 / rows**0.5, (out, rows)) for rows, out in zip(sizes, sizes[1:], strict=False)]
        self.network = Network(weights, [np.zeros(len(weight)) for weight in weights], self.activation)
        return self

    def logits(self, observation: np.ndarray) -> np.ndarray:
        """float32 [actions]."""
        network = self.trained_network()
        check_width(type(self).__name__, observation.shape[-1], getattr(network, "width", None))
        return network(observation)

    def choose(self, observation: np.ndarray) -> int:
        """The action for an observation: arg-max, or a draw if a temperature is set."""
        self.outputs = logits = self.logits(observation)
        if self.temperature is None:
            return int(logits.argmax())
        noise = self._random.gumbel(size=logits.shape)  # the arg-max of logits + Gumbel noise is a draw from softmax
        return int((logits / self.temperature + noise).argmax())

    def save(self, folder: Path) -> Path:
        """Write policy.safetensors and policy.json into `folder`; returns it."""
        arrays = self.trained_network().arrays()
        with runs.atomic(Path(folder) / WEIGHTS) as temporary:
            save_file(arrays, temporary)
        return super().save(folder)

    def build_network(self, arrays: dict[str, np.ndarray]) -> Any:
        return Network.from_arrays(arrays, self.activation)


@dataclasses.dataclass(frozen=True)
class PPOConfig:
    """PPO's hyperparameters. Names and defaults follow stable-baselines3.

    n_steps: decisions per rollout, over all environments. batch_size, n_epochs: minibatches and passes over a rollout.
    warmup_frac: part of the training in which the learning rate rises from 0; linear_decay: it then falls to 0.
    pi, vf: hidden widths of actor and critic. total_steps: decisions of the whole training.
    normalise_observations: by running mean and deviation, folded into the exported network.
    normalise_reward: by a running deviation.
    """

    n_steps: int = 2048
    batch_size: int = 64
    n_epochs: int = 10
    learning_rate: float = 3e-4
    warmup_frac: float = 0.0
    linear_decay: bool = False
    clip_range: float = 0.2
    gamma: float = 0.99
    gae_lambda: float = 0.95
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    pi: tuple[int, ...] = (64, 64)
    vf: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    total_steps: int = 100_000
    normalise_observations: bool = False
    normalise_reward: bool = False

    def __post_init__(self) -> None:
        counts = dict.fromkeys(("n_steps", "batch_size", "n_epochs", "total_steps"), (1, math.inf))
        check_fields(self, gamma=(0.0, 1.0), gae_lambda=(0.0, 1.0), **counts)


def chose(policy: Q, choice: str, part: str, value: object = "") -> Q:
    """Record that a choice was made by looking at a part of the prompts; for a Chain in each of its policies.

    The log is stored in the policy's files (`trained_for["choices"]`); comparisons on such a part are refused.
    """
    for one in policy.policies:
        row = {"choice": choice, "part": part, "value": str(value)}
        one.trained_for = {**one.trained_for, "choices": [*one.trained_for.get("choices", ()), row]}
    return policy


def choices_of(policy: Policy) -> list[dict[str, Any]]:
    """The log that `chose` wrote, each row once."""
    logs = [one.trained_for.get("choices", ()) for one in policy.policies]
    return [dict(row) for row in dict.fromkeys(tuple(row.items()) for log in logs for row in log)]


def named(config: C | str, configs: dict[str, C], system: str) -> C:
    """`config` itself, or the config of that name in `configs` ("paper", "official", "ours")."""
    return configs[check_name(f"preset of {system}", config, configs)] if isinstance(config, str) else config


def changed(config: C, changes: dict[str, Any]) -> C:
    """A copy of `config` with other values; "ppo.gamma" names the field gamma of the field ppo.

    >>> changed(PPOConfig(), {"gamma": 0.9}).gamma
    0.9
    """
    values: dict[str, Any] = {}
    for name, value in changes.items():
        field, _, inner = name.partition(".")
        known = vars(config) if dataclasses.is_dataclass(config) else {}
        if field not in known:
            raise nearest_name_error(f"field of {type(config).__name__}", field, known or ["none"])
        values[field] = changed(values.get(field, getattr(config, field)), {inner: value}) if inner else value
    return dataclasses.replace(config, **values)  # type: ignore[type-var]  # any dataclass


def setting(option: str, example: str, text: str, worded: Iterable[str] | None = None) -> tuple[str, Any]:
    """(name, value) of NAME=VALUE. The value is parsed as JSON; anything else is text, such as fc_norm=each.

    worded: names whose values may be text; None: all.
    """
    name, given, value = text.partition("=")
    name = name.strip()
    try:
        found = json.loads(value)
        return name, tuple(found) if isinstance(found, list) else found
    except ValueError:
        if not (given and name) or not (worded is None or (name in worded and value.strip())):
            raise SpecdecError(f"{option} takes name=value such as {example}, not {text!r}.") from None
        return name, value


def deviations_of(config: Any, **counted: object) -> list[str]:
    """The config's `deviations` with {names} replaced by counts; a line "flag=False: ..." is dropped if the flag is set."""
    numbers = {name: f"{value:,}" if isinstance(value, int) else value for name, value in counted.items()}
    lines = [line for line in config.deviations if not getattr(config, line.partition("=False:")[0], False)]
    return [line.format_map(numbers) for line in lines]


class Config:
    """Base of a controller's training config: the `policy` settings (defined once, for both), and how it learns.

    Subclasses are dataclasses(unsafe_hash=True) that inherit their policy's settings, so that a setting has one default and
    one explanation. while_training: settings that differ during training. Fields are set once.
    """

    while_training: dict[str, Any]
    ppo: PPOConfig

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self):
            raise dataclasses.FrozenInstanceError(f"{type(self).__name__} is frozen; make another by `changed`.")
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        check_fields(self, interval=(1, math.inf), stride=(1, math.inf))

    def shared_with(self, kind: type) -> dict[str, Any]:
        """The fields shared with a policy's class."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(kind) if field.name in vars(self)}

    def made(self, kind: type[P], training: bool, **settings: Any) -> P:
        """A policy as it decodes or, training, as it learns; its activation is PPO's."""
        learning = self.while_training if training else {}
        return kind(**settings | self.shared_with(kind) | {"activation": self.ppo.activation} | learning)


def shipped_folder(name: str) -> Path:
    """The folder of the shipped policy PAIR/POLICY; it may not exist."""
    pair, _, policy = name.partition("/")
    return Path(__file__).parents[1] / "weights" / pair / "policies" / policy


def policy_folder(folder: Path | str) -> Path:
    """`folder`, as printed by commands (`runs.placed`), or that of a shipped policy by its name PAIR/POLICY."""
    shipped = shipped_folder(str(folder))
    return shipped if shipped.is_dir() and not Path(folder).exists() else runs.placed(folder)


def policy_parts(folder: Path | str) -> list[Path]:
    """The folders of the policy, or of LTD's two (depth, size), in a folder, however it was written.

    folder: of `save`; of a training, which has them in policy/; of LTD's two, depth/ and size/; of its rounds, where the last of
    each counts; or one folder that contains any of these. SpecdecError if there is none or more than one.
    """
    place, two = policy_folder(folder), ("depth", "size")
    if place.name == "policy.json":
        place = place.parent
    for own in (place, place / "policy"):
        if (own / "policy.json").is_file():
            return [own]
        if all((own / part / "policy.json").is_file() for part in two):
            return [own / part for part in two]
    files = [place.glob(f"iter*-{part}/policy/policy.json") for part in two]
    rounds = [sorted(found, key=lambda path: int(path.parts[-3][len("iter") :].partition("-")[0])) for found in files]
    if all(rounds):
        return [paths[-1].parent for paths in rounds]
    written = [path for below in ("*", "*/policy", "*/*") for path in place.glob(f"{below}/policy.json")]
    below = sorted({path.relative_to(place).parts[0] for path in written} - set(two))  # half of LTD's two is no policy
    if len(below) == 1:
        return policy_parts(place / below[0])
    if below:
        why = f"{folder} holds several policies"
        raise SpecdecError(f"{why}; name one of them: {', '.join(str(place / one) for one in below)}.")
    if place.is_dir():
        raise SpecdecError(f"{folder} holds no policy.json and no rounds of LTD; give a folder that policy.save wrote.")
    shipped = [f"{path.parts[-3]}/{path.name}" for path in shipped_folder("*").parents[1].glob("*/policies/*/")]
    near = difflib.get_close_matches(str(folder), shipped, n=3, cutoff=0.6)
    hint = f"; did you mean {', '.join(map(repr, near))}?" if near else "; check the path."
    raise SpecdecError(f"there is no policy {folder}: neither a folder nor one that ships (no policy.json){hint}")


def combine(depth_policy: Any, size_policy: Any) -> Chain:
    """LTD: the depth policy grows the tree, the size policy prunes it; memory is reserved for the larger of both."""
    shapes = {(policy.top_k, policy.limits.beam) for policy in (depth_policy, size_policy)}
    if len(shapes) > 1 or depth_policy.depth > size_policy.depth:
        raise SpecdecError("the size policy cannot see all trees of the depth policy; give both one top_k and depth.")
    return Chain(depth_policy, size_policy)


@door
def load_policy(folder: Path | str) -> Any:
    """The policy in a folder written by `save` or a training, or a shipped one, by its name PAIR/POLICY.

    LTD's two policies are returned as one that asks both. A relative folder may be below the results folder, as printed by
    commands. Raises SpecdecError for a missing, damaged or foreign one.

    >>> load_policy("small/ours-float32").trained_for["pair"]
    'small'
    """
    parts = [_load_one(place) for place in policy_parts(folder)]
    return parts[0] if len(parts) == 1 else combine(*parts)


def _load_one(folder: Path) -> Any:
    """The policy of one policy.json. Warns about costs from another machine, named after the @ in the costs' name."""
    import torch  # noqa: F401 (its threads are part of what a machine is)

    advice, path = "train it again", folder / "policy.json"
    record = stored.read_json(path, stored.PolicyFile, advice, SCHEMA)
    name, settings = record["class"], record["settings"]
    if name not in Rule.classes:
        for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
            importlib.import_module(f"specdec.policies.{module.name}")
    kind = Rule.classes[check_name(f"policy in {path}", name, Rule.classes)]
    settings = {RENAMED.get(key, key): value for key, value in settings.items()}
    policy = stored.checked(kind, settings, f"{path}, settings of {name}", advice)
    if isinstance(policy, Learned):
        policy.network = _network_of(policy, stored.check_file(record, folder, WEIGHTS, advice), advice)
    policy.trained_for = record["trained_for"]
    prices = getattr(policy, "priced_for", "") or policy.trained_for.get("costs", "")
    where = prices.partition("@")[2]
    if prices and where != machine.short_name(machine.speed_facts()):
        how = "train it" if not hasattr(policy, "priced_for") else "run `specdec reprice` on it"
        how = how if isinstance(policy, Learned) else "call its price(costs) with those calibrated"
        of = f"machine {where}" if where else "a machine that it does not name"
        why = f"the policy in {folder} uses the costs {prices!r} of {of}"
        warn(f"{why}; the text stays right, but for speed {how} here.")
    return policy


def _network_of(policy: Learned, path: Path, advice: str) -> Any:
    """The network from stored arrays: exactly those needed, of matching shapes, all finite."""
    try:
        arrays = load_file(path)
        network = policy.build_network(arrays)
    except (OSError, LookupError, TypeError, ValueError, SafetensorError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else first_line(error).rstrip(".")
        raise SpecdecError(f"{path} does not hold a {type(policy).__name__} ({reason}); {advice}.") from error
    if extra := sorted(set(arrays) - set(network.arrays())):
        raise SpecdecError(f"{path} holds {', '.join(extra)}, which a {type(policy).__name__} does not have; {advice}.")
    if broken := sorted(name for name, array in arrays.items() if not np.isfinite(array).all()):
        raise SpecdecError(f"{path} holds values in {', '.join(broken)} that are not finite; {advice}.")
    if policy.observation_size and getattr(network, "width", policy.observation_size) != policy.observation_size:
        why = f"{path} reads {network.width} inputs, its settings make {policy.observation_size}"
        raise SpecdecError(f"{why}; {advice}.")
    return network
