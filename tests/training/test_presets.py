"""Every preset of a training is the one in presets.yml: whoever changes a number changes it there,
and says whose it is.
"""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from fakes.traces import COSTS, synthetic_trace

from specdec import runs
from specdec.errors import SpecdecError
from specdec.training.drafter import chats, eagle3, generate_data, presets, texts, ttt
from specdec.training.drafter.ppow import Ppow
from specdec.training.drafter.presets import (
    FRESH,
    OBJECTIVES,
    PRESETS,
    Budget,
    Settings,
    objective_named,
)
from specdec.training.drafter.ttt import LossRules, Supervised, TrainingTimeTest
from specdec.training.env import LAPS, Reward
from specdec.training.ppo import RunOptions, Task

from workbook import rules, terms

RECORD = runs.read_yaml(Path(__file__).with_name("presets.yml"))
KINDS = {kind.__name__: kind() for kind in (Ppow, TrainingTimeTest, Supervised)}
HOME = Path(generate_data.__file__).parent
DEFAULTS = (
    *(
        chats.Regeneration(),
        eagle3.OnlineConfig(),
        generate_data.ChatConfig(),
        presets.CacheConfig(),
        Budget(),
    ),
    *(terms.EqualTerms(), Reward(), Task("text"), RunOptions("out")),
)
CONFIGS = {
    "Settings": {"default": Settings()}
    | {name: settings for name, (settings, _) in PRESETS.items()},
    "LossRules": {"default": LossRules(), **ttt.RULES},
    "objectives": OBJECTIVES | KINDS,
    "defaults": {type(config).__name__: config for config in DEFAULTS},
    "rules": rules.RULES,
}


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, configs in CONFIGS.items() for name in configs]
)
def test_every_number_is_on_record(group, name):
    told, wanted = runs.plain(asdict(CONFIGS[group][name])), dict(RECORD[group][name])
    assert set(RECORD[group]) == set(CONFIGS[group])
    if group == "rules":
        wanted = dict.fromkeys(("fitted", "square", "chain"), False) | wanted
        assert (name in rules.ENGINES) == (not wanted["square"])
    if name == "ChatConfig":
        wanted |= {texts: str(HOME / wanted[texts]) for texts in ("openings", "prompts")}
    assert told == wanted


def test_objectives_and_presets_are_changed_by_name():
    for name, objective in OBJECTIVES.items():
        kind = (
            TrainingTimeTest
            if name == "cst"
            else Supervised
            if "labels" in RECORD["objectives"][name]
            else Ppow
        )
        assert type(objective) is kind and objective.updates == 1
        assert objective_named(name, seed=5) == (
            objective if name == "cst" else replace(objective, seed=5)
        )
    own = {
        "paper": TrainingTimeTest(ttt.RULES["official"]),
        "pretrained": TrainingTimeTest(LossRules(4)),
    }
    own |= dict.fromkeys(("continued", "continued-corpus"), OBJECTIVES["ppow"])
    for name, (_, objective) in PRESETS.items():
        assert objective == own.get(name, TrainingTimeTest())
    assert TrainingTimeTest().network == Ppow().network == "eagle3"
    changed = objective_named("ppow", {"speedups": [1, 2], "beta": 0.5}, seed=2)
    assert changed == replace(OBJECTIVES["ppow"], speedups=(1, 2), beta=0.5, seed=2)
    assert objective_named("cst", {"rules.steps": 2}, seed=3) == TrainingTimeTest(LossRules(2))
    fresh = {
        name: name for name in ("block", "eagle1", "griffin", "medusa", "hydra", "hydra++", "lm")
    }
    assert FRESH == fresh | {"hass": "hass-eagle1"}
    pytest.raises(SpecdecError, objective_named, "pow").match("unknown objective 'pow'")
    settings, objective = presets.preset("tiny", {"steps": 7, "muon": False}, unroll=2)
    assert settings == replace(presets.TINY, steps=7, muon=False)
    assert objective == TrainingTimeTest(LossRules(2)) and presets.preset("tiny")[
        1
    ] == TrainingTimeTest(LossRules(7))
    assert presets.preset("continued", {"patience": 3})[0] == presets.Continued(patience=3)
    griffin = replace(presets.PRETRAINED, learning_rate=0.001, head_rate=0.0005)  # rates of its own
    for changes, wanted in (
        ({}, griffin),
        ({"learning_rate": 0.002}, replace(griffin, learning_rate=0.002)),
    ):
        assert presets.preset("pretrained", changes, network="griffin")[0] == wanted
    assert presets.preset("pretrained", network="eagle1")[0] == presets.PRETRAINED
    budgets = ({}, {"steps": 3}, {"minutes": 1.0}, {"minutes": 1.0, "steps": 4})
    steps = [Budget(**some).steps_of(settings) for some in budgets]
    assert (
        eagle3.ESTIMATED_STEPS == 100
        and steps == [7, 3, None, 4]
        and Budget(seed=2**63 - 1).seed == 2**63 - 1
    )
    for kind, name, *values in (
        *((Settings, name, 0) for name in ("batch", "length", "steps", "passes")),
        (Settings, "betas", (0.9, 1.5)),
        (presets.Continued, "measure_every", 0),
        (Budget, "steps", 0),
        (Budget, "seed", -1, 2**63),
    ):
        for value in values:
            pytest.raises(SpecdecError, kind, **{name: value}).match(name)


