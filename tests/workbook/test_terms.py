"""Equal terms: the same options for all, choices on the tuning part alone and written down,
trainings that are found again.
"""

import dataclasses
import functools
import operator
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from fakes.pairs import random_pair
from fakes.traces import COSTS, SMALL_LTD, SMALL_PPO, SMALL_RESPS, synthetic_trace

from specdec.core.decode import decode
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import compare
from specdec.identity import Method
from specdec.models.fingerprint import fingerprint
from specdec.policies import ltd, radar, resps, value
from specdec.policies.base import changed, choices_of
from specdec.replays.record import record
from specdec.replays.replay import replay
from specdec.training.radar import from_trace, latency_ms, training_turns

from workbook import terms
from workbook.terms import EQUAL, LIVE, Arena, EqualTerms, Job

SMALL = {
    f"{kind}ppo.{name}": value for kind in ("depth.", "size.") for name, value in SMALL_PPO.items()
}
TERMS = EqualTerms(
    shapes=((3,), (2,), (9,)), depths=(0, 1, 3), total_tokens=(1, 2, 4, 8, 16), effort=1.0
)
QUIET = ("this .* gave the answer", "this RADAR policy stops", "the policy in .* uses the costs")
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
    assert terms.expected_min(here, jobs) > 0 and not any(tmp_path.iterdir())
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
    assert terms.expected_min(here, jobs) == 0
    assert found["minutes"].tolist() == table["minutes"].tolist()


def test_what_looked_at_a_part_is_not_judged_there(tmp_path):
    here = arena(tmp_path)
    policies = {"ours": terms.train(here, Job("ours", EQUAL, 0))}
    default = (TreeConfig(4, 2, 3),)
    trees = compare.Baselines.choose(here.trace, COSTS, parts=("train",), defaults=default)
    options = dict(baselines=trees, part="tune", progress=False)
    with pytest.raises(SpecdecError, match="looked at part 'tune'"):
        compare.compare_replay(here.trace, COSTS, policies, **options)


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


def leave(arena, job):
    terms.runs.write_json(arena.folder / job.folder / "trained.json", {"seconds": 1.0})


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
    brief = terms.briefly(ltd.PAPER, 16)
    assert brief.depth.ppo.n_steps == brief.depth.ppo.batch_size == 16 and len(brief.rounds) == 2


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


def test_equal_terms_change_the_tree_and_nothing_else(tmp_path):
    here = arena(tmp_path)
    start, sizes = here.start((2, ())).total_tokens, (0, 1, 3, 7, 15)
    fields = dict(name="equal", totals=(1, 2, 4, 8, 16), depths=(0, 1, 3), widths=((3,), (2,)))
    fields |= dict(small=True, interval=3, while_training={"interval": 3, "temperature": None})
    assert terms.equal_config(here, "Re-SpS", 3) == changed(resps.OURS, fields)
    fields = dict(name="equal", top_k=2, most_expansions=7, sizes=sizes)
    assert terms.equal_config(here, "ours", (2, ())) == changed(value.OURS, fields)
    fields = dict(name="equal", top_k=2, beam=(), total_tokens=start)
    assert terms.equal_config(here, "RADAR", (2, ())) == changed(radar.OURS, fields)
    fields = {"name": "equal", "depth.from_root": True, "depth.total_tokens": start}
    fields["size.sizes"] = sizes
    for part in ("depth", "size"):
        fields |= {f"{part}.depth": 7, f"{part}.top_k": 2, f"{part}.beam": ()}
    assert terms.equal_config(here, "LTD", (2, ())) == changed(ltd.OURS, fields)


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
    assert terms.config_of(here, Job("LTD", LIVE, 0), (2, ())) == terms.briefly(equal, 16)


@pytest.fixture
def trainers(monkeypatch):
    """(name, arguments, options) of every training that was asked for."""
    trained = {
        "resps": "a plan",
        "ltd": SimpleNamespace(policy="both"),
        "radar": SimpleNamespace(policy="stops"),
    }
    asked = Mock()
    for system, result in (trained | {"value": ("values", None)}).items():
        asked.attach_mock(Mock(return_value=result), f"train_{system}")
        monkeypatch.setattr(terms, f"train_{system}", getattr(asked, f"train_{system}"))
    return asked.mock_calls


