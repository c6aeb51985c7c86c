"""Training text of drafters: conversations, the target's own answers, and rows of packed tokens.

While decoding, a drafter only sees contexts written by the target. So the target rewrites the
answers of the training conversations (EAGLE-3 section 4), and they are mixed with the given text.

Rows are a pure function of (seed, step), so that a resumed run sees the same batches as an
uninterrupted one. Documents never cross rows, and each row marks the document of every token.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from specdec import runs
from specdec.errors import SpecdecError
from specdec.stored import json_line, read_text

# kinds of tokens in Batch.kind
PADDING, PROMPT, ANSWER, LIBRARY = 0, 1, 2, 3
# replaces an answer, to see what the template puts around it
MARK = "\ue000answer\ue001"
# roles as ShareGPT and UltraChat call them
_ROLE_NAMES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


class Batch(NamedTuple):
    """Packed rows.

    ids [B, S] int64; kind [B, S] uint8 (PADDING..LIBRARY); document [B, S] int64, -1 for padding.
    """

    ids: np.ndarray
    kind: np.ndarray
    document: np.ndarray

    @property
    def answer_mask(self) -> np.ndarray:
        """[B, S] bool: tokens an assistant wrote, end of turn included."""
        return self.kind == ANSWER


class Document(NamedTuple):
    """One text: ids [T] and kind [T]."""

    ids: np.ndarray
    kind: np.ndarray


def conversation_document(tokenizer, messages: list[dict]) -> Document:
    """A whole conversation under the tokenizer's own chat template, as PROMPT and ANSWER tokens.

    Assistant spans are found by rendering the chat with a mark in the answer's place, so that any
    template works, including those that rewrite earlier turns. A span starts where the generation
    prompt ends (or at the content, if the template alters history) and includes the end-of-turn
    token. A last message with `answer_ids` is used as sampled, token by token, and is the only
    answer. Raises SpecdecError without a chat template or without a fast tokenizer.
    """
    if not getattr(tokenizer, "chat_template", None):
        why = "the tokenizer has no chat template"
        raise SpecdecError(f"{why}; set tokenizer.chat_template before reading chats.")
    if "answer_ids" in messages[-1]:
        return _sampled_document(tokenizer, messages)
    if not tokenizer.is_fast:
        why = "the tokenizer reports no character offsets"
        raise SpecdecError(f"{why}; load its fast version (use_fast=True).")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = np.array(coded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
    kind = np.full(len(starts), PROMPT, dtype=np.uint8)
    for begin, end in _answer_spans(tokenizer, messages, text):
        kind[(starts >= begin) & (starts < end)] = ANSWER
    return Document(np.array(coded["input_ids"], dtype=np.int64), kind)


def _sampled_document(tokenizer, messages: list[dict]) -> Document:
    """A chat whose last message holds the ids of its answer."""
    answer = messages[-1]["answer_ids"]
    if not 0 <= min(answer) <= max(answer) < len(tokenizer):
        raise SpecdecError(f"answer_ids {min(answer)} to {max(answer)} are of another tokenizer.")
    text = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    kind = np.full(len(prompt) + len(answer), PROMPT, dtype=np.uint8)
    kind[len(prompt) :] = ANSWER
    return Document(np.array([*prompt, *answer], dtype=np.int64), kind)


def _answer_spans(tokenizer, messages: list[dict], text: str) -> Iterator[tuple[int, int]]:
    """(begin, end) in characters of each answer in the rendered `text`, end of turn included."""

    def rendered(part: list[dict], **options) -> str:
        return tokenizer.apply_chat_template(part, tokenize=False, **options)

    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        # 1. whatever the template and the message, a mark shows what is written around it
        earlier = messages[:index]
        later = messages[index + 1 :]
        marked = {**message, "content": MARK}
        before, mark, after = rendered([*earlier, marked, *later]).partition(MARK)
        if not mark:
            why = f"the chat template drops the answer of message {index}"
            raise SpecdecError(f"{why}; use one that keeps it.")
        # 2. the beginning: after the generation prompt, if the text has it
        prompt = rendered(earlier, add_generation_prompt=True)
        if not text.startswith(prompt):
            prompt = commonprefix([text, before])
        # 3. the end: with the end of turn, which another turn after it would hide
        end = len(text) - len(commonprefix([text[::-1], after[::-1]]))
        closing = after
        if later:
            closing = rendered([*earlier, marked]).partition(MARK)[2]
        closing = closing.rstrip("\n")
        if text.startswith(closing, end):
            end += len(closing)
        yield len(prompt), end


def load_conversations(path: Path) -> list[list[dict]]:
    """Chats of a JSONL file, or of all *.jsonl files of a folder in the order of their names.

    One object per line, ShareGPT (`conversations`: from, value) or UltraChat (`messages`: role,
    content) style. With `answer_ids` (the ids that the target sampled), these, `temperature` and
    `part` ("held-out": only measured on) are stored in the last message, the answer; it may be
    missing from `messages`. SpecdecError names the file and the line for anything else.
    """
    path = Path(path)
    chats = []
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        # texts may contain other line ends
        lines = read_text(file, "give a JSONL file of chats").split("\n")
        for number, line in enumerate(lines, 1):
            if line.strip():
                chats.append(_parse_chat(line, f"{file}, line {number}"))
    if not chats:
        why = f"{path} holds no conversation"
        raise SpecdecError(f"{why}; give a JSONL file with one chat per line.")
    return chats


def _parse_chat(line: str, where: str) -> list[dict]:
    record = json_line(line, where, "write one JSON object per line")
    turns = None
    if isinstance(record, dict):
        turns = record.get("conversations", record.get("messages"))
    if not isinstance(turns, list) or not turns:
        why = f"{where}: no list of turns in `conversations` or `messages`"
        raise SpecdecError(f"{why}; rename the field.")
    messages = [_parse_turn(turn, where) for turn in turns]
    if "answer_ids" in record:
        return _with_answer_ids(messages, record, where)
    for message in messages:
        if message["role"] == "assistant" and message["content"].strip():
            return messages
    raise SpecdecError(f"{where}: no assistant turn to train on; drop the line.")


def _parse_turn(turn, where: str) -> dict:
    role = None
    content = None
    if isinstance(turn, dict):
        role = turn.get("from", turn.get("role"))
        content = turn.get("value", turn.get("content"))
    if role not in _ROLE_NAMES or not isinstance(content, str):
        why = f"{where}: a turn needs a role out of {', '.join(_ROLE_NAMES)} and a text"
        raise SpecdecError(f"{why}; found {json.dumps(turn)[:80]}; correct or drop the line.")
    return {"role": _ROLE_NAMES[role], "content": content}


def _with_answer_ids(messages: list[dict], record: dict, where: str) -> list[dict]:
    ids = record["answer_ids"]
    temperature = record.get("temperature")
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        why = f"{where}: answer_ids must be a list of token ids"
        raise SpecdecError(f"{why}; correct or drop the line.")
    if temperature is not None and not isinstance(temperature, int | float):
        raise SpecdecError(f"{where}: temperature must be a number; correct or drop the line.")
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1] |= {"answer_ids": ids, "temperature": temperature}
    if "part" in record:
        messages[-1]["part"] = record["part"]
    return messages


class ChatSource(Protocol):
    """A source of training conversations. A chat is a list of {"role", "content"}.

    key: distinguishes sources in the plan of a run; None for a source that is the same everywhere.
    """

    key: str | None

    def prompts(self, seed: int, count: int) -> list[list[dict]]:
        """At most `count` conversations whose answers the target will rewrite."""

    def stream(self, block_seed: str) -> Iterator[list[dict]]:
        """Conversations of one block of rows, without end; a function of the seed alone."""


class ChatList:
    """A fixed list of conversations as a ChatSource: each block reads them in a new order."""

    def __init__(self, conversations: Sequence[list[dict]]):
        self.conversations = list(conversations)
        self.key = runs.content_key(chats=self.conversations)

    def prompts(self, seed: int, count: int) -> list[list[dict]]:
        return self.conversations[:count]

    def stream(self, block_seed: str) -> Iterator[list[dict]]:
        rng = random.Random(f"chats/{block_seed}")
        count = len(self.conversations)
        while True:
            for index in rng.sample(range(count), count):
                yield self.conversations[index]


def documents(tokenizer, source: ChatSource) -> Callable[[str], Iterator[Document]]:
    """`chats` of Rows: the tokenised conversations of a source."""

    def chats(block_seed: str) -> Iterator[Document]:
        for chat in source.stream(block_seed):
            yield conversation_document(tokenizer, chat)

    return chats


def mixed_documents(tokenizer, source: ChatSource, own: Sequence[list[dict]], own_frac: float):
    """`chats` of Rows: the target's own answers with probability own_frac, else the source's."""
    as_given = documents(tokenizer, source)
    if not own:
        return as_given
    answered = [conversation_document(tokenizer, chat) for chat in own]

    def chats(block_seed: str) -> Iterator[Document]:
        rng = random.Random(f"mixed/{block_seed}")
        fresh = as_given(f"drafter/{block_seed}")
        queue: list[int] = []
        while True:
            if rng.random() >= own_frac:
                yield next(fresh)
                continue
            if not queue:
                queue = rng.sample(range(len(answered)), len(answered))
            yield answered[queue.pop()]

    return chats


def pack(documents: Sequence[Document], rows: int, length: int) -> Batch:
    """Documents in `rows` rows of `length` tokens, the longest first into the first with room.

    Longer documents are cut to `length`; those that fit nowhere are dropped. Returns a Batch [rows,
    length].
    """
    longest_first = sorted(documents, key=lambda item: -len(item.ids))
    items = [cut(item, length) for item in longest_first]
    members = first_fit([len(item.ids) for item in items], length)[:rows]
    while len(members) < rows:
        members.append([])
    return lay_out(items, members, length)


def cut(document: Document, length: int) -> Document:
    """Its first `length` tokens."""
    return Document(document.ids[:length], document.kind[:length])


def first_fit(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Numbers of documents per row of `length` tokens.

    The longest comes first; each goes into the first row with room.
    """
    rows: list[list[int]] = []
    room = np.zeros(len(lengths), dtype=np.int64)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = np.flatnonzero(room[: len(rows)] >= lengths[index])
        if len(fitting):
            row = int(fitting[0])
        else:
            row = len(rows)
            room[row] = length
            rows.append([])
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def lay_out(documents: Sequence[Document], rows: Sequence[Sequence[int]], length: int) -> Batch:
    """Documents one after the other in the rows that name them; the rest of a row is padding."""
    shape = (len(rows), length)
    ids = np.zeros(shape, np.int64)
    kind = np.zeros(shape, np.uint8)
    owner = np.full(shape, -1, np.int64)
    for row, members in enumerate(rows):
        begin = 0
        for index in members:
            end = begin + len(documents[index].ids)
            ids[row, begin:end] = documents[index].ids
            kind[row, begin:end] = documents[index].kind
            owner[row, begin:end] = index
            begin = end
    return Batch(ids, kind, owner)


