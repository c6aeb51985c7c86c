"""Every preset of a training is the one in presets.yml, and is changed there too."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fakes.refusals import refusal
from fakes.traces import COSTS, synthetic_trace

from specdec import runs
from specdec.training.drafter import chats, eagle3, generate_data, presets, ttt
from specdec.training.drafter.ppow import PAID_FRAC, Ppow
from specdec.training.drafter.presets import OBJECTIVES, PRESETS, Budget, Settings, objective_named
from specdec.training.drafter.ttt import RULES, LossRules, Supervised, TrainingTimeTest
from specdec.training.env import LAPS, Reward
from specdec.training.ppo import RunOptions, Task

from workbook import rules, terms

RECORD = runs.read_yaml(Path(__file__).with_name("presets.yml"))
DEFAULTS = (
    chats.Regeneration(),
    eagle3.OnlineConfig(),
    generate_data.ChatConfig(prompts=Path("prompts.txt")),
    Budget(),
    terms.EqualTerms(),
    Reward(),
    Task("text"),
    RunOptions("out"),
)
SETTINGS = {name: settings for name, (settings, _) in PRESETS.items()}
KINDS = {kind.__name__: kind() for kind in (Ppow, TrainingTimeTest, Supervised)}
CONFIGS = {
    "Settings": {"default": Settings(), **SETTINGS},
    "LossRules": {"default": LossRules(), **ttt.RULES},
    "objectives": OBJECTIVES | KINDS,
    "defaults": {type(config).__name__: config for config in DEFAULTS},
    "rules": rules.RULES,
}


@pytest.mark.parametrize("group", CONFIGS)
def test_every_number_is_on_record(group):
    assert set(RECORD[group]) == set(CONFIGS[group])
    for name, config in CONFIGS[group].items():
        expected = dict(RECORD[group][name])
        if group == "rules":
            expected = dict.fromkeys(("fitted", "seeded", "square", "chain"), False) | expected
            assert (name in rules.ENGINES) == (not expected["square"])
        assert runs.plain(asdict(config)) == expected, name


def test_objectives_and_presets_are_changed_by_name():
    official = TrainingTimeTest(RULES["official"])
    of_presets = {"paper": official, "pretrained": TrainingTimeTest(LossRules(4))}
    of_presets |= dict.fromkeys(("continued", "continued-corpus"), OBJECTIVES["ppow"])
    for name, (_, objective) in PRESETS.items():
        assert objective == of_presets.get(name, TrainingTimeTest())
    changed = objective_named("ppow", {"speedups": (1, 2), "beta": 0.5}, seed=2)
    assert changed == replace(OBJECTIVES["ppow"], speedups=(1, 2), beta=0.5, seed=2)
    assert objective_named("cst", {"rules.steps": 2}, seed=3) == TrainingTimeTest(LossRules(2))
    settings, objective = presets.preset("tiny", {"steps": 7, "muon": False}, unroll=2)
    assert settings == replace(presets.TINY, steps=7, muon=False)
    assert objective == TrainingTimeTest(LossRules(2))
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
    settings, objective, start = named("eagle3", "tiny", "small", changes, unroll=3)
    assert settings == replace(presets.SMALL, fc_norm="each", steps=5)
    assert (objective, start) == (TrainingTimeTest(LossRules(3)), None)
    settings, objective, start = named("hass", "tiny", "small", fields=["noise=0.5"], seed=4)
    assert objective == replace(OBJECTIVES["hass-eagle1"], noise=0.5, seed=4) and start is None
    settings, objective, start = named("ppow", "tiny", own_text=True, objective="kl_only")
    assert (settings, objective) == (presets.Continued(), OBJECTIVES["kl_only"])
    assert (Path(start) / "config.json").is_file(), "the pair's own drafter"
    settings, objective, start = named("ppow", "tiny", objective="eagle1", start_from=tmp_path)
    assert (settings.regenerate_chats, objective.network, start) == (600, "eagle1", None)
    assert "steps of Settings" in refusal(named, "lm", "tiny", "small", ["steps=few"])


def test_constants_of_chats_terms_and_rules(tmp_path):
    assert (PAID_FRAC, eagle3.MEASURED_BATCHES) == (0.2, 8)
    assert (chats.ANSWERED_ROWS, chats.ANSWER_TEMPERATURE) == (64, 0.8)
    # a folder of chats is continued only with the same ones
    assert (generate_data.SHARD, generate_data.SLACK_TOK, generate_data.HOLD_OUT) == (64, 32, 0.02)
    assert generate_data.PROMPT_TEMPERATURE == 0.9
    assert generate_data.TEMPERATURES == ((0.0, 0.6), (0.7, 0.2), (1.0, 0.2))
    assert tuple(RECORD["defaults"]["Reward"]["laps"]) == LAPS
    three = ("Re-SpS", "LTD", "RADAR")
    of_terms = {"equal": (*three, "ours"), "paper": three, "official": three, "live": three[:2]}
    assert of_terms == terms.TERMS
    # Re-SpS 1.3, LTD 2.2
    wide = dict(depth=12, top_ks=(8, 10, 12, 16, 20, 32), trees=(10,), most_nodes=240)
    assert wide == terms.WIDE
    arena = terms.Arena(synthetic_trace(), COSTS, tmp_path)
    assert arena.terms == terms.EqualTerms()
    assert arena.choice_file("RADAR") == tmp_path / "radar-choice.json"
    job = terms.Job("Re-SpS", "paper", 3)
    assert (job.method, job.folder) == ("Re-SpS, the paper's settings", "re-sps-paper-3")
    tuner = rules.Tuner(arena, tmp_path)
    assert tuner.names == tuple(rules.RULES) and tuner.seeds == (0,)
