"""Equal terms: the same options for all, choices on the tuning part alone and written down, trainings that are found again."""

import dataclasses
import warnings

import numpy as np
import pytest
from fakes.pairs import random_pair
from fakes.traces import COSTS, SMALL_LTD, SMALL_PPO, SMALL_RESPS, synthetic_trace

from specdec.core.decode import decode
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import compare
from specdec.models.fingerprint import fingerprint
from specdec.policies import ltd, radar, resps, value
from specdec.policies.base import changed, choices_of
from specdec.replays.record import record
from specdec.replays.replay import replay
from specdec.training import terms
from specdec.training.terms import EQUAL, LIVE, Arena, EqualTerms, Job

SMALL = {f"{kind}ppo.{name}": value for kind in ("depth.", "size.") for name, value in SMALL_PPO.items()}
TERMS = EqualTerms(shapes=((3,), (2,), (9,)), depths=(0, 1, 3), total_tokens=(1, 2, 4, 8, 16), effort=1.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The systems' own configs, so small that they learn in a second; warnings of constants say nothing here."""
    monkeypatch.setattr(resps, "OURS", changed(resps.OURS, {f"ppo.{n}": v for n, v in SMALL_PPO.items()}))
    monkeypatch.setattr(ltd, "OURS", changed(ltd.OURS, {"rounds": ltd.ROUNDS[:2], **SMALL}))
    monkeypatch.setattr(radar, "OURS", changed(radar.OURS, {"epochs": 2}))
    monkeypatch.setattr(value, "OURS", changed(value.OURS, dict(steps=5, rounds=1, ensemble=1, detours=0)))
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "this .* gave the answer|this RADAR policy stops|the policy in .* goes by the prices"
        )
        yield


def recording(**options):
    trace = synthetic_trace(turns=12, positions=30, depth=7, top_ks=(2, 3), features=9, **options)
    trace.turns["part"] = ["train", "tune", "test", "train", "tune", "test"] * 2
    return trace


def arena(folder, **fields) -> Arena:
    return Arena(recording(), COSTS, folder, **{"terms": TERMS, "progress": False, **fields})


def test_every_system_gets_the_same_and_is_found_again(tmp_path):
    here = arena(tmp_path)
    assert here.shapes() == [(3, ()), (2, ())], "9 children were not recorded"
    jobs = here.jobs([0])
    assert [job.terms for job in jobs] == [EQUAL] * 4, "nothing to learn live from, and no wide recording"
    assert {len(here.options(job.system)) for job in jobs} == {2}
    policies, table = terms.train_all(here, jobs)
    assert list(policies) == ["Re-SpS", "LTD", "RADAR", "ours"]
    for job in jobs:  # what is measured with it now is found again with the one that is loaded
        assert fingerprint(policies[job.name][0]) == fingerprint(terms.saved(tmp_path / job.folder))
    assert (table["state"] == "trained").all() and (table["learned_from"] > 0).all()
    tune, test = (here.trace.select(part=part) for part in ("tune", "test"))
    for job in jobs:
        policy, choice = policies[job.name][0], terms.choose(here, job.system)
        times = [row["ms_per_tok"] for row in choice["table"]]
        assert len(times) == 2 and choice["option"] == int(np.argmin(times))
        rows = choices_of(policy)
        assert {row["part"] for row in rows} == {"train", "tune"}
        picked = {row["choice"]: row["value"] for row in rows}
        option = here.options(job.system)[choice["option"]]
        assert picked["interval" if job.system == "Re-SpS" else "width"] == str(option)
        assert policy.limits.total_tokens <= 16 and policy.limits.depth <= 7
        replay(tune, policy, COSTS)
        replayed = replay(test, policy, COSTS).ms_per_tok
        assert replayed == replay(test, terms.saved(tmp_path / job.folder), COSTS).ms_per_tok
    again, found = terms.train_all(here, jobs)
    assert (found["state"] == "found").all() and (found["expected_min"] == 0).all() and list(again) == list(policies)
    assert found["minutes"].tolist() == table["minutes"].tolist()
    resps_trees = policies["Re-SpS"][0].trees
    assert [tree.total_tokens for tree in resps_trees].count(1) == 1 and {tree.top_k for tree in resps_trees} == {2, 3}
    with pytest.raises(SpecdecError, match="looked at part 'tune'"):
        kept = compare.Baselines.choose(here.trace, COSTS, parts=("train",), defaults=(TreeConfig(4, 2, 3),))
        compare.compare_replay(here.trace, COSTS, policies, baselines=kept, part="tune", progress=False)


