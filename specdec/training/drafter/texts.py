"""Sources of a drafter's batches: an endless stream of rows, or a fixed set of documents.

In both, a batch depends only on the seed and the number of the step, so that a resumed run sees the
same batches as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from specdec import runs
from specdec.errors import SpecdecError
from specdec.training.drafter import chats
from specdec.training.drafter.chats import Batch, ChatList, Document, Regeneration
from specdec.training.drafter.objective import TokenBatch
from specdec.training.drafter.presets import Budget, Settings


def token_batch(rows: Batch, device, step: int = 0) -> TokenBatch:
    """Packed rows as tensors on a device."""
    ids, answer, document = (torch.from_numpy(np.ascontiguousarray(part)) for part in rows)
    return TokenBatch(ids.to(device), answer.to(device), document.to(device), step)


class StreamedText:
    """Rows without end, in blocks of 32 batches; block b depends on (seed, b) alone.

    A document is an answer of the target's own with probability settings.regenerated_frac.
    """

    steps = None
    held_out = ()

    def __init__(self, tokenizer, source, answered: list, settings: Settings, seed: int, device):
        self.tokenizer = tokenizer
        self.source = source
        self.answers = [chats.conversation_document(tokenizer, chat) for chat in answered]
        self.settings = settings
        self.seed = seed
        self.device = device
        self._block: tuple[int, Batch | None] = (-1, None)

    def answer_counts(self, vocabulary: int) -> np.ndarray:
        """How often each token occurs in an answer of the first block, [V]."""
        first = self.block(0)
        return np.bincount(first.ids[first.answer], minlength=vocabulary)

    def batch(self, number: int) -> TokenBatch:
        size = self.settings.batch
        index, place = divmod(number, 32)
        if self._block[0] != index:
            self._block = (index, self.block(index))
        rows = slice(place * size, (place + 1) * size)
        return token_batch(Batch(*(part[rows] for part in self._block[1])), self.device, number)

    def block(self, index: int) -> Batch:
        """As many documents as fill it, the longest first; those that fit nowhere are dropped."""
        length = self.settings.length
        count = 32 * self.settings.batch
        documents = []
        missing_tok = count * length
        for document in self._documents(f"{self.seed}/{index}"):
            documents.append(document)
            missing_tok -= min(len(document.ids), length)
            if missing_tok <= 0:
                break
        documents.sort(key=lambda item: -len(item.ids))
        documents = [chats.cut(document, length) for document in documents]
        rows = chats.first_fit([len(item.ids) for item in documents], length)[:count]
        packed = chats.lay_out(documents, rows + [[]] * (count - len(rows)), length)
        order = list(range(count))
        random.Random(f"rows/{self.seed}/{index}").shuffle(order)
        return Batch(*(part[order] for part in packed))

    def _documents(self, block_seed: str) -> Iterator[Document]:
        rng = random.Random(f"mixed/{block_seed}")
        stream = self.source.stream(f"drafter/{block_seed}" if self.answers else block_seed)
        queue: list[int] = []
        while True:
            if not self.answers or rng.random() >= self.settings.regenerated_frac:
                yield chats.conversation_document(self.tokenizer, next(stream))
                continue
            if not queue:
                queue = rng.sample(range(len(self.answers)), len(self.answers))
            yield self.answers[queue.pop()]


class FixedText:
    """Documents in rows of `settings.length`, read `settings.passes` times, each in a new order.

    Longer documents are cut. held_out: documents used only for measurements.
    """

    def __init__(self, documents: list, held_out: list, settings: Settings, seed: int, device):
        self.length = settings.length
        self.size = settings.batch
        self.device = device
        self.documents = [chats.cut(document, self.length) for document in documents]
        self.held_out = [chats.cut(document, self.length) for document in held_out]
        # numbers of the documents in each row, and of the rows in the order of reading
        self.rows = chats.first_fit([len(item.ids) for item in self.documents], self.length)
        self._reads: list[int] = []
        for number in range(settings.passes):
            order = list(range(len(self.rows)))
            random.Random(f"passes/{seed}/0/{number}").shuffle(order)
            self._reads += order
        answers = [int(item.answer.sum()) for item in self.documents]
        self._answer_tok = np.array([sum(answers[index] for index in row) for row in self.rows])
        self.steps = max(1, len(self._reads) // self.size)

    def answer_counts(self, vocabulary: int) -> np.ndarray:
        """How often each token occurs in an answer, [V]."""
        ids = np.concatenate([document.ids for document in self.documents])
        answer = np.concatenate([document.answer for document in self.documents])
        return np.bincount(ids[answer], minlength=vocabulary)

    def batch(self, number: int) -> TokenBatch:
        rows = [self.rows[row] for row in self._rows_of(number, number + 1)]
        packed = chats.lay_out(self.documents, rows, self.length)
        return token_batch(packed, self.device, number)

    def held_out_texts(self) -> Iterator[TokenBatch]:
        """The held-out documents, a row each."""
        for document in self.held_out:
            row = chats.lay_out([document], [[0]], len(document.ids))
            yield token_batch(row, self.device)

    def progress(self, step: int) -> dict:
        """Number of answer tokens read before `step`, and number of distinct ones."""
        read = self._rows_of(0, step)
        return {
            "seen_tok": int(self._answer_tok[read].sum()),
            "distinct_tok": int(self._answer_tok[list(set(read))].sum()),
        }

    def _rows_of(self, first: int, end: int) -> list[int]:
        """Numbers of the rows read in the steps first .. end - 1; past the end it starts again."""
        places = range(first * self.size, end * self.size)
        return [self._reads[place % len(self._reads)] for place in places]


Text = FixedText | StreamedText


def training_text(
    model, tokenizer, source, settings: Settings, state_dir: Path, budget: Budget
) -> Text:
    """The training text; the target's own answers are written first if the settings ask for it."""
    seed = budget.seed
    device = torch.device(model.device)
    # 1. the target's own answers
    answered: list[list[dict]] = []
    if settings.regenerate_chats:
        prompts = source.prompts(seed, settings.regenerate_chats)
        key = runs.content_key(prompts=prompts, seed=seed, most=settings.max_new_tokens)[:12]
        minutes = budget.minutes
        if minutes is not None:
            # a resumed run adds no text
            resumed = (state_dir / "checkpoint.safetensors").is_file()
            minutes = 0 if resumed else minutes / 4
        how = Regeneration(max_new_tokens=settings.max_new_tokens)
        ends = {"folder": state_dir / f"regenerated-{key}", "minutes": minutes, "seed": seed}
        answered = chats.regenerate(model, tokenizer, prompts, how, **ends)
    # 2. a stream without end
    if settings.passes is None:
        return StreamedText(tokenizer, source, answered, settings, seed, device)
    # 3. or a fixed text, a part of which is held out
    if not answered and not isinstance(source, ChatList):
        raise SpecdecError("passes need a list of conversations; give --data FILE, or no passes.")
    learned, held_out = split(answered or source.conversations, settings)
    documents = [chats.conversation_document(tokenizer, chat) for chat in learned]
    measured = [chats.conversation_document(tokenizer, chat) for chat in held_out]
    return FixedText(documents, measured, settings, seed, device)


def split(
    conversations: Sequence[list[dict]], settings: Settings
) -> tuple[list[list[dict]], list[list[dict]]]:
    """(training, held out): by a conversation's own `part`, else by its prompt alone.

    If answers record their temperature, only greedy ones are used for measurements.
    """
    held_out_frac = settings.held_out_frac if settings.held_out else 0.0
    learned = []
    held_out = []
    for chat in conversations:
        prompt = "\n".join(message["content"] for message in chat if message["role"] != "assistant")
        place = int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16) / 16**8
        part = chat[-1].get("part", "held-out" if place < held_out_frac else "train")
        if part != "held-out":
            learned.append(chat)
        elif not chat[-1].get("temperature"):
            held_out.append(chat)
    if not learned or (settings.held_out and not held_out):
        why = f"of {len(conversations)} conversations none are "
        why += "held out (greedy answers only)" if learned else "left to learn from"
        raise SpecdecError(f"{why}; give more, or change held_out_frac.")
    return learned, held_out[: settings.held_out]
