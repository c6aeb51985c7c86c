"""Rules tuned on the terms of controllers: what is tried, on which parts, and that it is found."""

import dataclasses
from types import SimpleNamespace

import pytest
from fakes.traces import COSTS, synthetic_trace

from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import compare
from specdec.identity import Method
from specdec.policies.base import choices_of
from specdec.policies.heuristics import Disco
from specdec.replays.replay import replay

from workbook import classifiers, rules, terms
from workbook.rules import ENGINES, RULES, Tuner
from workbook.terms import Arena, EqualTerms

TERMS = EqualTerms(shapes=((3,), (9,)), depth=4, total_tokens=(1, 2, 4, 8, 16))
pytestmark = pytest.mark.filterwarnings("ignore:the policy in .* uses the costs")


def arena(folder, **options) -> Arena:
    options = {"top_ks": (1, 3), **options}
    trace = synthetic_trace(turns=6, positions=24, depth=5, **options)
    trace.turns["part"] = ["train", "tune", "test"] * 2
    return Arena(trace, COSTS, folder, TERMS, progress=False)


def test_every_rule_is_tuned_on_train_and_tune_and_found_again(tmp_path, monkeypatch):
    monkeypatch.setattr(classifiers, "EPOCHS", dict.fromkeys(classifiers.EPOCHS, 1))
    here = arena(tmp_path)
    tuner = Tuner(here, tmp_path, seeds=(0, 1))
    assert tuner.shapes("ucb") == [(1, ()), (3, ())]
    policies, table = tuner.all()
    assert (table["state"] == "tuned").all(), table[["method", "state"]]
    assert list(table["method"]) == [Method(name, "tuned") for name in RULES]
    assert set(policies) == {*ENGINES, *table["method"]}
    for method, seeds in policies.items():
        name = Method.of(method).system
        tuned = name != method
        assert len(seeds) == (2 if RULES[name].fitted and tuned else 1)
        for policy in seeds:
            parts = {row["part"] for row in choices_of(policy)}
            assert parts == ({"train", "tune"} if tuned else {"none"})
            assert policy.limits.total_tokens <= 17
            assert policy.limits.depth <= 5
    tried = table.set_index("method")["replays"]
    assert tried[Method("ucb", "tuned")] == 2 * (4 + 1)
    assert tried[Method("llamacpp_p_min", "tuned")] == 2 * (5 + 1)
    assert tried[Method("vllm_logistic", "tuned")] == 3 + 1, "6 levels are more than recorded"
    ms = table.set_index("method")["ms_per_tok"]
    free = replay(here.trace.select(part="tune"), policies["DDD, tuned"][0], COSTS).ms_per_tok
    assert free <= ms[Method("DDD", "tuned")], "its answers are priced"
    again, found = Tuner(here, tmp_path, seeds=(0, 1)).all()
    assert (found["state"] == "found").all()
    assert found["ms_per_tok"].equals(table["ms_per_tok"])
    for method, seeds in policies.items():
        assert [policy.settings() for policy in seeds] == [p.settings() for p in again[method]]
        assert [choices_of(policy) for policy in seeds] == [choices_of(p) for p in again[method]]
    default = (TreeConfig(4, 2, 3),)
    kept = compare.Baselines.choose(here.trace, COSTS, parts=("tune",), defaults=default)
    options = dict(baselines=kept, random_seeds=(), progress=False)
    judged = compare.compare_replay(here.trace, COSTS, again, **options).table
    assert judged["headroom_frac"].max() <= 1
    assert set(policies) <= set(judged["method"])


