"""Equal terms: the same options for all, choices on the tuning part alone and written down,
trainings that are found again.
"""

import dataclasses
import functools
import operator
from types import SimpleNamespace

import numpy as np
import pytest
from fakes.pairs import random_pair
from fakes.traces import COSTS, SMALL_PPO, SMALL_RESPS, synthetic_trace

from specdec.core.decode import decode
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.identity import Method
from specdec.models.pairs import fingerprint
from specdec.policies import ltd, radar, resps, value
from specdec.policies.base import changed, choices_of
from specdec.replays.record import record
from specdec.replays.replay import replay

from workbook import terms
from workbook.terms import EQUAL, LIVE, Arena, EqualTerms, Job

SMALL = {
    f"{kind}ppo.{name}": value for kind in ("depth.", "size.") for name, value in SMALL_PPO.items()
}
TERMS = EqualTerms(
    shapes=((3,), (2,), (9,)), depths=(0, 1, 3), total_tokens=(1, 2, 4, 8, 16), effort=1.0
)
QUIET = ("the policy in .* uses the costs",)
pytestmark = pytest.mark.filterwarnings(*(f"ignore:{text}" for text in QUIET))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The systems' own configs, so small that they learn in a second."""
    monkeypatch.setattr(
        resps, "OURS", changed(resps.OURS, {f"ppo.{n}": v for n, v in SMALL_PPO.items()})
    )
    monkeypatch.setattr(ltd, "OURS", changed(ltd.OURS, {"rounds": ltd.ROUNDS[:2], **SMALL}))
    monkeypatch.setattr(radar, "OURS", changed(radar.OURS, {"epochs": 2}))
    monkeypatch.setattr(value, "OURS", changed(value.OURS, dict(steps=5, rounds=1)))


def recording(**options):
    trace = synthetic_trace(turns=12, positions=30, depth=7, top_ks=(2, 3), features=9, **options)
    trace.turns["part"] = ["train", "tune", "test", "train", "tune", "test"] * 2
    return trace


def arena(folder, **fields) -> Arena:
    return Arena(recording(), COSTS, folder, **{"terms": TERMS, "progress": False, **fields})


def test_every_system_gets_the_same_and_is_found_again(tmp_path):
    here = arena(tmp_path)
    jobs = here.jobs([0])
    assert [job.terms for job in jobs] == [EQUAL] * 4, "no prompts to decode, no wide recording"
    policies, table = terms.train_all(here, jobs)
    assert list(policies) == [Method(name, EQUAL) for name in ("Re-SpS", "LTD", "RADAR", "ours")]
    assert (table["state"] == "trained").all()
    test = here.trace.select(part="test")
    for job in jobs:
        policy, choice = policies[job.method][0], terms.choose(here, job.system)
        times = [row["ms_per_tok"] for row in choice["table"]]
        assert len(times) == 2 and choice["option"] == int(np.argmin(times))
        picked = {row["choice"]: row["value"] for row in choices_of(policy)}
        option = here.options(job.system)[choice["option"]]
        assert picked["interval" if job.system == "Re-SpS" else "width"] == str(option)
        assert {row["part"] for row in choices_of(policy)} == {"train", "tune"}
        assert policy.limits.total_tokens <= 16 and policy.limits.depth <= 7
        # what is measured with it now is found again with the one that is loaded
        again = terms.saved(tmp_path / job.folder)
        assert fingerprint(policy) == fingerprint(again)
        ms = replay(test, policy, COSTS).ms_per_tok
        assert ms == replay(test, again, COSTS).ms_per_tok
    again, found = terms.train_all(here, jobs)
    assert (found["state"] == "found").all() and list(again) == list(policies)
    assert found["minutes"].tolist() == table["minutes"].tolist()


def test_what_cannot_learn_stops_nothing_else(tmp_path, monkeypatch):
    here = arena(tmp_path, wide=recording(most_nodes=60))
    late = {"layers": 3, "interval": 99, "while_training": {"interval": 99}, "prompts": ()}
    never = changed(resps.PAPER, SMALL_RESPS | late)
    quick = changed(
        radar.PAPER,
        {"epochs": 1, "top_k": 3, "total_tokens": 16, "flat_nodes": None, "prompts": ()},
    )
    monkeypatch.setattr(terms, "PUBLISHED", {"Re-SpS": {"paper": never}, "RADAR": {"paper": quick}})
    monkeypatch.setitem(terms.TERMS, "paper", ("Re-SpS", "RADAR"))
    jobs = here.jobs([0], ["paper"])
    policies, table = terms.train_all(here, jobs, minutes=1)
    assert list(policies) == [Method("RADAR", "paper")] and table["state"].tolist()[1] == "trained"
    assert table["state"][0].startswith("refused: too few transitions")


