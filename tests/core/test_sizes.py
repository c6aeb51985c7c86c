"""What does not fit is refused in a sentence before it is made."""

import time

import pytest
import torch
from fakes.pairs import random_pair, shared_pair
from fakes.traces import round_costs

from specdec.core import tree_config as sizes
from specdec.core.decode import decode
from specdec.core.policy import RandomPolicy, Static
from specdec.core.tree import StaticShape
from specdec.core.tree_config import TREES, TreeConfig
from specdec.errors import SpecdecError
from specdec.policies.value import ValuePolicy


def test_what_no_machine_holds_is_refused_from_where_it_does_not_fit(monkeypatch):
    for make in (
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
    ):
        begin = time.monotonic()
        pytest.raises(SpecdecError, make).match(r"GiB.*; lower")
        assert time.monotonic() - begin < 2
    free, asked = 100 << 20, []
    monkeypatch.setattr(sizes, "free_bytes", lambda device: asked.append(device) or free)
    sizes.check_memory("a small thing", 64 << 20)  # not worth asking for
    sizes.check_memory("a thing", free, "cuda")
    assert asked == ["cuda"]
    with pytest.raises(
        SpecdecError, match=r"^a thing takes 3\.0 GiB and 0\.1 GiB are free; buy more\.$"
    ):
        sizes.check_memory("a thing", 3 << 30, advice="buy more")
    monkeypatch.setattr(sizes, "free_bytes", lambda device: None)
    sizes.check_memory("a thing", 1 << 60)
    assert sizes.tree_bytes(60, 710) == 40 * 710 + 5 * 3600
    edge = (sizes.MOST_TREE_BYTES - 5 * 16) // 40
    sizes.refuse_tree(4, edge)
    with pytest.raises(
        SpecdecError,
        match=f"total_tokens=4 out of {edge + 1} candidates takes 4 GiB per text; lower",
    ):
        sizes.refuse_tree(4, edge + 1)


def test_the_largest_trees_of_the_papers_are_small_and_a_cache_must_fit(monkeypatch):
    for tree in (*TREES.values(), TreeConfig(240, 12, 10), TreeConfig(1024, 20, 32)):
        assert sizes.tree_bytes(tree.total_tokens, tree.pool_size) < sizes.MOST_TREE_BYTES / 100
    pair = random_pair(limit=10**9)
    pair.target.position_limit = None
    monkeypatch.setattr(sizes, "free_bytes", lambda device="cpu": 1 << 30)
    with pytest.raises(
        SpecdecError, match=r"key-value cache of \d+ tokens takes .* GiB and 1.0 GiB are free"
    ):
        decode(pair, [1, 2], Static(4, 1, 2), max_new_tokens=10**8)
    pytest.raises(SpecdecError, pair.drafter.session, 10**8, 4).match("GiB are free")
    assert decode(pair, [1, 2], Static(4, 1, 2), max_new_tokens=4).new_tok == 4
    assert (
        pair.target.cache_bytes_per_tok == 8 * 2 * 2 * 8 * 4
    )  # layers, keys and values, heads, width, float32


def test_free_memory_is_what_the_system_says(monkeypatch):
    assert (1 << 27) < sizes.free_bytes() < (1 << 44)
    whole = "MemTotal:  9 kB\nMemAvailable:    2048 kB\nSwapFree: 7 kB"
    for says, free in (
        (whole, 2048 * 1024),
        ("MemTotal: 9 kB", None),
        ("MemAvailable: much", None),
        ("no colon", None),
    ):
        told = {"/proc/meminfo": says}
        monkeypatch.setattr(sizes.Path, "read_text", lambda self, told=told: told[str(self)])
        assert sizes.free_bytes() == sizes.free_bytes(torch.device("cpu")) == free
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (device, 5))
    gpu = torch.device("cuda", 1)
    assert sizes.free_bytes(gpu) == gpu and sizes.free_bytes("cuda") == "cuda"
