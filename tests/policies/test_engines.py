"""The engines' rules step by step against numbers worked out by hand; what they decode, save and refuse."""

import math

import numpy as np
import pytest
from fakes.pairs import shared_bigrams
from fakes.questions import finished, question
from fakes.traces import round_costs, synthetic_trace

from specdec import autoregress, decode
from specdec.core.cycle import checked_plan
from specdec.core.records import EXTEND, PLAN, SIZE, Question
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.errors import SpecdecError
from specdec.policies import engines
from specdec.policies.base import load_policy
from specdec.policies.heuristics import DDD, SVIP, GammaTune
from specdec.replays.replay import replay

FLAT = round_costs()  # root 1, expansion 0.5, verification 4 + 0.1 per node, rest 0.25, plain step 4
STEEP = round_costs(nodes=(0, 240), verify=(4.0, 244.0), verify_per_tok=(0.0, 0.0))  # a millisecond per node
ASK = Question(PLAN, 20, 0, 0, None, None, None)
TREE_SCORES = np.log([0.6, 0.3, 0.4, 0.1, 0.2, 0.05])  # two children, then two of each


def chain(kind, *chances) -> Question:
    """A question about a chain whose tokens have these probabilities, one after the other."""
    largest = len(chances) if kind == SIZE else 1
    scores = np.log(chances).cumsum()
    return question(scores, len(chances) - 1, kind, 1, largest, plan=TreeConfig(17, 15, 1))


def levels(policy) -> int:
    """What the policy drafts in the next cycle."""
    tree = policy.answer(ASK)
    return tree.depth + 1 if tree.verify_nodes else 0


def watch(policy, *accepted):
    """Cycles as planned that accept so many tokens each."""
    for count in accepted:
        drafted = levels(policy)
        policy.observe(finished(min(count, drafted), drafted))
    return policy


def after(policy, *accepted) -> int:
    """What it drafts after such cycles."""
    return levels(watch(policy, *accepted))


def test_sglangs_rules_move_every_fifth_cycle_and_weigh_rates_and_chances_against_times():
    policy = engines.SglangEma()
    assert levels(policy) == 5 and policy.average_tok == 4.0  # the middle candidate; its average begins one below
    assert after(policy, *[0] * 14) == 5, "warm-up and no fifth cycle yet"
    assert after(policy, 0) == 1  # 0.14: below 3 - 0.75 and 1 - 0.75
    assert policy.average_tok == pytest.approx(4 * 0.8**15)
    assert after(policy, *[1] * 5) == 3  # 0.72: above 1 - 0.5, not above 3 - 0.5
    assert policy.average_tok == pytest.approx(1 - (1 - 4 * 0.8**15) * 0.8**5)
    policy.reset()
    assert levels(policy) == 3, "an engine's slot outlives a text"
    late = engines.SglangEma(warmup=8)
    assert after(late, *[0] * 12) == 5
    assert after(late, 0) == 1, "every fifth cycle is counted from the end of the warm-up"
    # 4 + 2 * 0.8 ** 15 = 4.07: at most 5 - 0.75, and half of it rounds up to 3
    for ceiling, expected in ((0.0, 5), (0.5, 3)):
        assert after(engines.SglangEma(start=7, ceiling=ceiling), *[4] * 15) == expected
    policy = engines.SglangEma(candidates=(0, 1, 3), start=1)
    assert after(policy, *[0] * 15) == 0  # 0 <= 0.5 - 0.25
    assert after(policy, *[0] * 4) == 0 and policy.average_tok == 0.0
    assert after(policy, 0) == 1
    begun = engines.SglangEma(candidates=(0, 2), start=0)
    assert after(begun, *[0] * 15) == 2 and begun.average_tok == 1.0, "it had seen nothing: its own beginning"
    policy = engines.SglangThroughput(candidates=(1, 2), window=2, interval=2).price(FLAT)
    assert levels(policy) == 2
    watch(policy, 1, 1)
    # rates 1 and 0: (1 + 1) / 5.35 for one level, (1 + 1 + 0) / 5.95 for two
    assert policy.cycle_ms(1, 20) == pytest.approx(5.35) and policy.cycle_ms(2, 20) == pytest.approx(5.95)
    assert watch(policy, 1, 1).levels == 1
    assert policy.rates(2) == [1.0, 1.0], "the second level's window was cleared: the one known rate goes on"
    assert levels(policy) == 2  # 3 / 5.95
    other = watch(engines.SglangThroughput(candidates=(1, 2, 3), start=2, window=2).price(FLAT), 1, 2)
    assert other.rates(3) == [1.0, 0.5, 0.25] and levels(other) == 2, "not the tenth cycle"
    asked = chain(SIZE, 0.9, 0.5, 0.5)  # 1, 1.9, 2.35, 2.575 tokens
    assert engines.SglangDraftProb(levels=3).price(FLAT).answer(asked) == 3  # over 6.25, 6.35, 6.45, 6.55
    assert engines.SglangDraftProb(levels=3).price(STEEP).answer(asked) == 2  # over 6.25, 7.25, 8.25, 9.25
    doubtful = chain(SIZE, 0.01)
    assert engines.SglangDraftProb(levels=1).price(STEEP).answer(doubtful) == 1, "SGLang verifies one token at least"
    assert engines.SglangDraftProb(levels=1, least=0).price(STEEP).answer(doubtful) == 0
    tree = engines.SglangDraftProb(levels=2, top_k=2).price(STEEP)
    # by score .6 .4 .3 .2 .1 .05: 1, 1.6, 2, 2.3, 2.5 tokens over 5.75, 6.75, 7.75, 8.75, 9.75
    assert tree.answer(question(TREE_SCORES, 1, SIZE, 2, 6, plan=tree.plan)) == 3