@functools.cache
def recorded():
    """A random pair, a recording of it and the prompts: four to learn from, two to tune on, one to
    judge.
    """
    pair = random_pair()
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 24, 6).tolist() for _ in range(7)]
    trees = dict(depth=7, top_ks=(3,), trees=(3,), family=(3, 3, 2, 1), most_nodes=20)
    trace = record(pair, prompts, max_new_tokens=12, progress=False, **trees)
    trace.turns["part"] = ["train"] * 4 + ["tune"] * 2 + ["test"]
    return pair, trace, prompts


def test_live_learning_decodes_and_pays_the_stated_price(tmp_path):
    pair, trace, prompts = recorded()
    one_shape = dataclasses.replace(TERMS, shapes=((3,),))
    live = dict(pair=pair, live_prompts=prompts[:4], live_decisions=8, progress=False)
    here = Arena(trace, COSTS, tmp_path, one_shape, **live)
    jobs = here.jobs([0, 1], [LIVE])
    assert jobs == [Job("Re-SpS", LIVE, 0), Job("LTD", LIVE, 0)], "one seed: live learning is slow"
    policies, table = terms.train_all(here, jobs)
    assert (table["state"] == "trained").all()
    assert terms.runs.read_json(tmp_path / "answers.json")["Re-SpS-0"] > 0
    for job in jobs:
        again = terms.saved(tmp_path / job.folder)
        assert fingerprint(policies[job.method][0]) == fingerprint(again)


def test_beams_of_their_own_decide_live_as_in_replay(tmp_path):
    pair, trace, prompts = recorded()
    beams = dataclasses.replace(TERMS, shapes=((3, 2, 1),))
    here = Arena(trace, COSTS, tmp_path, beams, progress=False)
    facts = operator.attrgetter("expansions", "verify_nodes", "accepted_tok", "top_k")
    for job in here.jobs([0], [EQUAL]):
        policy = terms.train(here, job)
        trees = [policy.plan]
        if job.system == "Re-SpS":
            trees = [tree for tree in policy.trees if tree.depth > 1]
        assert {tree.beam for tree in trees} == {() if job.system == "ours" else (2, 1)}
        rows = replay(trace.select(part="test"), policy, COSTS, keep_cycles=True).rows[0]
        lived = decode(pair, prompts[6], policy, 12, stop_tokens=()).rows
        assert list(map(facts, rows)) == list(map(facts, lived)), job.system


@pytest.mark.parametrize(
    ("total", "effort", "most", "expected"),
    [
        (550, 1.0, None, (64, 64 * round(550 / 64))),
        (300, 0.1, None, (24, 24)),  # rollouts that divide among eight environments
        (3, 1.0, None, (8, 8)),
        (550, 1.0, 16, (16, 16 * round(550 / 16))),
    ],
)
def test_lengths_are_scaled_in_whole_rollouts(total, effort, most, expected):
    config = changed(resps.PAPER, {"ppo.total_steps": total})
    ppo = terms.lengthened(config, effort, most).ppo
    assert (ppo.n_steps, ppo.total_steps) == expected and ppo.batch_size <= ppo.n_steps


def test_every_kind_of_training_has_a_length():
    config = terms.lengthened(ltd.PAPER, 0.5)
    totals = (config.depth.ppo.total_steps, config.size.ppo.total_steps)
    assert totals == (2048 * round(500_000 / 2048), 2048 * 24)
    assert terms.lengthened(radar.PAPER, 0.25).epochs == 25
    assert terms.lengthened(radar.PAPER, 0.0).epochs == 1
    assert terms.lengthened(changed(value.OURS, {"steps": 300}), 0.5).steps == 150


def test_jobs_are_those_that_are_possible(tmp_path):
    wide = arena(tmp_path, wide=recording(), live_prompts=[[1, 2]])
    jobs = wide.jobs([5, 6])
    counts = {EQUAL: 4, "paper": 3, "official": 3, LIVE: 2}
    expected = []
    for name, count in counts.items():
        expected += [(name, system) for system in ("Re-SpS", "LTD", "RADAR", "ours")[:count]]
    assert [(job.terms, job.system) for job in jobs if job.seed == 5] == expected
    assert [(job.terms, job.system) for job in jobs if job.seed == 6] == expected[:-2]
    assert arena(tmp_path).jobs([0], ["paper"]) == []
    pytest.raises(SpecdecError, wide.jobs, [0], ["papers"]).match("'paper'")


