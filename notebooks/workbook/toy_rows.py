"""Rows for training a small target: the corpus, source of the standard library in the gaps, and tasks of copying at first.

Knows nothing about models or optimisers.
"""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from specdec.training.drafter.chats import ANSWER, LIBRARY, PROMPT, Batch, Document, Rows, pack

HALF_LIFE = 16  # blocks after which the share of copy tasks has halved
SKIPPED_PARTS = set(
    "site-packages dist-packages test tests idlelib idle_test lib2to3 turtledemo __pycache__ encodings pydoc_data "
    "ensurepip unicodedata lib-dynload __phello__".split()
)
LARGEST_BYTES = 200_000  # larger modules are data tables or monoliths that would dominate


def library_text() -> Iterator[tuple[str, str]]:
    """(module name, source) of this Python's standard library, sorted by name.

    Left out: one top-level package in eight, by the hash of its name, and sources that are not ASCII.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if SKIPPED_PARTS.intersection(parts) or path.stat().st_size > LARGEST_BYTES:
            continue
        name = ".".join(parts)[: -len(".py")].removesuffix(".__init__")
        if hashlib.sha256(name.split(".")[0].encode()).digest()[0] % 8 == 0:
            continue
        text = path.read_bytes().decode("latin-1").replace("\r\n", "\n")
        if text.strip() and text.isascii():
            yield name, text


def library_ids(tokenizer, texts: Iterable[str] | None = None) -> list[np.ndarray]:
    """Each library module as ids [T] (bos first); `texts` replaces the library in tests."""
    sources = [text for _, text in library_text()] if texts is None else list(texts)
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    coded = tokenizer(sources, add_special_tokens=False, verbose=False)["input_ids"]
    return [np.array(bos + ids, dtype=np.int64) for ids in coded]


def copy_task(rng: random.Random, vocabulary: Sequence[int], bos: int) -> Document:
    """A few random tokens, then spans of them again: only copying predicts the spans.

    Sources are 2 to 24 tokens, short ones as frequent as long ones, because a model with untrained attention learns
    from the short ones first. Only tokens predictable by copying count as ANSWER.
    """
    source = rng.choices(vocabulary, k=round(2 * 12 ** rng.random()))
    ids, kind = [bos, *source], [PROMPT] * (1 + len(source))
    while len(ids) < 48:
        begin = rng.randrange(len(source)) if len(source) > 4 else 0
        span = source[begin : begin + rng.randint(4, 20)]
        ids += span
        kind += [PROMPT] + [ANSWER] * (len(span) - 1)
    return Document(np.array(ids, dtype=np.int64), np.array(kind, dtype=np.uint8))


def library_piece(rng: random.Random, modules: Sequence[np.ndarray], chances: Sequence[int], length: int) -> Document:
    """At most `length` tokens of a random module: from its start one time in four, else from a random place."""
    module = rng.choices(modules, cum_weights=chances)[0]
    start = 0 if rng.random() < 0.25 else rng.randrange(max(1, len(module) - length // 2))
    ids = module[start : start + length]
    return Document(ids, np.full(len(ids), LIBRARY, dtype=np.uint8))


def fill_gaps(packed: Batch, fill: Callable[[int], Document]) -> None:
    """Put documents in place of the padding at the ends of rows. fill(room) makes one of at most so many tokens."""
    number = int(packed.document.max(initial=-1))
    for ids, kind, document in zip(*packed, strict=True):
        while room := int((document < 0).sum()):
            piece, number = fill(room), number + 1
            span = slice(len(ids) - room, len(ids) - room + len(piece.ids))
            ids[span], kind[span], document[span] = *piece, number


class MixedRows(Rows):
    """Rows of chats, copy tasks and library source.

    library: ids of whole modules, or an empty list (gaps then stay padding).
    library_frac: share of the tokens left to library source.
    copy_task: makes one Document from a random.Random. They start at `copy_task_frac` of the tokens and decay.
    """

    def __init__(
        self,
        chats,
        library: Sequence[np.ndarray],
        copy_task: Callable[[random.Random], Document],
        *,
        library_frac: float = 0.15,
        copy_task_frac: float = 0.0,
        **shape,
    ):
        super().__init__(chats, **shape)
        self.library, self.library_frac = library, library_frac if library else 0.0
        self.copy_task, self.copy_task_frac = copy_task, copy_task_frac
        self._chances = np.cumsum([len(module) for module in library]).tolist()

    def packed(self, index: int, rng: random.Random) -> Batch:
        budget_tok, tasks = (1 - self.library_frac) * self.block_rows * self.length, []
        for_chats = budget_tok * (1 - self.copy_task_share(index))
        while budget_tok > for_chats:
            tasks.append(self.copy_task(rng))
            budget_tok -= len(tasks[-1].ids)
        documents = tasks + self.documents(index, budget_tok)
        packed = pack(documents, self.block_rows, self.length)
        if self.library:
            fill_gaps(packed, lambda room: library_piece(rng, self.library, self._chances, room))
        return packed

    def copy_task_share(self, index: int) -> float:
        """Share of copy tasks in block `index`."""
        return self.copy_task_frac * 0.5 ** (index / HALF_LIFE)