def test_each_system_is_taught_by_its_own_trainer(tmp_path, trainers):
    wide = recording()
    here = arena(tmp_path, wide=wide, pair="pair")
    common = {"seed": 4, "progress": False}
    assert terms.learn(here, Job("Re-SpS", EQUAL, 4), "config", tmp_path, 0.5) == "a plan"
    options = common | {"out_dir": tmp_path, "policy_ms": 0.5}
    assert trainers[0] == ("train_resps", (here.trace, COSTS, "config"), options)
    assert terms.learn(here, Job("LTD", "paper", 4), "config", tmp_path, 0.5) == "both"
    assert trainers[1] == ("train_ltd", (wide, COSTS, "config"), options | {"envs": 1})
    ours = changed(value.OURS, {"top_k": 3})
    assert terms.learn(here, Job("ours", EQUAL, 4), ours, tmp_path, 0.5) == "values"
    _, (train, costs, config), options = trainers[-1]
    tune = options.pop("tune_on")
    assert set(train.turns["part"]) == {"train"} and set(tune.turns["part"]) == {"tune"}
    assert (costs, config) == (COSTS, ours)
    assert options == common | {"policy_ms": None, "pair": "pair", "start": here.start((3, ()))}


def test_radar_learns_from_sampled_text_or_exact_distributions(tmp_path, trainers):
    wide, sampled = recording(), recording(seed=1)
    here = arena(tmp_path, wide=wide, sampled=sampled)
    config = changed(radar.OURS, {"top_k": 3, "total_tokens": 16, "prompts": ("hard",)})
    drawn = changed(config, {"exact": None})
    for config, name, trace in ((config, EQUAL, here.trace), (drawn, "paper", sampled)):  # noqa: B020
        assert terms.learn(here, Job("RADAR", name, 4), config, tmp_path, 0.5) == "stops"
        _, (data, latency, _), options = trainers[-1]
        rows = from_trace(training_turns(trace, ("hard",)), exact=False, tree=config.tree)
        assert data.key == rows.key
        priced = dataclasses.replace(COSTS, policy_ms={"radar": 0.5})
        np.testing.assert_allclose(latency, latency_ms(priced, data.context_tok, None, config.tree))
        facts = {"pair": "synthetic", "costs": "round numbers"}
        assert options == {"seed": 4, "out_dir": tmp_path, "trained_for": facts}
    assert terms.radar_recording(dataclasses.replace(here, sampled=None), drawn) is wide
    exact = recording()
    exact.acceptance_distributions = np.arange(0, 360, 30), np.zeros((12, 8, 9), np.float32)
    assert terms.radar_recording(dataclasses.replace(here, trace=exact), radar.PAPER) is exact


def test_answers_of_untrained_policies_are_timed_once(tmp_path, monkeypatch):
    here = arena(tmp_path)
    plan = terms.untrained(here, "Re-SpS", changed(resps.OURS, SMALL_RESPS))
    assert plan.network.weights[0].shape[0] == 16 and plan.features_size == 9
    both = terms.untrained(here, "LTD", changed(ltd.OURS, SMALL_LTD))
    assert [type(part).__name__ for part in both.policies] == ["DepthPolicy", "SizePolicy"]
    stops = terms.untrained(here, "RADAR", radar.OURS)
    assert not any(array.any() for array in stops.network.arrays().values())
    assert terms.untrained(here, "ours", None) is None
    replayed, live = Mock(return_value=0.5), Mock(return_value=0.75)
    monkeypatch.setattr(terms, "answer_ms", replayed)
    monkeypatch.setattr(terms, "measured_answer_ms", live)
    for _ in range(2):
        assert terms.priced(here, "a", here.trace, plan) == 0.5
    trace, policy, costs = replayed.call_args.args
    assert set(trace.turns["part"]) == {"tune"} and policy is not plan and costs is COSTS
    assert terms.priced(here, "b", here.trace, None) == 0.0
    assert terms.priced(dataclasses.replace(here, pair="pair"), "c", here.trace, plan) == 0.75
    assert live.call_args.args[::2] == ("pair", COSTS)
    assert replayed.call_count == live.call_count == 1
    assert terms.runs.read_json(tmp_path / "answers.json") == {"a": 0.5, "b": 0.0, "c": 0.75}


