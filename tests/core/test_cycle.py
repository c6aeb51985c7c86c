"""The cycle: what it asks, when and within which limits; what it counts; and that bad answers lose
nothing.
"""

import contextlib
import itertools
from unittest.mock import Mock

import pytest
import torch
from fakes.clock import FakeClock
from fakes.pairs import bigram_pair, shared_bigrams, shared_pair
from fakes.refusals import refusal

import specdec
from specdec.core.cycle import cycle, run_cycle
from specdec.core.engine import LiveEngine
from specdec.core.policy import RandomPolicy, Static
from specdec.core.records import CYCLE_COLUMNS, EXTEND, KINDS, PLAN, SIZE
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.core.verification import Picker
from specdec.errors import SpecdecError

LIMITS = TreeConfig(12, 3, 4)
PROMPT = [3, 1, 4, 1, 5]
SUBSETS = [frozenset(c) for n in range(4) for c in itertools.combinations(KINDS, n)]
WIDE = StaticShape(
    [c for n in (1, 2, 3) for c in itertools.product((0, 1), repeat=n)]
)  # expands 4 nodes, top_k = 2


# a cycle's engine without tensors: every forward looks at the clock as the live one does
class ScriptedEngine:
    def __init__(self, limits=LIMITS, room=99):
        self.clock, self.limits = FakeClock(), limits
        self.context_tok, self.cycles, self.most_expansions = 10, 4, room
        self.forwards, self.extra_rows = True, 0
        self.candidates, self.calls = 0, []

    def _forward(self, lap, call):
        self.calls.append(call)
        self.clock.mark()
        self.clock.lap(lap)

    def root(self, plan):
        self.plan, self.candidates = plan, plan.top_k
        self._forward("draft", "root")

    def expand(self):
        self.candidates += self.plan.top_k**2
        self._forward("draft", "expand")

    def verify(self, verify_nodes):
        self._forward("verify", f"verify {verify_nodes}")
        return 2

    def commit(self):
        self._forward("commit", "commit")
        self.cycles += 1
        return 3


def drive(engine, asks, plan, answers):
    """Run one cycle with the answers given in order. Returns (questions, row)."""
    steps, (*given, last) = cycle(engine, frozenset(asks), plan), (None, *answers)
    return [steps.send(answer) for answer in given], pytest.raises(
        StopIteration, steps.send, last
    ).value.value


def test_everything_is_asked_in_order_and_sizes_are_limited_by_candidates_and_limits():
    engine = ScriptedEngine()
    questions, row = drive(engine, (), LIMITS, [])
    assert questions == []
    assert engine.calls == ["root", "expand", "expand", "expand", "verify 11", "commit"]
    assert (row.questions, row.expansions, row.draft_calls, row.candidates) == (0, 3, 4, 4 + 3 * 16)
    assert (row.verify_nodes, row.verified_tok, row.accepted_tok, row.new_tok, row.kept_tok) == (
        11,
        12,
        2,
        3,
        3,
    )
    engine, plan = ScriptedEngine(), TreeConfig(9, 2, 3)
    questions, row = drive(engine, KINDS, LIMITS, [plan, True, True, 5])
    assert [q.kind for q in questions] == [PLAN, EXTEND, EXTEND, SIZE]
    assert [q.expansions for q in questions] == [0, 0, 1, 2]
    assert [q.largest for q in questions] == [LIMITS, 1, 1, 11]
    assert [q.plan for q in questions] == [None, plan, plan, plan]
    assert {q.context_tok for q in questions} == {10} and {q.cycle for q in questions} == {4}
    assert all(q.view is engine for q in questions)
    assert engine.calls == ["root", "expand", "expand", "verify 5", "commit"]
    assert (row.cycle, row.context_tok, row.top_k, row.questions, row.verify_nodes) == (
        4,
        10,
        3,
        4,
        5,
    )
    for plan, answers in ((LIMITS, [True, False]), (LIMITS, [True] * 3), (TreeConfig(4, 0, 4), [])):
        questions, row = drive(
            ScriptedEngine(), {EXTEND}, plan, answers
        )  # depth 3 allows no fourth
        assert [q.kind for q in questions] == [EXTEND] * len(answers)
        assert row.expansions == sum(answers)
    questions, row = drive(ScriptedEngine(), {PLAN, SIZE}, LIMITS, [TreeConfig(2, 0, 2), 2])
    assert questions[-1].largest == 2 and row.verify_nodes == 2  # only two candidates were drafted
    questions, row = drive(ScriptedEngine(), {SIZE}, TreeConfig(3, 3, 4), [0])
    assert (
        questions[-1].largest == 11 and row.verified_tok == 1
    )  # more than planned is allowed, up to the limits
    assert (
        drive(ScriptedEngine(), {EXTEND}, LIMITS, [False])[1].verify_nodes == 4
    )  # planned 11, drafted 4
    for room in (1, -1):  # the end of the context limits the depth
        assert drive(ScriptedEngine(room=room), {EXTEND}, LIMITS, [True] * (room > 0))[
            1
        ].expansions == max(0, room)


