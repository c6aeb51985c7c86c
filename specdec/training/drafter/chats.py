"""Training text of drafters: conversations, the target's own answers, and rows of packed tokens.

While decoding, a drafter only sees contexts written by the target. So the target rewrites the
answers of the training conversations (EAGLE-3 section 4). Documents never cross rows.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from specdec import runs
from specdec.errors import SpecdecError
from specdec.stored import json_line, read_text

# replaces an answer, to see what the template puts around it
MARK = "\ue000answer\ue001"
ROLES = ("user", "assistant", "system")


class Batch(NamedTuple):
    """Packed rows: ids [B, S] int64; answer [B, S] bool; document [B, S] int64, -1 for padding."""

    ids: np.ndarray
    answer: np.ndarray
    document: np.ndarray


class Document(NamedTuple):
    """One text: ids [T], and answer [T], the tokens an assistant wrote, end of turn included."""

    ids: np.ndarray
    answer: np.ndarray


def conversation_document(tokenizer, messages: list[dict]) -> Document:
    """A whole conversation under the tokenizer's own chat template.

    An answer starts where the generation prompt ends (or at the content, if the template alters
    history) and includes the end-of-turn token. A last message with `answer_ids` is used as
    sampled, token by token, and is the only answer. Raises SpecdecError without a chat template.
    """
    if not getattr(tokenizer, "chat_template", None):
        why = "the tokenizer has no chat template"
        raise SpecdecError(f"{why}; set tokenizer.chat_template before reading chats.")
    # 1. an answer with the ids that were sampled
    if "answer_ids" in messages[-1]:
        sampled = messages[-1]["answer_ids"]
        if max(sampled) >= len(tokenizer):
            raise SpecdecError("the answer_ids are of another tokenizer; take the target's.")
        text = tokenizer.apply_chat_template(
            messages[:-1], tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = np.array([*prompt, *sampled], dtype=np.int64)
        return Document(ids, np.arange(len(ids)) >= len(prompt))
    # 2. answers as texts
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = np.array(coded["offset_mapping"], dtype=np.int64).reshape(-1, 2)[:, 0]
    answer = np.zeros(len(starts), dtype=bool)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            begin, end = _answer_span(tokenizer, messages, index, text)
            answer |= (starts >= begin) & (starts < end)
    return Document(np.array(coded["input_ids"], dtype=np.int64), answer)


def _answer_span(tokenizer, messages: list[dict], index: int, text: str) -> tuple[int, int]:
    """(begin, end) in characters of an answer in the rendered `text`, end of turn included."""

    def rendered(part: list[dict], **options) -> str:
        return tokenizer.apply_chat_template(part, tokenize=False, **options)

    # 1. whatever the template and the message, a mark shows what is written around it
    earlier = messages[:index]
    later = messages[index + 1 :]
    marked = {**messages[index], "content": MARK}
    before, mark, after = rendered([*earlier, marked, *later]).partition(MARK)
    assert mark, f"the chat template drops the answer of message {index}"
    # 2. the beginning: after the generation prompt, if the text has it
    prompt = rendered(earlier, add_generation_prompt=True)
    if not text.startswith(prompt):
        prompt = commonprefix([text, before])
    # 3. the end: with the end of turn, which another turn after it would hide
    end = len(text) - len(commonprefix([text[::-1], after[::-1]]))
    closing = rendered([*earlier, marked]).partition(MARK)[2].rstrip("\n")
    if text.startswith(closing, end):
        end += len(closing)
    return len(prompt), end


def load_conversations(path: Path) -> list[list[dict]]:
    """Chats of a JSONL file, or of all *.jsonl files of a folder in the order of their names.

    One object per line with `messages` of role and content. With `answer_ids` (the ids that the
    target sampled), these, `temperature` and `part` ("held-out": only measured on) are stored in
    the last message, the answer; it may be missing from `messages`.
    """
    path = Path(path)
    chats = []
    for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
        chats += read_chats(file)
    if not chats:
        why = f"{path} holds no conversation"
        raise SpecdecError(f"{why}; give a JSONL file with one chat per line.")
    return chats


def read_chats(file: Path) -> list[list[dict]]:
    """The chats of one file, of which there may be none."""
    chats = []
    # texts may contain other line ends
    for number, line in enumerate(read_text(file, "give a JSONL file of chats").split("\n"), 1):
        where = f"{file}, line {number}"
        if not line.strip():
            continue
        record = json_line(line, where, "write one JSON object per line")
        try:
            chats.append(_parse_chat(record))
        except (KeyError, TypeError, AttributeError) as error:
            why = f"{where}: not a chat with an answer ({error})"
            raise SpecdecError(f"{why}; correct or drop the line.") from None
    return chats


def _parse_chat(record: dict) -> list[dict]:
    messages = []
    for turn in record["messages"]:
        if turn["role"] not in ROLES or not isinstance(turn["content"], str):
            raise TypeError("a message needs a role and a text")
        messages.append({"role": turn["role"], "content": turn["content"]})
    if "answer_ids" in record:
        ids = record["answer_ids"]
        if not ids or not all(type(token) is int for token in ids):
            raise TypeError("answer_ids must be a list of token ids")
        if messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1] |= {"answer_ids": ids, "temperature": record.get("temperature")}
        if "part" in record:
            messages[-1]["part"] = record["part"]
        return messages
    for message in messages:
        if message["role"] == "assistant" and message["content"].strip():
            return messages
    raise TypeError("no assistant turn to train on")


class ChatList:
    """A source of conversations: a fixed list, in a new order for each block of rows.

    key: distinguishes sources in the plan of a run; None for one that is the same everywhere.
    """

    def __init__(self, conversations: Sequence[list[dict]]):
        self.conversations = list(conversations)
        self.key = runs.content_key(chats=self.conversations)

    def prompts(self, seed: int, count: int) -> list[list[dict]]:
        """At most `count` conversations whose answers the target will rewrite."""
        return self.conversations[:count]

    def stream(self, block_seed: str) -> Iterator[list[dict]]:
        """Conversations of one block of rows."""
        rng = random.Random(f"chats/{block_seed}")
        count = len(self.conversations)
        while True:
            for index in rng.sample(range(count), count):
                yield self.conversations[index]


def cut(document: Document, length: int) -> Document:
    """Its first `length` tokens."""
    return Document(document.ids[:length], document.answer[:length])


def first_fit(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Numbers of documents per row: the longest first, each into the first row with room."""
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
    """Documents one after the other in the rows that name them, then padding."""
    shape = (len(rows), length)
    batch = Batch(np.zeros(shape, np.int64), np.zeros(shape, bool), np.full(shape, -1, np.int64))
    for row, members in enumerate(rows):
        begin = 0
        for index in members:
            end = begin + len(documents[index].ids)
            batch.ids[row, begin:end] = documents[index].ids
            batch.answer[row, begin:end] = documents[index].answer
            batch.document[row, begin:end] = index
            begin = end
    return batch


