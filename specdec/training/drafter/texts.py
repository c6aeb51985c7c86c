"""Sources of a drafter's batches: an endless stream of rows, or a fixed set of documents read a few
times.

In both, a batch depends only on the seed and the number of the step, so that a resumed run sees the
same batches as an uninterrupted one; with several ranks, each gets its share of the batch that one
process would have read.

The target's features of fixed documents are computed once and kept on disk, so that training only
runs the drafter. For every token the taps are stored, in bfloat16. At places where an answer is
taught, the last hidden state as well, from which `HeadLogits` computes the logits that an objective
needs. Shards are named by their content. So an interrupted pass continues, a longer text reuses the
shards of a shorter one, and another target or other taps use other shards.
"""

from __future__ import annotations

import bisect
import hashlib
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from specdec import machine, runs
from specdec.errors import SpecdecError, unreadable
from specdec.models.fingerprint import fingerprint
from specdec.models.target import Target
from specdec.training.drafter import chats
from specdec.training.drafter.chats import (
    ANSWER,
    Batch,
    ChatList,
    ChatSource,
    Document,
    Regeneration,
    Rows,
)
from specdec.training.drafter.objective import FrozenTarget, HeadLogits, TargetOutput, TokenBatch
from specdec.training.drafter.presets import Budget, CacheConfig, Settings

FORMAT = 1
SHARD_TOK = 16_384  # a minute of a small target on one core
DTYPE = (
    torch.bfloat16
)  # its range holds what float16 cannot: the first token's activations reach tens of thousands
GB = 1e9


class Kept(NamedTuple):
    """Features of a document of T tokens with A taught places: features [T, taps * Ht], hidden [A,
    H], best, log_sum [A].
    """

    features: Tensor
    hidden: Tensor
    best: Tensor
    log_sum: Tensor


