"""Training text of drafters: conversations, the target's own answers, and rows of packed tokens.

While decoding, a drafter only sees contexts written by the target. So the target rewrites the
answers of the training conversations (EAGLE-3 section 4). Batches come from an endless stream of
rows, or from a fixed set of documents, and depend only on the seed and the number of the step.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tqdm.auto import tqdm

from specdec import runs
from specdec.errors import SpecdecError, unreadable
from specdec.stored import json_line, read_text
from specdec.training.drafter.objective import TokenBatch
from specdec.training.drafter.presets import Budget, Settings

# replaces an answer, to see what is around it
MARK = "\ue000answer\ue001"
USER, ANSWER = 1, 2  # roles of tokens in files of tokens; 0 are the template's and given ones
TOKENS = ".tokens.safetensors"


class Document(NamedTuple):
    """One text: ids [T], and answer [T], the tokens an assistant wrote, end of turn included.

    temperature and part ("held-out": only measured on): of a chat that the target wrote.
    """

    ids: np.ndarray
    answer: np.ndarray
    temperature: float = 0.0
    part: str | None = None


def conversation_document(tokenizer, messages: list[dict] | Document) -> Document:
    """A whole conversation under the tokenizer's own chat template, or what is one already.

    An answer starts where the generation prompt ends (or at the content, if the template alters
    history) and includes the end-of-turn token. Raises SpecdecError without a chat template.
    """
    if isinstance(messages, Document):
        if messages.ids.max() >= len(tokenizer):
            raise SpecdecError("these tokens are of another tokenizer; take the target's own.")
        return messages
    if not getattr(tokenizer, "chat_template", None):
        why = "the tokenizer has no chat template"
        raise SpecdecError(f"{why}; set tokenizer.chat_template before reading chats.")
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


def load_conversations(path: Path) -> list:
    """Chats of a file, or of all files of a folder in the order of their names.

    JSONL: one object per line with `messages` of role and content. A folder that holds files of
    tokens (`read_tokens`) is read from these alone.
    """
    path = Path(path)
    files = [path]
    if path.is_dir():
        files = sorted(path.glob(f"*{TOKENS}")) or sorted(path.glob("*.npz"))
        files = files or sorted(path.glob("*.jsonl"))
    chats: list = []
    for file in files:
        chats += read_tokens(file) if file.suffix in (".safetensors", ".npz") else read_chats(file)
    if not chats:
        raise SpecdecError(f"{path} holds no conversation; write one chat per line as JSON.")
    return chats


def read_chats(file: Path) -> list[list[dict]]:
    """The chats of one file, of which there may be none."""
    chats = []
    # texts may contain other line ends
    for number, line in enumerate(read_text(file, "give a JSONL file of chats").split("\n"), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            chats.append(_parse_chat(json_line(line, where, "write one JSON object per line")))
        except (KeyError, TypeError, AttributeError) as error:
            why = f"{where}: not a chat with an answer ({error})"
            raise SpecdecError(f"{why}; correct or drop the line.") from None
    return chats


def _parse_chat(record: dict) -> list[dict]:
    messages = []
    for turn in record["messages"]:
        is_turn = turn["role"] in ("user", "assistant", "system")
        if not is_turn or not isinstance(turn["content"], str):
            raise TypeError("a message needs a role and a text")
        messages.append({"role": turn["role"], "content": turn["content"]})
    if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in messages):
        raise TypeError("no assistant turn to train on")
    return messages


def read_tokens(file: Path) -> list[Document]:
    """Chats of a file of `generate_data`, or of an .npz with rows of chats one after the other.

    The latter holds tokens, roles and heats (tenths of the temperature), [rows, T] each; every row
    begins with a chat, and the first two tokens of a chat occur nowhere else.
    """
    load = np.load if Path(file).suffix == ".npz" else load_file
    try:
        stored = dict(load(file))
        tokens, roles = stored["tokens"].astype(np.int64), stored["roles"]
        answer = roles == ANSWER
        pieces = []
        if "lengths" in stored:
            ends = stored["lengths"].cumsum()
            of_chats = (ends, stored["lengths"], stored["temperatures"], stored["held_out"])
            for end, length, temperature, held_out in zip(*of_chats, strict=True):
                chat = slice(end - length, end)
                part = "held-out" if held_out else "train"
                pieces.append(Document(tokens[chat], answer[chat], float(temperature), part))
        else:
            heads = (tokens[:, :-1] == tokens[0, 0]) & (tokens[:, 1:] == tokens[0, 1])
            for row, head in enumerate(heads & (roles[:, :-1] == 0)):
                # the last one of a row was cut
                for begin, end in pairwise(np.flatnonzero(head)):
                    chat = (row, slice(begin, end))
                    heat = float(stored["heats"][chat][answer[chat]].max(initial=0)) / 10
                    pieces.append(Document(tokens[chat], answer[chat], heat))
    except (OSError, ValueError, KeyError, IndexError, SafetensorError) as error:
        raise unreadable(file, error, "tokens of chats", "write it anew") from error
    return [piece for piece in pieces if piece.answer.any()]


class ChatList:
    """A source of conversations: a fixed list, in a new order for each block of rows."""

    def __init__(self, conversations: Sequence[list[dict]]):
        self.conversations = list(conversations)
        chats: list = []
        for chat in self.conversations:
            if isinstance(chat, Document):
                chat = hashlib.sha256(chat.ids.tobytes() + chat.answer.tobytes()).hexdigest()
            chats.append(chat)
        self.key = runs.content_key(chats=chats)

    def prompts(self, seed: int, count: int) -> list[list[dict]]:
        """At most `count` conversations whose answers the target will rewrite; no Documents."""
        return [chat for chat in self.conversations if not isinstance(chat, Document)][:count]

    def stream(self, block_seed: str) -> Iterator[list[dict]]:
        """Conversations of one block of rows."""
        rng = random.Random(f"chats/{block_seed}")
        while True:
            yield from rng.sample(self.conversations, len(self.conversations))


def cut(document: Document, length: int) -> Document:
    """Its first `length` tokens."""
    return document._replace(ids=document.ids[:length], answer=document.answer[:length])


def first_fit(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Numbers of documents per row: the longest first, each into the first row with room."""
    rows: list[list[int]] = [[]]
    room = np.full(len(lengths) + 1, length)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        # the last row is always empty
        row = int((room[: len(rows)] >= lengths[index]).argmax())
        if row == len(rows) - 1:
            rows.append([])
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows[:-1]