def test_vllms_rules_maximise_goodput_learn_positions_and_keep_the_order_of_probabilities():
    policy = engines.VllmAdaptiveK(explore=0.0).price(FLAT)
    # priors .85: (1, 1.85, 2.57, 3.19, 3.71, 4.15) over (4, 5.35, 5.95, 6.55, 7.15, 7.75): five levels
    assert watch(policy, *[0] * 9).rates[0] == 0.85
    watch(policy, 0)
    assert policy.rates == pytest.approx([0.7 * 0.85, *[0.85] * 4]), "levels that were never reached keep the prior"
    assert after(policy, *[0] * 20) == 5  # 0.29: 2.08 / 7.75 = 0.269 against 1 / 4
    assert after(policy, *[0] * 10) == 0  # 1.76 / 7.75 = 0.227
    assert policy.rates[0] == pytest.approx(0.7**4 * 0.85)
    curious = engines.VllmAdaptiveK(explore=1.0).price(FLAT)
    assert levels(curious) == 5
    assert after(curious, *[0] * 60) == 5, "exploring drafts all levels"
    steady = engines.VllmAdaptiveK(explore=0.0, cooldown=2).price(FLAT)
    steady.rates = [1.0, 1.0, 1.0, 0.5, 0.0]
    assert levels(steady) == 5, "four levels would be best, 4.5 / 7.15 against 4 / 6.55, but that is one step"
    steady.rates = [1.0, 1.0, 0.0, 0.0, 0.0]
    assert levels(steady) == 2
    steady.rates = [1.0] * 5
    assert [levels(steady) for _ in range(3)] == [2, 2, 5], "while it cools it stays put"
    policy = engines.VllmAdaptiveVerification(levels=3, alpha=0.5).price(STEEP)
    policy.observe(finished(1, 3))
    assert policy.rates == pytest.approx([0.925, 0.425, 0.85]), "the third was never reached"
    policy.observe(finished(1, 3, verify_nodes=1))
    assert policy.rates == pytest.approx([0.9625, 0.425, 0.85]), "what was cut off says nothing"
    asked = chain(SIZE, 0.5, 0.5, 0.5)
    np.testing.assert_allclose(policy.survivals(asked), np.cumprod([0.9625, 0.425, 0.85]))
    assert policy.answer(asked) == 3  # 1, 1.96, 2.37, 2.72 tokens over 6.25, 7.25, 8.25, 9.25
    policy.observe(finished(2, 3))
    assert policy.rates == pytest.approx([0.98125, 0.7125, 0.425])
    assert policy.answer(asked) == 2  # 1, 1.98, 2.68, 2.98: 0.325 for two, 0.322 for three
    scores = np.log(np.array([0.6, 0.3, 0.3 * 0.8, 0.3 * 0.1, 0.6 * 0.5, 0.6 * 0.2]))
    scores = scores[[0, 1, 4, 5, 2, 3]]  # the second level row by row in the order of its parents' scores
    tree = TreeConfig(7, 1, 2)
    np.testing.assert_allclose(engines.calibrated(scores, tree, ()), np.exp(scores), atol=1e-6)
    # at temperature two 0.8 becomes sqrt(4) / (sqrt(4) + 1), 0.5 stays
    warm = engines.calibrated(scores, tree, (1.0, 2.0))
    np.testing.assert_allclose(warm[[0, 1, 2, 4]], [0.6, 0.3, 0.6 * 0.5, 0.3 * 2 / 3], atol=1e-6)
    hot = engines.calibrated(scores, tree, (2.0,))
    np.testing.assert_allclose(engines.calibrated(np.stack([scores, scores]), tree, (2.0,)), [hot, hot])
    sampled = dict(levels=2, top_k=2, confidence="probability", temperatures=(1.0, 2.0))
    policy = engines.VllmAdaptiveVerification(**sampled).price(STEEP)
    asked = question(scores, 1, SIZE, 2, 6, plan=policy.plan)
    np.testing.assert_allclose(policy.survivals(asked), warm, atol=1e-5)
    narrow = engines.Levels(top_k=4, beam=(2, 1), most_levels=3)
    assert all(checked_plan(tree, narrow.limits) for tree in narrow.trees), "the plain step, too"
    policy = engines.Levels(top_k=3, verify_nodes=12, most_levels=3)
    assert [tree.verify_nodes for tree in policy.trees] == [0, 3, 12, 12]
    assert [tree.depth for tree in policy.trees] == [0, 0, 1, 2] and pool_size(1, 3) == 12
    assert [tree.verify_nodes for tree in engines.Levels().trees] == list(range(10))