def test_a_budget_leaves_the_rest_for_later(tmp_path, monkeypatch):
    here, trained = arena(tmp_path), []
    jobs = here.jobs([0, 1])
    assert [job.seed for job in jobs] == [0] * 4 + [1] * 4, "a first seed of everything comes first"
    times = dict.fromkeys(jobs, 1000.0) | {jobs[0]: 1.0}
    monkeypatch.setattr(terms, "expected_s", lambda arena, jobs: times)
    monkeypatch.setattr(terms, "train", lambda arena, job: trained.append(job) or leave(arena, job))
    policies, table = terms.train_all(here, jobs, minutes=1)
    assert trained == jobs[:1] and list(policies) == [jobs[0].name]
    assert table["state"].tolist() == ["trained"] + ["left"] * 7 and table["minutes"].notna().sum() == 1
    times[jobs[0]] = 0.0  # as it is once it is there
    assert terms.train_all(here, jobs, minutes=1)[1]["state"].tolist() == ["found"] + ["left"] * 7
    assert list(terms.train_all(here, jobs[1:], minutes=0.1)[0]) == []


def test_what_cannot_learn_stops_nothing_else(tmp_path, monkeypatch):
    here = arena(tmp_path, wide=recording(most_nodes=60))
    never = changed(
        resps.PAPER, {**SMALL_RESPS, "layers": 3, "interval": 99, "while_training": {"interval": 99}, "prompts": ()}
    )
    quick = changed(radar.PAPER, {"epochs": 1, "top_k": 3, "total_tokens": 16, "flat_nodes": None, "prompts": ()})
    monkeypatch.setattr(terms, "PUBLISHED", {"Re-SpS": {"paper": never}, "RADAR": {"paper": quick}})
    monkeypatch.setitem(terms.TERMS, "paper", ("Re-SpS", "RADAR"))
    jobs = here.jobs([0], ["paper"])
    assert np.isnan(terms.expected_s(here, jobs)[jobs[0]])
    policies, table = terms.train_all(here, jobs, minutes=1)
    assert list(policies) == ["RADAR, paper"] and table["state"].tolist()[1] == "trained"
    assert table["state"][0].startswith("refused: 500 decisions gave no transition")


def leave(arena, job):
    folder = arena.folder / job.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trained.json").write_text('{"seconds": 1.0, "learned_from": 1}')


def test_published_terms_use_their_own_grid_and_recording(tmp_path, monkeypatch):
    small = {"prompts": ("hard",), "deviations": ("small",)}
    small_resps = {name: value for name, value in SMALL_RESPS.items() if name not in ("hidden_size", "layers")}
    configs = {"Re-SpS": {"paper": changed(resps.PAPER, {**small_resps, **small})}}
    configs["LTD"] = {"paper": changed(ltd.PAPER, {**SMALL_LTD, "rounds": ltd.ROUNDS[:2], **small})}
    configs["RADAR"] = {
        "paper": changed(radar.PAPER, {"epochs": 1, "top_k": 3, "total_tokens": 16, "flat_nodes": None, **small})
    }
    monkeypatch.setattr(terms, "PUBLISHED", configs)
    here = arena(tmp_path, wide=recording(most_nodes=60), sampled=recording(seed=1))
    jobs = here.jobs([0], ["paper"])
    policies, table = terms.train_all(here, jobs)
    assert list(policies) == ["Re-SpS, paper", "LTD, paper", "RADAR, paper"]
    assert {tree.total_tokens for tree in policies["Re-SpS, paper"][0].trees} == {3, 8, 16}
    assert {row["part"] for row in choices_of(policies["LTD, paper"][0])} == {"train", "none"}
    assert terms.runs.read_json(tmp_path / jobs[0].folder / "trained.json")["deviations"] == ["small"]
    assert table["learned_from"].iloc[0] == 64
    with pytest.raises(SpecdecError, match="unknown terms 'papers'"):
        here.jobs([0], ["papers"])