def test_a_budget_leaves_the_rest_and_what_cannot_be_had_is_refused(tmp_path, monkeypatch):
    names = ("llamacpp_p_min", "ucb", "DDD")
    tuner = Tuner(arena(tmp_path), tmp_path, names=names)
    monkeypatch.setattr(rules, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    times = iter((0.0, 0.0, 0.0, 100.0, 100.0, 100.0))
    monkeypatch.setattr(terms, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    policies, table = tuner.all(minutes=1)
    assert table["state"].tolist() == ["tuned", "left", "left"]
    assert list(policies) == ["llamacpp_p_min", "llamacpp_p_min, tuned", "ucb"]
    monkeypatch.undo()
    bare = Tuner(arena(tmp_path, top_ks=(3,)), tmp_path / "bare", names=("ucb", "DDD"))
    policies, table = bare.all()
    assert table["state"][0].startswith("refused: ucb drafts chains")
    assert list(policies) == ["DDD, tuned"]
    monkeypatch.setattr(Tuner, "made", lambda *_: None)
    pytest.raises(SpecdecError, tuner.tune, "ucb").match("no settings of ucb")
    pytest.raises(SpecdecError, Tuner, tuner.arena, tmp_path, names=("DDT",)).match("'DDD'")


def test_everything_of_a_shape_is_tried(tmp_path, monkeypatch):
    here = arena(tmp_path)
    tuner = Tuner(here, tmp_path)
    assert tuner.shapes("DDD") == [(1, ()), (3, ())]
    assert tuner.shapes("vllm_logistic") == [(1, ())]
    start = here.start((3, ())).verify_nodes
    assert (tuner.nodes((3, ())), tuner.nodes((1, ()))) == (start, 5)
    common = {"top_k": 3, "beam": (), "verify_nodes": start, "most_levels": 5}
    expected = [common | {"look_ahead": levels} for levels in (0, 2)]
    assert tuner.settings("llamacpp_ev", (3, ())) == expected
    chain = {"top_k": 1, "verify_nodes": 5, "max_depth": 4}
    expected = [chain | {"default_depth": depth} for depth in (2, 3, 5)]
    assert tuner.settings("GammaTune", (1, ())) == expected
    assert tuner.settings("vllm_logistic", (1, ())) == [{"levels": n} for n in (2, 3, 4)]
    shallow = Tuner(dataclasses.replace(here, terms=dataclasses.replace(TERMS, depth=2)), tmp_path)
    assert shallow.settings("ucb", (3, ()))[0]["most_levels"] == 3
    monkeypatch.setattr(Arena, "shapes", lambda self: [(3, ()), (3, (2, 1)), (1, ())])
    assert tuner.shapes("ucb") == [(1, ()), (3, ()), (3, (2, 1))]
    assert tuner.shapes("SVIP") == [(1, ()), (3, ())]


def test_a_rule_is_made_of_its_settings_and_as_it_ships(tmp_path):
    tuner = Tuner(arena(tmp_path), tmp_path)
    settings = {"top_k": 3, "verify_nodes": 8, "max_depth": 4, "default_depth": 2}
    gamma = tuner.made("GammaTune", settings)
    assert (gamma.default_depth, gamma.low, gamma.high) == (2, 0.25, 2.25)
    assert gamma.limits.depth == 4
    few = {"top_k": 1, "beam": (), "verify_nodes": 5, "most_levels": 3, "per_text": True}
    assert tuner.made("ucb", few | {"arms": (1, 4)}) is None, "more levels than were recorded"
    assert tuner.made("ucb", few | {"arms": (1, 2)}).arms == (1, 2)
    huge = {"top_k": 3, "verify_nodes": 10**6, "max_depth": 2, "threshold": -1.0}
    assert tuner.made("DDD", huge) is None
    fitted = Disco(max_depth=3, top_k=3, verify_nodes=5)
    made = tuner.made("Disco", {"threshold": 0.7}, fitted)
    assert made.settings() == fitted.with_settings(threshold=0.7).settings()
    constants = [{"choice": "constants", "part": "none", "value": "as they ship"}]
    shipped = {name: tuner.shipped(name) for name in ENGINES}
    assert all(choices_of(policy) == constants for policy in shipped.values())
    assert shipped["vllm_logistic"].levels == shipped["llamacpp_p_min"].most_levels == 6
    assert shipped["sglang_ema"].candidates == (1, 3, 5)
    assert shipped["llamacpp_p_min"].p_min == 0.75
    assert rules.rule("vllm_logistic", COSTS).levels == 7
    pytest.raises(SpecdecError, rules.rule, "ubc", COSTS).match("'ucb'")
