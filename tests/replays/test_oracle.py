"""The bound against brute force and random answers, static trees against replay."""

import dataclasses
import itertools

import numpy as np
import pandas as pd
import pytest
from fakes.traces import round_costs

from specdec.core.policy import RandomPolicy, Static
from specdec.core.tree_config import TreeConfig, pool_size
from specdec.replays import static_trees
from specdec.replays.oracle import clairvoyant, headroom, kept_bound
from specdec.replays.replay import replay
from specdec.replays.static_trees import best_static, static_grid
from specdec.replays.trace import NEVER, Column, Trace

DRAFT = dict(
    widths=(1, 4),
    root=(1.0, 1.3),
    root_per_tok=(0.002, 0.003),
    expand=(0.8, 1.1),
    expand_per_tok=(0.001, 0.002),
)
TARGET = dict(
    nodes=(0, 2, 8, 32), verify=(5.0, 5.0, 6.0, 9.0), verify_per_tok=(0.01, 0.01, 0.02, 0.02)
)
COSTS = round_costs(**DRAFT, **TARGET, step=4.5, step_per_tok=0.01, rest_ms=0.4, question_ms=0.05)
KINDS = {"chat": ("train", "test"), "code": ("train", "tune", "test")}


def made_up(positions, depth=3, top_ks=(1, 2, 3), most_nodes=12, seed=0, spread=1.2) -> Trace:
    """A recording with random ranks: increasing along the path, growing with the pool, NEVER
    outside it.
    """
    generator = np.random.default_rng(seed)
    kinds = [(suite, part) for suite, parts in KINDS.items() for part in parts]
    turns = pd.DataFrame(
        [kinds[i % len(kinds)] for i in range(len(positions))], columns=["suite", "part"]
    )
    turns["prompt"], turns["turn"] = [f"p{i}" for i in range(len(positions))], 0
    turns["prompt_tok"] = generator.integers(5, 90, len(positions))
    turns["positions"], turns["kept_tok"] = positions, np.array(positions) + 1
    turns["first"] = np.cumsum([0, *positions[:-1]])
    context_tok = np.concatenate(
        [np.arange(n) + tok for n, tok in zip(positions, turns["prompt_tok"], strict=True)]
    )
    columns = {"context_tok": context_tok.astype(np.int32)}
    rows = sum(positions)
    levels = np.arange(depth + 1)
    for top_k in top_ks:
        steps = generator.geometric(1 / spread, (rows, 1, depth + 1))
        grown = generator.poisson(0.5, (rows, depth + 1, depth + 1)).cumsum(axis=1)
        ranks = (steps + grown).cumsum(axis=2) - 1
        ranks[generator.random(rows) < 0.2] = NEVER
        outside = (levels > levels[:, None]) | (ranks >= pool_size(levels, top_k)[:, None])
        ranks = np.maximum.accumulate(np.where(outside, NEVER, ranks), axis=2)
        columns[Column("ranks", top_k)] = np.minimum(ranks, NEVER).astype(np.int16)
    root_rank = np.where(generator.random(rows) < 0.3, NEVER, generator.geometric(0.2, rows))
    columns["root_rank"] = root_rank.astype(np.int16)
    return Trace({"depth": depth, "top_ks": top_ks, "most_nodes": most_nodes}, turns, columns)


def one_cycle(trace, costs, row, top_k, expansions, verify_nodes):
    """(tokens gained, milliseconds) of one answer, the obvious way."""
    nodes = min(verify_nodes, pool_size(expansions, top_k))
    accepted = sum(int(rank) < nodes for rank in trace.ranks[top_k][row, expansions])
    return accepted + 1, float(
        costs.cycle_ms(top_k, expansions, nodes, int(trace.context_tok[row]))
    )


def plain_step(trace, costs, row):
    return 1, float(costs.verify_ms(0, int(trace.context_tok[row])) + costs.rest_ms)


def flat_cycle(trace, costs, row, top_k, verify_nodes):
    hit = int(trace.root_rank[row] < verify_nodes)
    return hit + 1, float(costs.cycle_ms(top_k, 0, verify_nodes, int(trace.context_tok[row])))