@contextlib.contextmanager
def begun(pair, policy, clock=None):
    """An engine that has read the prompt."""
    engine = LiveEngine(pair, torch.tensor(PROMPT), 24, policy.limits, Picker(), clock=clock)
    with engine.inference():
        engine.prefill()
        yield engine


@pytest.mark.parametrize("make", [shared_pair, shared_bigrams], ids=["eagle", "bigrams"])
@pytest.mark.parametrize("asks", SUBSETS, ids=lambda a: "+".join(sorted(a)) or "nothing")
def test_counts_of_live_cycles(make, asks):
    pair, policy = make(), RandomPolicy(LIMITS, seed=5, asks=asks, own_beams=True)
    policy.answer, policy.observe = Mock(side_effect=policy.answer), Mock()
    with begun(pair, policy, FakeClock()) as engine:
        assert engine.context_tok == len(engine.cache) == len(PROMPT)
        while not engine.finished:
            before = len(engine.tokens)
            row = run_cycle(engine, policy)
            assert row.verified_tok == len(engine.tree) and row.accepted_tok == len(engine.path) - 1
            assert row.kept_tok == len(engine.tokens) - before <= row.new_tok
            drafted = pool_size(row.expansions, row.top_k, engine._plan.beam)
            assert row.candidates == drafted == len(engine.growing.whole()) - 1
            assert len(engine.cache) == engine.context_tok  # all committed tokens but the root
            laps = row.draft_ms + row.policy_ms + row.verify_ms + row.commit_ms + row.host_ms
            assert laps == row.total_ms
            assert row.draft_ms == 1000 * row.draft_calls
            assert row.host_ms > 0
            assert (row.verify_ms, row.commit_ms, row.policy_ms) == (
                1000,
                1000,
                1000 * row.questions,
            )
            assert tuple(row.row()) == CYCLE_COLUMNS
    questions, rows = (
        [one.args[0] for one in noted.call_args_list] for noted in (policy.answer, policy.observe)
    )
    assert rows and [row.cycle for row in rows] == list(range(len(rows)))
    assert len(questions) == sum(row.questions for row in rows)
    assert {q.kind for q in questions} == asks
    lengths = itertools.accumulate((row.new_tok for row in rows), initial=len(PROMPT))
    assert [row.context_tok for row in rows] == list(lengths)[:-1]
    assert 1 + sum(row.kept_tok for row in rows) == 24


