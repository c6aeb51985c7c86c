"""The rules of engines beside notebook 33: each a file with one policy, which decides by hand."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from fakes.questions import asked, finished
from fakes.traces import round_costs, synthetic_trace

from specdec.core.policy import Policy
from specdec.core.records import EXTEND, PLAN, SIZE
from specdec.replays.replay import replay

FOLDER = Path(__file__).parents[2] / "notebooks" / "rules"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def rule(name: str, **settings):
    """A fresh policy of the file, with prices if it takes any."""
    spec = importlib.util.spec_from_file_location(f"rule_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
    (kind,) = [kind for kind in kinds if kind.__module__ == spec.name]
    policy = kind(**settings)
    assert isinstance(policy, Policy)
    return policy.price(round_costs()) if hasattr(policy, "price") else policy


def chain(kind, *chances, largest=9):
    """A question about a drafted chain whose tokens have these probabilities."""
    scores = torch.tensor(chances).log().cumsum(0)
    expansions = len(chances) - 1
    return asked(kind, expansions, scores=scores, newest_scores=scores[-1:], largest=largest)


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_decides_in_replay(name):
    trace = synthetic_trace(turns=4, positions=60, depth=8, top_ks=(1,), most_nodes=9, hit=0.8)
    cut = {"levels": 7} if name == "vllm_logistic" else {"most_levels": 8}
    replayed = replay(trace, rule(name, **cut), round_costs(), keep_cycles=True)
    assert len(replayed.cycles) > 50
    assert (replayed.cycles["verify_nodes"] <= 9).all()


def test_confidence_and_cumulative_probability_stop_where_they_should():
    confident = rule("llamacpp_p_min")
    assert confident.answer(chain(EXTEND, 0.9, 0.8)) is True
    assert confident.answer(chain(EXTEND, 0.9, 0.7)) is False
    assert confident.answer(chain(SIZE, 0.9, 0.7)) == 1
    assert rule("llamacpp_p_min", keeps=True).answer(chain(SIZE, 0.9, 0.7)) == 2
    # one node more costs 0.1 ms of a step's 4 ms: a path pays above 1/40
    worth = rule("llamacpp_ev")
    assert worth.answer(chain(EXTEND, 0.2, 0.2)) is True
    assert worth.answer(chain(EXTEND, 0.2, 0.1)) is False
    assert worth.answer(chain(SIZE, 0.2, 0.2, 0.1)) == 2
    assert worth.answer(chain(SIZE, 0.02)) == 0


def test_the_moving_average_moves_by_candidates_after_its_warm_up():
    ema = rule("sglang_ema")
    assert ema.answer(asked(PLAN)).depth == 4
    for _ in range(14):
        ema.observe(finished(5, 4))
    assert ema.levels == 5
    ema.observe(finished(5, 4))
    assert ema.average_tok == pytest.approx(5 - 0.8**15)
    assert ema.levels in (5, 7)
    for _ in range(10):
        ema.observe(finished(0, 6))
    assert ema.average_tok == pytest.approx((5 - 0.8**15) * 0.8**10)
    resting = rule("sglang_ema", candidates=(0, 1, 3))
    for _ in range(15):
        resting.observe(finished(0, 1))
    assert resting.answer(asked(PLAN)).total_tokens == 1
    for _ in range(5):
        resting.observe(finished(0, 0))
    assert resting.levels == 1


def test_the_estimator_learns_to_verify_less_where_nothing_is_accepted():
    first = rule("vllm_logistic", levels=1)
    first.answer(chain(SIZE, 0.5))
    assert first.chances() == pytest.approx([1 / (1 + math.exp(-1.5))])
    fitted = rule("vllm_logistic", levels=3)
    question = chain(SIZE, 0.5, 0.5, 0.5, largest=3)
    for _ in range(300):
        assert fitted.answer(question) == 3
        fitted.observe(finished(0, 2, verify_nodes=3))
    assert fitted.fits == 3
    assert fitted.coefficients[1] < 0 < fitted.coefficients[2]
    assert fitted.chances()[0] < 0.5


def test_the_bandit_pulls_every_arm_twice_and_then_by_its_bound():
    ucb = rule("ucb", arms=(1, 3))
    rewards = {1: 2, 3: 8}
    depths = []
    for _ in range(12):
        plan = ucb.answer(asked(PLAN))
        depths.append(plan.depth + 1)
        ucb.observe(finished(rewards[plan.depth + 1] - 1, plan.depth, total_ms=1000.0))
    assert depths[:4] == [1, 3, 1, 3]
    assert depths[4] == 3 and depths.count(3) > depths.count(1) >= 2
    assert ucb.means == pytest.approx([2.0, 8.0])
    ucb.reset()
    assert ucb.pulls == [0, 0]
