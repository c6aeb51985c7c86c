"""Every way to train a drafter, by name. Knows nothing about the trainer.

`cst` is the training-time test itself: continued supervised training of a drafter that has learned already. `hass` on an
EAGLE-3 drafter leaves out the distance from the target's features, which its states are not; `hass-eagle1`, `eagle1` and
`griffin` make networks whose states are. `medusa` and `hydra` teach their heads the text's tokens, a head the less the later
it is; `hydra++` teaches the target's distribution, and so does `lm`, a small language model (FastDraft's last stage, and
DistillSpec on given text). `osd` learns from the corrected positions of served text alone, read once and in order.
`draft_opd` is our reading of an abstract: drafting is taken up again where verification found errors, and the target
supervises all that is drafted from there, accepted or not.
"""

from __future__ import annotations

from dataclasses import replace

from specdec.errors import check_fields, nearest_name_error
from specdec.policies.base import changed
from specdec.training.drafter.objective import Objective
from specdec.training.drafter.ppow import Ppow
from specdec.training.drafter.supervised import Supervised
from specdec.training.drafter.ttt import LossRules, TrainingTimeTest

_PPOW = Ppow(window=6, curriculum_steps=300)  # ours, for small models: they accept less
_DISTILLED = Ppow(window=6, group=1, places_per_row=32, hard_from=0.0, hard_to=0.0, reward="none", beta=1.0)
_ERRORS = dict(places="errors", hard_from=1.0, hard_to=1.0)
_HASS = Supervised(LossRules(3, 1.0), labels="soft", soft_weight=0.1, top_k=10, top_weight=1.0, detach=True)
_FEATURES = dict(feature_weight=1.0, noise=0.2)
OBJECTIVES: dict[str, Objective] = {
    "ppow": _PPOW,
    "ppow-wide": replace(_PPOW, epsilon=30.0),  # nats: 5 a token, so that a fifth of what smollm2 refuses is near enough
    "ppow-paper": Ppow(),
    "kl_only": replace(_PPOW, reward="none", beta=1.0),
    "raw_reward": replace(_PPOW, reward="raw"),
    "expected_reward": replace(_PPOW, verify="expected"),
    "cst": TrainingTimeTest(LossRules(steps=4)),
    "cst-hard": Supervised(LossRules(steps=4)),
    "distillspec-forward": replace(_DISTILLED, divergence="forward_kl"),
    "distillspec-reverse": _DISTILLED,
    "distillspec-jsd": replace(_DISTILLED, divergence="jsd"),
    "distillspec-tv": replace(_DISTILLED, divergence="tv"),
    "distillspec-text": replace(_DISTILLED, divergence="forward_kl", rollout="text"),
    "distillspec-mixed": replace(_DISTILLED, divergence="forward_kl", rollout="mixed"),
    "draft_opd": replace(_DISTILLED, **_ERRORS),
    "osd": replace(_DISTILLED, window=1, divergence="forward_kl", rollout="text", **_ERRORS),
    "hass": _HASS,
    "hass-eagle1": replace(_HASS, **_FEATURES, network="eagle1"),
    "eagle1": Supervised(LossRules(1), labels="soft", soft_weight=0.1, **_FEATURES, network="eagle1"),
    "griffin": replace(_HASS, rules=LossRules(3, 1.0, aligned_top=3), top_weight=0.5, **_FEATURES, network="griffin"),
    "medusa": Supervised(LossRules(4), network="medusa"),
    "hydra": Supervised(LossRules(4), network="hydra"),
    "hydra++": Supervised(LossRules(4), labels="soft", network="hydra++"),
    "lm": Supervised(LossRules(1), labels="soft", network="lm"),
}  # fmt: skip


FRESH = {name: name for name in ("eagle1", "griffin", "medusa", "hydra", "hydra++", "lm")} | {
    "hass": "hass-eagle1"
}  # drafters by name -> what makes them


def objective_named(name: str, changes: dict | None = None, seed: int = 0) -> Objective:
    """The objective of this name with some fields changed; "rules.steps" names a field inside. SpecdecError otherwise.

    seed: of what an objective draws, for those that draw.

    >>> objective_named("ppow", {"beta": 0.1, "window": 4}).window
    4
    """
    if name not in OBJECTIVES:
        raise nearest_name_error("objective", name, OBJECTIVES)
    objective = OBJECTIVES[name]
    given = {"seed": seed} if hasattr(objective, "seed") else {}
    given |= {field: tuple(value) if isinstance(value, list) else value for field, value in (changes or {}).items()}
    objective = changed(objective, given)
    check_fields(objective)
    return objective
