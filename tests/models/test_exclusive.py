"""A model that is taken is handed back whole: after Ctrl-C, exceptions, threads and forks it is as it was."""

import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fakes.children import child, ended
from fakes.families import state_of
from fakes.pairs import random_pair
from fakes.refusals import refusal

from specdec.core.decode import autoregress, decode
from specdec.core.policy import Static
from specdec.models.exclusive import interrupts_deferred
from specdec.models.lean import ROTARY
from specdec.models.target import Target
from specdec.models.tree_attention import TreeMask, _active, active_mask

PROMPT = [1, 2, 3]
TREE = Static(8, 2, 3)


@pytest.fixture(autouse=True)
def ctrl_c_is_heard():
    """Also by a run that was started in the background; a timer's signal presses it, so that no second thread is needed."""
    pressed = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGALRM: lambda *_: os.kill(os.getpid(), signal.SIGINT),
    }
    before = {number: signal.signal(number, handler) for number, handler in pressed.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def state(pair) -> tuple:
    """All that decoding changes in a model, its file and this thread while it goes on."""
    file = sys.modules[type(pair.target.model.model.layers[0].self_attn).__module__]
    return (
        state_of(pair.target.model, pair.drafter.network),
        getattr(file, ROTARY),
        torch.is_inference_mode_enabled(),
        active_mask(),
        signal.getsignal(signal.SIGINT),
    )


def in_thread(work):
    """What `work` returned or raised in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(work)
    return done.exception() or done.result()


@pytest.mark.parametrize(("times", "least"), [(25, 3), pytest.param(1000, 100, marks=pytest.mark.nightly)])
def test_ctrl_c_at_random_moments(times, least):
    pair = random_pair(layers=8)
    draw, before, interrupted = random.Random(times), state(pair), 0
    expected = autoregress(pair, PROMPT, 8, stop_tokens=()).tokens
    decode(pair, PROMPT, TREE, 8)
    begin = time.perf_counter()
    decode(pair, PROMPT, TREE, 8, stop_tokens=())
    usual_s = time.perf_counter() - begin
    for _ in range(times):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.0001, usual_s))
                decode(pair, PROMPT, TREE, 8, stop_tokens=())
                time.sleep(2 * usual_s)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            time.sleep(0)  # what is on its way comes here at the latest
        except KeyboardInterrupt:
            interrupted += 1
        assert state(pair) == before
    assert in_thread(lambda: decode(pair, PROMPT, TREE, 8, stop_tokens=()).tokens) == expected
    assert interrupted > least


def test_ctrl_c_just_before_a_mask_is_put_away_and_in_what_must_not_be_cut():
    pair = random_pair()
    before = state(pair)
    with pytest.raises(KeyboardInterrupt), pair.inference():
        _active.set(TreeMask(torch.arange(3), 0))
        raise KeyboardInterrupt
    assert state(pair) == before and before[-2] is None
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_deferred():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert in_thread(lambda: interrupts_deferred().__enter__()) is None  # a thread gets no Ctrl-C: nothing to put off


def test_two_models_of_a_family_run_in_two_threads_and_one_does_not():
    pairs = [random_pair(seed=seed) for seed in range(4)]
    before = [state(pair) for pair in pairs]
    expected = [autoregress(random_pair(seed=seed), PROMPT, 12, stop_tokens=()).tokens for seed in range(4)]

    def three_times(pair):
        return [decode(pair, PROMPT, TREE, 12, stop_tokens=()).tokens for _ in range(3)]

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(three_times, pairs))
    assert found == [[tokens] * 3 for tokens in expected]
    assert [state(pair) for pair in pairs] == before
    pair = random_pair()
    with pair.target.inference(), Target(pair.target.model).inference():
        assert "another thread" in str(in_thread(lambda: decode(pair, PROMPT, TREE, 4)))
    assert in_thread(lambda: decode(pair, PROMPT, TREE, 4).new_tok) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_forks():
    pair = random_pair()
    tokens = decode(pair, PROMPT, TREE, 8, stop_tokens=()).tokens
    entered, leave = threading.Event(), threading.Event()

    def hold():
        with pair.inference():
            entered.set()
            leave.wait(60)

    def same():
        assert decode(pair, PROMPT, TREE, 8, stop_tokens=()).tokens == tokens

    def refused():
        assert "forked" in refusal(decode, pair, PROMPT, TREE, 4)

    assert ended(child(same)) == 0
    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(60)
    assert ended(child(refused)) == 0  # its thread is not here, and the model is half-way
    leave.set()
    thread.join(60)
    assert ended(child(same)) == 0
