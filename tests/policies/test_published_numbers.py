"""Every number of the papers' recipes and of ours is the one in published.yml."""

import dataclasses
from pathlib import Path

import pytest

from specdec import runs
from specdec.errors import SpecdecError
from specdec.policies import heuristics, ltd, radar, resps, value
from specdec.policies.base import PPOConfig, choices_of, chose

RECORD = runs.read_yaml(Path(__file__).with_name("published.yml"))
CONFIGS = {
    "PPO": {"default": PPOConfig()},
    "Re-SpS": resps.CONFIGS,
    "LTD": ltd.CONFIGS,
    "RADAR": radar.CONFIGS,
    "ours": {"ours": value.OURS},
}


@pytest.mark.parametrize("system", CONFIGS)
def test_every_number_is_the_one_in_the_table(system):
    assert RECORD[system].keys() == CONFIGS[system].keys()
    for name, config in CONFIGS[system].items():
        held = runs.plain(config)
        deviations = held.pop("deviations", ())
        assert held == RECORD[system][name]
        assert bool(deviations) == (name in ("paper", "official"))


@pytest.mark.parametrize("name", RECORD["heuristics"])
def test_rules_of_papers_begin_with_these_constants(name):
    assert getattr(heuristics, name)().settings() == RECORD["heuristics"][name]


def test_rounds_and_observations_of_ltd():
    assert runs.plain(ltd.ORDERS) == RECORD["LTD's rounds"] and ltd.ORDERS["6.1"] is ltd.ROUNDS
    assert runs.plain(ltd.OBSERVATIONS) == RECORD["LTD's observations"]


def test_every_choice_is_written_down_once():
    policy = heuristics.SVIP()
    for choice in ("threshold", "width", "threshold"):
        chose(policy, choice, "tune", 0.3)
    assert choices_of(policy) == [
        {"choice": "threshold", "part": "tune", "value": "0.3"},
        {"choice": "width", "part": "tune", "value": "0.3"},
    ]


def test_configs_are_checked():
    for bad in ({"gamma": 1.1}, {"epochs": 0}):
        pytest.raises(SpecdecError, dataclasses.replace, radar.PAPER, **bad).match(next(iter(bad)))