def recorded(pair):
    """A recording of a random pair, the prompts and the settings: four to learn from, two to tune on, one to judge."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 24, 6).tolist() for _ in range(7)]
    options = dict(
        max_new_tokens=12, depth=7, top_ks=(3,), trees=(3,), family=(3, 3, 2, 1), most_nodes=20, progress=False
    )
    trace = record(pair, prompts, **options)
    trace.turns["part"] = ["train"] * 4 + ["tune"] * 2 + ["test"]
    return trace, prompts


def test_live_learning_decodes_and_pays_the_stated_price(tmp_path):
    pair = random_pair()
    trace, prompts = recorded(pair)
    live = dict(live_prompts=prompts[:4], live_decisions=8)
    here = Arena(trace, COSTS, tmp_path, dataclasses.replace(TERMS, shapes=((3,),)), pair=pair, progress=False, **live)
    jobs = here.jobs([0, 1], [LIVE])
    assert jobs == [Job("Re-SpS", LIVE, 0), Job("LTD", LIVE, 0)], "one seed: live learning is slow"
    policies, table = terms.train_all(here, jobs)
    assert (table["state"] == "trained").all() and table["learned_from"].tolist() == [8, 16]
    assert terms.runs.read_json(tmp_path / "answers.json")["Re-SpS-0"] > 0
    for job in jobs:
        assert fingerprint(policies[job.name][0]) == fingerprint(terms.saved(tmp_path / job.folder))
    for policy in policies.values():
        replay(trace.select(part="tune"), policy[0], COSTS)


def test_beams_of_their_own_decide_live_as_in_replay(tmp_path):
    pair = random_pair()
    trace, prompts = recorded(pair)
    here = Arena(trace, COSTS, tmp_path, dataclasses.replace(TERMS, shapes=((3, 2, 1),)), progress=False)
    jobs = here.jobs([0], [EQUAL])
    policies = {job.system: terms.train(here, job) for job in jobs}
    test = trace.select(part="test")
    for system, policy in policies.items():
        beams = {tree.beam for tree in policy.trees if tree.depth > 1} if system == "Re-SpS" else {policy.plan.beam}
        assert beams == {(2, 1)}
        rows = replay(test, policy, COSTS, keep_cycles=True).rows[0]
        lived = decode(pair, prompts[6], policy, 12, stop_tokens=()).rows
        told = ("expansions", "verify_nodes", "accepted_tok", "candidates", "top_k")
        assert [[getattr(row, name) for name in told] for row in rows] == [
            [getattr(row, name) for name in told] for row in lived
        ], system


def test_lengths_are_scaled_in_whole_rollouts():
    config = terms.lengthened(resps.PAPER, 0.01)
    assert config.ppo.total_steps == 64 * round(550 / 64) and config.ppo.n_steps == 64
    both = terms.lengthened(ltd.PAPER, 0.5)
    assert (both.depth.ppo.total_steps, both.size.ppo.total_steps) == (2048 * round(500_000 / 2048), 2048 * 24)
    assert terms.lengthened(radar.PAPER, 0.25).epochs == 25
    tiny = terms.lengthened(ltd.PAPER, 0.0005).size.ppo
    assert (tiny.n_steps, tiny.total_steps, tiny.batch_size) == (48, 48, 48), "less than one rollout is a shorter one"
    brief = terms.briefly(ltd.PAPER, 16)
    assert brief.depth.ppo.n_steps == brief.depth.ppo.batch_size == 16 and len(brief.rounds) == 2
    assert dataclasses.replace(TERMS, effort=2.0).name == EQUAL
