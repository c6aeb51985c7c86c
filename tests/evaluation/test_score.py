"""A controller's score: the same numbers for a file and an object, and what no file may be."""

import pytest
from fakes.traces import round_costs, synthetic_trace

from specdec.core.policy import Policy, Static
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation import score
from specdec.evaluation.compare import Baselines
from specdec.replays.oracle import clairvoyant, headroom
from specdec.replays.replay import replay
from specdec.replays.static_trees import static_turns

HEAD = """
from specdec.core.policy import Policy
from specdec.core.tree_config import TreeConfig

class Mine(Policy):
    asks = frozenset({"size"})
    plan = limits = TreeConfig(9, 3, 3)
"""
ANSWER = "    def answer(self, question):\n        return {}\n"
TRACE = synthetic_trace(turns=12, top_ks=(3,))
COSTS = round_costs(question_ms=0.01)


def scored(policy, **options):
    return score.score(policy, trace=TRACE, costs=COSTS, machines=(), progress=False, **options)


class Likely(Policy):
    asks = frozenset({"size"})
    plan = limits = TreeConfig(9, 3, 3)

    def answer(self, question):
        return min(question.largest, int((question.scores > -2).sum()))


def test_a_file_and_an_object_get_the_same_score_as_by_hand(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(HEAD + ANSWER.format("min(8, int((question.scores > -2).sum()))"))
    of_file = scored(file, policy_ms=0.05)
    of_object = scored(Likely(), policy_ms=0.05)
    assert of_file.table.equals(of_object.table)
    assert of_file.sentence.startswith("mine decodes")
    row = of_object.table.iloc[0]
    test = TRACE.select(part="test")
    by_hand = replay(test, Likely(), COSTS, policy_ms=0.05)
    chosen = Baselines.choose(TRACE, COSTS, total_tokens=[n for n in score.SIZES if n < 18]).tuned
    assert row["tuned"] == chosen.text
    tuned = static_turns(test, COSTS, chosen)
    tuned_ms = tuned["time_ms"].sum() / tuned["new_tok"].sum()
    bound_ms = clairvoyant(test, COSTS).ms_per_tok
    assert row["speedup"] == pytest.approx(by_hand.speedup)
    assert row["tau"] == pytest.approx(by_hand.tau)
    assert row["over_tuned"] == pytest.approx(tuned_ms / by_hand.ms_per_tok)
    share = headroom(by_hand.ms_per_tok, tuned_ms, bound_ms)
    assert row["headroom_frac"] == pytest.approx(share)
    assert row["over_tuned_low"] < row["over_tuned"] < row["over_tuned_high"]


def test_a_rule_gets_the_prices_of_its_machine():
    prices = []

    class Priced(Likely):
        def price(self, costs):
            prices.append(costs)
            return Static(4, 2, 3)

    row = scored(Priced(), policy_ms=0.0).table.iloc[0]
    assert prices == [COSTS]
    assert row["tau"] == scored(Static(4, 2, 3), policy_ms=0.0).table["tau"][0]


BAD = {
    "no class": ("x = 1", "0 subclasses"),
    "two classes": (HEAD + "class Other(Policy):\n    pass\n", "2 subclasses"),
    "out of range": (HEAD + ANSWER.format("99"), "99"),
    "missing import": ("import not_there\n" + HEAD, "not_there"),
    "no constructor": (HEAD + "    def __init__(self, needed):\n        pass\n", "needed"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_file_ends_in_one_sentence(how, tmp_path):
    text, word = BAD[how]
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(SpecdecError, match=word) as refused:
        scored(file, policy_ms=0.0)
    assert "\n" not in str(refused.value)