def test_what_a_policy_sees_and_the_drafters_state_where_there_is_one():
    seen = []

    class Looker(RandomPolicy):
        def answer(self, question):
            level = question.expansions if question.kind == EXTEND else 2
            scores, newest = question.scores, question.newest_scores
            assert len(scores) == 3 + 9 * level and len(newest) == (9 if level else 3)
            assert (scores <= 0).all() and torch.equal(scores[-len(newest) :], newest)
            seen.append(question.features)
            return {EXTEND: True, SIZE: 5}[question.kind]

    pair = shared_pair()
    specdec.decode(
        pair, PROMPT, Looker(TreeConfig(12, 2, 3), asks={EXTEND, SIZE}), max_new_tokens=3
    )
    assert {len(features) for features in seen} == {3 * pair.target.hidden_size}
    expected = specdec.autoregress(pair, PROMPT, max_new_tokens=1).tokens
    output = pair.target.model(torch.tensor([PROMPT + expected]), output_hidden_states=True)
    last_accepted = torch.cat(
        [output.hidden_states[tap][0, len(PROMPT) - 1] for tap in pair.drafter.taps]
    )
    torch.testing.assert_close(seen[0], last_accepted, atol=1e-4, rtol=1e-4)
    for pair in (shared_pair(), shared_bigrams()):
        with begun(pair, Static(12, 2, 3)) as engine:
            run_cycle(engine, Static(12, 2, 3))
            if pair is shared_pair():
                assert engine.draft_state.shape == (pair.drafter.network.config.hidden_size,)
                assert torch.equal(engine.draft_state, engine.drafting.root_state)
            else:
                # noqa: B023
                assert "this drafter has no state to read" in refusal(lambda: engine.draft_state)


def test_rows_beside_the_tree_count_as_verified_and_policies_that_fail_are_named(monkeypatch):
    pair, policy, learned = shared_bigrams(), Static(12, 2, 3), []
    window = torch.tensor([1, 2]), torch.tensor([1, 2]), torch.ones(2, 2, dtype=torch.bool).tril()
    with begun(pair, policy) as engine:
        alone = run_cycle(engine, policy)
        for name, method in (("window", lambda levels: window), ("learn", learned.append)):
            monkeypatch.setattr(
                engine.drafting, name, method, raising=False
            )  # the drafter is shared by other tests
        row = run_cycle(engine, policy)
    assert alone.verified_tok == alone.verify_nodes + 1
    assert row.verified_tok == row.verify_nodes + 1 + 2
    assert [len(logits) for logits in learned] == [2]
    policy, call = Static(12, 3, 4), (specdec.decode, shared_bigrams(), PROMPT)
    for method, where in (("observe", "while it observed a cycle"), ("reset", "when a turn began")):
        with monkeypatch.context() as patch:
            patch.setattr(policy, method, lambda *given: {}["memory"])
            assert f"policy Static failed {where} (KeyError: 'memory'); nothing" in refusal(
                *call, policy
            )
    policy.limits = TreeConfig(12, 2, 4)
    assert "plans depth=3" in refusal(*call, policy)


@pytest.mark.parametrize("shape", [StaticShape(EAGLE1_TREE), WIDE], ids=["eagle1", "wide"])
@pytest.mark.parametrize("make", [shared_pair, shared_bigrams], ids=["eagle", "bigrams"])
def test_static_shapes_decode(shape, make):
    pair, policy = make(), Static(shape=shape)
    of_levels = [1, *(sum(len(c) == d for c in shape.choices) for d in range(1, shape.depth + 2))]
    with begun(pair, policy) as engine:
        while not engine.finished:
            row = run_cycle(engine, policy)
            assert row.verify_nodes == shape.verify_nodes and row.expansions == shape.depth
            assert engine.tree.depth.bincount().tolist() == of_levels
    assert engine.tokens == specdec.autoregress(pair, PROMPT, max_new_tokens=24).tokens


def test_a_shape_is_a_legal_plan_cut_short_by_a_policy_or_the_end_of_the_context():
    class Shaped(RandomPolicy):
        def answer(self, question):
            return WIDE if question.kind == PLAN else super().answer(question)

    pair, policy = shared_bigrams(), Shaped(Static(shape=WIDE).limits, seed=2)
    drafted = specdec.decode(pair, PROMPT, policy, max_new_tokens=24)
    assert drafted.tokens == specdec.autoregress(pair, PROMPT, max_new_tokens=24).tokens
    assert len({(row.expansions, row.verify_nodes) for row in drafted.rows}) > 3
    pair, room = bigram_pair(limit=24), 24 - len(PROMPT)
    for policy in (Static(12, 3, 4), RandomPolicy(LIMITS, seed=1), Static(shape=WIDE)):
        drafted = specdec.decode(pair, PROMPT, policy, max_new_tokens=room)
        assert drafted.tokens == specdec.autoregress(pair, PROMPT, max_new_tokens=room).tokens
        assert all(row.expansions <= max(0, 24 - row.context_tok - 2) for row in drafted.rows)
    pytest.raises(SpecdecError, specdec.decode, pair, PROMPT, max_new_tokens=room + 1).match(
        "context ends at 24"
    )


