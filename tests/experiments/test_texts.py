"""Embeddings beside a recording: of the text that was committed, in every cut of the recording, priced and learned from."""

import numpy as np
import pytest
from fakes.traces import round_costs

import specdec
from specdec.core.records import PLAN, Question
from specdec.errors import SpecdecError
from specdec.policies import resps
from specdec.policies.base import changed
from specdec.replays.replay import ReplayEngine, replay
from specdec.training.controllers import train_resps

from experiments import texts, variants

GRID = {"totals": (4, 8), "depths": (2, 3), "widths": (4,), "starter": (8, 3, 4), "interval": 2}
LEARNING = {"ppo.n_steps": 16, "ppo.batch_size": 8, "ppo.total_steps": 32, "while_training": {}, "push_partial": True}


class Letters:
    """How often each of 384 letters occurs, and what was asked."""

    name = "letters"

    def __init__(self):
        self.asked = []

    def __call__(self, text):
        return np.bincount([ord(letter) % 384 for letter in text], minlength=384).astype(np.float32)

    def of(self, some):
        self.asked += some
        return np.stack([self(text) for text in some])


@pytest.fixture
def recording(tiny, home):
    small = dict(depth=7, top_ks=(4,), trees=(), max_new_tokens=12, limit=8, progress=False)
    return specdec.record(tiny, ["toy/mt_bench", "toy/gsm8k"], **small)


def test_every_position_knows_the_text_before_it(tiny, recording):
    encoder = Letters()
    beside = texts.with_text_states(tiny, recording, encoder, every_tok=5, progress=False)
    assert beside.header["text_state"] == "letters, every 5 tokens" and "text_state" not in recording.header
    states = beside.column("text_state")
    assert len(states) == len(recording)
    last = recording.turns.iloc[-1]
    (prompt, answer) = texts.texts_of(tiny, recording)[-1]
    assert (len(prompt), len(answer)) == (last["prompt_tok"], last["kept_tok"])
    for position in (0, 4, 5, last["positions"] - 1):
        text = tiny.tokenizer.decode([*prompt, *answer[: position // 5 * 5 + 1]], skip_special_tokens=True)
        np.testing.assert_array_equal(states[last["first"] + position], encoder(text))
    test = beside.select(part="test").restrict({"expansions": (0, 5)})
    turns = beside.turns[beside.turns["part"] == "test"]
    rows = np.concatenate([np.arange(f, f + n) for f, n in zip(turns["first"], turns["positions"], strict=True)])
    np.testing.assert_array_equal(test.column("text_state"), states[rows])


def test_another_text_than_the_recorded_one_is_refused(tiny, recording):
    recording.turns["kept_tok"] += 1
    pytest.raises(SpecdecError, texts.texts_of, tiny, recording).match("otherwise than in the recording")


def test_a_policy_learns_from_them_and_the_embedding_is_charged(tiny, recording, tmp_path):
    beside = texts.with_text_states(tiny, recording, Letters(), progress=False)
    config = changed(resps.PAPER, {"state": "text", **GRID, **LEARNING, "prompts": ()})
    policy = train_resps(beside, round_costs(), config, out_dir=tmp_path, envs=1, progress=False)
    assert policy.observation_size == 384 and replay(beside.select(part="test"), policy, round_costs()).tau >= 1
    with pytest.raises(SpecdecError, match="holds no embedding"):
        replay(recording.select(part="test"), policy, round_costs())
    lengths = []
    charged = variants._encoding(policy, lambda text: lengths.append(len(text.split())) or Letters()(text))
    engine = ReplayEngine(beside, round_costs(), policy.limits)
    engine.open(0)
    charged.answer(Question(PLAN, engine.context_tok, 0, 0, policy.limits, None, engine))
    assert lengths == [engine.context_tok]