class Rows:
    """An endless, deterministic table of packed rows, built in blocks.

    chats: `chats(block_seed)` yields Documents for one block, finitely or infinitely many.
    Block b depends on (seed, b) alone, so row r of step s is the same in every run.
    """

    def __init__(self, chats, *, seed: int, length: int, block_rows: int = 256):
        self.chats = chats
        self.seed = seed
        self.length = length
        self.block_rows = block_rows
        self._block: tuple[int, Batch | None] = (-1, None)

    def block(self, index: int) -> Batch:
        """Block `index` as a Batch [block_rows, length], rows shuffled."""
        rng = random.Random(f"rows/{self.seed}/{index}")
        packed = self.packed(index, rng)
        order = list(range(self.block_rows))
        rng.shuffle(order)
        return Batch(*(field[order] for field in packed))

    def packed(self, index: int, rng: random.Random) -> Batch:
        """The rows of block `index` in the order of packing."""
        documents = self.documents(index, self.block_rows * self.length)
        return pack(documents, self.block_rows, self.length)

    def documents(self, index: int, budget_tok: float) -> list[Document]:
        """Chats of block `index`, until they have so many tokens or end."""
        documents = []
        for document in self.chats(f"{self.seed}/{index}"):
            documents.append(document)
            budget_tok -= min(len(document.ids), self.length)
            if budget_tok <= 0:
                break
        return documents

    def batch(self, step: int, size: int) -> Batch:
        """Rows step * size and following as a Batch [size, length]; `size` divides block_rows."""
        assert self.block_rows % size == 0, "a batch must divide a block of rows"
        index, offset = divmod(step * size, self.block_rows)
        if self._block[0] != index:
            self._block = (index, self.block(index))
        return Batch(*(field[offset : offset + size] for field in self._block[1]))


