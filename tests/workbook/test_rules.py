"""Rules tuned on the terms of controllers: what is tried, on which parts, that it is found again; calibration by hand."""

import dataclasses
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
from fakes.traces import COSTS, synthetic_trace

from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import compare
from specdec.identity import Method
from specdec.policies.base import choices_of, load_policy
from specdec.policies.heuristics import Disco
from specdec.replays.columns import Column
from specdec.replays.replay import replay
from specdec.replays.trace import NEVER, Trace

from workbook import classifiers, rules, terms
from workbook.rules import ENGINES, RULES, Tuner, calibration_error, temperatures
from workbook.terms import Arena, EqualTerms

TERMS = EqualTerms(shapes=((3,), (9,)), depth=4, total_tokens=(1, 2, 4, 8, 16))
pytestmark = pytest.mark.filterwarnings("ignore:the policy in .* uses the costs")


def arena(folder, **options) -> Arena:
    trace = synthetic_trace(turns=6, positions=24, depth=5, **{"top_ks": (1, 3), **options})
    trace.turns["part"] = ["train", "tune", "test"] * 2
    return Arena(trace, COSTS, folder, TERMS, progress=False)


def test_calibration_error_by_hand_and_temperatures_level_by_level():
    chances, happened = np.array([0.95, 0.95, 0.35, 0.31]), np.array([True, True, True, False])
    assert calibration_error(chances, happened) == pytest.approx((2 * 0.05 + abs(0.66 - 1)) / 4)
    assert calibration_error(np.array([1.0]), np.array([True])) == 0.0
    chances, happened = np.array([0.05, 0.12, 0.18, 0.99, 1.0]), np.array([True, False, True, False, True])
    # of ten: one at 0.05 that happened, two around 0.15 of which one did, two above 0.9 of which one did
    assert calibration_error(chances, happened) == pytest.approx((0.95 + abs(0.3 - 1) + abs(1.99 - 1)) / 5)
    assert calibration_error(chances, happened, bins=1) == pytest.approx(abs(2.34 - 3) / 5)
    # tokens of probability 0.8 that are right two times in three: sigmoid(log(4) / 2) = 2 / 3. Those below of 0.2, right
    # one time in three: sigmoid(-log(4) / 2) = 1 / 3, both together 2 / 9
    rows = np.arange(18)
    scores = np.log(np.array([[0.8, 0.16]] * 18, np.float32))
    ranks = np.full((18, 2, 2), NEVER, np.int16)
    ranks[:12, :, 0] = 0
    ranks[:4, 1, 1] = 1
    columns = {Column("scores", 1): scores, Column("ranks", 1): ranks, "context_tok": rows.astype(np.int32)}
    turns = pd.DataFrame({"suite": ["a"], "prompt": ["p"], "turn": 0, "part": "train", "first": 0, "positions": 18})
    trace = Trace({"depth": 1, "top_ks": [1], "most_nodes": 2}, turns, columns)
    assert temperatures(trace, 1) == pytest.approx((2.0, 2.0))
    trace = synthetic_trace(turns=4, positions=50, depth=3, top_ks=(3,))
    found = temperatures(trace, 3)
    assert len(found) == 4 and set(found) <= set(rules.GRID) and len(temperatures(trace, 3, levels=2)) == 2
    assert temperatures(trace, 3, levels=2) == found[:2]
    scores, ranks = trace.trees(3).scores, trace.ranks[3]
    best = scores[:, :3].argmax(1)
    accepted = ranks[:, 0, 0] == 0  # the best child of the root
    plan = TreeConfig(1, 0, 3)
    chances = [rules.engines.calibrated(scores[:, :3], plan, (one,))[np.arange(200), best] for one in rules.GRID]
    errors = [calibration_error(one, accepted) for one in chances]
    assert found[0] == rules.GRID[int(np.argmin(errors))]
    some = np.unique(np.linspace(0, 199, 20).astype(int))
    errors = [calibration_error(one[some], accepted[some]) for one in chances]
    assert temperatures(trace, 3, levels=1, most=20) == (rules.GRID[int(np.argmin(errors))],)