def lay_out(
    documents: Sequence[Document], rows: Sequence[Sequence[int]], length: int
) -> TokenBatch:
    """Documents one after the other in the rows that name them, then padding."""
    shape = (len(rows), length)
    ids = torch.zeros(shape, dtype=torch.long)
    answer = torch.zeros(shape, dtype=torch.bool)
    document = torch.full_like(ids, -1)
    for row, members in enumerate(rows):
        begin = 0
        for index in members:
            end = begin + len(documents[index].ids)
            ids[row, begin:end] = torch.from_numpy(documents[index].ids)
            answer[row, begin:end] = torch.from_numpy(documents[index].answer)
            document[row, begin:end] = index
            begin = end
    return TokenBatch(ids, answer, document)


def token_batch(batch: TokenBatch, device, step: int = 0, rows=slice(None)) -> TokenBatch:
    """Rows of a batch on a device."""
    parts = (batch.ids, batch.loss_mask, batch.documents)
    return TokenBatch(*(part[rows].to(device) for part in parts), step)


# conversations that the target answers at a time, and its temperature where it is not greedy
ANSWERED_ROWS = 64
ANSWER_TEMPERATURE = 0.8


def regenerate(
    model, tokenizer, prompts, *, folder, max_new_tokens=256, greedy_frac=0.5, minutes=None, seed=0
) -> list[list[dict]]:
    """Each conversation with every assistant turn rewritten by the model, turn after turn.

    folder: stores a shard per batch; existing shards are not written again. greedy_frac of the
    batches are greedy, the others sampled. minutes: time limit; returns what is done.
    """
    shards = runs.Shards(Path(folder))
    done = set(shards.done())

    # 1. conversations of similar longest answer share a batch; batches come in random order
    def longest(index: int) -> int:
        return max(len(turn["content"]) for turn in prompts[index] if turn["role"] == "assistant")

    order = sorted(range(len(prompts)), key=longest)
    begins = range(0, len(order), ANSWERED_ROWS)
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(begins), generator=generator).tolist()
    # 2. batch after batch, as far as the time goes
    began_s = time.monotonic()
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
        is_greedy = (number + 1) * greedy_frac % 1.0 < greedy_frac
        temperature = 0.0 if is_greedy else ANSWER_TEMPERATURE
        members = order[begins[place] : begins[place] + ANSWERED_ROWS]
        chats = [prompts[index] for index in members]
        answered = answer(chats, model, tokenizer, temperature, max_new_tokens)
        written += answered
        shards.write(number, pd.DataFrame({"messages": [json.dumps(chat) for chat in answered]}))
    return written


