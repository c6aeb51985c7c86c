"""The environment decodes what the policy would decode, rewards what it says, and passes the
libraries' own checks.
"""

import contextlib
import dataclasses
import time
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from fakes.pairs import random_pair
from fakes.traces import round_costs, synthetic_trace
from gymnasium.utils.env_checker import check_env
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as check_for_sb3
from stable_baselines3.common.env_util import make_vec_env

from specdec.core.policy import Chain, Policy, RandomPolicy
from specdec.core.records import EXTEND, PLAN, SIZE
from specdec.core.tree_config import TreeConfig
from specdec.errors import SpecdecError
from specdec.policies.base import Learned, load_policy
from specdec.replays.record import record
from specdec.replays.replay import ReplayEngine, replay
from specdec.replays.trace import Trace
from specdec.training.env import LAPS, Env, LiveSource, ReplaySource, Reward

LIMITS = TreeConfig(21, 4, 3)


@dataclasses.dataclass
class Toy(Learned):  # answers `kind_asked` from three numbers
    kind_asked: str = SIZE
    interval: int = 1
    observation_size: ClassVar[int] = 3

    def __post_init__(self):
        super().__post_init__()
        self.kind, self.actions = self.kind_asked, {SIZE: 4, EXTEND: 2, PLAN: 3}[self.kind_asked]
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
        return np.array(
            [question.expansions, question.context_tok / 100, self.count], dtype=np.float32
        )

    def meaning(self, action, question):
        if self.kind == SIZE:
            return min(5 * action, question.largest)
        return bool(action) if self.kind == EXTEND else TreeConfig(4 + action, 1 + action, 3)


def replayed(**options) -> ReplaySource:
    return ReplaySource(synthetic_trace(**options), round_costs())


@pytest.mark.parametrize("kind", [PLAN, EXTEND, SIZE])
def test_check_env_and_the_libraries_learn(kind):
    def make():
        return Env(Toy(kind_asked=kind), replayed())

    check_env(make(), skip_render_check=True)
    check_for_sb3(make())
    model = PPO("MlpPolicy", make_vec_env(make, 2), n_steps=16, batch_size=16, n_epochs=1, seed=0)
    model.learn(64)
    assert model.num_timesteps >= 64


@pytest.mark.parametrize("kind, interval", [(PLAN, 1), (PLAN, 5), (EXTEND, 1), (SIZE, 1)])
def test_the_environment_decodes_what_the_policy_decodes(kind, interval):
    trace, costs = synthetic_trace(), round_costs(question_ms=0.1)
    others_ask = {PLAN: (EXTEND,), EXTEND: (SIZE,), SIZE: (EXTEND,)}[kind]
    policy = Toy(kind_asked=kind, interval=interval).fill_at_random((8,))

    class InOrder(ReplaySource):
        turn = -1

        def next(self, random, limits):
            engine = super().next(random, limits)
            self.turn = (self.turn + 1) % len(self.trace.turns)
            engine.open(self.turn)
            return engine

    env = Env(policy, InOrder(trace, costs), RandomPolicy(LIMITS, 7, others_ask), episode="turn")
    observation, _ = env.reset(seed=0)
    rows, turns = [], 0
    while turns < len(trace.turns):
        observation, _, terminated, _, info = env.step(int(policy.network(observation).argmax()))
        rows += info["cycles"]
        turns += terminated
        if terminated:
            observation, _ = env.reset()
    again = Toy(kind_asked=kind, interval=interval).fill_at_random((8,))
    chain = Chain(again, RandomPolicy(LIMITS, 7, others_ask))
    expected = [row for turn in replay(trace, chain, costs, keep_cycles=True).rows for row in turn]
    assert rows[: len(expected)] == expected
    assert env.tokens / env.time_ms == pytest.approx(
        sum(r.kept_tok for r in rows) / sum(r.total_ms for r in rows)
    )