def test_every_rule_is_tuned_on_train_and_tune_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(classifiers, "EPOCHS", dict.fromkeys(classifiers.EPOCHS, 1))
    here = arena(tmp_path)
    tuner = Tuner(here, tmp_path, seeds=(0, 1))
    assert tuner.shapes("ucb") == [(1, ()), (3, ())] and tuner.nodes((1, ())) == 5
    expected = tuner.expected_s()
    assert min(expected.values()) > 0
    policies, table = tuner.all(expected=expected)
    assert (table["state"] == "tuned").all(), table[["method", "state"]]
    assert list(table["method"]) == [Method(name, "tuned") for name in RULES]
    assert set(policies) == {*ENGINES, *table["method"]}
    for name, some in policies.items():
        plain = Method.of(name).system
        assert len(some) == (2 if RULES[plain].seeded and name != plain else 1)
        for policy in some:
            parts = {row["part"] for row in choices_of(policy)}
            assert parts == ({"none"} if name == plain else {"train", "tune"})
            assert policy.limits.total_tokens <= 17 and policy.limits.depth <= 5
    tried = {row["method"]: row["replays"] for row in table.to_dict("records")}
    assert tried[Method("ucb", "tuned")] == 2 * (4 + 1) and tried[Method("llamacpp_p_min", "tuned")] == 2 * (5 + 1)
    held = here.trace.select(part="tune")
    row = table.set_index("method").loc[Method("DDD", "tuned")]
    free = replay(held, policies[Method("DDD", "tuned")][0], COSTS).ms_per_tok
    assert free <= row["ms_per_tok"], "its answers are priced"
    again, found = Tuner(here, tmp_path, seeds=(0, 1)).all()
    assert (found["state"] == "found").all() and found["ms_per_tok"].equals(table["ms_per_tok"])
    assert [list(map(str, some)) for some in policies.values()] == [list(map(str, again[name])) for name in policies]
    kept = compare.Baselines.choose(here.trace, COSTS, parts=("tune",), defaults=(TreeConfig(4, 2, 3),))
    judged = compare.compare_replay(here.trace, COSTS, again, baselines=kept, random_seeds=(), progress=False).table
    assert judged["headroom_frac"].max() <= 1 and set(policies) <= set(judged["method"])


def test_a_budget_leaves_the_rest_and_what_cannot_be_had_is_refused(tmp_path, monkeypatch):
    tuner = Tuner(arena(tmp_path), tmp_path, names=("hf_heuristic", "ucb", "DDD"))
    policies, table = tuner.all(minutes=1, expected={"hf_heuristic": 1.0, "ucb": 1e6, "DDD": 1e6})
    assert table["state"].tolist() == ["tuned", "left", "left"]
    assert list(policies) == ["hf_heuristic", "hf_heuristic, tuned", "ucb"]
    bare = Tuner(arena(tmp_path, top_ks=(3,)), tmp_path / "bare", names=("hf_heuristic", "DDD"))
    policies, table = bare.all(expected=dict.fromkeys(bare.names, 1.0))
    assert table["state"][0].startswith("refused: hf_heuristic drafts chains, which were not recorded")
    assert list(policies) == ["DDD, tuned"] and table["shape"][1] == "[3, []]"
    monkeypatch.setattr(rules.engines, "rule", Mock(side_effect=SpecdecError("no")))
    none = Tuner(arena(tmp_path), tmp_path / "none", names=("ucb",))
    pytest.raises(SpecdecError, none.tune, "ucb").match("no settings of ucb fit this recording")
    misspelt = pytest.raises(SpecdecError, Tuner, arena(tmp_path), tmp_path, names=("DDT",))
    misspelt.match("unknown rule 'DDT'; did you mean 'DDD'")