def _joined(parts: Sequence[Kept]) -> Kept:
    """The features of several documents, one after the other."""
    return Kept(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def taught_places(document: Document) -> np.ndarray:
    """[T] bool: the tokens of answers and the one after each, where a drafter may learn the
    target's choice.
    """
    answer = document.kind == ANSWER
    answer[1:] |= answer[:-1]
    return answer


class FeatureCache:
    """Features of `documents` under a target. `fill` computes missing ones; then `read` returns
    those of one document.

    SpecdecError if they would exceed the limit or the free disk space.
    """

    def __init__(self, target: FrozenTarget, documents: Sequence[Document], config: CacheConfig):
        self.target, self.documents, self.config = target, documents, config
        key = runs.content_key(format=FORMAT, target=fingerprint(target.model), taps=target.taps)
        self.folder = (config.folder or machine.cache_folder() / "features") / key[:12]
        self._lengths = np.array([len(document.ids) for document in documents])
        self._taught = np.array([taught_places(document).sum() for document in documents])
        self._begins = _shards(self._lengths)
        self._paths = [
            self.folder / f"{self._name(shard)}.safetensors"
            for shard in range(len(self._begins) - 1)
        ]
        self._open: dict[int, object] = {}

    @property
    def gb(self) -> float:
        """Size of all features in GB (10**9 bytes)."""
        config = self.target.model.config.get_text_config()
        per_tok = len(self.target.taps) * config.hidden_size * DTYPE.itemsize
        per_place = config.hidden_size * DTYPE.itemsize + 4 + 4
        return (self._lengths.sum() * per_tok + self._taught.sum() * per_place) / GB

    def fill(self, progress: bool = True) -> None:
        """Compute and write the missing shards. The progress bar shows the size beforehand."""
        missing = [number for number, path in enumerate(self._paths) if not path.is_file()]
        if not missing:
            return
        total = int(self._lengths.sum())
        missing_tok = sum(self._tokens(number) for number in missing)
        self._check_room(self.gb * missing_tok / total)
        label = f"features, {self.gb:.1f} GB in {self.folder}"
        layers = self.target.model.config.get_text_config().num_hidden_layers
        engine = Target(self.target.model, (*self.target.taps, layers))
        bar = tqdm(
            total=total, initial=total - missing_tok, desc=label, unit="tok", disable=not progress
        )
        with bar, engine.inference():
            for number in missing:
                outputs = []
                for index in self._members(number):
                    outputs.append(self._compute(engine, self.documents[index]))
                self._write(number, _joined(outputs))
                bar.update(self._tokens(number))

    def read(self, index: int) -> Kept:
        """The stored features of document `index`, on the CPU. SpecdecError for a damaged file."""
        number = bisect.bisect_right(self._begins, index) - 1
        begin = self._begins[number]
        token, place = int(self._lengths[begin:index].sum()), int(self._taught[begin:index].sum())
        tokens, places = (
            slice(token, token + self._lengths[index]),
            slice(place, place + self._taught[index]),
        )
        if number not in self._open:
            try:
                self._open[number] = safe_open(self._paths[number], "pt")
            except (OSError, SafetensorError) as error:
                raise unreadable(
                    self._paths[number], error, "features", "delete it and run again"
                ) from error
        stored = self._open[number]
        return Kept(
            *(
                stored.get_slice(name)[tokens if name == "features" else places]
                for name in Kept._fields
            )
        )

    def _members(self, shard: int) -> range:
        return range(self._begins[shard], self._begins[shard + 1])

    def _tokens(self, shard: int) -> int:
        return int(self._lengths[self._begins[shard] : self._begins[shard + 1]].sum())

    def _name(self, shard: int) -> str:
        documents = [self.documents[index] for index in self._members(shard)]
        return runs.content_key(documents=[[item.ids, taught_places(item)] for item in documents])[
            :24
        ]

    def _check_room(self, wanted_gb: float) -> None:
        tokens, limit = int(self._lengths.sum()), self.config.limit_gb
        if self.gb > limit:
            raise SpecdecError(
                f"the features of {tokens:,} tokens take {self.gb:.2f} GB, more than the limit of "
                f"{limit:g} GB; raise it, give fewer conversations, or set it to 0 to store none."
            )
        there = next(folder for folder in (self.folder, *self.folder.parents) if folder.is_dir())
        free_gb = shutil.disk_usage(there).free / GB
        if wanted_gb > free_gb:
            why = f"the features take {wanted_gb:.2f} GB more in {self.folder}"
            why = f"{why}, {free_gb:.2f} GB are free"
            raise SpecdecError(
                f"{why}; free the disk, choose another folder or give fewer conversations."
            )

    def _compute(self, engine: Target, document: Document) -> Kept:
        """One document with the engine's own forward, as in decoding."""
        ids = torch.from_numpy(document.ids).to(engine.device)
        rows = engine.forward(ids, engine.new_cache(len(ids)), last_only=True)
        features, hidden = rows.features.split(
            [len(self.target.taps) * engine.hidden_size, engine.hidden_size], -1
        )
        again, said = self.target.head(hidden[-1]), rows.logits[-1]
        linear = isinstance(self.target.head, torch.nn.Linear)
        if not linear or float((again - said).abs().max()) > 0.03 * float(
            said.std()
        ):  # scaled or capped logits
            why = f"{type(self.target.model).__name__} changes its head's logits after the head"
            raise SpecdecError(
                f"{why}; set the limit of the features to 0 to run the target in every step."
            )
        hidden = hidden[torch.from_numpy(taught_places(document)).to(ids.device)]
        best, log_sum = [], []
        for part in hidden.split(256):
            logits = self.target.head(part).float()  # an arg-max in bfloat16 takes longer
            best.append(logits.argmax(-1).int())
            log_sum.append(logits.logsumexp(-1))
        return Kept(
            *(
                x.cpu()
                for x in (features.to(DTYPE), hidden.to(DTYPE), torch.cat(best), torch.cat(log_sum))
            )
        )

    def _write(self, number: int, kept: Kept) -> None:
        with runs.atomic(self._paths[number]) as temporary:
            save_file(
                {name: value.contiguous() for name, value in kept._asdict().items()}, temporary
            )


def _shards(lengths: np.ndarray) -> list[int]:
    """Starts of the shards of about SHARD_TOK tokens, and the end of the last."""
    begins, tokens = [0], 0
    for index, length in enumerate(lengths):
        tokens += length
        if tokens >= SHARD_TOK or index == len(lengths) - 1:
            begins.append(index + 1)
            tokens = 0
    return begins


def token_batch(
    rows: Batch, device, step: int = 0, output: TargetOutput | None = None
) -> TokenBatch:
    """Packed rows as tensors on a device."""
    arrays = (rows.ids, rows.answer_mask, rows.document)
    tensors = (torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays)
    return TokenBatch(*tensors, step=step, output=output)


class StreamedText:
    """Rows without end."""

    steps = None
    held_out = ()

    def __init__(self, rows: Rows, size: int, device):
        self.rows, self.size, self.device = rows, size, device

    def answer_counts(self, vocabulary: int) -> np.ndarray:
        """How often each token occurs in an answer, [V]. Of the first block: all that is available
        before training begins.
        """
        first = self.rows.block(0)
        return np.bincount(first.ids[first.answer_mask], minlength=vocabulary)

    def prepare(self, target: FrozenTarget, cache: CacheConfig) -> None:
        """Does nothing: rows that are read once need no stored features."""

    def batch(self, number: int) -> TokenBatch:
        rows = self.rows.batch(number, self.size)
        return token_batch(rows, self.device, number)

    def progress(self, step: int) -> dict:
        return {}


class FixedText:
    """Documents packed in rows of `settings.length`, and read `settings.passes` times.

    Each pass has a new order. Longer documents are cut. held_out: documents used only for
    measurements.
    """

    def __init__(
        self,
        documents: list[Document],
        held_out: list[Document],
        settings: Settings,
        seed: int,
        device,
    ):
        length = settings.length
        self.length = length
        self.size = settings.batch
        self.device = device
        self.documents = [chats.cut(document, length) for document in documents]
        self.held_out = [chats.cut(document, length) for document in held_out]
        # numbers of the documents in each row, and of the rows in the order of reading
        self.rows = chats.first_fit([len(item.ids) for item in self.documents], length)
        self._reads: list[int] = []
        for number in range(settings.passes):
            order = list(range(len(self.rows)))
            random.Random(f"passes/{seed}/0/{number}").shuffle(order)
            self._reads += order
        answers = [int((item.kind == ANSWER).sum()) for item in self.documents]
        self._answer_tok = np.array([sum(answers[index] for index in row) for row in self.rows])
        self.steps = max(1, len(self._reads) // self.size)
        self.cache = None
        self.held_out_cache = None

    def answer_counts(self, vocabulary: int) -> np.ndarray:
        """How often each token occurs in an answer, [V]."""
        ids = np.concatenate([document.ids for document in self.documents])
        kind = np.concatenate([document.kind for document in self.documents])
        return np.bincount(ids[kind == ANSWER], minlength=vocabulary)

    def prepare(self, target: FrozenTarget, cache: CacheConfig) -> None:
        """Let the target read everything once, and store its features."""
        if cache.limit_gb:
            self.cache = FeatureCache(target, self.documents, cache)
            self.cache.fill()
            self.held_out_cache = FeatureCache(target, self.held_out, cache)
            self.held_out_cache.fill()
        self._target = target

    def batch(self, number: int) -> TokenBatch:
        chosen = [self.rows[row] for row in self._rows_of(number, number + 1)]
        return self._batch(self.documents, self.cache, chosen, self.length, number)

    def held_out_texts(self):
        """The held-out documents, a row each."""
        for index, item in enumerate(self.held_out):
            yield self._batch(self.held_out, self.held_out_cache, [[index]], len(item.ids), 0)

    def progress(self, step: int) -> dict:
        """Number of answer tokens read before `step`, and number of distinct ones."""
        read = self._rows_of(0, step)
        return {
            "seen_tok": int(self._answer_tok[read].sum()),
            "distinct_tok": int(self._answer_tok[list(set(read))].sum()),
        }

    def _rows_of(self, first: int, end: int) -> list[int]:
        """Numbers of the rows read in the steps first .. end - 1; past the end it starts again."""
        return [
            self._reads[place % len(self._reads)]
            for place in range(first * self.size, end * self.size)
        ]

    def _batch(
        self, documents, cache: FeatureCache | None, rows: list[list[int]], length: int, step: int
    ) -> TokenBatch:
        packed = chats.lay_out(documents, rows, length)
        output = None if cache is None else self._output(documents, cache, rows, length)
        return token_batch(packed, self.device, step, output)

    def _output(
        self, documents, cache: FeatureCache, rows: list[list[int]], length: int
    ) -> TargetOutput:
        """The target's output for these rows, assembled from the stored features of their
        documents.
        """
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
        flat = _joined([part for parts in kept for part in parts])
        head, device = self._target.head, self.device
        stored = (
            flat.hidden.to(device, head.weight.dtype),
            flat.best.long().to(device),
            flat.log_sum.to(device),
        )
        logits = HeadLogits(head, *stored, torch.from_numpy(place).to(device))
        return TargetOutput(features.to(device, self._target.dtype), logits)


Text = FixedText | StreamedText


def training_text(
    model, tokenizer, source: ChatSource, settings: Settings, state_dir: Path, budget: Budget
) -> Text:
    """The training text: the target's own answers and given text.

    The answers are written first if the settings ask for it.
    """
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
        folder = state_dir / f"regenerated-{key}"
        answered = chats.regenerate(
            model, tokenizer, prompts, how, folder=folder, minutes=minutes, seed=seed
        )
    # 2. a stream without end
    if settings.passes is None:
        mixed = chats.mixed_documents(tokenizer, source, answered, settings.regenerated_frac)
        rows = Rows(mixed, seed=seed, length=settings.length, block_rows=32 * settings.batch)
        return StreamedText(rows, settings.batch, device)
    # 3. or a fixed text, a part of which is held out
    if not answered and not isinstance(source, ChatList):
        why = "text that is read in passes must be a list of conversations"
        raise SpecdecError(f"{why}; give --data FILE, or no passes.")
    learned, held_out = split(answered or source.conversations, settings)
    documents = [chats.conversation_document(tokenizer, chat) for chat in learned]
    measured = [chats.conversation_document(tokenizer, chat) for chat in held_out]
    return FixedText(documents, measured, settings, seed, device)


def split(
    conversations: Sequence[list[dict]], settings: Settings
) -> tuple[list[list[dict]], list[list[dict]]]:
    """(training, held out): the side of a conversation depends only on its prompt.

    A conversation's own `part` takes precedence. If answers record their temperature, only greedy
    ones are used for measurements.
    """
    learned, held_out = [], []
    for chat in conversations:
        prompt = "\n".join(message["content"] for message in chat if message["role"] != "assistant")
        share = int(hashlib.sha256(prompt.encode()).hexdigest()[:8], 16) / 16**8
        part = chat[-1].get(
            "part", "held-out" if settings.held_out and share < settings.held_out_frac else "train"
        )
        (held_out if part == "held-out" else learned).append(chat)
    if not learned:
        raise SpecdecError(f"all {len(held_out)} conversations are held out; give more of them.")
    greedy = [chat for chat in held_out if not chat[-1].get("temperature")]
    if settings.held_out and not greedy:
        why = f"no greedy answer among {len(conversations)} conversations is held out"
        raise SpecdecError(f"{why}; give more of them, raise held_out_frac, or set held_out to 0.")
    return learned, greedy[: settings.held_out]
