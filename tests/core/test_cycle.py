"""The cycle: what it asks, when, within which limits; its counts; bad answers lose nothing."""

import contextlib
import itertools
from unittest.mock import Mock

import pytest
import torch
from fakes.clock import FakeClock
from fakes.pairs import bigram_pair, shared_bigrams, shared_pair
from fakes.traces import round_costs

import specdec
from specdec.core.cycle import cycle, run_cycle
from specdec.core.engine import LiveEngine
from specdec.core.policy import RandomPolicy, Static
from specdec.core.records import EXTEND, KINDS, PLAN, SIZE
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.core.verification import Picker
from specdec.errors import SpecdecError
from specdec.replays.record import record
from specdec.replays.replay import replay

LIMITS = TreeConfig(12, 3, 4)
PROMPT = [3, 1, 4, 1, 5]
SUBSETS = [frozenset(c) for n in range(4) for c in itertools.combinations(KINDS, n)]
# expands 4 nodes, top_k = 2
WIDE = StaticShape([c for n in (1, 2, 3) for c in itertools.product((0, 1), repeat=n)])


class ScriptedEngine:
    """A cycle's engine without tensors: every forward looks at the clock as the live one does."""

    def __init__(self, room=99):
        self.clock, self.limits = FakeClock(), LIMITS
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


def drive(asks, plan, answers, room=99):
    """Run one cycle with the answers given in order. Returns (engine, questions, row)."""
    engine = ScriptedEngine(room)
    steps, (*given, last) = cycle(engine, frozenset(asks), plan), (None, *answers)
    questions = [steps.send(answer) for answer in given]
    row = pytest.raises(StopIteration, steps.send, last).value.value
    return engine, questions, row


def test_everything_is_asked_in_order():
    plan = TreeConfig(9, 2, 3)
    engine, questions, row = drive(KINDS, LIMITS, [plan, True, True, 5])
    assert [q.kind for q in questions] == [PLAN, EXTEND, EXTEND, SIZE]
    assert [q.expansions for q in questions] == [0, 0, 1, 2]
    assert [q.largest for q in questions] == [LIMITS, 1, 1, 11]
    assert [q.plan for q in questions] == [None, plan, plan, plan]
    assert {(q.context_tok, q.cycle, q.view) for q in questions} == {(10, 4, engine)}
    assert engine.calls == ["root", "expand", "expand", "verify 5", "commit"]
    assert (row.cycle, row.context_tok, row.top_k) == (4, 10, 3)
    assert (row.questions, row.verify_nodes) == (4, 5)


def test_sizes_and_depths_are_limited():
    for plan, answers in ((LIMITS, [True, False]), (LIMITS, [True] * 3), (TreeConfig(4, 0, 4), [])):
        _, questions, row = drive({EXTEND}, plan, answers)
        assert len(questions) == len(answers) and row.expansions == sum(answers)
    # only two candidates were drafted
    _, questions, row = drive({PLAN, SIZE}, LIMITS, [TreeConfig(2, 0, 2), 2])
    assert questions[-1].largest == 2 and row.verify_nodes == 2
    # more than planned is allowed, up to the limits
    _, questions, row = drive({SIZE}, TreeConfig(3, 3, 4), [0])
    assert questions[-1].largest == 11 and row.verified_tok == 1
    # planned 11, drafted 4
    assert drive({EXTEND}, LIMITS, [False])[2].verify_nodes == 4
    # the end of the context limits the depth
    assert drive({EXTEND}, LIMITS, [True], room=1)[2].expansions == 1
    assert drive({EXTEND}, LIMITS, [], room=-1)[2].expansions == 0


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
        while not engine.finished:
            before = len(engine.tokens)
            row = run_cycle(engine, policy)
            assert row.verified_tok == len(engine.tree) and row.accepted_tok == len(engine.path) - 1
            assert row.kept_tok == len(engine.tokens) - before <= row.new_tok
            drafted = pool_size(row.expansions, row.top_k, engine._plan.beam)
            assert row.candidates == drafted == len(engine.growing.whole()) - 1
            assert len(engine.cache) == engine.context_tok, "all committed tokens but the root"
            laps = (row.draft_ms, row.policy_ms, row.verify_ms, row.commit_ms)
            assert laps == (1000 * row.draft_calls, 1000 * row.questions, 1000, 1000)
            assert sum(laps) + row.host_ms == row.total_ms and row.host_ms > 0
    questions = [call.args[0] for call in policy.answer.call_args_list]
    rows = [call.args[0] for call in policy.observe.call_args_list]
    assert rows and [row.cycle for row in rows] == list(range(len(rows)))
    assert len(questions) == sum(row.questions for row in rows)
    assert {q.kind for q in questions} == asks
    lengths = itertools.accumulate((row.new_tok for row in rows), initial=len(PROMPT))
    assert [row.context_tok for row in rows] == list(lengths)[:-1]
    assert 1 + sum(row.kept_tok for row in rows) == 24