def test_shapes_are_those_that_were_recorded(tmp_path):
    here = arena(tmp_path)
    assert here.shapes() == [(3, ()), (2, ())], "9 children were not recorded"
    assert TERMS.depth == 12 and here.depth((3, ())) == 7, "as deep as it was recorded"
    assert here.options("Re-SpS") == [10, 1] and here.options("LTD") == [(3, ()), (2, ())]
    assert here.options("RADAR") == here.options("ours") == here.options("LTD")
    none = arena(tmp_path, terms=dataclasses.replace(TERMS, shapes=((9,),)))
    pytest.raises(SpecdecError, none.shapes).match("were recorded")


def test_learning_begins_with_the_fastest_tree_that_drafts(tmp_path):
    here = arena(tmp_path)
    start = here.start((3, ()))
    tune = here.trace.select(part="tune")
    times = {}
    for depth in range(1, 8):
        for total in (2, 4, 8, 16):
            tree = TreeConfig(min(total, 4 + 9 * depth), depth, 3)
            times[tree] = replay(tune, Static.of(tree), COSTS).ms_per_tok
    assert times[start] == pytest.approx(min(times.values()))
    only = dataclasses.replace(here, terms=dataclasses.replace(TERMS, total_tokens=(1, 4, 99)))
    assert only.start((3, ())).total_tokens == 4, "one token drafts nothing, 99 were not recorded"


def test_a_job_has_its_config(tmp_path):
    here = arena(tmp_path)
    hidden = changed(resps.OFFICIAL, {"hidden_size": 3})  # 9 features of 3 layers
    official = terms.config_of(here, Job("Re-SpS", "official", 0))
    assert official == terms.lengthened(hidden, 1.0)
    published = terms.config_of(here, Job("LTD", "paper", 0))
    assert published == terms.lengthened(ltd.LAPTOP["paper"], 1.0)
    twice = dataclasses.replace(TERMS, effort=2.0)
    here = dataclasses.replace(here, terms=twice, live_decisions=16)
    equal = terms.lengthened(terms.equal_config(here, "LTD", (2, ())), 2.0)
    assert terms.config_of(here, Job("LTD", EQUAL, 0), (2, ())) == equal
    live = terms.config_of(here, Job("LTD", LIVE, 0), (2, ()))
    assert live.depth.ppo.n_steps == live.depth.ppo.batch_size == 16 and len(live.rounds) == 2
    assert live.depth.ppo.total_steps == live.size.ppo.total_steps == 16


def test_a_budget_goes_by_how_long_the_last_of_a_kind_took(monkeypatch):
    clock, done = SimpleNamespace(now=0.0), set()
    monkeypatch.setattr(terms, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    tasks = [("Re-SpS", 0), ("LTD", 0), ("Re-SpS", 1), ("LTD", 1)]

    def make(task):
        clock.now += 180.0
        done.add(task)
        return {"seed": task[1]}

    def states(minutes):
        kinds = [system for system, _ in tasks]
        rows = terms.in_time(tasks, kinds, minutes, make, "trained", lambda task: task in done)
        return [row["state"] for row in rows]

    assert states(8) == ["trained", "trained", "left", "left"], "a third would end after 9 minutes"
    assert states(0) == ["found", "found", "trained", "trained"]
    assert states(0.1) == ["found"] * 4, "whatever loading them takes"


def test_the_best_tree_of_a_papers_own_grid(monkeypatch):
    assert [len(trees) for trees in terms.GRIDS.values()] == [177, 99, 7]
    small = {
        "Re-SpS": [TreeConfig(8, 2, 3), TreeConfig(16, 3, 3)],
        "LTD": [TreeConfig(4, 1, 2), TreeConfig(4, 8, 2)],
    }
    monkeypatch.setattr(terms, "GRIDS", small)
    trace = recording()
    assert list(terms.best_of_grids(trace, COSTS, ["LTD"])) == [], "nothing of HumanEval"
    trace.turns["suite"] = np.resize(["toy/humaneval", "gsm8k"], len(trace.turns))
    found = terms.best_of_grids(trace, COSTS, list(small))
    name = "best static tree of the grid of "
    assert list(found) == [f"{name}Re-SpS", f"{name}LTD, as far as recorded"]
    assert [policy.plan for (policy,) in found.values()][1] == TreeConfig(4, 1, 2)
    own = trace.select(trace.turns["part"] != "test")
    times = {tree: replay(own, Static.of(tree), COSTS).ms_per_tok for tree in small["Re-SpS"]}
    assert next(iter(found.values()))[0].plan == min(times, key=times.get)
