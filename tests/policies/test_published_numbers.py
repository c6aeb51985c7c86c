"""Every number of the papers' recipes and of ours in one reviewed table: one that changes has to be changed here as well.

Numbers in comments are sections of the papers' text: Re-SpS (PPO: Table 4, networks: Table 5), LTD (Appendix C, Table 12),
RADAR (section 4.1). "official" follows the published code, "ours" is ours.
"""

import dataclasses

import pytest

from specdec.errors import SpecdecError
from specdec.policies import engines, heuristics, ltd, radar, resps, value
from specdec.policies.base import PPOConfig, choices_of, chose


def flat(config, before="") -> dict:
    """All fields by name, those of configs inside with a dot."""
    found = {}
    for field in dataclasses.fields(config):
        held = getattr(config, field.name)
        nested = dataclasses.is_dataclass(held) and not isinstance(held, type)
        found |= flat(held, f"{before}{field.name}.") if nested else {before + field.name: held}
    return found


def inside(part: str, **fields) -> dict:
    return {f"{part}.{name}": held for name, held in fields.items()}


SB3 = dict(  # stable-baselines3's own defaults, and what it does not have
    n_steps=2048, batch_size=64, n_epochs=10, learning_rate=3e-4, warmup_frac=0.0, linear_decay=False, clip_range=0.2,
    gamma=0.99, gae_lambda=0.95, ent_coef=0.0, vf_coef=0.5, max_grad_norm=0.5, pi=(64, 64), vf=(64, 64),
    activation="tanh", total_steps=100_000, normalise_observations=False, normalise_reward=False,
)  # fmt: skip
RESPS = dict(
    name="paper", state="concat", per_layer=False, hidden_size=4096, layers=3, totals=(32, 48, 64, 80, 96, 128),
    depths=(3, 4, 5, 6, 7, 8), widths=(8, 12, 16, 20, 32), small=False, interval=30, temperature=1.5,
    starter=(96, 8, 20), first_tree=None, action_lag=False, reseed_each_turn=False,
    while_training={"interval": 10, "temperature": None}, reward="mean_of_ratios",
    timed=("draft", "policy", "verify", "commit", "host"), terminal=False, start_in_reward=False, junk_zero=False,
    push_partial=False, select=False, prompts=("mt_bench", "alpaca"),
)  # fmt: skip
RESPS |= inside("ppo", **SB3) | inside(
    "ppo", n_steps=64, batch_size=32, n_epochs=4, gamma=0.95, gae_lambda=0.9, ent_coef=0.1, pi=(128, 128),
    vf=(128, 128), total_steps=55_000,
)  # fmt: skip
RESPS_OFFICIAL = RESPS | dict(
    name="official", state="official", first_tree=(97, 8, 20), action_lag=True, reseed_each_turn=True,
    timed=("policy", "verify"), terminal=True, start_in_reward=True, junk_zero=True, push_partial=True,
)  # fmt: skip
RESPS_OURS = RESPS | dict(
    name="ours", state="normalised", per_layer=True, interval=10, temperature=None, reward="lagrangian",
    push_partial=True, select=True, prompts=(),
)  # fmt: skip
RESPS_OURS |= inside(
    "ppo", n_steps=512, batch_size=128, n_epochs=10, linear_decay=True, ent_coef=0.01, total_steps=60_000,
    normalise_reward=True,
)  # fmt: skip

TABLE_12 = dict(
    n_steps=2048, batch_size=256, n_epochs=20, learning_rate=1e-3, warmup_frac=0.01, linear_decay=True, ent_coef=0.01,
    vf=(1024, 256), activation="relu",
)  # fmt: skip
SCRIPT = dict(
    n_steps=128, batch_size=64, n_epochs=1, learning_rate=3e-4, gamma=0.99, ent_coef=0.0, activation="tanh",
    total_steps=100_000,
)  # fmt: skip
LTD = dict(
    name="paper", reward="throughput", timed=("draft", "verify", "commit", "host"), random_depth=True, select=True,
    prompts=("humaneval",),
)  # fmt: skip
LTD |= inside(
    "depth", depth=12, top_k=10, stride=1, total_tokens=61, constant_length=False, first_depth=None, ask_at_zero=False,
    beam=(), from_root=False, while_training={},
)  # fmt: skip
LTD |= inside(
    "size", sizes=tuple(range(20, 241, 20)), depth=12, top_k=10, drafted=8, parts=("scores", "length", "depth"),
    features_size=0, exponentiated=False, best=0, first_nodes=None, beam=(), while_training={"drafted": None},
)  # fmt: skip
LTD |= inside("depth.ppo", **SB3 | TABLE_12 | dict(gamma=0.999, pi=(1024,), total_steps=1_000_000))
LTD |= inside("size.ppo", **SB3 | TABLE_12 | dict(gamma=0.9, pi=(1024, 256)))
LTD_OFFICIAL = LTD | inside("depth.ppo", **SCRIPT) | inside("size.ppo", **SCRIPT)
LTD_OFFICIAL |= dict(name="official", random_depth=False, select=False)
LTD_OFFICIAL |= inside("size", sizes=tuple(range(10, 241, 10)), first_nodes=59)
LTD_OFFICIAL |= inside("depth", stride=3, total_tokens=60, constant_length=True, first_depth=8)
LTD_OFFICIAL["depth.while_training"] = dict(
    stride=1, constant_length=False, total_tokens=61, first_depth=5, ask_at_zero=True
)
OUR_PPO = dict(n_epochs=10, learning_rate=3e-4, gamma=1.0, pi=(256, 64), vf=(256, 64))
LTD_OURS = LTD | inside("depth.ppo", **OUR_PPO, total_steps=200_000) | inside("size.ppo", **OUR_PPO)
LTD_OURS |= dict(name="ours", reward="lagrangian", timed=("draft", "policy", "verify", "commit", "host"), prompts=())
LTD_OURS |= inside(
    "size", sizes=(4, 8, 12, 16, 20, 24, 32, 40, 48, 60, 80, 100, 120, 160, 200, 240), drafted=None,
    exponentiated=True, best=240, while_training={},
)  # fmt: skip