def test_live_and_replayed_agree_and_the_partner_is_told_of_every_cycle():
    pair, prompt = random_pair(), list(range(3, 12))
    trace = record(
        pair,
        [prompt],
        max_new_tokens=40,
        depth=4,
        top_ks=(3,),
        trees=(3,),
        most_nodes=20,
        progress=False,
    )
    found = []
    for source in (LiveSource(pair, [prompt], 40), ReplaySource(trace, round_costs())):
        env = Env(Toy(kind_asked=SIZE), source, episode="cycle")
        observation, _ = env.reset(seed=0)
        steps = []
        for _ in range(12):
            observation, _, terminated, _, info = env.step(int(observation.sum() * 7) % 4)
            steps.append(
                (
                    info["cycles"][0].accepted_tok,
                    info["cycles"][0].verify_nodes,
                    terminated,
                    *observation,
                )
            )
            env.reset()
        env.close()
        found.append(steps)
    assert found[0] == found[1]
    partner = Partner()
    env = Env(Toy(kind_asked=SIZE), replayed(turns=3, positions=8), partner)
    env.reset(seed=0)
    assert (partner.turns, partner.cycles) == (1, 0)
    turns, cycles = 1, 0
    for _ in range(30):
        _, _, over, _, info = env.step(1)
        turns, cycles = turns + info["turn_ended"], cycles + len(info["cycles"])
        if over:
            env.reset()
    assert (partner.turns, partner.cycles) == (turns, cycles) and turns > 3 and cycles > turns
    trace, costs = synthetic_trace(turns=3, positions=8), round_costs(question_ms=0.5)
    turns = trace.turns.assign(positions=[8, 0, 8])
    source = ReplaySource(Trace(trace.header, turns, dict(trace._columns)), costs, 0.25)
    opened, random = [], np.random.default_rng(0)
    engine = source.next(random, LIMITS)
    for _ in range(40):
        assert source.next(random, LIMITS) is engine
        opened.append(engine.row)
    assert set(opened) == {0, 16}
    other = source.next(random, TreeConfig(4, 1, 3))
    assert other is not engine and other.limits == TreeConfig(4, 1, 3)
    question_ms = ReplayEngine(trace, costs, LIMITS, 0.25).clock.question_ms
    assert other.clock.question_ms == engine.clock.question_ms == question_ms
    assert source.priced("as it is") == "as it is"
    pytest.raises(SpecdecError, ReplaySource, trace, costs, -1.0).match("policy_ms")


def test_fast_enough_for_training():
    trace = synthetic_trace(turns=8, positions=60, depth=12, top_ks=(10,), most_nodes=240)

    class Sized(Toy):
        observation_size = 1268

        def observation(self, question):
            scores = question.scores.numpy()
            self.buffer = getattr(self, "buffer", np.zeros(1268, dtype=np.float32))
            self.buffer[: len(scores)] = scores
            return self.buffer

    def make():
        learner = Sized()
        learner.plan = learner.limits = TreeConfig(61, 8, 10)
        return Env(learner, ReplaySource(trace, round_costs()))

    vec = make_vec_env(make, 4)
    vec.reset()
    actions = np.array([3, 2, 1, 3])
    for _ in range(20):
        vec.step(actions)
    begin = time.perf_counter()
    for _ in range(150):
        vec.step(actions)
    assert 600 / (time.perf_counter() - begin) > 1500


class Partner(Policy):  # answers EXTEND and counts what it is told
    asks = frozenset({EXTEND})
    plan = limits = LIMITS
    turns = cycles = 0

    def reset(self):
        self.turns += 1

    def answer(self, question):
        return True

    def observe(self, cycle):
        self.cycles += 1


def row(kept_tok, **laps) -> SimpleNamespace:
    return SimpleNamespace(kept_tok=kept_tok, new_tok=99, **dict.fromkeys(LAPS, 0.0) | laps)


