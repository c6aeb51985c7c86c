"""RADAR's flat tree: where drafting stops after one call, more of the root's children are verified,
live and replayed.
"""

import numpy as np
import pytest
import torch
from fakes.pairs import bigram_pair
from fakes.traces import round_costs

from specdec.core.decode import autoregress, decode
from specdec.core.policy import RandomPolicy
from specdec.core.records import EXTEND
from specdec.core.tree import DraftTree
from specdec.core.tree_config import TreeConfig
from specdec.replays.record import record
from specdec.replays.replay import replay

FLAT = TreeConfig(15, 3, 3, flat_nodes=12)


class StopsEarly(RandomPolicy):  # extends now and then, on a plan with a flat tree
    def __init__(self, seed, plan=FLAT):
        super().__init__(plan, seed, (EXTEND,))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_live_and_replayed(temperature, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    pair, prompt = bigram_pair(), list(range(2, 12))
    options = dict(max_new_tokens=60, temperature=temperature, seed=3)
    trace = record(
        pair, [prompt], depth=3, top_ks=(3,), trees=(3,), most_nodes=20, progress=False, **options
    )
    plain = autoregress(pair, prompt, **options)
    hits = {True: 0, False: 0}
    for seed in range(6):
        live = decode(pair, prompt, StopsEarly(seed), **options)
        assert live.tokens == plain.tokens
        rows = replay(trace, StopsEarly(seed), round_costs(), keep_cycles=True).rows[0]
        names = (
            "context_tok",
            "expansions",
            "candidates",
            "verify_nodes",
            "accepted_tok",
            "kept_tok",
        )
        assert [[getattr(r, n) for n in names] for r in rows] == [
            [getattr(r, n) for n in names] for r in live.rows
        ]
        for row in rows:
            if row.expansions == 0:
                assert (row.candidates, row.verify_nodes) == (12, 12)
                hits[bool(row.accepted_tok)] += 1
            else:
                assert row.verify_nodes == min(14, row.candidates)
    assert min(hits.values()) > 0
    narrow = trace.ranks[3][:, 0, 0] < 3
    assert (
        trace.root_rank < 12
    ).sum() > narrow.sum()  # the wider tree catches what the beam misses


def test_a_flat_tree_by_hand():
    tree = DraftTree.flat(torch.tensor(7), torch.tensor([4, 5]), torch.tensor([-0.5, -1.0]))
    assert tree.token.tolist() == [7, 4, 5]
    assert tree.parent.tolist() == [-1, 0, 0]
    assert tree.depth.tolist() == [0, 1, 1]
    assert tree.score.tolist() == [0.0, -0.5, -1.0] and tree.levels == 1
    np.testing.assert_array_equal(tree.ancestors.numpy(), [[1, 0, 0], [1, 1, 0], [1, 0, 1]])