def test_everything_of_a_shape_is_tried(tmp_path, monkeypatch):
    here = arena(tmp_path)
    tuner = Tuner(here, tmp_path)
    assert tuner.shapes("DDD") == [(1, ()), (3, ())] and tuner.depth((1, ())) == tuner.depth((3, ())) == 4
    start = here.start((3, ())).verify_nodes
    assert tuner.nodes((3, ())) == start and tuner.nodes((1, ())) == 5
    common = {"top_k": 3, "beam": (), "verify_nodes": start, "most_levels": 5}
    tried = [common | {"start": first, "more": more} for first in (2, 5) for more in (1, 2)]
    assert tuner.settings("hf_heuristic", (3, ())) == tried
    chain = {"top_k": 1, "verify_nodes": 5, "max_depth": 4}
    assert tuner.settings("GammaTune", (1, ())) == [chain | {"default_depth": depth} for depth in (2, 3, 5)]
    shallow = Tuner(dataclasses.replace(here, terms=dataclasses.replace(TERMS, depth=2)), tmp_path)
    assert shallow.depth((3, ())) == 2 and shallow.settings("ucb", (3, ()))[0]["most_levels"] == 3
    parts = {name: part.turns["part"].unique().tolist() for name, part in tuner.parts.items()}
    assert parts == {"train": ["train"], "tune": ["tune"]}
    beams = dataclasses.replace(here, terms=dataclasses.replace(TERMS, shapes=((3,), (3, 2, 1))))
    asked = Tuner(beams, tmp_path)
    monkeypatch.setattr(Arena, "shapes", lambda self: [(3, ()), (3, (2, 1)), (1, ())])
    assert asked.shapes("ucb") == [(1, ()), (3, ()), (3, (2, 1))] and asked.shapes("SVIP") == [(1, ()), (3, ())]


def test_a_rule_is_made_of_its_settings_and_as_it_ships_cut_to_what_was_recorded(tmp_path):
    tuner = Tuner(arena(tmp_path), tmp_path)
    gamma = tuner.made("GammaTune", {"top_k": 3, "verify_nodes": 8, "max_depth": 4, "default_depth": 2})
    assert (gamma.default_depth, gamma.low, gamma.high) == (2, 0.25, 2.25) and gamma.limits.depth == 4
    engine = {"top_k": 1, "beam": (), "verify_nodes": 5, "most_levels": 5}
    drawn = [tuner.made("exp3", engine | {"arms": (1, 2), "per_text": True}, seed=seed) for seed in (0, 3)]
    assert [policy.seed for policy in drawn] == [0, 3]
    told = tuner.made("vllm_adaptive_verification", engine | {"levels": 2})
    assert told.confidence == "probability" and told.temperatures == temperatures(tuner.parts["train"], 1)
    assert tuner.made("trtllm_gate", engine | {"levels": 9, "threshold": 0.0}) is None, "more levels than were recorded"
    assert tuner.made("DDD", {"top_k": 3, "verify_nodes": 10**6, "max_depth": 2, "threshold": -1.0}) is None
    fitted = Disco(max_depth=3, top_k=3, verify_nodes=5)
    assert tuner.made("Disco", {"threshold": 0.7}, fitted).settings() == fitted.with_settings(threshold=0.7).settings()
    for name in ENGINES:
        ships, cut = rules.engines.rule(name).settings(), tuner.shipped(name)
        assert choices_of(cut) == [{"choice": "constants", "part": "none", "value": "as they ship"}]
        for key in ("most_levels", "levels"):
            assert key not in ships or getattr(cut, key) == min(ships[key], 6), name
        assert "candidates" not in ships or cut.candidates == tuple(n for n in ships["candidates"] if n <= 6)
        for key in {"p_min", "start", "more", "explore", "arms"} & set(ships):
            assert cut.settings()[key] == ships[key]


