"""A recording judges trees exactly as live decoding would, and refuses what it cannot judge."""

import numpy as np
import pytest
import torch
from fakes.killed import killed_at
from fakes.pairs import bigram_pair, random_pair
from fakes.traces import RandomRecorded, round_costs, synthetic_trace

from specdec import runs
from specdec.core.decode import autoregress, decode
from specdec.core.engine import LiveEngine
from specdec.core.policy import RandomPolicy, Static
from specdec.core.protocols import finish
from specdec.core.tree_config import TreeConfig, plain_beam, pool_size
from specdec.core.verification import Picker, acceptance_distribution
from specdec.models.eagle_drafter import BatchedDrafter
from specdec.policies import ltd
from specdec.replays import record as record_module
from specdec.replays.oracle import clairvoyant
from specdec.replays.record import grown_singly, record
from specdec.replays.replay import replay
from specdec.replays.static_trees import fastest, static_grid, tree_of
from specdec.replays.trace import OWN_NOISE, SHARED_NOISE, open_trace

TOP_KS = (2, 3, 5)
DEPTH = 4
MOST_NODES = 30
COLUMNS = (
    "context_tok top_k expansions draft_calls candidates verify_nodes "
    "accepted_tok kept_tok questions"
).split()
pytestmark = pytest.mark.usefixtures("home")


def facts(rows):
    """What replayed and live cycles have in common."""
    return [[getattr(row, name) for name in COLUMNS] for row in rows]


def replayed(trace, number, policy):
    """Cycles of one turn."""
    part = trace.select(np.arange(len(trace.turns)) == number)
    return replay(part, policy, round_costs(), keep_cycles=True).rows[0]


class Watching:
    """Notes what the policy may look at before each answer: its `looks`, arrays by name."""

    looks = ("scores", "newest_scores")

    def __init__(self, *given):
        super().__init__(*given)
        self.seen = []

    def answer(self, question):
        if question.kind != "plan":
            noted = [getattr(question, name).float().numpy().copy() for name in self.looks]
            self.seen.append([question.context_tok, *noted])
        return super().answer(question)

    def saw_as(self, second) -> None:
        """Equal to what another saw; features and states are recorded in half precision."""
        for mine, theirs in zip(self.seen, second.seen, strict=True):
            for place, (array, expected) in enumerate(zip(mine, theirs, strict=True)):
                rough = dict(rtol=1e-7, atol=1e-4) if place <= 2 else dict(rtol=2e-3, atol=2e-3)
                np.testing.assert_allclose(array, expected, **rough)


class Recorded(Watching, RandomRecorded):
    pass


def prompts_of(pair, count=6, seed=0):
    random = np.random.default_rng(seed)
    return [
        random.integers(0, pair.target.vocab_size, size).tolist()
        for size in random.integers(4, 30, count)
    ]


def recorded(pair, prompts, **options):
    usual = dict(
        max_new_tokens=60,
        depth=DEPTH,
        top_ks=TOP_KS,
        trees=(5,),
        most_nodes=MOST_NODES,
        progress=False,
    )
    return record(pair, prompts, **usual | options)


def live_rows(pair, prompt, policy, **options):
    return decode(pair, prompt, policy, **{"max_new_tokens": 60, **options}).rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("make", [random_pair, bigram_pair])
def test_replay_equals_live_decoding(make, temperature):
    pair = make()
    prompts = prompts_of(pair, 4)
    options = dict(temperature=temperature, seed=5, max_new_tokens=30)
    trace = recorded(pair, prompts, trees=TOP_KS, **options)
    compared = 0
    limits = TreeConfig(MOST_NODES + 1, DEPTH, max(TOP_KS))
    for number, prompt in enumerate(prompts):
        for seed, asks in enumerate(
            (("plan", "extend", "size"), ("plan",), ("extend", "size"), ("size",))
        ):
            first = Recorded(limits, seed, asks)
            second = Recorded(limits, seed, asks)
            if make is random_pair:
                first.looks = second.looks = (*Watching.looks, "features", "draft_state")
            live = live_rows(pair, prompt, first, **options)
            rows = replayed(trace, number, second)
            assert facts(rows) == facts(live)
            second.saw_as(first)
            compared += len(rows)
    assert compared > 150, compared


