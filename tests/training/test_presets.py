"""Every preset of a training as a table: whoever changes a number changes it here as well, and says where it comes from."""

from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.traces import COSTS, synthetic_trace

from specdec.errors import SpecdecError
from specdec.training.drafter import chat_files, chats, eagle3, features, generate_data, online, presets, ttt
from specdec.training.drafter import self_prompting as own_chats
from specdec.training.drafter.ppow import Ppow
from specdec.training.drafter.presets import FRESH, OBJECTIVES, objective_named
from specdec.training.drafter.supervised import Supervised
from specdec.training.drafter.ttt import LossRules, TrainingTimeTest
from specdec.training.env import LAPS, Reward
from specdec.training.ppo import RunOptions, Task

from workbook import rules, terms


def told(config) -> dict:
    """What a config says of its fields, first level only."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


# What is ours where nobody says it otherwise.
SETTINGS = dict(
    draft_vocab_size=None, intermediate_size=None, fc_norm=None, learning_rate=0.015, head_rate=None, betas=(0.9, 0.95),
    warmup_steps=40, linear_end=None, clip_norm=0.5, muon=True, warm_start=True, average_frac=0.0, batch=8, length=256,
    steps=1000, passes=None, held_out=0, held_out_frac=0.02, regenerate_chats=0, regenerated_frac=0.75, max_new_tokens=256,
)  # fmt: skip
CONTINUED = SETTINGS | dict(
    learning_rate=1e-4, muon=False, batch=4, steps=300, passes=1, held_out=24, held_out_frac=0.1, measure_every=25, patience=0
)  # fmt: skip
PRESETS = {
    # EAGLE-3's trainer (sheet section 8)
    "paper": SETTINGS | dict(
        draft_vocab_size=32000, learning_rate=5e-5, warmup_steps=12_000, linear_end=800_000, muon=False, warm_start=False,
        batch=2, length=2048, steps=800_000,
    ),
    "tiny": SETTINGS | dict(draft_vocab_size=256, steps=240, batch=4, regenerate_chats=192),
    "small": SETTINGS | dict(
        draft_vocab_size=1024, intermediate_size=1024, learning_rate=0.01, steps=1200, regenerate_chats=2000,
        regenerated_frac=0.5,
    ),
    "pretrained": SETTINGS | dict(
        draft_vocab_size=8192, fc_norm="each", learning_rate=0.004, head_rate=0.0015, average_frac=0.3, batch=1, length=1024,
        steps=None, passes=1, held_out=48,
    ),
    "continued": CONTINUED,
    "continued-corpus": CONTINUED | dict(regenerate_chats=600),
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_settings_of_drafters(name):
    settings, objective = presets.preset(name)
    assert told(settings) == PRESETS[name] and list(presets.PRESETS) == list(PRESETS)
    wanted = {
        "paper": TrainingTimeTest(LossRules(7, 0.8, "all", "early")),
        "pretrained": TrainingTimeTest(LossRules(4)),
    }
    assert objective == wanted.get(name, OBJECTIVES["ppow"] if name.startswith("continued") else TrainingTimeTest())


def test_a_preset_is_changed_by_name():
    settings, objective = presets.preset("tiny", {"steps": 7, "muon": False}, unroll=2)
    assert settings == replace(presets.TINY, steps=7, muon=False)
    assert objective == TrainingTimeTest(LossRules(2)) and presets.preset("tiny")[1] == TrainingTimeTest(LossRules(7))
    assert presets.preset("continued", {"patience": 3})[0] == presets.Continued(patience=3)
    assert presets.Budget() == presets.Budget(None, None, 0, None, None, features.CacheConfig(), False)
    budgets = ({}, {"steps": 3}, {"minutes": 1.0}, {"minutes": 1.0, "steps": 4})
    steps = [presets.Budget(**some).steps_of(settings) for some in budgets]
    assert (
        eagle3.ESTIMATED_STEPS == 100 and steps == [7, 3, None, 4] and presets.Budget(seed=2**63 - 1).seed == 2**63 - 1
    )
    for wrong in ({"batch": 0}, {"length": 0}, {"steps": 0}, {"passes": 0}, {"betas": (0.9, 1.5)}):
        pytest.raises(SpecdecError, presets.Settings, **wrong).match(next(iter(wrong)))
    pytest.raises(SpecdecError, presets.Continued, measure_every=0).match("measure_every")
    for wrong in ({"steps": 0}, {"seed": -1}, {"seed": 2**63}):
        pytest.raises(SpecdecError, presets.Budget, **wrong).match(next(iter(wrong)))


RULES = dict(steps=7, decay=0.8, divide_by="counted", positions="taught", aligned_top=0)  # EAGLE-3 section 3.2
PPOW = dict(  # arXiv 2605.14978, and what it leaves open
    window=10, group=8, places_per_row=4, places="adaptive", hard_from=0.2, hard_to=0.8, curriculum="gradual",
    curriculum_steps=1000, rollout="drafter", verify="sampled", reward="cost_aware", gamma=0.12, speedups=(), eta=0.5,
    epsilon=2.0, clip=0.2, delta=1e-6, updates=1, after_rejection=True, beta=0.04, divergence="reverse_kl", temperature=1.0,
    detach=False, seed=0,
)  # fmt: skip
OURS = PPOW | dict(window=6, curriculum_steps=300)
DISTILLED = PPOW | dict(window=6, group=1, places_per_row=32, hard_from=0.0, hard_to=0.0, reward="none", beta=1.0)
ERRORS = DISTILLED | dict(places="errors", hard_from=1.0, hard_to=1.0)
SUPERVISED = dict(
    rules=LossRules(**RULES), labels="hard", soft_weight=1.0, top_k=0, top_weight=0.0, feature_weight=0.0, noise=0.0,
    detach=False, errors_only=False, network="eagle3", seed=0,
)  # fmt: skip
FOUR, FEATURES = SUPERVISED | dict(rules=LossRules(4)), dict(feature_weight=1.0, noise=0.2)
HASS = SUPERVISED | dict(  # HASS section 3
    rules=LossRules(3, 1.0), labels="soft", soft_weight=0.1, top_k=10, top_weight=1.0, detach=True
)
BY_NAME = {
    "ppow": OURS,
    "ppow-wide": OURS | dict(epsilon=30.0),
    "ppow-paper": PPOW,
    "kl_only": OURS | dict(reward="none", beta=1.0),
    "raw_reward": OURS | dict(reward="raw"),
    "expected_reward": OURS | dict(verify="expected"),
    "cst": dict(rules=LossRules(4), backward="auto"),
    "cst-hard": FOUR,
    "distillspec-forward": DISTILLED | dict(divergence="forward_kl"),
    "distillspec-reverse": DISTILLED,
    "distillspec-jsd": DISTILLED | dict(divergence="jsd"),
    "distillspec-tv": DISTILLED | dict(divergence="tv"),
    "distillspec-text": DISTILLED | dict(divergence="forward_kl", rollout="text"),
    "distillspec-mixed": DISTILLED | dict(divergence="forward_kl", rollout="mixed"),
    "draft_opd": ERRORS,
    "osd": ERRORS | dict(window=1, divergence="forward_kl", rollout="text"),
    "hass": HASS,
    "hass-eagle1": HASS | FEATURES | dict(network="eagle1"),
    "eagle1": SUPERVISED | dict(rules=LossRules(1), labels="soft", soft_weight=0.1, network="eagle1") | FEATURES,
    "griffin": HASS | FEATURES | dict(rules=LossRules(3, 1.0, aligned_top=3), top_weight=0.5, network="griffin"),
    "medusa": FOUR | dict(network="medusa"),
    "hydra": FOUR | dict(network="hydra"),
    "hydra++": FOUR | dict(labels="soft", network="hydra++"),
    "lm": SUPERVISED | dict(rules=LossRules(1), labels="soft", network="lm"),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_objectives_by_name(name):
    objective = objective_named(name)
    kind = TrainingTimeTest if name == "cst" else Supervised if "labels" in BY_NAME[name] else Ppow
    assert type(objective) is kind and told(objective) == BY_NAME[name] and list(OBJECTIVES) == list(BY_NAME)
    assert objective.updates == 1
    if name != "cst":
        assert objective_named(name, seed=5) == replace(objective, seed=5)


def test_what_objectives_are_made_of():
    assert told(LossRules()) == RULES and told(Ppow()) == PPOW and told(Supervised()) == SUPERVISED
    assert told(TrainingTimeTest()) == dict(rules=LossRules(), backward="auto")
    assert ttt.RULES == {"official": LossRules(7, 0.8, "all", "early"), "ours": LossRules()}
    assert TrainingTimeTest().network == Ppow().network == "eagle3"
    changed = objective_named("ppow", {"speedups": [1, 2], "beta": 0.5}, seed=2)
    assert changed == replace(OBJECTIVES["ppow"], speedups=(1, 2), beta=0.5, seed=2)
    assert objective_named("cst", {"rules.steps": 2}, seed=3) == TrainingTimeTest(LossRules(2))
    fresh = {name: name for name in ("eagle1", "griffin", "medusa", "hydra", "hydra++", "lm")}
    assert FRESH == fresh | {"hass": "hass-eagle1"}
    pytest.raises(SpecdecError, objective_named, "pow").match("unknown objective 'pow'")


def test_chats_and_serving():
    assert told(chats.Regeneration()) == dict(greedy_frac=0.5, temperature=0.8, batch=64, max_new_tokens=256)
    assert chats._answer_length([{"role": "assistant", "content": "four"}]) == 4
    assert (chats.PADDING, chats.PROMPT, chats.ANSWER, chats.LIBRARY) == (0, 1, 2, 3)
    # OSD's own learning rate
    assert asdict(online.OnlineConfig()) == dict(every=8, learning_rate=1e-5, longest=256)
    pytest.raises(SpecdecError, online.learned_by, None).match("can learn while they serve")
    home = Path(own_chats.__file__).parent
    assert told(own_chats.ChatConfig()) == dict(
        seed=0, rows=64, prompt_tok=256, answer_tok=320, prompt_temperature=0.9,
        temperatures=((0.0, 0.6), (0.7, 0.2), (1.0, 0.2)), openings=home / "openings.txt", prompts=home / "prompts.txt",
        hold_out=0.02, on=None, jobs=None,
    )  # fmt: skip
    assert own_chats.SLACK_TOK == 32 and own_chats.draw(torch.tensor([0.0, 1.0]), 0, None) == 1
    assert chat_files.SHARD == 64 and chat_files.numbers_of(2) == range(128, 192)
    # measured on SmolLM2-135M-Instruct's chats
    assert (generate_data.ANSWER_SHARE, generate_data.MEAN_CONTEXT_TOK, generate_data.ROW_BYTES) == (0.6, 200, 12)
    assert told(features.CacheConfig()) == dict(folder=None, limit_gb=20.0)
    assert (features.SHARD_TOK, features.DTYPE, features.GB, features.FORMAT) == (16_384, torch.bfloat16, 1e9, 1)
    pytest.raises(SpecdecError, features.CacheConfig, limit_gb=-1.0).match("limit_gb")


def test_terms_of_controllers(tmp_path):
    assert told(terms.EqualTerms()) == dict(
        name="equal", shapes=((4,), (4, 2, 1), (2,), (10,)), depth=7, depths=(0, 1, 2, 3, 4, 5, 7),
        total_tokens=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 60), intervals=(10, 1, 3, 30), trial_frac=0.2, effort=1.0,
    )  # fmt: skip
    three = ("Re-SpS", "LTD", "RADAR")
    assert terms.TERMS == {"equal": (*three, "ours"), "paper": three, "official": three, "live": three[:2]}
    assert dict(depth=12, top_ks=(8, 10, 12, 16, 20, 32), trees=(10,), most_nodes=240) == terms.WIDE, (
        "Re-SpS 1.3, LTD 2.2"
    )
    arena = terms.Arena(synthetic_trace(), COSTS, tmp_path)
    assert told(arena) == dict(
        trace=arena.trace, costs=COSTS, folder=tmp_path, terms=terms.EqualTerms(), wide=None, sampled=None, pair=None,
        live_prompts=(), live_decisions=256, progress=True,
    )  # fmt: skip
    assert arena.choice_file("RADAR") == tmp_path / "radar-choice.json"
    job = terms.Job("Re-SpS", "paper", 3)
    assert (job.method, job.folder) == ("Re-SpS, the paper's settings", "re-sps-paper-3")


STEPS, LONGEST, LIKELY = ((1, 3, 5, 7), (1, 2, 3), (0, 1, 3)), (2, 3, 4, 6), (0.15, 0.3, 0.45, 0.6, 0.75)
ARMS, HALF = {"arms": ((1, 2, 3, 4), (0, 1, 2, 3)), "per_text": (True, False)}, {"threshold": (0.3, 0.5, 0.7)}
OPEN = {  # rule: what is tried, and what it is (fitted, seeded, square)
    "sglang_ema": ({"candidates": STEPS}, ""),
    "sglang_throughput": ({"candidates": STEPS[:2]}, ""),
    "sglang_draft_prob": ({"levels": LONGEST}, ""),
    "vllm_adaptive_verification": ({"levels": LONGEST}, ""),
    "vllm_adaptive_k": ({"explore": (0.1, 0.02)}, "seeded"),
    "llamacpp_ev": ({"look_ahead": (0, 2)}, ""),
    "llamacpp_p_min": ({"p_min": LIKELY}, ""),
    "hf_heuristic": ({"start": (2, 5), "more": (1, 2)}, ""),
    "hf_confidence": ({"p_min": LIKELY}, ""),
    "trtllm_gate": ({"levels": LONGEST, "threshold": (0.0, 0.2)}, ""),
    "ucb": (ARMS, ""),
    "exp3": (ARMS, "seeded"),
    "DDD": ({"layers": ((5, 7, 9), (1, 2, 3, 4, 5, 6, 7)), "threshold": (-2.0, -1.0, -0.3)}, "square"),
    "SVIP": ({"minimum": (0.3, 0.5, 0.6, 0.7)}, "square"),
    "GammaTune": ({"default_depth": (2, 3, 5)}, "square"),
    "C2T": (HALF, "fitted seeded square"),
    "Disco": (HALF, "fitted seeded square"),
    "SpecDec++": (HALF, "fitted seeded square"),
}


def test_what_rules_leave_open(tmp_path):
    tuner = rules.Tuner(terms.Arena(synthetic_trace(), COSTS, tmp_path), tmp_path)
    assert tuner.names == tuple(OPEN) == tuple(rules.RULES) and tuner.seeds == (0,)
    for name, (knobs, flags) in OPEN.items():
        given = {flag: flag in flags.split() for flag in ("fitted", "seeded", "square")}
        assert told(rules.RULES[name]) == {"knobs": knobs, **given}, name
        assert (name in rules.ENGINES) == (given["square"] is False)
    assert np.log2(rules.GRID).tolist() == pytest.approx(np.arange(-6, 7) / 3)


def test_rewards_tasks_and_runs(tmp_path):
    assert LAPS == ("draft_ms", "policy_ms", "verify_ms", "commit_ms", "host_ms")
    assert told(Reward()) == dict(kind="ratio", mean=False, laps=LAPS, unit_ms=10.0, rate=0.0)
    assert told(Task("source")) == dict(
        source="source", reward=Reward(), episode="cycle", others=None, credit=None, adapt_rate=False, reseed_each_turn=False
    )  # fmt: skip
    assert RunOptions(tmp_path) == RunOptions(tmp_path, 0, 8, 8192, None, {}, True, True)
    pytest.raises(SpecdecError, RunOptions, tmp_path, envs=0).match("envs")