def test_settings_are_chosen_on_train_and_the_shape_on_tune(tmp_path, monkeypatch):
    tuner, asked, seen = Tuner(arena(tmp_path), tmp_path, seeds=(0, 1)), [], []
    times = {("train", 0): 3.0, ("train", 1): 2.0, ("train", 2): 2.0, ("tune", 1): 7.0, ("tune", 2): 1.0}
    monkeypatch.setattr(rules, "answer_ms", lambda trace, policy, costs: asked.append((trace, policy.number)) or 0.5)

    def timed(trace, policy, costs, policy_ms=0.0):
        part = trace.turns["part"].iloc[0]
        seen.append((part, policy.number, policy_ms))
        return SimpleNamespace(ms_per_tok=times[part, policy.number])

    monkeypatch.setattr(rules, "replay", timed)
    options = [{"number": -1}, {"number": 0}, {"number": 1}, {"number": 2}]
    monkeypatch.setattr(Tuner, "settings", lambda self, name, shape: options)
    fitting = lambda self, name, wanted, *_: SimpleNamespace(**wanted) if wanted["number"] >= 0 else None  # noqa: E731
    monkeypatch.setattr(Tuner, "made", fitting)
    best = {"shape": (3, ()), "settings": {"number": 1}, "ms_per_tok": 7.0, "replays": 4}
    assert tuner._best_settings("DDD", (3, ()), tmp_path) == [best], "of equals the first"
    assert seen == [("train", 0, 0.5), ("train", 1, 0.5), ("train", 2, 0.5), ("tune", 1, 0.5)]
    assert asked == [(tuner.parts["train"], 0)], "answers are timed once a shape"
    options[:] = options[:1]
    assert tuner._best_settings("DDD", (3, ()), tmp_path) == []


def test_the_fastest_shape_is_kept_with_its_seeds(tmp_path, monkeypatch):
    found = {(1, ()): 5.0, (3, ()): 4.0}
    tried = []

    def best(self, name, shape, folder):
        tried.append((shape, folder))
        wanted = self.settings(name, shape)[1]
        return [{"shape": shape, "settings": wanted, "ms_per_tok": found[shape], "replays": 5}]

    monkeypatch.setattr(Tuner, "_best_settings", best)
    here = arena(tmp_path)
    tuner = Tuner(here, tmp_path, seeds=(0, 7))
    policies, facts = tuner.tune("exp3")
    wanted = tuner.settings("exp3", (3, ()))[1]
    assert tried == [((1, ()), tmp_path / "exp3" / "trial-0"), ((3, ()), tmp_path / "exp3" / "trial-1")]
    best = {"shape": (3, ()), "settings": wanted, "ms_per_tok": 4.0, "replays": 10, "seeds": [0, 7]}
    assert facts == rules.runs.plain(best) | {"seconds": facts["seconds"]}
    assert [policy.seed for policy in policies] == [0, 7] and facts["seconds"] >= 0
    knobs = {"arms": wanted["arms"], "per_text": wanted["per_text"]}
    for seed, policy in zip((0, 7), policies, strict=True):
        kept = load_policy(tmp_path / "exp3" / f"seed-{seed}" / "policy")
        assert kept.settings() == policy.settings()
        choices = [{"choice": "settings", "part": "train", "value": str(knobs)}]
        choices += [{"choice": "width", "part": "tune", "value": str((3, ()))}]
        assert kept.trained_for == {"pair": "synthetic", "costs": "round numbers", "choices": choices}
    assert len(Tuner(here, tmp_path / "one", seeds=(3, 7)).tune("ucb")[0]) == 1, "it does not draw"
    again = Tuner(here, tmp_path, seeds=(0,)).tune("exp3")
    assert len(tried) == 6 and len(again[0]) == 1, "other seeds are tuned anew"
    shown = f"arms={rules.runs.plain(wanted['arms'])}, per_text={wanted['per_text']}"
    row = {"replays": 10, "ms_per_tok": 4.0, "minutes": 0.5, "shape": "[3, []]", "settings": shown}
    assert rules._row_of("exp3", facts | {"seconds": 30.0}) == row