@dataclass(frozen=True)
class Regeneration:
    """How the target rewrites answers.

    greedy_frac of the batches are decoded greedily, the rest sampled at `temperature`. batch:
    conversations at a time.
    """

    greedy_frac: float = 0.5
    temperature: float = 0.8
    batch: int = 64
    max_new_tokens: int = 256


def regenerate(
    model,
    tokenizer,
    conversations: Sequence[list[dict]],
    how: Regeneration,
    *,
    folder: Path,
    minutes: float | None = None,
    seed: int = 0,
) -> list[list[dict]]:
    """Each conversation with every assistant turn rewritten by the model, turn after turn.

    model: a transformers causal LM. folder: stores a shard per batch; existing shards are not
    written again. minutes: time limit; returns what is done.
    """
    limit_s = float("inf") if minutes is None else 60 * minutes
    shards = runs.Shards(Path(folder))
    done = set(shards.done())
    # 1. conversations of similar length share a batch; batches come in random order
    order = sorted(range(len(conversations)), key=lambda index: _longest(conversations[index]))
    groups = [order[begin : begin + how.batch] for begin in range(0, len(order), how.batch)]
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(groups), generator=generator).tolist()
    # 2. batch after batch, as far as the time goes
    started_s = time.perf_counter()
    written = []
    for number, place in enumerate(tqdm(shuffled, desc="regenerate", unit="batch")):
        if number in done:
            stored = runs.read_table(shards.path(number))["messages"]
            written += [json.loads(text) for text in stored]
            continue
        if time.perf_counter() - started_s > limit_s:
            break
        # sampling inside generate uses the global generator
        torch.manual_seed(seed * 1_000_003 + number)
        # spreads the greedy batches evenly
        is_greedy = (number + 1) * how.greedy_frac % 1.0 < how.greedy_frac
        temperature = 0.0 if is_greedy else how.temperature
        chats = [conversations[index] for index in groups[place]]
        answered = _answer(chats, model, tokenizer, temperature, how.max_new_tokens)
        written += answered
        shards.write(number, pd.DataFrame({"messages": [json.dumps(chat) for chat in answered]}))
    return written