def test_rewards_by_hand_and_bad_input(tmp_path):
    rows = [row(4, draft_ms=12.0, host_ms=8.0), row(1, verify_ms=0.5, commit_ms=1.0, policy_ms=0.5)]
    for reward, given, earned in (
        (Reward(), rows, 50 / 22),
        (Reward(unit_ms=1.0), rows, 5 / 22),
        (Reward(mean=True), rows, 3.5),
        (Reward(mean=True), rows[:1], 2.0),
        (Reward(laps=("policy_ms", "verify_ms", "commit_ms", "host_ms")), rows, 5.0),
        (Reward("time"), rows, -2.2),
        (Reward("time", True), rows, -1.1),
        (Reward("lagrangian", rate=0.5), rows, 5 - 0.5 * 2.2),
        (Reward("lagrangian", True, unit_ms=1.0, rate=0.25), rows, (4 - 5 + 1 - 0.5) / 2),
        (Reward("accepted"), rows, 5.0),
        (Reward(), [row(3)], 3e9),  # no time at all is not a division by zero
        (Reward(), [], 0.0),
    ):
        assert reward(given) == pytest.approx(earned) and isinstance(reward(given), float)
    for wrong in (0.0, -1.0):
        pytest.raises(SpecdecError, Reward, unit_ms=wrong).match("unit_ms")
    pytest.raises(SpecdecError, Env, Toy(), replayed(), episode="turns").match(
        "unknown episode 'turns'"
    )
    pytest.raises(SpecdecError, Reward, "speed").match("unknown reward")
    pytest.raises(SpecdecError, Reward, laps=("draft",)).match("unknown lap")
    pytest.raises(SpecdecError, Env(Toy(), replayed()).step, 0).match("waits for reset")
    pytest.raises(SpecdecError, LiveSource, random_pair(), []).match("at least one prompt")
    pytest.raises(SpecdecError, Toy().save, tmp_path).match("no network yet")
    Toy().fill_at_random((8,)).save(tmp_path)
    # a class of this test, which no file may name
    pytest.raises(SpecdecError, load_policy, tmp_path).match("unknown policy in")


def test_a_live_pair_is_lent_once_and_an_environment_goes_on_with_its_text():
    pair, lent = random_pair(), []

    @contextlib.contextmanager
    def inference():
        lent.append("begun")
        yield
        lent.append("ended")

    pair.inference = inference
    source = LiveSource(pair, [[3, 4, 5], [6, 7]], 5, 1.0, seed=3, policy_ms=2.0)
    engines = [source.next(np.random.default_rng(number), LIMITS) for number in range(6)]
    assert lent == ["begun"] and {engine.prompt_tok for engine in engines} == {2, 3}
    assert engines[0].max_new_tokens == 5 and engines[0].limits == LIMITS
    source.close()
    source.close()
    assert lent == ["begun", "ended"]
    source.next(np.random.default_rng(0), LIMITS)
    assert lent == ["begun", "ended", "begun"]
    lived = Env(Toy(kind_asked=EXTEND), replayed(), episode="turn")
    lived.reset(seed=0)
    one = next(rows[0] for rows in iter(lambda: lived.step(1)[4]["cycles"], None) if rows)
    priced = source.priced(one)
    assert priced.policy_ms == 2.0 * one.questions > 2.0
    assert priced.total_ms == pytest.approx(one.total_ms - one.policy_ms + priced.policy_ms)
    assert dataclasses.replace(priced, policy_ms=one.policy_ms, total_ms=one.total_ms) == one
    plain = LiveSource(pair, [[1]])
    assert (plain.max_new_tokens, plain.temperature, plain.seed, plain.policy_ms) == (
        128,
        0.0,
        0,
        0.0,
    )
    env = Env(Toy(kind_asked=SIZE), replayed(turns=40, positions=30), episode="cycle")
    assert env.observation_space.shape == (3,) and env.observation_space.dtype == np.float32
    assert (env.action_space.n, env.reward, env.metadata) == (4, Reward(), {"render_modes": []})
    first, told = env.reset(seed=5)
    assert told == {} and first.dtype == np.float32 and first.base is None
    observation, reward, terminated, truncated, info = env.step(2)
    assert set(info) == {"cycles", "turn_ended"} and truncated is False and terminated is True
    assert reward == Reward()(info["cycles"])
    assert (env.tokens, env.time_ms) == (info["cycles"][0].kept_tok, info["cycles"][0].total_ms)
    goes_on = env.reset()[0]
    assert (goes_on == observation).all() and goes_on[2] == 1
    fresh = [env.reset(options={"new_turn": True})[0] for _ in range(8)]
    assert all(one[2] == 0 for one in fresh) and len({one[1] for one in fresh}) > 1
    assert (env.reset(options={"new_turn": False})[0] == fresh[-1]).all()
    assert (env.reset(seed=5)[0] == first).all()
    interval, turn = (
        Env(Toy(kind_asked=EXTEND), env.source, episode=name) for name in ("interval", "turn")
    )
    for one, ends in ((interval, True), (turn, False)):
        one.reset(seed=0)
        assert one.step(1)[2] is ends
