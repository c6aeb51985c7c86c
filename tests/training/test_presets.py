"""Presets of trainings: none changes unnoticed; each is taken and changed by name."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fakes.refusals import refusal

from specdec import runs
from specdec.training.drafter import chats, eagle3, generate_data, presets
from specdec.training.drafter.ppow import PAID_FRAC, Ppow
from specdec.training.drafter.presets import OBJECTIVES, PRESETS, Budget, Settings, objective_named
from specdec.training.drafter.ttt import LossRules, Supervised
from specdec.training.env import Reward
from specdec.training.ppo import RunOptions, Task

from workbook import rules, terms

CHATS = generate_data.ChatConfig()
CONFIGS = {
    "settings": {"default": Settings()} | {name: pair[0] for name, pair in PRESETS.items()},
    "losses": {"default": LossRules()},
    "objectives": OBJECTIVES | {"ppow-default": Ppow(), "supervised": Supervised()},
    "texts": {"chats": CHATS},
    "budgets": {"run": Budget(), "online": eagle3.OnlineConfig()},
    "controllers": {"reward": Reward(), "task": Task("text"), "run": RunOptions("out")},
    "terms": {"equal": terms.EqualTerms()},
    "rules": rules.RULES,
}
# a number that is changed on purpose is changed here by its new digest
DIGESTS = {
    "settings": "fa3d1eccf2c7",
    "losses": "e46348c6be72",
    "objectives": "b844ebc3a9da",
    "texts": "7b5fdfb2ae0f",
    "budgets": "f2b10eb6cfad",
    "controllers": "e142a1f0ce41",
    "terms": "531d61a7311d",
    "rules": "330c430c159a",
}


@pytest.mark.parametrize("group", CONFIGS)
def test_no_number_changes_unnoticed(group):
    numbers = {name: runs.plain(asdict(config)) for name, config in CONFIGS[group].items()}
    assert runs.content_key(numbers=numbers)[:12] == DIGESTS[group], numbers


def test_constants_of_texts():
    assert (PAID_FRAC, eagle3.MEASURED_BATCHES) == (0.2, 8)
    assert (chats.ANSWERED_ROWS, chats.ANSWER_TEMPERATURE) == (64, 0.8)
    # a folder of chats is continued only with the same ones
    assert generate_data.HOLD_OUT == 0.02
    assert generate_data.PROMPT_TEMPERATURE == 0.9
    assert generate_data.TEMPERATURES == ((0.0, 0.6), (0.7, 0.2), (1.0, 0.2))


def test_objectives_and_presets_are_changed_by_name():
    of_presets = {"pretrained": Supervised(LossRules(4))}
    of_presets |= dict.fromkeys(("continued", "continued-corpus"), OBJECTIVES["ppow"])
    for name, (_, objective) in PRESETS.items():
        assert objective == of_presets.get(name, Supervised())
    changed = objective_named("ppow", {"speedups": (1, 2), "beta": 0.5}, seed=2)
    assert changed == replace(OBJECTIVES["ppow"], speedups=(1, 2), beta=0.5, seed=2)
    assert objective_named("cst", {"rules.steps": 2}, seed=3) == Supervised(LossRules(2), seed=3)
    settings, objective = presets.preset("tiny", {"steps": 7, "muon": False})
    assert settings == replace(presets.TINY, steps=7, muon=False)
    assert objective == Supervised()
    # rates of its own, which may be changed
    griffin = replace(presets.PRETRAINED, learning_rate=0.002, head_rate=0.0005)
    changes = {"learning_rate": 0.002}
    assert presets.preset("pretrained", changes, network="griffin")[0] == griffin
    budgets = ({}, {"steps": 3}, {"minutes": 1.0}, {"minutes": 1.0, "steps": 4})
    steps = [Budget(**budget).steps_of(settings) for budget in budgets]
    assert steps == [7, 3, None, 4]


def test_a_training_is_named_by_words(tmp_path):
    named = presets.training_named
    changes = ["fc_norm=each", "steps=5"]
    settings, objective, start = named("eagle3", "tiny", "small", changes)
    assert settings == replace(presets.SMALL, fc_norm="each", steps=5)
    assert (objective, start) == (Supervised(), None)
    settings, objective, start = named("hass", "tiny", "small", fields=["noise=0.5"], seed=4)
    assert objective == replace(OBJECTIVES["hass-eagle1"], noise=0.5, seed=4) and start is None
    settings, objective, start = named("ppow", "tiny", "continued", objective="kl_only")
    assert (settings, objective) == (presets.Continued(), OBJECTIVES["kl_only"])
    assert (Path(start) / "config.json").is_file(), "the pair's own drafter"
    settings, objective, start = named("ppow", "tiny", "continued-corpus", (), tmp_path, seed=3)
    assert (settings.regenerate_chats, objective.seed, start) == (600, 3, tmp_path)
    assert "steps of Settings" in refusal(named, "lm", "tiny", "small", ["steps=few"])
