"""What does not fit is refused in a sentence before it is made."""

import json
import time

import pytest
from fakes.pairs import random_pair, shared_pair
from fakes.traces import round_costs

from specdec.core import sizes
from specdec.core.decode import decode
from specdec.core.policy import RandomPolicy, Static
from specdec.core.tree import StaticShape
from specdec.core.tree_config import TREES, TreeConfig
from specdec.errors import SpecdecError
from specdec.models.eagle.checkpoints import read_checkpoint, save_drafter
from specdec.policies.value import ValuePolicy


@pytest.mark.parametrize(
    "make",
    [
        lambda: Static(10**6, 10**4, 100),
        lambda: Static(12, 10**8, 4),
        lambda: TreeConfig(1, 3, 10**9),
        lambda: TreeConfig(12, 10**6, 100, beam=(10**6,)),
        lambda: TreeConfig(10**6, 10**3, 100),
        lambda: RandomPolicy(TreeConfig(60, 10**7, 60)),
        lambda: decode(shared_pair(), [1, 2], Static(shape=StaticShape([(10**9,)])), 4),
        lambda: ValuePolicy(top_k=10**9),
        lambda: ValuePolicy(most_expansions=10**9),
        lambda: round_costs().lookup(10**12),
    ],
)
def test_what_no_machine_holds(make):
    begin = time.monotonic()
    with pytest.raises(SpecdecError, match=r"GiB.*; lower"):
        make()
    assert time.monotonic() - begin < 2


def test_the_largest_trees_of_the_papers_and_of_training_are_small():
    for tree in (*TREES.values(), TreeConfig(240, 12, 10), TreeConfig(1024, 20, 32)):
        assert sizes.tree_bytes(tree.total_tokens, tree.pool_size) < sizes.MOST_TREE_BYTES / 100


def test_a_cache_must_fit(monkeypatch):
    pair = random_pair(limit=10**9)
    pair.target.position_limit = None
    monkeypatch.setattr(sizes, "free_bytes", lambda device="cpu": 1 << 30)
    with pytest.raises(SpecdecError, match=r"key-value cache of \d+ tokens takes .* GiB and 1.0 GiB are free"):
        decode(pair, [1, 2], Static(4, 1, 2), max_new_tokens=10**8)
    with pytest.raises(SpecdecError, match="GiB are free"):
        pair.drafter.session(10**8, 4)
    assert decode(pair, [1, 2], Static(4, 1, 2), max_new_tokens=4).new_tok == 4
    assert pair.target.cache_bytes_per_tok == 8 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, float32


def test_a_config_of_a_drafter_is_compared_before_it_is_believed(tmp_path):
    folder = save_drafter(shared_pair().drafter.network, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 10**12, "draft_vocab_size": 10**12}))
    with pytest.raises(SpecdecError, match="do not belong together"):
        read_checkpoint(folder).network()