# conversations that the target answers at a time, and its temperature where it is not greedy
ANSWERED_ROWS = 64
ANSWER_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Regeneration:
    """How the target rewrites answers: greedy_frac of the batches greedily, the rest sampled."""

    greedy_frac: float = 0.5
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

    folder: stores a shard per batch; existing shards are not written again. minutes: time limit;
    returns what is done.
    """
    shards = runs.Shards(Path(folder))
    done = set(shards.done())
    # 1. conversations of similar longest answer share a batch; batches come in random order
    longest = []
    for chat in conversations:
        answers = [message["content"] for message in chat if message["role"] == "assistant"]
        longest.append(max(map(len, answers)))
    order = sorted(range(len(longest)), key=longest.__getitem__)
    begins = range(0, len(order), ANSWERED_ROWS)
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(begins), generator=generator).tolist()
    # 2. batch after batch, as far as the time goes
    began_s = time.monotonic()
    batches = 0
    written = []
    for number, place in enumerate(tqdm(shuffled, desc="regenerate", unit="batch")):
        if number in done:
            stored = runs.read_table(shards.path(number))["messages"]
            written += [json.loads(text) for text in stored]
            continue
        if minutes is not None and time.monotonic() - began_s >= 60 * minutes:
            break
        # sampling inside generate uses the global generator
        torch.manual_seed(seed * 1_000_003 + number)
        # spreads the greedy batches evenly
        is_greedy = (number + 1) * how.greedy_frac % 1.0 < how.greedy_frac
        temperature = 0.0 if is_greedy else ANSWER_TEMPERATURE
        members = order[begins[place] : begins[place] + ANSWERED_ROWS]
        chats = [conversations[index] for index in members]
        answered = _answer(chats, model, tokenizer, temperature, how.max_new_tokens)
        written += answered
        shards.write(number, pd.DataFrame({"messages": [json.dumps(chat) for chat in answered]}))
        batches += 1
        if batches == 1:
            left = len(shuffled) - number - 1
            print_estimate("writing answers", left, time.monotonic() - began_s, minutes)
    return written


def print_estimate(what: str, left: float, each_s: float, minutes: float | None = None) -> None:
    """Say how long the steps that are left will take, if that is more than a minute."""
    total = left * each_s / 60
    if minutes is not None:
        total = min(total, minutes)
    if total > 1:
        tqdm.write(f"{what}: about {total:.0f} minutes")


def _answer(
    conversations, model, tokenizer, temperature: float, max_new_tokens: int
) -> list[list[dict]]:
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
    template = dict(tokenize=False, add_generation_prompt=True)
    texts = [tokenizer.apply_chat_template(chat, **template) for chat in chats]
    how = dict(padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    inputs = tokenizer(texts, return_token_type_ids=False, **how).to(model.device)
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