def _longest(chat: list[dict]) -> int:
    """Characters of its longest answer."""
    return max(len(message["content"]) for message in chat if message["role"] == "assistant")


def _answer(
    conversations, model, tokenizer, temperature: float, max_new_tokens: int
) -> list[list[dict]]:
    """The conversations with all assistant turns replaced; greedy at temperature 0."""
    chats: list[list[dict]] = [[] for _ in conversations]
    for turn in range(max(map(len, conversations))):
        unanswered = []
        for chat, messages in zip(chats, conversations, strict=True):
            if turn >= len(messages):
                continue
            if messages[turn]["role"] == "assistant":
                unanswered.append(chat)
            else:
                chat.append(messages[turn])
        if unanswered:
            texts = generate_texts(unanswered, model, tokenizer, temperature, max_new_tokens)
            for chat, text in zip(unanswered, texts, strict=True):
                chat.append({"role": "assistant", "content": text})
    return chats


@torch.no_grad()
def generate_texts(chats, model, tokenizer, temperature: float, max_new_tokens: int) -> list[str]:
    """The next assistant message of each chat; greedy at temperature 0."""
    if tokenizer.pad_token_id is None:
        why = "the tokenizer has no padding token"
        raise SpecdecError(f"{why}; set tokenizer.pad_token (the end-of-text token will do).")
    texts = []
    for chat in chats:
        texts.append(
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        )
    inputs = tokenizer(
        texts,
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=False,
        return_token_type_ids=False,
    ).to(model.device)
    prompt_tok = inputs["input_ids"].shape[1]
    room = (getattr(model.config, "max_position_embeddings", None) or 10**9) - prompt_tok
    if room < 1:
        why = "a conversation fills the target's whole context"
        raise SpecdecError(f"{why}; shorten or drop it before training.")
    sampling = {"do_sample": False}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    sampling["max_new_tokens"] = min(max_new_tokens, room)
    ids = model.generate(**inputs, **sampling, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.batch_decode(ids[:, prompt_tok:], skip_special_tokens=True)