def test_hf_heuristic_trtllm_gate_and_llamacpps_rules_step_by_step():
    policy = engines.HfHeuristic()
    assert [levels(policy), *(after(policy, accepted) for accepted in (5, 6, 0, 0))] == [5, 7, 6, 5, 4]
    assert after(policy, *[0] * 9) == 1
    policy.reset()
    assert levels(policy) == 1
    fresh = engines.HfHeuristic(start=20, transient=True)
    assert levels(fresh) == 9 and fresh.wanted == 20
    assert watch(fresh, 0).wanted == 19
    fresh.reset()
    assert fresh.wanted == 20
    policy = engines.TrtllmGate(levels=4, window=2, threshold=0.5)
    # one rate does not fill the window; then means of 0.5, which is not below, 0.63 and 0.38
    assert [after(policy, accepted) for accepted in (0, 4, 1, 2)] == [4, 4, 4, 0]
    watch(policy, 0, 0, 0).reset()
    assert levels(policy) == 0
    policy = engines.LlamacppPMin()
    assert policy.p_min == 0.75 and policy.plan.verify_nodes == 16
    assert policy.answer(chain(EXTEND, 0.9)) and policy.answer(chain(EXTEND, 0.9, 0.8))
    assert not policy.answer(chain(EXTEND, 0.9, 0.8, 0.7))
    asked = chain(SIZE, 0.9, 0.8, 0.7)
    assert policy.answer(asked) == 2 and engines.LlamacppPMin(keeps=True).answer(asked) == 3
    assert engines.LlamacppPMin(least=3).answer(asked) == 0 and engines.LlamacppPMin(least=2).answer(asked) == 2
    assert policy.answer(chain(SIZE, 0.9, 0.8, 0.8)) == 3, "drafting ended for want of levels"
    hugging = engines.rule("hf_confidence")
    assert (hugging.p_min, hugging.keeps, hugging.most_levels) == (0.4, True, 20)
    policy = engines.LlamacppPMin(top_k=2, most_levels=3, p_min=0.5, verify_nodes=5)
    tree = question(TREE_SCORES, 1, EXTEND, 2, plan=policy.plan)
    assert policy.answer(tree)  # 0.4 / 0.6 is above a half
    assert not policy.with_settings(p_min=0.7).answer(tree)
    assert policy.answer(question(TREE_SCORES, 1, SIZE, 2, 5, plan=policy.plan)) == 5
    policy = engines.LlamacppEv().price(STEEP)  # each verified token costs a quarter of a plain step
    assert policy.marginal(20)[:3] == pytest.approx([0.25] * 3)
    assert policy.answer(chain(EXTEND, 0.9, 0.8, 0.7)) and not policy.answer(chain(EXTEND, 0.9, 0.8, 0.7, 0.4))
    assert policy.answer(chain(SIZE, 0.9, 0.8, 0.7, 0.4)) == 3  # products .9 .72 .504 .2016
    assert policy.answer(chain(SIZE, 0.2)) == 0
    steps = round_costs(nodes=(0, 1, 2, 3, 4, 20), verify=(4, 5, 6, 7.2, 7.6, 30.0), verify_per_tok=(0.0,) * 6)
    near, far = (engines.LlamacppEv(look_ahead=n).price(steps) for n in (0, 1))
    asked = chain(EXTEND, 0.7, 0.7, 0.571)  # 0.28: not worth its own 0.3, but the fourth costs 0.1
    assert not near.answer(asked) and far.answer(asked)
    assert far.answer(chain(SIZE, 0.7, 0.7, 0.571, 0.7)) == 4 and near.answer(chain(SIZE, 0.7, 0.7, 0.571)) == 2