def brute_force(trace, costs, turn, top_ks, depths, sizes, everything=False):
    """The least time of one turn: every sequence of answers is tried out, nothing is remembered."""
    first, positions = trace.turns.loc[turn, ["first", "positions"]]
    every = list(itertools.product(top_ks, depths, sizes))
    cycles = [
        [one_cycle(trace, costs, first + p, *answer) for answer in every] for p in range(positions)
    ]
    if everything:
        for p in range(positions):
            flat = [(k, size) for k in top_ks for size in sizes if size > k]
            cycles[p] += [flat_cycle(trace, costs, first + p, *answer) for answer in flat]
            cycles[p].append(plain_step(trace, costs, first + p))

    def least(p):
        return min(ms + least(p + gained) for gained, ms in cycles[p]) if p < positions else 0.0

    return least(0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("positions", "top_ks", "most"), [([5, 1, 4], (2,), 6), ([4, 3], (1, 2), 5)]
)
def test_the_bound_is_brute_force(positions, top_ks, most, seed):
    trace = made_up(positions, depth=2, top_ks=top_ks, most_nodes=most, seed=seed)
    everything = top_ks, range(3), range(most + 1), True
    least = [brute_force(trace, COSTS, turn, *everything) for turn in range(len(positions))]
    assert clairvoyant(trace, COSTS).turns["time_ms"].tolist() == pytest.approx(least)


def test_restricted_bounds_are_brute_force():
    for top_ks, depths, sizes in [
        ([3], [2], None),
        (None, None, [4]),
        ([1, 3], [0, 3], [0, 5, 11]),
        (None, [3], [12]),
    ]:
        trace = made_up([4, 3, 4], seed=7)
        result = clairvoyant(trace, COSTS, top_ks, depths, sizes)
        allowed = [top_ks or [1, 2, 3], depths or range(4), sizes or range(13)]
        least = [brute_force(trace, COSTS, turn, *allowed) for turn in range(3)]
        assert result.turns["time_ms"].tolist() == pytest.approx(least)
        answers = result.answers
        assert set(answers["top_k"]) <= set(allowed[0])
        assert set(answers["expansions"]) <= set(allowed[1])
        for row in answers.itertuples():
            assert row.verify_nodes in {
                min(size, pool_size(row.expansions, row.top_k)) for size in allowed[2]
            }


@pytest.mark.parametrize("cycles", [1, 2, 4, 30])
def test_the_bound_of_kept_trees_is_brute_force(cycles):
    trace = made_up([5, 1, 4], seed=11)
    every = list(itertools.product([1, 3], [0, 2], [0, 5]))

    def least(first, positions, begin=0):
        def spent(top_k, depth, size):
            p = begin
            ms = 0.0
            for _ in range(cycles):
                if p < positions:
                    answer = (first + p, top_k, depth, size)
                    gained, more = (
                        one_cycle(trace, COSTS, *answer)
                        if size
                        else plain_step(trace, COSTS, first + p)
                    )
                    p = p + gained
                    ms = ms + more
            return ms + least(first, positions, p)

        return min(itertools.starmap(spent, every)) if begin < positions else 0.0

    result = kept_bound(trace, COSTS, cycles, [1, 6], top_ks=[1, 3], depths=[0, 2])["time_ms"]
    assert result.tolist() == pytest.approx(
        [least(*turn) for turn in trace.turns[["first", "positions"]].to_numpy()]
    )


def test_the_answers_are_a_sequence_that_takes_that():
    trace = made_up([40, 40], depth=2, top_ks=(2,), most_nodes=12, seed=3)
    result = clairvoyant(trace, COSTS)
    trees_only = clairvoyant(trace, COSTS, top_ks=[2])
    flat = (result.answers["expansions"] == 0) & (result.answers["verify_nodes"] > 2)
    plain = result.answers["top_k"] == 0
    assert flat.any() and plain.any() and result.ms_per_tok < trees_only.ms_per_tok
    assert trees_only.answers["top_k"].eq(2).all()
    assert result.answers[plain]["accepted_tok"].eq(0).all()
    assert result.turns["draft_calls"].sum() == (result.answers["expansions"] + 1)[~plain].sum()
    trace = made_up([30, 0, 17, 1, 25], seed=2)
    result = clairvoyant(trace, COSTS)
    assert list(result.turns["new_tok"]) == [30, 0, 17, 1, 25] and result.turns["time_ms"][1] == 0
    answers = result.answers.assign(gained=result.answers["accepted_tok"] + 1)
    for prompt, rows in answers.groupby("prompt"):
        row = result.turns[result.turns["prompt"] == prompt].iloc[0]
        assert row["time_ms"] == pytest.approx(rows["time_ms"].sum())
        assert (row["cycles"], row["cycle_tok"]) == (len(rows), rows["gained"].sum())
        assert rows["position"].tolist() == [0, *rows["gained"].cumsum()[:-1]]
    spent_ms = result.turns["time_ms"].sum()
    plain_ms = float(COSTS.step_ms(trace.context_tok).sum())
    assert result.ms_per_tok == pytest.approx(spent_ms / 73)
    assert result.speedup == pytest.approx(plain_ms / spent_ms)
    assert result.tau == pytest.approx(answers["gained"].mean())