def test_chats_serving_terms_and_rules_of_controllers(tmp_path):
    assert (chats.PADDING, chats.PROMPT, chats.ANSWER, chats.LIBRARY) == (0, 1, 2, 3)
    pytest.raises(SpecdecError, eagle3.learned_by, None).match("can learn while they serve")
    assert (
        generate_data.SLACK_TOK == 32 and generate_data.draw(torch.tensor([0.0, 1.0]), 0, None) == 1
    )
    assert generate_data.SHARD == 64 and generate_data.numbers_of(2) == range(128, 192)
    # measured on SmolLM2-135M-Instruct's chats
    assert (
        generate_data.ANSWER_SHARE,
        generate_data.MEAN_CONTEXT_TOK,
        generate_data.ROW_BYTES,
    ) == (0.6, 200, 12)
    assert (texts.SHARD_TOK, texts.DTYPE, texts.GB, texts.FORMAT) == (
        16_384,
        torch.bfloat16,
        1e9,
        1,
    )
    pytest.raises(SpecdecError, presets.CacheConfig, limit_gb=-1.0).match("limit_gb")
    pytest.raises(SpecdecError, RunOptions, "out", envs=0).match("envs")
    assert tuple(RECORD["defaults"]["Reward"]["laps"]) == LAPS
    three = ("Re-SpS", "LTD", "RADAR")
    assert terms.TERMS == {
        "equal": (*three, "ours"),
        "paper": three,
        "official": three,
        "live": three[:2],
    }
    wide = dict(
        depth=12, top_ks=(8, 10, 12, 16, 20, 32), trees=(10,), most_nodes=240
    )  # Re-SpS 1.3, LTD 2.2
    assert wide == terms.WIDE
    arena = terms.Arena(synthetic_trace(), COSTS, tmp_path)
    usual = dict(
        terms=terms.EqualTerms(),
        wide=None,
        sampled=None,
        pair=None,
        live_prompts=(),
        live_decisions=256,
    )
    assert arena == terms.Arena(arena.trace, COSTS, tmp_path, **usual, progress=True)
    job = terms.Job("Re-SpS", "paper", 3)
    assert (job.method, job.folder) == ("Re-SpS, the paper's settings", "re-sps-paper-3")
    tuner = rules.Tuner(arena, tmp_path)
    assert tuner.names == tuple(rules.RULES) == tuple(RECORD["rules"]) and tuner.seeds == [0]