def test_ucb_adds_what_an_arm_may_still_be_and_exp3_draws_by_what_arms_earned():
    policy, tried = engines.Ucb(arms=(1, 2)), []
    for reward_ms in (20.0, 10.0, 20.0, 10.0):  # tokens per second: 2 / 20 ms = 100, 3 / 10 ms = 300
        tried.append(levels(policy))
        policy.observe(finished(tried[-1], tried[-1], reward_ms))
    assert tried == [1, 2, 1, 2] and policy.means == pytest.approx([100.0, 300.0]) and policy.pulls == [2, 2]
    policy.means = [100.0, 104.0]
    assert levels(policy) == 2
    policy.observe(finished(0, 2, 1000 / 96))  # 96 tokens per second: the mean falls to 101.3
    assert policy.means[1] == pytest.approx(104 - 8 / 3)
    # 100 + 6 sqrt(ln 5 / 2) = 105.38 against 101.33 + 6 sqrt(ln 5 / 3) = 105.73
    assert levels(policy) == 2
    assert levels(policy.with_settings(weight=0.0)) == 1, "a copy with other settings has seen nothing"
    policy.means[1] = 100.9  # 105.29
    assert levels(policy) == 1
    policy.reset()
    assert policy.pulls == [0, 0]
    kept = watch(engines.Ucb(per_text=False), 1)
    kept.reset()
    assert sum(kept.pulls) == 1
    policy = engines.Exp3(arms=(1, 2), mixing=0.5)
    assert policy.chances() == [0.5, 0.5]
    levels(policy)
    policy.arm = 0
    policy.learn(70.0)
    assert policy.logs == pytest.approx([0.5, 0.0])  # 0.5 * (70 / 70) / 0.5 / 2
    assert policy.chances()[0] == pytest.approx(0.25 + 0.5 / (1 + math.exp(-0.5)))
    levels(policy)
    policy.arm, drawn = 1, policy.chances()[1]
    policy.learn(35.0)
    assert policy.logs[1] == pytest.approx(0.5 * 0.5 / drawn / 2)
    assert [levels(engines.Exp3(seed=3)) for _ in range(5)] == [levels(engines.Exp3(seed=3))] * 5
    draws = engines.Exp3(seed=1)
    assert {levels(draws) for _ in range(60)} == {1, 2, 3, 4}