RADAR = dict(
    name="paper", temperature=1.0, half_inputs=False, flat_nodes=59, total_tokens=60, top_k=10, beam=(),
    objective="ratio", gradient="sampled", alpha=0.02, beta_factor=10.0, gamma=0.99, count_bonus=False,
    select_by="surrogate", split_by="cycle", held_out_frac=0.2, learning_rate=1e-4, last_rate=1e-6, weight_decay=1e-4,
    dropout=0.1, batch=64, epochs=100, clip=1.0, continue_bias=0.0, entropy=0.0, prompts=("mt_bench",),
)  # fmt: skip
RADAR_OFFICIAL = RADAR | dict(name="official", half_inputs=True)
RADAR_OURS = RADAR | dict(
    name="ours", temperature=None, flat_nodes=None, objective="lagrangian", gradient="advantage", alpha=0.0, gamma=1.0,
    count_bonus=True, select_by="throughput", split_by="prompt", learning_rate=1e-3, weight_decay=0.0, batch=128,
    epochs=30, continue_bias=1.0, prompts=(),
)  # fmt: skip

OURS = dict(
    name="ours", top_k=6, beam=(), most_expansions=12, sizes=(0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 20, 26, 34, 44, 59),
    probe=None, hidden=64, probe_width=8, steps=2000, batch=256, learning_rate=2e-3, weight_decay=0.03, dropout=0.2,
    noise=0.3, rounds=2, detours=3, ensemble=3, distil=True, held_out_frac=0.15, patience=4,
)  # fmt: skip

CHAIN = {"top_k": 1, "beam": [], "most_levels": 9, "verify_nodes": 60}
UNPRICED = {
    "draft_ms": [], "draft_per_tok": [], "verify_ms": [], "verify_per_tok": [], "rest_ms": 0.0, "step_ms": 0.0,
    "step_per_tok": 0.0, "priced_for": "",
}  # fmt: skip
STEPS = {"candidates": [1, 3, 5, 7], "start": -1}
ENGINES = {  # as they ship; sources stand in the docstrings of policies.engines
    "sglang_ema": CHAIN | STEPS | dict(alpha=0.2, interval=5, warmup=10, down=-0.25, up=0.0, ceiling=0.0),
    "sglang_throughput": CHAIN | UNPRICED | STEPS | dict(window=20, interval=10),
    "sglang_draft_prob": CHAIN | UNPRICED | dict(levels=5, least=1),
    "vllm_adaptive_verification": CHAIN | UNPRICED | dict(
        levels=7, least=0, confidence="position", temperatures=[], alpha=0.1, prior=0.85
    ),
    "vllm_adaptive_k": CHAIN | UNPRICED | dict(
        most_levels=5, least=0, alpha=0.3, prior=0.85, period=10, explore=0.1, cooldown=2, seed=0
    ),
    "llamacpp_ev": CHAIN | UNPRICED | dict(most_levels=16, look_ahead=0),
    "llamacpp_p_min": CHAIN | dict(most_levels=16, p_min=0.75, least=0, keeps=False),
    "hf_heuristic": CHAIN | dict(start=5, more=2, less=1, transient=False),
    "trtllm_gate": CHAIN | dict(levels=3, window=20, threshold=0.3),
    "ucb": CHAIN | dict(arms=[1, 2, 3, 4], per_text=True, weight=6.0, warmup=2),
    "exp3": CHAIN | dict(arms=[1, 2, 3, 4], per_text=True, mixing=0.1, seed=0),
}  # fmt: skip
WIDE = {"verify_nodes": 60, "top_k": 10}
FITTED = WIDE | {"temperature": None, "seed": 0, "activation": "relu", "max_depth": 12, "threshold": 0.5}
HEURISTICS = {
    heuristics.DDD: WIDE | dict(max_depth=12, layers=(5, 7, 9), threshold=-0.3, statistic="mass"),
    heuristics.SVIP: WIDE | dict(
        max_depth=12, factor=0.15, minimum=0.3, rule="bound", node="best", estimate="remainder"
    ),
    heuristics.GammaTune: WIDE | dict(default_depth=8, low=0.5, high=1.5, eta=0.2, growth=1.0),
    heuristics.C2T: FITTED | dict(max_depth=8, prunes=True, least=1),
    heuristics.Disco: FITTED | dict(estimate="remainder"),
    heuristics.SpecDecPlus: FITTED | dict(rule="level"),
}  # fmt: skip

