"""Repetitions of a growing text: by hand, and the same in live decoding and in replay."""

import torch

import specdec
from specdec.core.policy import Policy
from specdec.core.records import EXTEND, PLAN
from specdec.core.text import LONGEST, Text
from specdec.core.tree_config import TreeConfig
from specdec.costs.profiles import profile


def text_of(*tokens: int) -> Text:
    text = Text()
    text.grow_to(torch.tensor(tokens))
    return text


def test_the_newest_longest_match_says_what_followed():
    assert text_of(1, 2, 3).repeats() == (0, -1)
    assert text_of(5, 1, 6, 1).repeats() == (1, 6), "one token agrees"
    assert text_of(1, 2, 8, 1, 2, 9, 1, 2).repeats() == (2, 9), "the newest of two places"
    assert text_of(0, 1, 2, 8, 7, 1, 2, 9, 0, 1, 2).repeats() == (3, 8), "the longer one"
    assert text_of(*[1, 2, 3, 4, 5] * 4).repeats() == (LONGEST, 1), "no further than that is compared"


class Looking(Policy):
    """Keeps what it sees of the text's repetitions."""

    asks = frozenset({PLAN, EXTEND})
    plan = limits = TreeConfig(8, 2, 3)

    def __init__(self):
        self.seen = []

    def answer(self, question):
        count, probability = question.matched
        self.seen.append((question.kind, question.context_tok, count, round(probability, 4)))
        return self.plan if question.kind == PLAN else question.expansions < 1


def test_a_policy_sees_the_same_live_and_in_replay():
    pair = specdec.load_pair("tiny", dtype="float32")
    prompt = "Ann has 3 apples and 3 pears. Ann has 3 apples and"
    small = dict(depth=3, top_ks=(3,), trees=(3,), max_new_tokens=24, progress=False, name="repeats")
    trace = specdec.record(pair, {"mine": [prompt]}, **small)
    live, replayed = Looking(), Looking()
    specdec.chat(pair, [prompt], live, max_new_tokens=24)
    specdec.replay(trace, replayed, profile("roofline-a100-llama-8b-eager"))
    assert live.seen[: len(replayed.seen)] == replayed.seen and len(replayed.seen) > 4
    assert any(count > 0 and probability > 0 for kind, _, count, probability in replayed.seen if kind == EXTEND)
    counts = [{count for kind, _, count, _ in replayed.seen if kind == asked} for asked in (PLAN, EXTEND)]
    assert counts[0] == counts[1] and not any(told[3] for told in replayed.seen if told[0] == PLAN), (
        "nothing is drafted"
    )
    assert trace.select(part="test").column("matched").tolist() == trace.column("matched").tolist()