@pytest.fixture
def clock(monkeypatch):
    """The module's seconds, which pass where a test says so."""
    clock = SimpleNamespace(now=0.0)
    for module in (rules, terms):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_what_tuning_will_take_is_told_beforehand(tmp_path, monkeypatch, clock):
    """A replay of two of four turns takes 2 s, so 4 s in all; a fit of one epoch takes 3 s."""
    trace = synthetic_trace(turns=12, positions=10, depth=5, top_ks=(1, 3))
    trace.turns["part"] = ["train", "tune", "test"] * 4
    here = Arena(trace, COSTS, tmp_path, TERMS, progress=False)
    tuner = Tuner(here, tmp_path, seeds=(0, 1), names=("ucb", "Disco", "DDD"))
    fits = []

    def passes(seconds, given=None):
        clock.now += seconds
        return given

    monkeypatch.setattr(rules, "replay", lambda few, policy, costs: passes(len(few) / 10, few))

    def fit(self, name, wanted, folder, seed=0, **options):
        if name != "Disco":
            return None
        fits.append((wanted, options))
        return passes(3.0, Disco(top_k=1, max_depth=4, verify_nodes=5))

    monkeypatch.setattr(Tuner, "fit", fit)
    expected = tuner.expected_s()
    assert expected["ucb"] == 2 * 2 * (4 + 4) and expected["DDD"] == 2 * 2 * (6 + 6)
    assert expected["Disco"] == 2 * 2 * (3 + 3) + 3 * 50 * (2 + 2)
    assert fits == [(tuner.settings("Disco", (1, ()))[0], {"epochs": 1})]
    rules.runs.write_json(tmp_path / "ucb" / "tuned.json", {})
    assert tuner.expected_s()["ucb"] == 0.0
    monkeypatch.setattr(Tuner, "made", lambda *_: None)
    assert tuner.expected_s()["DDD"] == 1.0, "nothing fits"


def test_a_budget_is_kept_by_how_long_things_really_take(tmp_path, monkeypatch, clock):
    names = ("DDD", "SVIP", "GammaTune", "ucb")
    tuner = Tuner(arena(tmp_path), tmp_path, names=names)
    took = {"DDD": 120.0, "SVIP": 240.0, "GammaTune": 60.0}

    def tune(self, name):
        clock.now += took[name]
        knobs = dict.fromkeys(RULES[name].knobs, 1)
        return [name], {"shape": (3, ()), "settings": knobs, "ms_per_tok": 2.0, "replays": 3, "seconds": took[name]}

    monkeypatch.setattr(Tuner, "tune", tune)
    monkeypatch.setattr(Tuner, "shipped", lambda self, name: f"{name} as it ships")
    policies, table = tuner.all(minutes=6, expected=dict.fromkeys(names, 60.0))
    assert policies == {"DDD, tuned": ["DDD"], "SVIP, tuned": ["SVIP"], "ucb": ["ucb as it ships"]}
    assert list(table) == ["method", "state", "shape", "settings", "ms_per_tok", "replays", "minutes", "expected_min"]
    assert table["method"].tolist() == [f"{name}, tuned" for name in names]
    assert table["state"].tolist() == ["tuned", "tuned", "left", "left"]
    assert table["expected_min"].tolist() == [1.0, 2.0, 4.0, 4.0], "each as long as the last one took, of what was said"
    assert table["minutes"].tolist()[:2] == [2.0, 4.0] and table["replays"].tolist() == [3, 3, 0, 0]
    assert table["settings"].tolist() == ["layers=1, threshold=1", "minimum=1", "", ""]
    assert table["shape"].tolist() == ["(3, ())", "(3, ())", "", ""]
    assert table["ms_per_tok"].isna().tolist() == [False, False, True, True]
    clock.now, took["DDD"], took["SVIP"] = 0.0, 6000.0, 1.0
    _, table = tuner.all(expected={"DDD": 60.0, "SVIP": 60.0, "GammaTune": 0.0, "ucb": 1e9}, minutes=1e6)
    assert table["expected_min"].tolist()[:3] == [1.0, 5.0, 0.0]
    assert table["state"].tolist()[:3] == ["tuned", "tuned", "found"]
