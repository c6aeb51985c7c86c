"""The environment decodes what the policy would decode and rewards as it says."""

import dataclasses
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from fakes.pairs import random_pair
from fakes.traces import round_costs, synthetic_trace

from specdec.core.policy import Chain, Policy, RandomPolicy
from specdec.core.records import EXTEND, PLAN, SIZE
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies.base import Learned
from specdec.replays.record import record
from specdec.replays.replay import replay
from specdec.replays.trace import Trace
from specdec.training.env import LAPS, Environment, LiveSource, ReplaySource, Reward, Task

LIMITS = TreeConfig(21, 4, 3)


@dataclasses.dataclass
class Toy(Learned):  # answers `asked_kind` from three numbers
    asked_kind: str = SIZE
    interval: int = 1
    observation_size: ClassVar[int] = 3

    def __post_init__(self):
        super().__post_init__()
        self.kind = self.asked_kind
        self.actions = {SIZE: 4, EXTEND: 2, PLAN: 3}[self.kind]
        self.asks = frozenset({self.kind})
        self.plan = self.limits = LIMITS
        self.reset()

    def reset(self):
        self.count = 0

    def observe(self, cycle):
        self.count += 1

    def decides(self, question):
        return self.count % self.interval == 0

    def otherwise(self, question):
        return TreeConfig(4, 1, 3) if self.kind == PLAN else question.largest

    def observation(self, question):
        numbers = [question.expansions, question.context_tok / 100, self.count]
        return np.array(numbers, dtype=np.float32)

    def meaning(self, action, question):
        if self.kind == SIZE:
            return min(5 * action, question.largest)
        return bool(action) if self.kind == EXTEND else TreeConfig(4 + action, 1 + action, 3)


class Partner(Policy):  # answers EXTEND and counts what it observes
    asks = frozenset({EXTEND})
    plan = limits = LIMITS
    turns = cycles = 0

    def reset(self):
        self.turns += 1

    def answer(self, question):
        return True

    def observe(self, cycle):
        self.cycles += 1


def replayed(**options) -> ReplaySource:
    return ReplaySource(synthetic_trace(**options), round_costs())


@pytest.mark.parametrize("kind, interval", [(PLAN, 1), (PLAN, 5), (EXTEND, 1), (SIZE, 1)])
def test_it_decodes_what_the_policy_decodes(kind, interval):
    trace = synthetic_trace()
    costs = round_costs(question_ms=0.1)
    others_ask = {PLAN: (EXTEND,), EXTEND: (SIZE,), SIZE: (EXTEND,)}[kind]
    policy = Toy(asked_kind=kind, interval=interval).fill_at_random((8,))

    class InOrder(ReplaySource):
        turn = -1

        def next(self, random, limits):
            engine = super().next(random, limits)
            self.turn = (self.turn + 1) % len(self.trace.turns)
            engine.open(self.turn)
            return engine

    others = RandomPolicy(LIMITS, 7, others_ask)
    env = Environment(policy, Task(InOrder(trace, costs), episode="turn", others=others), 0)
    rows = []
    turns = 0
    while turns < len(trace.turns):
        rows += env.step(int(policy.network(env.observation).argmax()))
        env.pending.clear()
        turns += env.following[1]
    again = Toy(asked_kind=kind, interval=interval).fill_at_random((8,))
    chain = Chain(again, RandomPolicy(LIMITS, 7, others_ask))
    expected = [row for turn in replay(trace, chain, costs, keep_cycles=True).rows for row in turn]
    assert rows[: len(expected)] == expected


def test_live_and_replayed_agree():
    pair = random_pair()
    prompt = list(range(3, 12))
    tree = dict(depth=4, top_ks=(3,), trees=(3,), most_nodes=20)
    trace = record(pair, [prompt], max_new_tokens=40, progress=False, **tree)
    decoded = []
    for source in (LiveSource(pair, [prompt], 40), ReplaySource(trace, round_costs())):
        env = Environment(Toy(asked_kind=SIZE), Task(source, episode="turn"), 0)
        steps = []
        for _ in range(12):
            (row,) = env.step(int(env.observation.sum() * 7) % 4)
            env.pending.clear()
            steps.append((row.accepted_tok, row.verify_nodes, env.following[1], *env.observation))
        env.close()
        decoded.append(steps)
    assert decoded[0] == decoded[1]