@pytest.mark.parametrize(
    ("job", "key", "choices"),
    [
        (Job("Re-SpS", EQUAL, 2), "Re-SpS-1", {"interval": ("tune", "1")}),
        (Job("LTD", LIVE, 0), "LTD-1", {"width": ("tune", "(2, ())"), "nodes to begin with": None}),
        (Job("RADAR", EQUAL, 2), "RADAR-1", {"width": None, "nodes to begin with": None}),
        (Job("ours", EQUAL, 2), "ours-1", {"width": ("tune", "(2, ())")}),
        (Job("LTD", "paper", 1), "LTD-paper", {"action grid, recipe": ("none", "as in the paper")}),
        (
            Job("LTD", "official", 1),
            "LTD-official",
            {"action grid, recipe": ("none", "as in its code")},
        ),
    ],
)
def test_a_job_writes_down_what_was_chosen_for_it(tmp_path, monkeypatch, job, key, choices):
    here = arena(tmp_path, wide=recording(most_nodes=60), live_prompts=[[1, 2]])
    policy = Static(1, 0, 1)
    policy.trained_for = {"deviations": ["counted"]}
    learned, answers, trials = [], [], []
    monkeypatch.setattr(terms, "choose", lambda arena, system: {"option": 1})
    monkeypatch.setattr(terms, "learn", lambda arena, *given: learned.append(given) or policy)
    monkeypatch.setattr(terms, "priced", lambda arena, *given: answers.append(given) or 0.75)
    monkeypatch.setattr(terms, "save", lambda policy, folder: trials.append(choices_of(policy)))
    monkeypatch.setattr(terms, "saved", lambda folder: "kept")
    assert terms.deviations(here, job) == [], "it is not trained yet"
    assert terms.train(here, job) == "kept" == terms.train(here, job)
    option = None if job.terms in ("paper", "official") else here.options(job.system)[1]
    config = terms.config_of(here, job, option)
    assert learned == [(job, config, tmp_path / job.folder, 0.75)], "once"
    assert answers[0][0] == key and answers[0][1] is here.home(job)
    assert [row["choice"] for row in trials[0]] == list(choices)
    for row in trials[0]:
        if choices[row["choice"]] is not None:
            assert (row["part"], row["value"]) == choices[row["choice"]]
    assert terms.deviations(here, job) == ["counted"]


def test_a_budget_goes_by_how_long_the_last_of_a_kind_took(tmp_path, monkeypatch):
    here = arena(tmp_path)
    clock = SimpleNamespace(now=0.0)
    jobs = [Job(system, EQUAL, seed) for seed in (0, 1) for system in ("Re-SpS", "LTD")]
    monkeypatch.setattr(terms, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def train(arena, job):
        clock.now += 180.0
        leave(arena, job)
        return job.folder

    monkeypatch.setattr(terms, "train", train)
    policies, table = terms.train_all(here, jobs, minutes=8)
    re_sps = Method("Re-SpS", EQUAL)
    ltd_too = Method("LTD", EQUAL)
    assert policies == {re_sps: ["re-sps-equal-0"], ltd_too: ["ltd-equal-0"]}
    assert table.fillna(-1.0).to_dict("list") == {
        "minutes": [1 / 60, 1 / 60, -1.0, -1.0],
        "method": ["Re-SpS, equal terms", "LTD, equal terms"] * 2,
        "seed": [0, 0, 1, 1],
        "state": ["trained", "trained", "left", "left"],
    }
    policies, table = terms.train_all(here, jobs)
    both = {re_sps: ["re-sps-equal-0", "re-sps-equal-1"], ltd_too: ["ltd-equal-0", "ltd-equal-1"]}
    assert policies == both
    assert table["state"].tolist() == ["found", "found", "trained", "trained"]
    clock.now = 0.0
    found = terms.train_all(here, jobs, 0.1)[1]
    assert found["state"].tolist() == ["found"] * 4, "whatever loading them takes"


def test_two_policies_are_kept_side_by_side(tmp_path):
    tree = dict(depth=4, top_k=3)
    depth, size = (
        ltd.DepthPolicy(total_tokens=8, **tree),
        ltd.SizePolicy(sizes=(1, 4), drafted=4, **tree),
    )
    both = ltd.combine(depth.fill_at_random((4,)), size.fill_at_random((4,)))
    terms.save(both, tmp_path)
    found = terms.saved(tmp_path)
    assert [part.settings() for part in found.policies] == [depth.settings(), size.settings()]
    assert (tmp_path / "policy" / "depth" / "policy.json").is_file()
    terms.save(depth, tmp_path)
    assert terms.saved(tmp_path).settings() == depth.settings()


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