@torch.no_grad()
def answer(conversations, model, tokenizer, temperature, max_new_tokens) -> list[list[dict]]:
    """The conversations with new assistant turns; greedy at temperature 0."""
    ends = {"pad_token_id": tokenizer.pad_token_id, "do_sample": bool(temperature)}
    if temperature:
        ends |= {"temperature": temperature, "top_k": 0}
    longest = getattr(model.config, "max_position_embeddings", None) or 10**9
    how = dict(padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    chats: list[list[dict]] = [[] for _ in conversations]
    for turn in range(max(map(len, conversations))):
        unanswered = []
        for chat, messages in zip(chats, conversations, strict=True):
            if turn < len(messages) and messages[turn]["role"] == "assistant":
                unanswered.append(chat)
            elif turn < len(messages):
                chat.append(messages[turn])
        if not unanswered:
            continue
        texts = tokenizer.apply_chat_template(
            unanswered, tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(texts, return_token_type_ids=False, **how).to(model.device)
        prompt_tok = inputs["input_ids"].shape[1]
        if prompt_tok >= longest:
            why = "a conversation fills the target's whole context"
            raise SpecdecError(f"{why}; shorten or drop it before training.")
        room = min(max_new_tokens, longest - prompt_tok)
        ids = model.generate(**inputs, max_new_tokens=room, **ends)[:, prompt_tok:]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        for chat, text in zip(unanswered, texts, strict=True):
            chat.append({"role": "assistant", "content": text})
    return chats


class StreamedText:
    """Rows without end, in blocks of 32 batches; block b depends on (seed, b) alone.

    A document is an answer of the target's own with probability settings.regenerated_frac.
    """

    steps = None
    held_out = ()

    def __init__(self, tokenizer, source, answered: list, settings: Settings, seed: int, device):
        self.tokenizer = tokenizer
        self.source = source
        self.answers = [conversation_document(tokenizer, chat) for chat in answered]
        self.settings = settings
        self.seed = seed
        self.device = device
        self._block: tuple[int, TokenBatch | None] = (-1, None)

    def answer_counts(self, vocabulary: int) -> np.ndarray:
        """How often each token occurs in an answer of the first block, [V]."""
        first = self.block(0)
        return np.bincount(first.ids[first.loss_mask], minlength=vocabulary)

    def batch(self, number: int) -> TokenBatch:
        size = self.settings.batch
        index, place = divmod(number, 32)
        if self._block[0] != index:
            self._block = (index, self.block(index))
        rows = slice(place * size, (place + 1) * size)
        return token_batch(self._block[1], self.device, number, rows)

    def block(self, index: int) -> TokenBatch:
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
        documents = [cut(document, length) for document in documents]
        rows = first_fit([len(item.ids) for item in documents], length)[:count]
        packed = lay_out(documents, rows + [[]] * (count - len(rows)), length)
        order = list(range(count))
        random.Random(f"rows/{self.seed}/{index}").shuffle(order)
        return token_batch(packed, "cpu", rows=order)

    def _documents(self, block_seed: str) -> Iterator[Document]:
        rng = random.Random(f"mixed/{block_seed}")
        stream = self.source.stream(f"drafter/{block_seed}" if self.answers else block_seed)
        queue: list[int] = []
        while True:
            if not self.answers or rng.random() >= self.settings.regenerated_frac:
                yield conversation_document(self.tokenizer, next(stream))
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
        self.documents = [cut(document, self.length) for document in documents]
        self.held_out = [cut(document, self.length) for document in held_out]
        # numbers of the documents in each row, and of the rows in the order of reading
        self.rows = first_fit([len(item.ids) for item in self.documents], self.length)
        self._reads: list[int] = []
        for number in range(settings.passes):
            order = list(range(len(self.rows)))
            random.Random(f"passes/{seed}/0/{number}").shuffle(order)
            self._reads += order
        self.steps = max(1, len(self._reads) // self.size)

    def answer_counts(self, vocabulary: int) -> np.ndarray:
        """How often each token occurs in an answer, [V]."""
        answers = [document.ids[document.answer] for document in self.documents]
        return np.bincount(np.concatenate(answers), minlength=vocabulary)

    def batch(self, number: int) -> TokenBatch:
        places = range(number * self.size, (number + 1) * self.size)
        # past the end it starts again
        rows = [self.rows[self._reads[place % len(self._reads)]] for place in places]
        packed = lay_out(self.documents, rows, self.length)
        return token_batch(packed, self.device, number)

    def held_out_texts(self) -> Iterator[TokenBatch]:
        """The held-out documents, a row each."""
        for document in self.held_out:
            row = lay_out([document], [[0]], len(document.ids))
            yield token_batch(row, self.device)


def training_text(
    model, tokenizer, source, settings: Settings, state_dir: Path, budget: Budget
) -> FixedText | StreamedText:
    """The training text; the target's own answers are written first if the settings ask for it."""
    seed = budget.seed
    device = torch.device(model.device)
    # 1. the target's own answers
    answered: list = []
    if settings.regenerate_chats:
        prompts = source.prompts(seed, settings.regenerate_chats)
        key = runs.content_key(prompts=prompts, seed=seed, most=settings.max_new_tokens)[:12]
        how = {"seed": seed, "max_new_tokens": settings.max_new_tokens}
        if budget.minutes is not None:
            # a resumed run adds no text
            resumed = (state_dir / "checkpoint.safetensors").is_file()
            how["minutes"] = 0 if resumed else budget.minutes / 4
        folder = state_dir / f"regenerated-{key}"
        answered = regenerate(model, tokenizer, prompts, folder=folder, **how)
    # 2. a stream without end
    if settings.passes is None:
        return StreamedText(tokenizer, source, answered, settings, seed, device)
    # 3. or a fixed text, a part of which is held out
    if not answered and not isinstance(source, ChatList):
        raise SpecdecError("passes need a list of conversations; give --data FILE, or no passes.")
    parts = []
    for part in split(answered or source.conversations, settings):
        parts.append([conversation_document(tokenizer, chat) for chat in part])
    return FixedText(*parts, settings, seed, device)


def split(conversations: list, settings: Settings) -> tuple[list, list]:
    """(training, held out): by a conversation's own `part`, else by its prompt alone.

    If answers record their temperature, only greedy ones are used for measurements.
    """
    held_out_frac = settings.held_out_frac if settings.held_out else 0.0
    learned = []
    held_out = []
    for chat in conversations:
        if isinstance(chat, Document):
            prompt, marks = chat.ids[~chat.answer].tobytes(), chat._asdict()
        else:
            questions = [turn["content"] for turn in chat if turn["role"] != "assistant"]
            prompt, marks = "\n".join(questions).encode(), chat[-1]
        place = int(hashlib.sha256(prompt).hexdigest()[:8], 16) / 16**8
        part = marks.get("part") or ("held-out" if place < held_out_frac else "train")
        if part == "train":
            learned.append(chat)
        elif not marks.get("temperature"):
            held_out.append(chat)
    if not learned or (settings.held_out and not held_out):
        why = f"of {len(conversations)} conversations none are "
        why += "held out (greedy answers only)" if learned else "left to learn from"
        raise SpecdecError(f"{why}; give more, or change held_out_frac.")
    return learned, held_out[: settings.held_out]