def test_what_a_policy_sees():
    seen = []

    class Looker(RandomPolicy):
        def answer(self, question):
            scores, newest = question.scores, question.newest_scores
            level = question.expansions
            assert len(scores) == 3 + 9 * level and len(newest) == (9 if level else 3)
            assert torch.equal(scores[-len(newest) :], newest)
            seen.append(question.features)
            return True

    pair = shared_pair()
    specdec.decode(pair, PROMPT, Looker(TreeConfig(12, 2, 3), asks={EXTEND}), max_new_tokens=3)
    first = specdec.autoregress(pair, PROMPT, max_new_tokens=1).tokens
    out = pair.target.model(torch.tensor([PROMPT + first]), output_hidden_states=True)
    rows = [out.hidden_states[tap][0, len(PROMPT) - 1] for tap in pair.drafter.taps]
    torch.testing.assert_close(seen[0], torch.cat(rows), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "make, shape", [(shared_pair, StaticShape(EAGLE1_TREE)), (shared_bigrams, WIDE)]
)
def test_static_shapes_decode(make, shape):
    pair, policy = make(), Static(shape=shape)
    lengths = [0, *map(len, shape.choices)]
    with begun(pair, policy) as engine:
        while not engine.finished:
            row = run_cycle(engine, policy)
            assert row.verify_nodes == shape.verify_nodes and row.expansions == shape.depth
            assert sorted(engine.tree.depth.tolist()) == lengths
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
    plain = specdec.autoregress(pair, PROMPT, max_new_tokens=room).tokens
    for policy in (Static(12, 3, 4), RandomPolicy(LIMITS, seed=1), Static(shape=WIDE)):
        drafted = specdec.decode(pair, PROMPT, policy, max_new_tokens=room)
        assert drafted.tokens == plain
        assert all(row.expansions <= max(0, 24 - row.context_tok - 2) for row in drafted.rows)


FLAT = TreeConfig(15, 3, 3, flat_nodes=12)
COUNTS = ("context_tok", "expansions", "candidates", "verify_nodes", "accepted_tok", "kept_tok")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_of_the_roots_children_where_drafting_stops_after_one_call(temperature, home):
    """RADAR's flat tree, live and replayed."""
    pair, prompt = bigram_pair(), list(range(2, 12))
    options = dict(max_new_tokens=60, temperature=temperature, seed=3)
    grid = dict(depth=3, top_ks=(3,), trees=(3,), most_nodes=20, progress=False)
    trace = record(pair, [prompt], **grid, **options)
    plain = specdec.autoregress(pair, prompt, **options).tokens
    hits = set()
    for seed in range(6):
        live = specdec.decode(pair, prompt, RandomPolicy(FLAT, seed, {EXTEND}), **options)
        assert live.tokens == plain
        policy = RandomPolicy(FLAT, seed, {EXTEND})
        (rows,) = replay(trace, policy, round_costs(), keep_cycles=True).rows
        for row, of_live in zip(rows, live.rows, strict=True):
            assert [getattr(row, n) for n in COUNTS] == [getattr(of_live, n) for n in COUNTS]
            flat = row.expansions == 0
            assert row.verify_nodes == (12 if flat else min(14, row.candidates))
            if flat:
                hits.add(bool(row.accepted_tok))
    assert hits == {True, False}


