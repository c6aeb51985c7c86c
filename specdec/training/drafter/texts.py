"""Sources of a drafter's batches: an endless stream of rows, or a fixed set of documents read a few times.

In both, a batch depends only on the seed and the number of the step, so that a resumed run sees the same batches
as an uninterrupted one; with several ranks, each gets its share of the batch that one process would have read.
Knows nothing about drafters, objectives or how documents were written.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from specdec import ranks, runs
from specdec.errors import SpecdecError
from specdec.training.drafter import chats
from specdec.training.drafter.chats import ANSWER, Batch, ChatList, ChatSource, Document, Regeneration, Rows
from specdec.training.drafter.features import CacheConfig, FeatureCache, Kept, taught_places
from specdec.training.drafter.objective import FrozenTarget, HeadLogits, TargetOutput, TokenBatch
from specdec.training.drafter.presets import Budget, Settings


def token_batch(rows: Batch, device, step: int = 0, output: TargetOutput | None = None) -> TokenBatch:
    """Packed rows as tensors on a device."""
    arrays = (rows.ids, rows.answer_mask, rows.document)
    tensors = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)
    return TokenBatch(*tensors, step=step, output=output)


def count_answers(ids: np.ndarray, answer_mask: np.ndarray, vocabulary: int) -> np.ndarray:
    """How often each token of the vocabulary occurs in an answer. -> [V]"""
    return np.bincount(ids[answer_mask], minlength=vocabulary)


Documents = Sequence[Document]


class StreamedText:
    """Rows without end."""

    steps, begins, held_out = None, (), ()

    def __init__(self, rows: Rows, size: int, device):
        self.rows, self.size, self.device = rows, size, device

    def answer_counts(self, vocabulary: int) -> np.ndarray:
        """Of the first block: all that is available before training begins."""
        first = self.rows.block(0)
        return count_answers(first.ids, first.answer_mask, vocabulary)

    def prepare(self, target: FrozenTarget, cache: CacheConfig) -> None:
        """Does nothing: such rows are read once, so that storing their features would not pay off."""

    def batch(self, number: int) -> TokenBatch:
        rows = self.rows.batch(number, self.size)
        return token_batch(Batch(*map(ranks.share, rows)), self.device, number)

    def progress(self, step: int) -> dict:
        return {}


class FixedText:
    """Documents packed in rows of `settings.length`, and read `settings.passes` times, each time in a new order.

    Longer documents are cut. held_out: documents used only for measurements. stages: number of documents at the end of each
    stage, default one stage of all. Stages are packed and read in sequence, so that later documents change nothing before
    the step at which their stage begins (a batch may overlap).
    """

    def __init__(
        self,
        documents: Documents,
        held_out: Documents,
        settings: Settings,
        seed: int,
        device,
        stages: Sequence[int] = (),
    ):
        self.length, self.size, self.device = settings.length, settings.batch, device
        length, size = self.length, self.size
        self.documents, self.held_out = ([chats.cut(item, length) for item in items] for items in (documents, held_out))
        self.stages = [*stages] or [len(documents)]
        self.rows: list[list[int]] = []  # numbers of documents
        self._reads: list[int] = []  # numbers of rows
        self.begins: list[int] = []  # steps
        for stage, (begin, end) in enumerate(zip([0, *self.stages], self.stages, strict=False)):
            rows = chats.first_fit([len(item.ids) for item in self.documents[begin:end]], length)
            self.begins.append(len(self._reads) // size)
            for number in range(settings.passes):
                order = list(range(len(self.rows), len(self.rows) + len(rows)))
                random.Random(f"passes/{seed}/{stage}/{number}").shuffle(order)
                self._reads += order
            self.rows += [[begin + index for index in row] for row in rows]
        answer_tok = [int((item.kind == ANSWER).sum()) for item in self.documents]
        self._answer_tok = np.array([sum(answer_tok[index] for index in row) for row in self.rows])
        self.steps = max(1, len(self._reads) // size)
        self.cache = self.held_out_cache = None

    def answer_counts(self, vocabulary: int) -> np.ndarray:
        """Of the documents of the first stage: the counts must not change with later ones."""
        ids, kind = (np.concatenate(parts) for parts in zip(*self.documents[: self.stages[0]], strict=True))
        return count_answers(ids, kind == ANSWER, vocabulary)

    def prepare(self, target: FrozenTarget, cache: CacheConfig) -> None:
        """Let the target read everything once, and store its features."""
        if cache.limit_gb:
            self.cache, self.held_out_cache = (
                FeatureCache(target, documents, cache) for documents in (self.documents, self.held_out)
            )
            self.cache.fill()
            self.held_out_cache.fill()
        self._target = target

    def batch(self, number: int) -> TokenBatch:
        chosen = [self.rows[row] for row in ranks.share(self._rows_of(number, number + 1))]
        return self._batch(self.documents, self.cache, chosen, self.length, number)

    def held_out_texts(self):
        """The held-out documents, a row each."""
        for index, item in enumerate(self.held_out):
            yield self._batch(self.held_out, self.held_out_cache, [[index]], len(item.ids), 0)

    def progress(self, step: int) -> dict:
        """Number of answer tokens read before `step`, and number of distinct ones."""
        read = self._rows_of(0, step)
        seen, distinct = (int(self._answer_tok[rows].sum()) for rows in (read, [*set(read)]))
        return {"seen_tok": seen, "distinct_tok": distinct}

    def _rows_of(self, first: int, end: int) -> list[int]:
        """Numbers of the rows read in the steps first .. end - 1; past the end it starts again."""
        return [self._reads[place % len(self._reads)] for place in range(first * self.size, end * self.size)]

    def _batch(
        self, documents, cache: FeatureCache | None, rows: list[list[int]], length: int, step: int
    ) -> TokenBatch:
        packed = chats.lay_out(documents, rows, length)
        output = None if cache is None else self._output(documents, cache, rows, length)
        return token_batch(packed, self.device, step, output)

    def _output(self, documents, cache: FeatureCache, rows: list[list[int]], length: int) -> TargetOutput:
        """The target's output for these rows, assembled from the stored features of their documents."""
        kept = [[cache.read(index) for index in row] for row in rows]
        features = kept[0][0].features.new_zeros(len(rows), length, kept[0][0].features.shape[1])
        place, count = np.full((len(rows), length), -1, dtype=np.int64), 0
        for row, (members, parts) in enumerate(zip(rows, kept, strict=True)):
            begin = 0
            for index, part in zip(members, parts, strict=True):
                end = begin + len(part.features)
                features[row, begin:end] = part.features
                taught = begin + np.flatnonzero(taught_places(documents[index]))
                place[row, taught] = count + np.arange(len(taught))
                begin, count = end, count + len(taught)
        flat = Kept(*(torch.cat(parts) for parts in zip(*(part for parts in kept for part in parts), strict=True)))
        target, device = self._target, self.device
        head = target.head
        hidden = flat.hidden.to(device, head.weight.dtype)
        logits = HeadLogits(
            head, hidden, flat.best.long().to(device), flat.log_sum.to(device), torch.from_numpy(place).to(device)
        )
        return TargetOutput(features.to(device, target.dtype), logits)


