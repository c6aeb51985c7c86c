"""What a single choice is worth: a system trained again with one setting changed, all else as in its preset `ours`.

Papers and their codes disagree in many small things (the fact sheets list them). `QUIRKS` names those that can be changed
alone; what paper, code and ours say is read from the presets themselves, so the table cannot say otherwise than the code.
Knows nothing about how the systems learn (controllers.py, radar.py).
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from specdec.core.policy import Policy
from specdec.errors import nearest_name_error
from specdec.evaluation import stats
from specdec.policies import ltd, resps
from specdec.policies import radar as radar_policy
from specdec.replays.replay import answer_ms, replay
from specdec.training import radar, radar_data
from specdec.training.controllers import train_ltd, train_resps

PRESETS = ("paper", "official", "ours")


@dataclass(frozen=True)
class Quirk:
    """One setting in which paper, code and ours differ, and what ours is changed to.

    where: "policy" (while learning and after), "decoding" (after learning only, so nothing is learnt again), "flags", "ppo"
    or "training" (RADAR's). setting: its name there. also: what has to change with it. part: "depth" or "size" (LTD).
    """

    name: str
    where: str
    setting: str
    value: object
    also: dict = field(default_factory=dict)
    part: str = ""

    @property
    def changes(self) -> dict:
        return {self.setting: self.value, **self.also}


_PAPER_PPO = dict(batch_size=32, n_epochs=4, linear_decay=False)
QUIRKS: dict[str, tuple[Quirk, ...]] = {
    "resps": (
        Quirk("reward: mean of the cycles' ratios", "flags", "reward", "mean_of_ratios"),
        Quirk("reward: ratio of the interval's sums", "flags", "reward", "ratio_of_sums"),
        Quirk("drafting and committing not timed", "flags", "timed", ("policy", "verify")),
        Quirk("every interval an episode of its own", "flags", "terminal", True),
        Quirk("cycles before the first answer rewarded", "flags", "start_in_reward", True),
        Quirk("a transition of zeros after the first interval", "flags", "junk_zero", True),
        Quirk("cut intervals dropped", "flags", "push_partial", False),
        Quirk("the same exploration in every turn", "flags", "reseed_each_turn", True),
        Quirk("reward not normalised", "flags", "normalise_reward", False),
        Quirk("features as they are", "policy", "state", "concat"),
        Quirk("rollouts of 64, entropy 0.1", "ppo", "n_steps", 64, {**_PAPER_PPO, "ent_coef": 0.1}),
        Quirk("answer kept for 30 cycles", "decoding", "interval", 30),
        Quirk("answer drawn at temperature 1.5", "decoding", "temperature", 1.5),
        Quirk("answer in force one cycle late", "decoding", "action_lag", True),
    ),
    "ltd": (
        Quirk("reward: throughput of the cycle", "flags", "reward", "throughput"),
        Quirk("reward: accepted tokens (Table 2)", "flags", "reward", "accepted"),
        Quirk("reward: minus time (Table 2)", "flags", "reward", "time_cost"),
        Quirk("policies' own time not counted", "flags", "timed", ("draft", "verify", "commit", "host")),
        Quirk("size policy learns on the deepest trees", "flags", "random_depth", False),
        Quirk("asked after every third level", "policy", "stride", 3, part="depth"),
        Quirk("asked after every third level, decoding only", "decoding", "stride", 3, part="depth"),
        Quirk("context length always 10", "policy", "constant_length", True, part="depth"),
        Quirk("sizes 20 to 240 only", "policy", "sizes", ltd.PAPER_SIZES, part="size"),
        Quirk("scores as log-probabilities, padded with 0", "policy", "exponentiated", False, {"best": 0}, "size"),
        Quirk("discount 0.999", "ppo", "gamma", 0.999, part="depth"),
    ),
    "radar": (
        Quirk(
            "reward: beta L / l with a step penalty", "training", "objective", "ratio", {"alpha": 0.02, "gamma": 0.99}
        ),
        Quirk("REINFORCE, one draw, no baseline", "training", "gradient", "sampled"),
        Quirk("exact policy gradient", "training", "gradient", "exact"),
        Quirk("L without the bonus token", "training", "count_bonus", False),
        Quirk("epoch chosen by the surrogate loss", "training", "select_by", "surrogate"),
        Quirk("cycles of one prompt on both sides of the split", "training", "split_by", "cycle"),
        Quirk("discount 0.99", "training", "gamma", 0.99),
        Quirk("no lean towards continuing at first", "training", "continue_bias", 0.0),
        Quirk("decision drawn, not the likelier one", "decoding", "temperature", 1.0),
        Quirk("scores rounded to float16", "decoding", "half_inputs", True),
    ),
}


def stated(system: str, quirk: Quirk) -> dict[str, object]:
    """What each of PRESETS says about the quirk's setting."""
    return {preset: _settings(system, quirk, preset).get(quirk.setting) for preset in PRESETS}


def _settings(system: str, quirk: Quirk, preset: str) -> dict:
    """All settings of a preset that stand where the quirk's does."""
    if system == "radar":
        return dataclasses.asdict(radar_policy.CONFIGS[preset])
    if quirk.where == "flags":
        return dataclasses.asdict({"resps": resps, "ltd": ltd}[system].FLAGS[preset])
    if quirk.where == "ppo":
        return resps.ppo_settings(preset) if system == "resps" else ltd.PPO[preset][quirk.part]
    if system == "resps":
        return _defaults(resps.RespsPolicy) | resps.settings(preset, training=False)
    policy = {"depth": ltd.DepthPolicy, "size": ltd.SizePolicy}[quirk.part]
    return _defaults(policy) | ltd.PRESETS[preset][quirk.part]


def _defaults(policy: type) -> dict:
    return {one.name: one.default for one in dataclasses.fields(policy)}


def measure_quirks(
    system: str,
    trace,
    costs,
    out_dir: Path,
    *,
    seeds=(0, 1),
    options: dict | None = None,
    quirks: tuple[Quirk, ...] | None = None,
    progress: bool = True,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Train and replay `ours` and every quirk of a system. Returns (effects, turns): see `effects`; turns holds one row per
    test turn, quirk ("ours" for none) and seed.

    options: what all trainings share: arguments of train_resps or train_ltd (changes, total_steps, rounds), fields of
    RadarConfig for RADAR. Every training is a run of its own below out_dir; what is finished is not trained again. All
    pay the same for an answer, what one of `ours` costs on this machine. SpecdecError for an unknown system.
    """
    if system not in QUIRKS:
        raise nearest_name_error("system", system, QUIRKS)
    chosen = QUIRKS[system] if quirks is None else quirks
    learn = {"resps": _learn_resps, "ltd": _learn_ltd, "radar": _learn_radar}[system]
    test, rows, base, policy_ms = trace.select(part="test"), [], {}, None
    jobs = [(one, seed) for one in (None, *chosen) for seed in seeds]
    for quirk, seed in tqdm(jobs, desc=f"quirks of {system}", disable=not progress):
        name = "ours" if quirk is None else quirk.name
        if quirk is not None and quirk.where == "decoding":
            policy = changed(base[seed], quirk)
        else:
            place = Path(out_dir) / f"{_folder_name(name)}-{seed}"
            policy = learn(trace, costs, quirk, seed, place, copy.deepcopy(options or {}), progress)
        if quirk is None:
            base[seed] = policy
        policy_ms = answer_ms(test, copy.deepcopy(policy), costs) if policy_ms is None else policy_ms
        found = replay(test, copy.deepcopy(policy), costs, policy_ms=policy_ms)
        rows.append(found.table.assign(quirk=name, seed=seed))
    turns = pd.concat(rows, ignore_index=True)
    return effects(system, turns, chosen), turns


def _folder_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def effects(system: str, turns: pd.DataFrame, quirks: tuple[Quirk, ...]) -> pd.DataFrame:
    """One row per quirk: setting, what paper, official and ours say, changed_to, seeds, and over_ours: speed over that of
    `ours`, mean over seeds, with its paired bootstrap over prompts (low, high). Below 1 the change is slower."""
    times = turns.groupby(["suite", "prompt", "quirk", "seed"])["time_ms"].sum().unstack(["quirk", "seed"])
    base, found = times["ours"].to_numpy(), []
    for quirk in quirks:
        own = times[quirk.name].to_numpy()
        spread = stats.bootstrap(np.concatenate((base, own), axis=1), _mean_gain)
        row = {"choice": quirk.name, "setting": " ".join(filter(None, (quirk.part, quirk.setting)))}
        row |= {preset: _shown(value) for preset, value in stated(system, quirk).items()}
        row |= {"changed_to": _shown(quirk.value), "seeds": own.shape[1]}
        found.append(row | {"over_ours": spread.value, "low": spread.low, "high": spread.high})
    return pd.DataFrame(found)


def _mean_gain(means: np.ndarray) -> np.ndarray:
    half = means.shape[-1] // 2
    return (means[..., :half] / means[..., half:]).mean(axis=-1)


def _shown(value) -> str:
    if isinstance(value, tuple) and len(value) > 6:
        return f"{len(value)} values, {value[0]} to {value[-1]}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# ---- the systems -----------------------------------------------------------------------------------------------------
def _learn_resps(trace, costs, quirk, seed: int, place: Path, options: dict, progress: bool) -> Policy:
    where = {"policy": "changes"}.get(quirk.where, quirk.where) if quirk else ""
    if quirk:
        options[where] = options.get(where, {}) | quirk.changes
    return train_resps(trace, costs, "ours", seed=seed, out_dir=place, progress=progress, **options)


def _learn_ltd(trace, costs, quirk, seed: int, place: Path, options: dict, progress: bool) -> Policy:
    if quirk and quirk.where == "flags":
        options["flags"] = options.get("flags", {}) | quirk.changes
    elif quirk:
        both = options.setdefault({"policy": "changes"}.get(quirk.where, quirk.where), {})
        both[quirk.part] = both.get(quirk.part, {}) | quirk.changes
    return train_ltd(trace, costs, "ours", seed=seed, out_dir=place, progress=progress, **options).policy


def _learn_radar(trace, costs, quirk, seed: int, place: Path, options: dict, progress: bool) -> Policy:
    settings = dataclasses.replace(radar_policy.OURS, **options, **(quirk.changes if quirk else {}))
    data = radar_data.from_trace(trace.select(part="train"))
    latency = radar.latency_ms(costs, data.context_tok)
    facts = {"pair": trace.header["pair"], "costs": costs.name}
    return radar.train_radar(data, latency, settings, seed=seed, out_dir=place, trained_for=facts).policy


def changed(policy: Policy, quirk: Quirk) -> Policy:
    """A trained policy that decodes with another setting; of LTD's two, the one that the quirk is about."""
    parts = getattr(policy, "policies", None)
    if parts is None:
        return policy.with_settings(**quirk.changes)
    kinds = {"depth": ltd.DepthPolicy, "size": ltd.SizePolicy}
    return ltd.combine(*(changed(one, quirk) if isinstance(one, kinds[quirk.part]) else one for one in parts))