class FailsLater(RandomPolicy):  # answers legally for two cycles; then `fail` decides
    def __init__(self, kind, fail):
        super().__init__(LIMITS, seed=1, asks={kind})
        self.kind, self.fail, self.done = kind, fail, 0

    def answer(self, question):
        return self.fail() if self.done == 2 else {PLAN: LIMITS, EXTEND: True, SIZE: 6}[self.kind]

    def observe(self, row):
        self.done += 1


def raises():
    raise RuntimeError("the network exploded")


@pytest.mark.parametrize(
    ("kind", "fail", "message"),
    [
        (PLAN, lambda: TreeConfig(60, 7, 10), "plans total_tokens=60"),
        (PLAN, lambda: 12, "PLAN with a TreeConfig"),
        (PLAN, raises, "policy FailsLater failed on a plan question"),
        (EXTEND, lambda: "yes", "EXTEND with True or False"),
        (EXTEND, raises, "the network exploded"),
        (SIZE, lambda: 12, "SIZE with an integer from 0 to 11"),
        (SIZE, lambda: -1, "SIZE with an integer from 0 to 11"),
        (SIZE, raises, "failed on a size question"),
    ],
)
def test_bad_answers_lose_nothing(kind, fail, message):
    pair = shared_bigrams()
    whole = specdec.autoregress(pair, PROMPT, max_new_tokens=24).tokens
    failed = pytest.raises(
        SpecdecError, specdec.decode, pair, PROMPT, FailsLater(kind, fail), max_new_tokens=24
    )
    assert failed.match(rf"{message}.*\.$")
    so_far = failed.value.so_far
    assert so_far.finish_reason == "unfinished" and len(so_far.rows) == 2
    assert so_far.tokens == whole[: len(so_far.tokens)] and len(so_far.tokens) >= 3
    # What was streamed before the failure is the caller's, and the pair is as good as new.
    streamed, steps = [], specdec.stream(pair, PROMPT, FailsLater(kind, fail), max_new_tokens=24)
    pytest.raises(SpecdecError, streamed.extend, itertools.chain.from_iterable(steps))
    assert streamed == so_far.tokens
    assert specdec.decode(pair, PROMPT, Static(12, 3, 4), max_new_tokens=24).tokens == whole
    assert pair.target.model.config._attn_implementation != "specdec_tree"


class Alternating(
    Static
):  # `plain` plain steps, then a tree; writes down the trees' scores by where their roots are
    asks = frozenset({PLAN, SIZE})

    def __init__(self, plain: int):
        super().__init__(8, 2, 3)
        self.plain, self.scores = plain, {}

    def answer(self, question):
        if question.kind == PLAN:
            return (
                self.plan
                if question.cycle % (self.plain + 1) == self.plain
                else TreeConfig(1, 0, 1)
            )
        self.scores[question.context_tok] = question.scores
        return self.plan.verify_nodes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_plan_of_one_token_is_a_plain_step_and_the_drafter_catches_up(temperature):
    pair, settings = shared_pair(), dict(max_new_tokens=40, temperature=temperature, seed=3)
    always, seldom = Alternating(0), Alternating(3)
    expected = specdec.decode(pair, PROMPT, always, **settings)
    found = specdec.decode(pair, PROMPT, seldom, **settings)
    assert found.tokens == expected.tokens
    plain = [row for row in found.rows if row.top_k == 0]
    counted = {
        (row.draft_calls, row.candidates, row.verify_nodes, row.new_tok, row.questions)
        for row in plain
    }
    assert counted == {(0, 0, 0, 1, 1)} and all(row.draft_ms == 0 for row in plain)
    assert {row.draft_calls for row in found.rows if row.top_k} == {3}
    both = seldom.scores.keys() & always.scores.keys()
    assert len(both) >= 3
    for context_tok in both:  # the drafter has read the same text, if later and in other pieces
        torch.testing.assert_close(
            seldom.scores[context_tok], always.scores[context_tok], atol=1e-4, rtol=1e-4
        )