CHAINS = {
    "sglang_ema": dict(interval=2, warmup=2),
    "sglang_throughput": dict(window=3, interval=2),
    "sglang_draft_prob": {},
    "vllm_adaptive_verification": {},
    "vllm_adaptive_k": dict(period=2, explore=0.3),
    "llamacpp_ev": dict(most_levels=6),
    "llamacpp_p_min": dict(most_levels=6, p_min=0.5),
    "hf_confidence": dict(most_levels=6),
    "hf_heuristic": {},
    "trtllm_gate": dict(window=4, threshold=0.9),
    "ucb": {},
    "exp3": {},
}
ALIKE = dict(top_k=3, verify_nodes=12, most_levels=5)
TREES = {name: settings | ALIKE for name, settings in CHAINS.items()}
TREES["sglang_ema"] |= dict(candidates=(0, 1, 3, 5), alpha=1.0)
TREES["sglang_throughput"] |= dict(candidates=(1, 3, 5))
TREES["vllm_adaptive_verification"] |= dict(levels=4, confidence="probability", temperatures=(1.5, 0.7))
BOTH = [(name, settings) for some in (CHAINS, TREES) for name, settings in some.items()]
IDS = [f"{name}-{'tree' if 'top_k' in settings else 'chain'}" for name, settings in BOTH]


@pytest.fixture(scope="module")
def plain():
    """What plain decoding says, greedily and sampled."""
    options = dict(max_new_tokens=32, seed=2)
    return {hot: autoregress(shared_bigrams(), [3, 1, 4], temperature=hot, **options).tokens for hot in (0.0, 1.0)}


@pytest.mark.filterwarnings("ignore:the policy in .* uses the costs")
@pytest.mark.parametrize(("name", "settings"), BOTH, ids=IDS)
def test_text_stays_what_it_is_something_is_decided_and_saved_rules_come_back(name, settings, plain, tmp_path):
    policy, temperature = engines.rule(name, FLAT, **settings), float("top_k" not in settings)
    options = dict(max_new_tokens=32, temperature=temperature, seed=2)
    out = decode(shared_bigrams(), [3, 1, 4], policy=policy, **options)
    assert out.tokens == plain[temperature]
    answers = out.cycles[["draft_calls", "verify_nodes"]].iloc[:-1]
    fixed = {"vllm_adaptive_verification", "sglang_draft_prob", "sglang_throughput", "llamacpp_ev"}
    assert len(answers.drop_duplicates()) > 1 or name in fixed  # these go by prices, which may have one answer here
    assert out.cycles["verify_nodes"].max() <= policy.limits.verify_nodes
    policy = engines.rule(name, FLAT, **settings)
    policy.trained_for = {"pair": "synthetic", "choices": [{"choice": "rule", "part": "none", "value": name}]}
    again = load_policy(policy.save(tmp_path))
    assert type(again) is type(policy) and again == policy and again.trained_for == policy.trained_for
    assert not (tmp_path / "policy.safetensors").exists()
    trace = synthetic_trace(turns=2, positions=30, depth=8, top_ks=(1, 3))
    rows = [replay(trace, some, FLAT).table for some in (policy, again)]
    assert rows[0].equals(rows[1]) and rows[0]["new_tok"].sum() == 60


def test_papers_rules_are_saved_alike_and_prices_of_another_machine_are_told(tmp_path):
    for kind in (DDD, SVIP, GammaTune):
        assert load_policy(kind(top_k=4).save(tmp_path / kind.__name__)) == kind(top_k=4)
    policy = engines.rule("sglang_draft_prob", FLAT)
    assert policy.priced_for == "round numbers"
    with pytest.warns(UserWarning, match="uses the costs 'far@away'.* call its price"):
        load_policy(policy.with_settings(priced_for="far@away").save(tmp_path))
    costs = round_costs(root_per_tok=(0.01, 0.01), verify_per_tok=(0.0, 0.01, 0.02), step_per_tok=0.002)
    policy = engines.SglangThroughput(top_k=3, verify_nodes=12).price(costs)
    for count in (1, 3, 7):
        tree = policy.trees[count]
        expected = costs.cycle_ms(3, tree.depth, tree.verify_nodes, 100)
        assert policy.cycle_ms(count, 100) == pytest.approx(float(expected))
    assert policy.cycle_ms(0, 100) == pytest.approx(4.2)


