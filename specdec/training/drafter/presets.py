"""Named objectives and settings of drafter trainings, and the budget of a run.

`cst` is continued supervised training. `hass` on an EAGLE-3 drafter omits the distance from the
target's features, since its states are not features. `lm` is FastDraft's last stage. `osd` learns
only where the drafter's first choice for served text was wrong.
`draft_opd` is our reading of an abstract: drafting resumes where verification found errors, and the
target supervises everything drafted from there, accepted or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specdec import runs
from specdec.errors import check_fields, check_name
from specdec.models.load import own_drafter, placement
from specdec.policies.base import changed, setting
from specdec.training.drafter.objective import Objective
from specdec.training.drafter.ppow import Ppow
from specdec.training.drafter.ttt import LossRules, Supervised
from specdec.training.loop import rate_factor

# ours, for small models, which accept less
_PPOW = Ppow(window=6, curriculum_steps=300, epsilon=None)
_DISTILLED = Ppow(
    window=6, group=1, places_per_row=32, hard_from=0.0, hard_to=0.0, reward="none", beta=1.0
)
_ERRORS = replace(_DISTILLED, places="errors", hard_from=1.0, hard_to=1.0)
_HASS = Supervised(LossRules(3, 1.0), soft_weight=0.1, top_k=10, top_weight=1.0, detach=True)
_HASS_EAGLE1 = replace(_HASS, feature_weight=1.0, noise=0.2, network="eagle1")
OBJECTIVES: dict[str, Ppow | Supervised] = {
    "ppow": _PPOW,
    # nats: 5 per token, to pay a fifth of smollm2's rejected windows
    "ppow-wide": replace(_PPOW, epsilon=30.0),
    "ppow-paper": Ppow(),
    "kl_only": replace(_PPOW, reward="none", beta=1.0),
    "cst": Supervised(LossRules(steps=4)),
    "cst-hard": Supervised(LossRules(steps=4), "hard"),
    "distillspec-forward": replace(_DISTILLED, divergence="forward_kl"),
    "distillspec-reverse": _DISTILLED,
    "draft_opd": _ERRORS,
    "osd": replace(_ERRORS, window=1, divergence="forward_kl"),
    "hass": _HASS,
    "hass-eagle1": _HASS_EAGLE1,
    "block": Supervised(LossRules(8), network="block"),
    "eagle1": replace(_HASS_EAGLE1, rules=LossRules(1), top_k=0, top_weight=0.0, detach=False),
    "griffin": replace(
        _HASS_EAGLE1, rules=LossRules(3, 1.0, aligned_top=3), top_weight=0.5, network="griffin"
    ),
    "medusa": Supervised(LossRules(4), "hard", network="medusa"),
    "hydra": Supervised(LossRules(4), "hard", network="hydra"),
    "lm": Supervised(LossRules(1), network="lm"),
}


def objective_named(name: str, changes: dict | None = None, seed: int = 0) -> Objective:
    """The objective of this name with some fields changed; "rules.steps" is a nested field."""
    objective = OBJECTIVES[check_name("objective", name, OBJECTIVES)]
    objective = changed(replace(objective, seed=seed), changes or {})
    check_fields(objective)
    return objective


@dataclass(frozen=True)
class Settings:
    """Training settings of a drafter, for any objective. `PRESETS` holds some.

    average_frac: measure and write the mean of the weights over about this last fraction of the
    steps so far, at a constant rate; 0: the newest.
    """

    draft_vocab_size: int | None = None  # None: the target's
    intermediate_size: int | None = None  # None: the target's
    fc_norm: str | None = None  # before fc: "each" tap by itself, or "joint"
    learning_rate: float = 0.015
    head_rate: float | None = None  # of AdamW; None: as of Muon
    warmup_steps: int = 40
    linear_end: int | None = None  # see loop.rate_factor
    clip_norm: float = 0.5
    muon: bool = True  # Muon for the matrices, AdamW for head and norms
    average_frac: float = 0.0
    batch: int = 8  # rows in a step
    length: int = 256  # packed tokens in a row
    steps: int | None = 1000
    passes: int | None = None  # over a fixed text; steps is None then
    held_out: int = 0  # at most so many conversations of a fixed text, to measure on
    held_out_frac: float = 0.02
    measure_every: int = 250  # steps between two measurements
    regenerate_chats: int = 0  # conversations that the target answers anew
    regenerated_frac: float = 0.75  # their share of the training text
    max_new_tokens: int = 256  # of these answers

    def __post_init__(self):
        counts = ("batch", "length", "steps", "passes", "measure_every")
        check_fields(self, **dict.fromkeys(counts, (1, math.inf)))
        if self.fc_norm is not None:
            check_name("fc_norm", self.fc_norm, ("each", "joint"))

    def rate_factor(self, step: int, last_step: int | None) -> float:
        """The learning rate as a fraction of its peak."""
        last_step = None if self.average_frac else last_step
        return rate_factor(step, last_step, self.warmup_steps, self.linear_end)


@dataclass(frozen=True)
class Continued(Settings):
    """Settings for continuing a trained drafter: the best weights on held-out text are kept."""

    learning_rate: float = 1e-4  # ours; for 8B targets about 1e-5
    muon: bool = False
    batch: int = 4
    steps: int | None = 300
    passes: int | None = 1
    held_out: int = 24
    held_out_frac: float = 0.1
    measure_every: int = 25

    def rate_factor(self, step: int, last_step: int | None) -> float:
        if last_step is None:
            return 1.0
        # a rise over 3 % of the steps, then a cosine to zero
        rise = min(1.0, (step + 1) / max(1.0, 0.03 * last_step))
        return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / last_step)))


@dataclass(frozen=True)
class Budget:
    """Duration and place of a training; without minutes or steps it is the preset's."""

    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    device: str | None = None  # default a GPU if there is one

    def __post_init__(self):
        # torch's own limit of seeds
        check_fields(self, steps=(1, math.inf), seed=(0, 2**63 - 1))

    def steps_of(self, preset) -> int | None:
        """The number of steps, or None if time or the text decides."""
        if self.steps is not None or self.minutes is not None:
            return self.steps
        return preset.steps

    def place(self) -> torch.device:
        """The device to train on."""
        return placement("auto", self.device or "auto")[1]


