"""Hundreds of decodings and a long chat in one process: the text stays right and memory stays flat."""

from pathlib import Path

import pytest
from fakes.pairs import random_pair

from specdec.core.decode import autoregress, chat, decode
from specdec.core.policy import RandomPolicy, Static
from specdec.core.tree_config import TreeConfig
from specdec.models.load import load_pair

pytestmark = pytest.mark.nightly


def resident() -> int:
    """Bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_five_hundred_decodings():
    pair = random_pair()
    policies = [Static(8, 2, 3), Static(30, 4, 4), RandomPolicy(TreeConfig(16, 4, 4), seed=1)]
    prompts = [[1 + number % 20, 2, 3] for number in range(20)]
    expected = [autoregress(pair, prompt, 24, stop_tokens=()).tokens for prompt in prompts]
    after = []
    for number in range(500):
        found = decode(pair, prompts[number % 20], policies[number % 3], 24, stop_tokens=())
        assert found.tokens == expected[number % 20]
        after.append(resident())
    assert after[-1] <= 1.02 * after[99]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_two_hundred_turns_of_chats():
    pair, after = load_pair("tiny", dtype="float32"), []
    for _ in range(20):
        answers = chat(pair, ["Hello."] * 10, Static(12, 3, 4), max_new_tokens=12)
        assert len(answers) == 10
        after.append(resident())
    assert after[-1] <= 1.02 * after[4]