def test_a_partner_observes_every_cycle():
    partner = Partner()
    task = Task(replayed(turns=3, positions=8), episode="turn", others=lambda seed: partner)
    env = Environment(Toy(asked_kind=SIZE), task, 0)
    assert (partner.turns, partner.cycles) == (1, 0)
    turns = 1
    cycles = 0
    for _ in range(30):
        cycles += len(env.step(1))
        env.pending.clear()
        turns += env.following[1]
    assert (partner.turns, partner.cycles) == (turns, cycles) and cycles > turns > 3
    trace = synthetic_trace(turns=3, positions=8)
    turns = trace.turns.assign(positions=[8, 0, 8])
    costs = round_costs(question_ms=0.5)
    source = ReplaySource(Trace(trace.header, turns, dict(trace._columns)), costs, 0.25)
    random = np.random.default_rng(0)
    assert {source.next(random, LIMITS).row for _ in range(40)} == {0, 16}
    assert source.next(random, LIMITS).clock.question_ms == 0.75


def test_a_learner_that_is_never_asked_is_refused():
    class Silent(Toy):
        def decides(self, question):
            return False

    for learner in (Silent(), Toy(asked_kind=EXTEND)):
        learner.plan = TreeConfig(4, 0, 3)  # a root pass alone: no question of EXTEND
        refused = pytest.raises(SpecdecError, Environment, learner, Task(replayed()), 0)
        refused.match("was never asked in 2000 cycles")


def row(kept_tok, **laps) -> SimpleNamespace:
    return SimpleNamespace(kept_tok=kept_tok, new_tok=99, **dict.fromkeys(LAPS, 0.0) | laps)


def test_rewards_by_hand():
    rows = [row(4, draft_ms=12.0, host_ms=8.0), row(1, verify_ms=0.5, commit_ms=1.0, policy_ms=0.5)]
    for reward, cycles, earned in (
        (Reward(), rows, 50 / 22),
        (Reward("ratio_of_sums"), rows, 5000 / 22),
        (Reward("mean_of_ratios"), rows, 350.0),
        (Reward("mean_of_ratios"), rows[:1], 200.0),
        (Reward(laps=("policy_ms", "verify_ms", "commit_ms", "host_ms")), rows, 5.0),
        (Reward("time_cost"), rows, -2.2),
        (Reward("lagrangian", rate=0.5), rows, 5 - 0.5 * 2.2),
        (Reward("accepted"), rows, 5.0),
        (Reward(), [row(3)], 3e9),  # no time at all is not a division by zero
        (Reward(), [], 0.0),
    ):
        assert reward(cycles) == pytest.approx(earned)


def test_an_episode_ends_and_the_text_continues():
    task = Task(replayed(turns=40, positions=30), episode="cycle")
    env, again, other = (Environment(Toy(asked_kind=SIZE), task, seed) for seed in (5, 5, 6))
    first = env.observation
    assert first.dtype == np.float32 and (again.observation == first).all()
    assert (other.observation != first).any()
    cycles = [env.step(action) for action in (2, 3)]
    (action, seen, rows, starts), later = env.pending
    assert (action, starts) == (2, True) and (seen == first).all() and rows == cycles[0]
    # the second cycle of the same text
    assert later[0] == 3 and later[3] is True and later[1][2] == 1
    assert env.following[0] is seen
    env.pending.clear()
    assert env.following[0] is env.observation and env.observation[2] == 2
    live = LiveSource(random_pair(), [[3, 4, 5]], policy_ms=2.0)
    cycle = dataclasses.replace(rows[0], policy_ms=0.5)
    priced = live.priced(cycle)
    assert priced.policy_ms == 2.0 * cycle.questions > 0
    assert priced.total_ms == pytest.approx(cycle.total_ms - cycle.policy_ms + priced.policy_ms)
    for episode, ends in (("interval", True), ("turn", False), ("cycle", False)):
        env = Environment(Toy(asked_kind=EXTEND), Task(replayed(), episode=episode), 0)
        assert not env.step(1)
        env.pending.clear()
        assert env.following[1] is ends