def test_drawn_answers_are_the_same_in_any_order():
    pair = random_pair()
    trees = dict(depth=DEPTH, top_k=TOP_KS[-1], temperature=50.0)
    prompts = [prompt + [1] * number for number, prompt in enumerate(prompts_of(pair)[:4])]
    trace = recorded(pair, prompts, temperature=0.0, seed=5)
    depth = ltd.DepthPolicy(total_tokens=9, stride=1, **trees).fill_at_random((8,))
    policy = ltd.combine(
        depth, ltd.SizePolicy(sizes=(1, 3, 6, 8), drafted=DEPTH, **trees).fill_at_random((8,))
    )
    result = replay(trace, policy, round_costs(), keep_cycles=True).rows
    live = [
        live_rows(pair, prompt, policy, temperature=0.0, seed=5) for prompt in reversed(prompts)
    ]
    assert [facts(rows) for rows in result] == [facts(rows) for rows in reversed(live)]
    answers = [tuple((row.expansions, row.verify_nodes) for row in rows[:5]) for rows in result]
    assert len(set(answers)) > 1, "prompts of other lengths draw other numbers"
    assert len({answer for some in answers for answer in some}) > 3


FAMILY = (4, 4, 3, 2)  # up to four children, and up to 4, 3, 2, 2, ... nodes expanded


class RandomMember(Watching, RandomPolicy):
    """Random answers within a recorded family."""

    def answer(self, question):
        answer = super().answer(question)
        if not isinstance(answer, TreeConfig):
            return answer
        top_k = self._random.randint(1, FAMILY[0])
        beam = tuple(
            self._random.randint(1, most) for most in FAMILY[1 : 1 + self._random.randint(1, 3)]
        )
        beam = beam if len(beam) == 3 else (*beam, min(beam[-1], FAMILY[-1]))
        most = min(
            self.limits.verify_nodes, pool_size(answer.depth, top_k, plain_beam(top_k, beam))
        )
        return TreeConfig(self._random.randint(1, most + 1), answer.depth, top_k, beam=beam)


def test_every_member_of_a_family_replays_exactly():
    pair = random_pair()
    prompts = prompts_of(pair, 3)
    trace = recorded(
        pair, prompts, family=FAMILY, depth=5, top_ks=(), trees=(2,), max_new_tokens=30
    )
    limits = TreeConfig(MOST_NODES + 1, 5, 4)
    compared = 0
    shapes = set()
    for number, prompt in enumerate(prompts):
        for seed in range(4):
            asks = (("plan", "extend", "size"), ("plan",))[seed % 2]
            first = RandomMember(limits, seed, asks)
            second = RandomMember(limits, seed, asks)
            live = live_rows(pair, prompt, first, max_new_tokens=30)
            rows = replayed(trace, number, second)
            assert facts(rows) == facts(live)
            second.saw_as(first)
            shapes |= {(row.top_k, row.candidates) for row in rows}
            compared += len(rows)
    assert compared > 120 and len(shapes) > 20, (compared, len(shapes))


def test_static_trees_of_a_family_equal_their_replay():
    pair = random_pair()
    costs = round_costs(candidate_ms=0.01)
    trace = recorded(pair, prompts_of(pair, 3), family=FAMILY, top_ks=(), trees=(3,))
    table = static_grid(trace, costs, total_tokens=[3, 9], depths=[0, 2, 4])
    beams = " ".join(table[table["top_k"] == 4]["beam"].unique())
    assert beams == " 1 2,1 2 3,1 3,2,1 4,2,1 4,3,2,1 4,3,1"
    for row in table.sample(12, random_state=0).to_dict("records"):
        replayed_ms = replay(trace, Static.of(tree_of(row)), costs).ms_per_tok
        assert replayed_ms == pytest.approx(row["ms_per_tok"], rel=1e-9)
    least_ms = table["ms_per_tok"].min()
    assert clairvoyant(trace, costs).ms_per_tok <= least_ms * (1 + 1e-9)
    best = fastest(table)
    only = clairvoyant(trace, costs, [best.top_k], [best.depth], [best.verify_nodes], [best.beam])
    assert only.ms_per_tok == pytest.approx(least_ms, rel=1e-9)
    # four children where two at most are expanded: recorded without expansions alone
    narrow = recorded(pair, prompts_of(pair, 2), family=(4, 2), top_ks=(), trees=(3,))
    table = static_grid(narrow, costs, total_tokens=[3], top_ks=[4], beams=[()])
    assert table["depth"].tolist() == [0]
    replayed_ms = replay(narrow, Static(3, 0, 4), costs).ms_per_tok
    assert table["ms_per_tok"].tolist() == [pytest.approx(replayed_ms)]