Text = FixedText | StreamedText


def training_text(
    model, tokenizer, source: ChatSource, settings: Settings, state_dir: Path, budget: Budget, stages: Sequence[int]
) -> Text:
    """The training text: the target's own answers, written first if the settings ask for it, and given text.

    stages: number of conversations at the end of each stage of a growing text. Measurements use those held out in the first.
    """
    seed, own, device = budget.seed, [], torch.device(model.device)
    if settings.regenerate_chats:
        prompts = source.prompts(seed, settings.regenerate_chats)
        key = runs.content_key(prompts=prompts, seed=seed, most=settings.max_new_tokens)[:12]
        begun = (state_dir / "checkpoint.safetensors").is_file()  # a resumed run adds no text
        minutes = None if budget.minutes is None else 0 if begun else budget.minutes / 4
        how = Regeneration(max_new_tokens=settings.max_new_tokens)
        folder = state_dir / f"regenerated-{key}"
        own = ranks.on_rank_zero(
            lambda: chats.regenerate(model, tokenizer, prompts, how, folder=folder, minutes=minutes, seed=seed)
        )
    if settings.passes is None:
        mixed = chats.mixed_documents(tokenizer, source, own, settings.regenerated_frac)
        rows = Rows(mixed, [], seed=seed, length=settings.length, block_rows=32 * settings.batch)
        return StreamedText(rows, settings.batch, device)
    if not own and not isinstance(source, ChatList):
        raise SpecdecError(
            "text that is read in passes must be a list of conversations; give --data FILE, or no passes."
        )
    given = own or source.conversations
    sides = [split(given[:end], settings) for end in stages or [len(given)]]
    parts = sides[-1][0], sides[0][1]
    documents = ([chats.conversation_document(tokenizer, chat) for chat in part] for part in parts)
    return FixedText(*documents, settings, seed, device, [len(side[0]) for side in sides])


def split(conversations: Sequence[list[dict]], settings: Settings) -> tuple[list[list[dict]], list[list[dict]]]:
    """(training, held out): the side of a conversation depends only on its prompt.

    A conversation's own `part` takes precedence. If answers record their temperature, only greedy ones are used for
    measurements.
    """
    learned, held_out = [], []
    for chat in conversations:
        prompt = "\n".join(message["content"] for message in chat if message["role"] != "assistant")
        share = int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16) / 16**8
        part = chat[-1].get("part", "held-out" if settings.held_out and share < settings.held_out_frac else "train")
        (held_out if part == "held-out" else learned).append(chat)
    if not learned:
        raise SpecdecError(f"all {len(held_out)} conversations are held out; give more of them.")
    greedy = [chat for chat in held_out if not chat[-1].get("temperature")]
    if settings.held_out and not greedy:
        raise SpecdecError(
            f"no greedy answer among {len(conversations)} conversations is held out; give more of them, raise "
            "held_out_frac, or set held_out to 0."
        )
    return learned, greedy[: settings.held_out]