def test_bad_settings_get_one_sentence():
    for make, message in [
        (lambda: engines.rule("sglang_emma"), "unknown engine's rule 'sglang_emma'; did you mean 'sglang_ema'"),
        (lambda: engines.rule("hf_heuristic", begin=3), "unknown setting of hf_heuristic 'begin'"),
        (lambda: engines.SglangEma(candidates=(3, 1)), r"ascending whole numbers from 0 to 9, got \(3, 1\)"),
        (lambda: engines.SglangEma(candidates=()), "ascending whole numbers"),
        (lambda: engines.SglangThroughput(candidates=(0, 3)), "ascending whole numbers from 1 to 9"),
        (lambda: engines.SglangEma(alpha=0.0), "alpha must lie in"),
        (lambda: engines.TrtllmGate(levels=12), "levels must lie from 1 to 9, got 12"),
        (lambda: engines.VllmAdaptiveK(least=7), "least must lie from 0 to 5, got 7"),
        (lambda: engines.LlamacppPMin(p_min=75), "p_min must lie from 0 to 1, got 75"),
        (lambda: engines.HfHeuristic(start=0), "start must be at least 1, got 0"),
        (lambda: engines.Ucb(arms=()), "arms must be whole numbers"),
        (lambda: engines.Exp3(mixing=0.0), "mixing must lie in"),
        (lambda: engines.VllmAdaptiveVerification(top_k=3), "for chains 'position', got 'position'"),
        (lambda: engines.HfHeuristic(most_levels=0), "most_levels must be at least 1"),
        (lambda: engines.SglangEma(most_levels=10**9), "GiB"),  # before there is a tree of each number of levels
        (lambda: engines.SglangDraftProb().answer(chain(SIZE, 0.5)), "SglangDraftProb has no costs yet; call price"),
        (lambda: engines.LlamacppEv().answer(chain(EXTEND, 0.5)), "LlamacppEv has no costs yet"),
    ]:
        pytest.raises(SpecdecError, make).match(message)


def drive(policy, chances, accepted, times=1):
    """Cycles with a chain of these probabilities that accept so many of the verified tokens each."""
    for _ in range(times):
        verified = policy.answer(chain(SIZE, *chances))
        policy.observe(finished(min(accepted, verified), len(chances), verify_nodes=verified))


def test_vllm_logistic_fits_log_odds_while_it_decodes_and_recovers_from_poison():
    policy = engines.VllmLogistic(levels=2, interval=1, warmup_fits=1, damping=1.0, ridge=0.0).price(STEEP)
    assert policy.answer(chain(SIZE, 0.2, 0.2)) == 2, "everything is verified until the first fit"
    np.testing.assert_allclose(policy._features, np.log([0.25, 0.25]), rtol=1e-5)
    np.testing.assert_allclose(policy.survivals(None), [0.8176, 0.6684], atol=1e-4)  # sigmoid(1.5), and its square
    learning = engines.VllmLogistic(levels=2, interval=40, warmup_fits=1, damping=5.0).price(STEEP)
    for taught in ([0.0, 1.5, 1.5], [0.0, -4.0, -4.0]):  # as it begins; as another text may have left it
        learning.coefficients, learning.fits = np.array(taught), 0
        for _ in range(200):
            drive(learning, [0.9, 0.9], 2)
            drive(learning, [0.2, 0.2], 0)
        assert learning.chances(np.log([9.0, 9.0])).min() > 0.9 and learning.chances(np.log([0.25]))[0] < 0.1
        assert learning.answer(chain(SIZE, 0.9, 0.9)) == 2 and learning.answer(chain(SIZE, 0.2, 0.2)) == 0
    with pytest.raises(SpecdecError, match="drafts chains"):
        engines.VllmLogistic(top_k=2)