def test_the_batched_forest_equals_the_session():
    pair = random_pair(drafter_fields={"draft_vocab_size": 16})
    tokens = torch.tensor(prompts_of(pair, 1, seed=4)[0] * 3)
    with pair.target.inference() as target, pair.drafter.inference():
        features = target.forward(tokens, target.new_cache(len(tokens))).features
        contexts = torch.arange(3, len(tokens) - 1)
        fast = BatchedDrafter(pair.drafter, tokens, features, 5).grow(contexts, 4, 5, 9)
        slow = grown_singly(pair.drafter, tokens, features, contexts, 4, 5, 9)
    assert torch.equal(fast.tokens, slow.tokens) and torch.equal(fast.beams, slow.beams)
    assert torch.equal(fast.root_tokens, slow.root_tokens)
    torch.testing.assert_close(fast.scores, slow.scores, atol=2e-5, rtol=1e-5)


def test_a_killed_recording_continues(monkeypatch):
    pair = random_pair()
    prompts = prompts_of(pair, 4)
    whole = recorded(pair, prompts, name="whole")
    recorder = record_module.Recorder
    real = record_module.Recorder.positions
    done = []
    monkeypatch.setattr(
        recorder, "positions", lambda self, ids, *a: done.append(ids) or real(self, ids, *a)
    )
    with killed_at(recorder, "positions", 2):
        recorded(pair, prompts, name="broken")
    assert len(done) == 2
    again = recorded(pair, prompts, name="broken")
    # the one that broke, and the one never begun
    assert len(done) == 4 == len({str(ids) for ids in done})
    columns = [("ranks", 5), ("scores", 5), ("features",), ("draft_state",), ("root_rank",)]
    for column in columns:
        np.testing.assert_array_equal(whole.column(*column), again.column(*column))


def test_every_prompt_and_every_equal_one_is_a_draw_of_its_own():
    pair = random_pair()
    pair.stop_tokens = frozenset()
    prompts = [[1, 2 + number % 20, 3] for number in range(24)]
    hot = dict(depth=1, top_ks=(2,), trees=(), temperature=3.0, max_new_tokens=8)
    trace = recorded(pair, prompts, **hot)
    ids = np.stack(trace.turns["ids"])[:, 3:]
    # 1. no token is common to the prompts, as with noise of one seed
    assert max(np.bincount(tokens).max() for tokens in ids.T) <= 12
    # 2. equal prompts differ; each is that visit of live decoding, and goes on beyond its end
    for number in (0, 20):
        settings = dict(temperature=3.0, visit=number // 20, stop_tokens=())
        live = autoregress(pair, prompts[number], 9, **settings).tokens
        assert ids[number].tolist() == live[:8]
        assert trace.text[7 * number + 6].tolist() == live[6:9]
    assert ids[0].tolist() != ids[20].tolist()
    # 3. recordings say so, as those with one noise do not
    del trace.header["noise"]
    reopened = open_trace(runs.find("record")[0].directory)
    assert (reopened.noise, trace.noise) == (OWN_NOISE, SHARED_NOISE)


def test_exact_lengths_of_the_recording():
    pair = random_pair(vocab_size=40)
    prompt = prompts_of(pair, 1)[0]
    wide = dict(depth=7, top_ks=(10,), trees=(10,), lengths=5)
    trace = recorded(pair, [prompt], max_new_tokens=20, **wide)
    rows, result = trace.acceptance_distributions
    assert result.shape == (len(rows), 8, 9) and len(rows) == 5
    np.testing.assert_allclose(result.sum(-1), 1.0, atol=1e-4)
    assert (result[:, 0, 2:] == 0).all()
    tree = TreeConfig(60, 7, 10)
    engine = LiveEngine(pair, torch.tensor(prompt), 20, tree, Picker())
    with pair.target.inference(), pair.drafter.inference():
        engine.prefill()
        finish(engine.root(tree))
        for _ in range(7):
            finish(engine.expand())
        finish(engine.verify(59))
        live = acceptance_distribution(engine.tree, engine._rows.logits.softmax(-1)).numpy()
    assert rows[0] == 0
    np.testing.assert_allclose(result[0, 7], live, atol=2e-3)


def test_replay_charges_every_question():
    trace = synthetic_trace(turns=20, positions=100)
    policy = RandomPolicy(TreeConfig(20, 4, 3), 0, ("size",))
    costs = round_costs(question_ms=0.5)
    replayed = replay(trace, policy, costs, policy_ms=0.25, keep_cycles=True)
    assert replayed.cycles["policy_ms"].eq(0.75).all()
    assert replayed.cycles["questions"].eq(1).all()
    assert replayed.table["policy_ms"].sum() == pytest.approx(0.75 * len(replayed.cycles))