TABLES = {
    "PPO": (PPOConfig(), SB3),
    "Re-SpS, paper": (resps.PAPER, RESPS),
    "Re-SpS, official": (resps.OFFICIAL, RESPS_OFFICIAL),
    "Re-SpS, ours": (resps.OURS, RESPS_OURS),
    "LTD, paper": (ltd.PAPER, LTD),
    "LTD, official": (ltd.OFFICIAL, LTD_OFFICIAL),
    "LTD, ours": (ltd.OURS, LTD_OURS),
    "RADAR, paper": (radar.PAPER, RADAR),
    "RADAR, official": (radar.OFFICIAL, RADAR_OFFICIAL),
    "RADAR, ours": (radar.OURS, RADAR_OURS),
    "ours": (value.OURS, OURS),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_number_is_the_one_in_the_table(name):
    config, table = TABLES[name]
    held = flat(dataclasses.replace(config))  # made anew, so that its own checks run as well
    deviations = held.pop("deviations", ())
    if name.startswith("LTD"):
        assert held.pop("rounds") == ltd.ROUNDS
    assert held == table
    assert all(len(line) > 30 for line in deviations) and bool(deviations) == ("ours" not in name and "PPO" not in name)


def test_the_rounds_of_ltd_in_both_orders():
    assert [tuple(one) for one in ltd.ROUNDS] == [
        ("iter0", "size", None), ("iter0", "depth", None), ("iter1", "size", "depth"), ("iter2", "depth", "size"),
        ("iter3", "size", "depth"),
    ]  # fmt: skip
    assert set(ltd.ORDERS) == {"6.1", "4"} and ltd.ORDERS["6.1"] == ltd.ROUNDS
    depth, size = ("depth", "size"), ("size", "depth")
    assert [tuple(one) for one in ltd.ORDERS["4"]] == [
        ("iter0", "size", None), ("iter0", "depth", None),
        *((f"iter{number}", *pair) for number, pair in enumerate((depth, size, depth, size), start=1)),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ENGINES)
def test_the_engines_rules_ship_with_these_constants(name):
    assert engines.rule(name).settings() == ENGINES[name]


def test_every_rule_that_ships_is_in_the_table():
    assert set(engines.NAMES) == set(ENGINES)


@pytest.mark.parametrize("rule", HEURISTICS)
def test_the_papers_heuristics_begin_with_these_constants(rule):
    made = rule()
    assert {field.name: getattr(made, field.name) for field in dataclasses.fields(made)} == HEURISTICS[rule]


@pytest.mark.parametrize("name", ["n_steps", "batch_size", "n_epochs", "total_steps"])
def test_what_is_counted_is_at_least_one(name):
    assert getattr(PPOConfig(**{name: 1}), name) == 1
    pytest.raises(SpecdecError, PPOConfig, **{name: 0}).match(name)


def test_every_choice_is_written_down_once_with_the_part_it_looked_at():
    policy = heuristics.SVIP()
    assert choices_of(policy) == []
    chose(policy, "threshold", "tune", 0.3)
    chose(chose(policy, "width", "train"), "threshold", "tune", 0.3)
    assert choices_of(policy) == [
        {"choice": "threshold", "part": "tune", "value": "0.3"},
        {"choice": "width", "part": "train", "value": ""},
    ]


@pytest.mark.parametrize("bad", [{"last_rate": 2e-4}, {"gamma": 0.0}, {"gamma": 1.1}, {"epochs": 0}])
def test_radar_learns_at_rates_that_fall_and_for_an_epoch_at_least(bad):
    pytest.raises(SpecdecError, dataclasses.replace, radar.PAPER, **bad).match("training needs epochs")
    assert dataclasses.replace(radar.PAPER, last_rate=0.0).last_rate == 0.0
    assert dataclasses.replace(radar.PAPER, last_rate=1e-4, gamma=1.0, epochs=1).epochs == 1


def test_what_ltds_size_policy_may_see_by_the_names_of_its_table():
    seen = {name: ltd.SizePolicy(parts=parts, features_size=4).parts for name, parts in ltd.OBSERVATIONS.items()}
    assert {name: tuple(parts) for name, parts in seen.items()} == {
        "P+L": ("scores", "length"),
        "P+D": ("scores", "depth"),
        "P+D+L": ("scores", "length", "depth"),
        "+hidden": ("scores", "length", "depth", "hidden"),
        "+entropy": ("scores", "length", "depth", "entropy"),
    }