class FailsLater(RandomPolicy):  # answers legally for two cycles; then `fail` decides
    def __init__(self, kind, fail):
        super().__init__(LIMITS, seed=1, asks={kind})
        self.kind, self.fail, self.done = kind, fail, 0

    def answer(self, question):
        return self.fail() if self.done == 2 else {PLAN: LIMITS, EXTEND: True, SIZE: 6}[self.kind]

    def observe(self, row):
        self.done += 1


@pytest.mark.parametrize(
    ("kind", "fail", "message"),
    [
        (PLAN, lambda: TreeConfig(60, 7, 10), "plans total_tokens=60"),
        (EXTEND, lambda: "yes", "EXTEND with True or False"),
        (SIZE, lambda: 12, "SIZE with an integer from 0 to 11"),
        (SIZE, Mock(side_effect=RuntimeError("a network exploded")), "exploded"),
    ],
)
def test_bad_answers_lose_nothing(kind, fail, message):
    pair, settings = shared_bigrams(), dict(max_new_tokens=24)
    text = specdec.autoregress(pair, PROMPT, **settings).tokens
    call = (specdec.decode, pair, PROMPT, FailsLater(kind, fail))
    failed = pytest.raises((SpecdecError, RuntimeError), *call, **settings)
    assert failed.match(message)
    so_far = failed.value.so_far
    assert so_far.finish_reason == "unfinished" and len(so_far.rows) == 2
    assert so_far.tokens == text[: len(so_far.tokens)] and len(so_far.tokens) >= 3
    # what was streamed before the failure is the caller's, and the pair is as good as new
    streamed, steps = [], specdec.stream(pair, PROMPT, FailsLater(kind, fail), **settings)
    pieces = itertools.chain.from_iterable(steps)
    pytest.raises((SpecdecError, RuntimeError), streamed.extend, pieces)
    assert streamed == so_far.tokens
    assert specdec.decode(pair, PROMPT, Static(12, 3, 4), **settings).tokens == text


class Alternating(Static):
    """`plain` plain steps, then a tree; writes down the trees' scores by where their roots are."""

    asks = frozenset({PLAN, SIZE})

    def __init__(self, plain: int):
        super().__init__(8, 2, 3)
        self.plain, self.scores = plain, {}

    def answer(self, question):
        if question.kind == PLAN:
            drafts = question.cycle % (self.plain + 1) == self.plain
            return self.plan if drafts else TreeConfig(1, 0, 1)
        self.scores[question.context_tok] = question.scores
        return self.plan.verify_nodes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_plan_of_one_token_is_a_plain_step_and_the_drafter_catches_up(temperature):
    pair, settings = shared_pair(), dict(max_new_tokens=40, temperature=temperature, seed=3)
    always, seldom = Alternating(0), Alternating(3)
    expected = specdec.decode(pair, PROMPT, always, **settings)
    drafted = specdec.decode(pair, PROMPT, seldom, **settings)
    assert drafted.tokens == expected.tokens
    for row in drafted.rows:
        counts = (row.draft_calls, row.candidates, row.verify_nodes, row.questions)
        assert counts == ((3, 21, 7, 2) if row.top_k else (0, 0, 0, 1))
    places = seldom.scores.keys() & always.scores.keys()
    assert len(places) >= 3
    # the drafter has read the same text, if later and in other pieces
    for place in places:
        torch.testing.assert_close(seldom.scores[place], always.scores[place], atol=1e-4, rtol=1e-4)