TINY = Settings(256, steps=240, batch=4, regenerate_chats=192)
SMALL = Settings(
    1024, 1024, learning_rate=0.01, steps=1200, regenerate_chats=2000, regenerated_frac=0.5
)
# for a pretrained target, on its own text
PRETRAINED = Settings(
    8192,
    fc_norm="each",
    learning_rate=0.004,
    head_rate=0.0015,
    average_frac=0.3,
    batch=1,
    length=1024,
    steps=None,
    passes=1,
    held_out=48,
)
PRESETS: dict[str, tuple[Settings, Objective]] = {
    "tiny": (TINY, Supervised()),
    "small": (SMALL, Supervised()),
    "pretrained": (PRETRAINED, OBJECTIVES["cst"]),
    "continued": (Continued(), OBJECTIVES["ppow"]),
    "continued-corpus": (Continued(regenerate_chats=600), OBJECTIVES["ppow"]),
}


def preset(
    name: str, changes: dict | None = None, network: str = "eagle3"
) -> tuple[Settings, Objective]:
    """Settings, some of them changed, and objective of one of PRESETS."""
    settings, objective = PRESETS[check_name("drafter preset", name, PRESETS)]
    if (name, network) == ("pretrained", "griffin"):
        # at the preset's rates its loss diverges
        settings = replace(settings, learning_rate=0.001, head_rate=0.0005)
    return runs.configured(settings, type(settings), changes or {}), objective


def training_named(
    system, target, preset_name, changes=(), start_from=None, fields=(), objective="ppow", seed=0
) -> tuple[Settings, Objective, Path | None]:
    """(settings, objective, start_from) of `train_drafter` by the words of `specdec train`.

    system: "eagle3", "ppow", which continues a drafter, or another kind. changes, fields: strings
    NAME=VALUE for the preset's settings and the objective.
    """
    of_settings = dict(setting("--set", "passes=2", text) for text in changes)
    of_objective = dict(setting("--fields", "beta=0.1", text) for text in fields)
    if system == "eagle3":
        # the objective is the preset's
        settings, aim = preset(preset_name, of_settings)
    else:
        name = {"ppow": objective, "hass": "hass-eagle1"}.get(system, system)
        aim = objective_named(name, of_objective, seed)
        settings, _ = preset(preset_name, of_settings, aim.network)
    if system == "ppow" and not start_from:
        start_from = own_drafter(target)
    return settings, aim, Path(start_from) if start_from else None