@pytest.mark.parametrize("seed", range(3))
def test_no_policy_beats_the_bound_in_replay(seed):
    trace = made_up([40, 25, 33, 8] * 3, seed=seed)
    costs = dataclasses.replace(COSTS, question_ms=0.0)
    result = clairvoyant(trace, costs)
    policy = RandomPolicy(TreeConfig(13, 3, 3), seed=seed)
    for _ in range(20):
        random = replay(trace, policy, costs)
        assert (random.table["time_ms"] >= result.turns["time_ms"] * (1 - 1e-9)).all()
    same = ["suite", "prompt", "turn", "part", "new_tok", "plain_ms"]
    pd.testing.assert_frame_equal(result.turns[same], random.table[same])
    assert 0 < result.ms_per_tok < random.ms_per_tok and result.speedup > random.speedup
    assert (
        static_grid(trace, costs)["time_ms"] >= result.turns["time_ms"].sum() * (1 - 1e-9)
    ).all()


def test_static_trees_agree_with_replay():
    trace = made_up([40, 25, 33, 8] * 3, seed=4)
    for total, depth, top_k in ((13, 3, 3), (9, 2, 3), (2, 3, 1), (5, 1, 2), (1, 2, 3)):
        replayed = replay(trace, Static(total, depth, top_k), COSTS)
        static = static_trees.static_turns(trace, COSTS, TreeConfig(total, depth, top_k))
        pd.testing.assert_frame_equal(static, replayed.table[list(static)], check_exact=False)
        row = static_grid(trace, COSTS, [total], [depth], [top_k]).iloc[0]
        assert row["tau"] == pytest.approx(replayed.tau)
        assert row["speedup"] == pytest.approx(replayed.speedup)
    for total, depth, top_k in ((9, 2, 3), (13, 3, 2), (2, 0, 1), (4, 0, 3)):
        only = clairvoyant(trace, COSTS, [top_k], [depth], [total - 1]).turns
        static = static_trees.static_turns(trace, COSTS, TreeConfig(total, depth, top_k))
        pd.testing.assert_frame_equal(static, only[[*static]])


def test_the_grid_sums_every_tree_and_per_suite_adds_up():
    trace = made_up([21, 0, 14, 9, 1, 30], seed=1)
    table = static_grid(trace, COSTS)
    trees = [(1, 0, 1)]  # plain steps once
    for top_k, depth in itertools.product((1, 2, 3), range(4)):
        most = min(12, pool_size(depth, top_k))
        trees += [(nodes + 1, depth, top_k) for nodes in range(1, most + 1)]
    assert table[["total_tokens", "depth", "top_k"]].to_numpy().tolist() == [*map(list, trees)]
    for row, tree in zip(table.itertuples(), trees, strict=True):
        turns = static_trees.static_turns(trace, COSTS, TreeConfig(*tree))
        assert (row.cycles, row.cycle_tok) == (turns["cycles"].sum(), turns["cycle_tok"].sum())
        assert row.time_ms == pytest.approx(turns["time_ms"].sum())
        assert row.ms_per_tok == pytest.approx(row.time_ms / 75)
    settings = dict(total_tokens=[1, 5, 9], depths=[0, 3], top_ks=[2, 3])
    whole = static_grid(trace, COSTS, **settings)
    parts = static_grid(trace, COSTS, by="suite", **settings)
    setting = ["top_k", "depth", "total_tokens"]
    sums = ["new_tok", "cycles", "cycle_tok", "time_ms", "plain_ms"]
    assert len(parts) == 2 * len(whole) == 24
    added = parts.groupby(setting)[sums].sum()
    pd.testing.assert_frame_equal(added, whole.set_index(setting)[sums])


def test_the_best_static_tree_and_headroom():
    trace = made_up([21, 30, 14, 9, 11, 30], seed=1)
    table = static_grid(trace, COSTS)
    best = best_static(trace, COSTS)
    fast = table.loc[table["ms_per_tok"].idxmin()]
    fastest = fast[["total_tokens", "depth", "top_k"]].tolist()
    assert [best.total_tokens, best.depth, best.top_k] == fastest
    dear = dataclasses.replace(COSTS, root=tuple(100.0 for _ in COSTS.root))
    assert best_static(trace, dear).total_tokens == 1, "plain steps win where drafting does not pay"
    cut = best_static(trace, COSTS, total_tokens=[12], depths=[0], top_ks=[3])
    assert cut == TreeConfig(4, 0, 3), "a tree larger than its pool is cut"
    np.testing.assert_allclose(headroom(np.array([10, 5, 8, 20.0]), 10, 5), [0, 1, 0.25, -0.5])
    assert np.isnan(headroom(10, 10, 10))
