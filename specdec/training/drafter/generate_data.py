"""Training text from the target itself: chats written in bulk into a folder.

    chats-00000.jsonl                a line per chat: number, part, temperature, messages
    chats-00000.tokens.safetensors   the same chats as the target saw them, in token ids, which
                                     training reads; and the numbers of those that were dropped
    manifest.json                    target and settings

A chat answers one of PROMPTS, or the target makes one up: it continues one of OPENINGS inside the
user's turn. Rows decode in lockstep, a token per step, each chat after chat into the same cache,
where none sees the one before. What is drawn follows from (seed, number of the chat,
position): a chat is the same in any row beside any others, up to rounding in shared products. The
host reads what was written every few steps. No step is a CUDA graph: no GPU was there to try.

The folder can be continued, also after a kill, and holds neither repetitions nor benchmark text.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm

from specdec import runs
from specdec.core.pair import Pair
from specdec.core.tree_config import check_memory
from specdec.data.suites import DATA_VARIABLE, SUITES, load_suite, prompt_digest
from specdec.errors import SpecdecError
from specdec.models.kv_cache import TreeCache, aligned
from specdec.models.pairs import describe_pair
from specdec.models.target import FULL, SLIDING, cache_keyword
from specdec.stored import read_text
from specdec.training.drafter.chats import ANSWER, TOKENS, USER

OPENINGS = Path(__file__).with_name("openings.txt")
PROMPTS = Path(__file__).with_name("prompts.txt")
MARKER = "USERTEXT"  # placeholder for the user's text in the template
PROMPT_TEMPERATURE = 0.9  # of made-up prompts
TEMPERATURES = ((0.0, 0.6), (0.7, 0.2), (1.0, 0.2))  # of answers, each with its share
HOLD_OUT = 0.02  # fraction of chats marked for measurements
READ_STEPS = 16  # steps between two reads from the device
SAVE_S = 3.0  # seconds between two writes
PART = 4096  # chats after which the next part of the folder begins
FATES = ("kept", "unfinished", "empty", "benchmark", "repeated")
FREE = -1  # in a table of forced tokens: the target chooses
ENDED = 4  # added to the role of a chat's last token
# places of a chat's random numbers that are no positions
OF_TEMPERATURE, OF_OPENING = -1, -2


@dataclass(frozen=True)
class ChatConfig:
    """What is written."""

    seed: int = 0
    rows: int | None = None  # chats side by side; None: 64 on a CPU, 2048 on a GPU
    prompt_tok: int = 256  # a made-up prompt that does not end by then is dropped
    answer_tok: int = 320  # longer answers are cut


def generate_chats(
    pair, config=ChatConfig(), out="chats", *, tokens=3_000_000, minutes=None, progress=True
) -> ChatFiles:
    """Let the pair's target write chats into the folder `out`, and continue those in it.

    It ends when the folder holds `tokens` answer tokens, or after `minutes`. Chats that have not
    ended by then are written when it is continued, so a run of few chats a row prefers short ones.
    Chats whose prompt or answer occurs in a suite (embedded, or of SPECDEC_DATA) are dropped, and
    so are repetitions. Raises SpecdecError for a target without a chat template, and for a folder
    of another target or other settings.
    """
    # 1. the writer, and the folder of this target and these settings
    writer = ChatWriter(pair, config)
    settings = dataclasses.asdict(config)
    # it only affects rounding
    del settings["rows"]
    settings |= {"prompt_temperature": PROMPT_TEMPERATURE, "temperatures": TEMPERATURES}
    for name, path in (("openings", OPENINGS), ("prompts", PROMPTS)):
        settings[name] = runs.content_key(texts=read_text(path, "give a file of prompts"))[:16]
    target = describe_pair(dataclasses.replace(pair, drafter=None, name="target"))
    files = ChatFiles(Path(out), {"target": target, "settings": settings}, pair.target.vocab_size)
    # 2. what has ended is stored every few seconds
    began_s = saved_s = time.monotonic()
    bar = tqdm(total=tokens, initial=files.answer_tok, unit="tok", disable=not progress)
    with pair.inference(plain=True), bar:
        writer.begin(files.ended)
        try:
            while files.answer_tok < tokens:
                if minutes is not None and time.monotonic() - began_s >= 60 * minutes:
                    break
                for chat in writer.chats():
                    files.add(*chat)
                bar.update(files.answer_tok - bar.n)
                if time.monotonic() - saved_s >= SAVE_S:
                    files.save()
                    saved_s = time.monotonic()
        finally:
            files.save()
    return files


class ChatFiles:
    """The folder; `identity` is everything that its chats depend on."""

    def __init__(self, folder: Path, identity: dict, vocabulary: int):
        self.folder = Path(folder)
        self.kind = np.uint16 if vocabulary <= 1 << 16 else np.uint32
        self.counts: Counter[str] = Counter()
        self.ended: set[int] = set()  # numbers of chats
        self._benchmark = {prompt_digest(text) for text in benchmark_texts()}
        self._texts: set[bytes] = set()
        self._rows: list[dict] = []  # of the newest part
        # 1. another target or other settings would write other chats
        identity = runs.plain(identity)
        manifest = self.folder / "manifest.json"
        stored = runs.read_json(manifest) if manifest.is_file() else identity
        for name, value in identity.items():
            if stored.get(name) != value:
                why = f"{self.folder} holds chats made with another {name}"
                raise SpecdecError(f"{why}; choose another folder.")
        runs.write_json(manifest, identity)
        # 2. what was written; a kill may have left lines without their tokens
        self._part = 0
        while self._file(TOKENS).is_file():
            part = load_file(self._file(TOKENS))
            self.ended.update(part["numbers"].tolist())
            self.counts.update(FATES[fate] for fate in part["fates"])
            self.counts["answer_tok"] += int((part["roles"] == ANSWER).sum())
            lines = []
            for line in read_text(self._file(".jsonl"), "choose another folder").split("\n")[:-1]:
                row = json.loads(line)
                if row["number"] in self.ended:
                    self._texts |= _digests([turn["content"] for turn in row["messages"]])
                    lines.append(line + "\n")
            runs.write_text(self._file(".jsonl"), "".join(lines))
            self._part += 1

    @property
    def answer_tok(self) -> int:
        return self.counts["answer_tok"]

    def _file(self, ending: str) -> Path:
        return self.folder / f"chats-{self._part:05d}{ending}"

    def add(self, number: int, ids, roles, temperature: float, texts: list[str]) -> None:
        """A chat that has ended: tokens, roles, question and answer; without texts if it failed."""
        fate = self._fate(texts)
        row = {"number": number, "part": "train", "temperature": temperature}
        if fate == "kept":
            place = int.from_bytes(prompt_digest(texts[0])[8:12], "big") / 2**32
            row["part"] = "held-out" if place < HOLD_OUT else "train"
            self._texts |= _digests(texts)
        else:
            ids, roles = ids[:0], roles[:0]
        self.counts[fate] += 1
        self.counts["answer_tok"] += int((roles == ANSWER).sum())
        self.ended.add(number)
        self._rows.append({**row, "texts": texts, "fate": fate, "ids": ids, "roles": roles})

    def _fate(self, texts: list[str]) -> str:
        """Why a chat is dropped, or "kept"."""
        if not texts:
            return "unfinished"
        if not texts[-1].strip():
            return "empty"
        if not self._benchmark.isdisjoint(map(prompt_digest, texts)):
            return "benchmark"
        return "repeated" if self._texts & _digests(texts) else "kept"

    def save(self) -> None:
        """Write the newest part anew; its tokens come last, and say which chats have ended."""
        if not self._rows:
            return
        lines = []
        for row in self._rows:
            if row["fate"] == "kept":
                line = {name: row[name] for name in ("number", "part", "temperature")}
                turns = zip(("user", "assistant"), row["texts"], strict=True)
                line["messages"] = [{"role": role, "content": text} for role, text in turns]
                lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        runs.write_text(self._file(".jsonl"), "".join(lines))
        table = pd.DataFrame(self._rows)
        part = {
            "numbers": table["number"].to_numpy(np.int64),
            "lengths": table["ids"].map(len).to_numpy(np.int64),
            "temperatures": table["temperature"].to_numpy(np.float32),
            "held_out": (table["part"] == "held-out").to_numpy(),
            "fates": table["fate"].map(FATES.index).to_numpy(np.uint8),
            "tokens": np.concatenate(list(table["ids"])).astype(self.kind),
            "roles": np.concatenate(list(table["roles"])).astype(np.uint8),
        }
        with runs.atomic(self._file(TOKENS)) as temporary:
            save_file(part, temporary)
        if len(self._rows) >= PART:
            self._rows = []
            self._part += 1


def _digests(texts: list[str]) -> set[bytes]:
    return {b"%d %b" % (place, prompt_digest(text)) for place, text in enumerate(texts)}


def benchmark_texts() -> Iterator[str]:
    """Prompts and references of the embedded suites, and of those in SPECDEC_DATA."""
    folder = os.environ.get(DATA_VARIABLE)
    for name, suite in SUITES.items():
        in_folder = folder and (Path(folder) / suite.file).is_file()
        if suite.hub is not None and not in_folder:
            continue
        for prompt in load_suite(name, folder):
            yield from filter(None, (*prompt.turns, prompt.reference))


class ChatWriter:
    """Rows of chats on the target's device: `begin` them, then read `chats` as they end."""

    def __init__(self, pair: Pair, config: ChatConfig):
        self.pair = pair
        self.config = config
        tokenizer = pair.tokenizer
        # 1. the template's ids before a user's text, and after it
        messages = [{"role": "user", "content": MARKER}]
        pair.ids_of(messages)  # reports a missing template
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, _, after = text.partition(MARKER)
        self.before = tokenizer.encode(before, add_special_tokens=False)
        self.after = tokenizer.encode(after, add_special_tokens=False)
        special = set(tokenizer.all_special_ids)
        self.turn_ends = pair.stop_tokens | (special & {self.after[0]})
        self.breaks = special | pair.stop_tokens
        # 2. what is forced: given prompts, beginnings of prompts, and the cue of an answer
        self.prompts = read_prompts(PROMPTS)
        self.forced = [pair.ids_of(prompt) for prompt in self.prompts]
        self.prompt_end = len(self.before) + config.prompt_tok
        for [opening] in read_prompts(OPENINGS):
            ids = tokenizer.encode(opening["content"], add_special_tokens=False)
            self.forced.append([*self.before, *ids])
        self.forced.append(self.after[1:])
        prompt_tok = max(self.prompt_end + len(self.after), *map(len, self.forced))
        self.longest = prompt_tok + config.answer_tok
        limit = pair.target.position_limit
        if limit is not None and self.longest > limit:
            why = f"a chat may grow to {self.longest} tokens, the target reads {limit}"
            raise SpecdecError(f"{why}; lower prompt_tok or answer_tok.")

    def begin(self, ended: set[int]) -> None:
        """Begin a chat in every row, the lowest numbers that are not in `ended`."""
        target = self.pair.target
        device = target.device
        rows = self.config.rows or 64
        if self.config.rows is None and device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0] // 2
            rows = max(1, min(2048, free // (self.longest * target.cache_bytes_per_tok)))
        # 1. tables
        parts = [torch.tensor([*ids, FREE], device=device) for ids in self.forced]
        pad = torch.nn.utils.rnn.pad_sequence
        self.table = pad(parts, batch_first=True, padding_value=FREE)
        temperatures, shares = zip(*TEMPERATURES, strict=True)
        self.degrees = torch.tensor(temperatures, device=device)
        self.edges = torch.tensor(shares[:-1], device=device).cumsum(0)
        ids = (self.pair.stop_tokens, self.turn_ends, self.breaks)
        self.stops = [torch.tensor(sorted(part), dtype=torch.long, device=device) for part in ids]
        first = max(ended, default=-1) + 1
        gaps = [number for number in range(first) if number not in ended]
        self.numbers = torch.tensor([*gaps, first], device=device)
        # 2. every row is as if its chat had just ended
        capacity = self.longest + READ_STEPS + 2
        size = rows * capacity * target.cache_bytes_per_tok
        check_memory(f"a key-value cache of {rows} chats", size, device)
        self.cache = TreeCache(target.num_layers, capacity)
        self.time = -1
        self.begun = torch.zeros((), dtype=torch.long, device=device)
        zeros = torch.zeros(rows, dtype=torch.long, device=device)
        self.newest = self.chat = self.entry = self.at = self.answered = zeros
        self.start = zeros
        self.answers = zeros > 0
        self._next(zeros == 0, zeros > 0)
        self.time = 0
        # tokens of chats that have not ended, as they were read
        self.pieces: list[list[np.ndarray]] = [[] for _ in range(rows)]

    def chats(self) -> Iterator[tuple]:
        """A few steps; then `ChatFiles.add`'s arguments for every chat that ended."""
        log = torch.stack([self.step() for _ in range(READ_STEPS)]).cpu().numpy()
        # keys that no chat sees any more make room
        needed = max(0, self.time - int(self.start.min()))
        for layer in self.cache.layers:
            if layer.is_initialized:
                begin = layer.rows - needed
                layer.keys[:, :, :needed] = layer.keys[:, :, begin : layer.rows].clone()
                layer.values[:, :, :needed] = layer.values[:, :, begin : layer.rows].clone()
                layer.rows = needed
        for row, pieces in enumerate(self.pieces):
            begin = 0
            for end in np.flatnonzero(log[:, 1, row] >= ENDED) + 1:
                ids, roles, chats, degrees = np.concatenate((*pieces, log[begin:end, :, row])).T
                pieces.clear()
                begin = end
                number, roles = int(chats[-1]), roles % ENDED
                texts = self._texts(number, ids, roles)
                yield number, ids, roles, TEMPERATURES[degrees[-1]][0], texts
            pieces.append(log[begin:, :, row])

    def _texts(self, number: int, ids, roles) -> list[str]:
        answer = ids[roles == ANSWER].tolist()
        if not answer:
            return []
        if number < len(self.prompts):
            question = self.prompts[number][0]["content"]
        else:
            end = len(ids) - len(answer) - len(self.after)
            question = self.pair.tokenizer.decode(ids[len(self.before) : end].tolist()).strip()
        return [question, self.pair.text_of(answer)]

    def step(self) -> Tensor:
        """A further token of every row: (token, role, chat, number of its temperature) [4, B]."""
        # 1. what the template forces, or the target draws
        place = self.time + 1 - self.start
        logits = self._logits(place - 1)
        degree = chance(self.config.seed, self.chat, OF_TEMPERATURE)
        degree = torch.bucketize(degree, self.edges, right=True)
        temperature = torch.where(self.answers, self.degrees[degree], PROMPT_TEMPERATURE)
        drawn = draw(logits, temperature, chance(self.config.seed, self.chat, place))
        forced = self.table[self.entry, self.at]
        free = forced == FREE
        token = torch.where(free, drawn, forced)
        # 2. the end of a prompt, which the template writes, or of a chat
        stops, turn_ends, breaks = (torch.isin(token, ids) for ids in self.stops)
        answers = free & self.answers
        asks = free & ~self.answers
        asked = asks & turn_ends
        token = torch.where(asked, self.after[0], token)
        self.answered = self.answered + answers
        ended = answers & (stops | (self.answered >= self.config.answer_tok))
        ended |= asks & ~asked & (breaks | (place + 1 >= self.prompt_end))
        # 3. what is noted, and what follows
        role = torch.where(answers, ANSWER, torch.where(asks & ~asked, USER, 0))
        log = torch.stack((token, role + ENDED * ended, self.chat, degree))
        self.newest = token
        self._next(ended, asked)
        self.time += 1
        return log

    def _next(self, ended: Tensor, asked: Tensor) -> None:
        """New chats in the rows that ended, the cue of an answer in those that asked."""
        number = self.begun + ended.cumsum(0) - 1
        self.begun = self.begun + ended.sum()
        last = len(self.numbers) - 1
        number = self.numbers[number.clamp(0, last)] + (number - last).clamp(min=0)
        self.chat = torch.where(ended, number, self.chat)
        prompted = self.chat < len(self.prompts)
        openings = len(self.forced) - len(self.prompts) - 1
        opening = chance(self.config.seed, self.chat, OF_OPENING) * openings
        entry = torch.where(prompted, self.chat, len(self.prompts) + opening.long())
        entry = torch.where(ended, entry, self.entry)
        self.entry = torch.where(asked, len(self.forced) - 1, entry)
        # the last column of the table is free
        following = (self.at + 1).clamp(max=self.table.shape[1] - 1)
        self.at = torch.where(ended | asked, 0, following)
        self.answers = torch.where(ended, prompted, self.answers) | asked
        self.answered = torch.where(ended, 0, self.answered)
        # the last token is read too, by nobody
        self.start = torch.where(ended, self.time + 2, self.start)

    def _logits(self, place: Tensor) -> Tensor:
        """The target's logits [B, V] after the newest tokens, at `place` of their chats."""
        target = self.pair.target
        age = torch.arange(len(self.cache), -1, -1, device=target.device)
        hidden = age > place[:, None]
        # finite, so that a row that sees nothing has a softmax
        mask = torch.zeros(hidden.shape, dtype=target.dtype, device=target.device)
        far = torch.finfo(target.dtype).min
        full = aligned(mask.masked_fill(hidden, far)[:, None, None])
        near = full
        if target.window is not None:
            near = aligned(mask.masked_fill(hidden | (age >= target.window), far)[:, None, None])
        inputs = {"input_ids": self.newest[:, None], "position_ids": place.clamp(min=0)[:, None]}
        inputs["attention_mask"] = {FULL: full, SLIDING: near} if SLIDING in target.kinds else near
        inputs |= {"use_cache": True, cache_keyword(type(target.model)): self.cache}
        return target.model(**inputs).logits[:, -1]


def draw(logits: Tensor, temperature: Tensor, chance: Tensor) -> Tensor:
    """Tokens [B] of logits [B, V]: the likeliest at temperature 0, else by `chance` in [0, 1)."""
    logits = logits.float()
    warm = temperature > 0
    mass = (logits / torch.where(warm, temperature, 1.0)[:, None]).softmax(-1).cumsum(-1)
    drawn = torch.searchsorted(mass, (chance * mass[:, -1])[:, None], right=True)[:, 0]
    return torch.where(warm, drawn.clamp(max=logits.shape[1] - 1), logits.argmax(-1))


def chance(seed: int, chat: Tensor, place: Tensor | int) -> Tensor:
    """A number in [0, 1) per chat and place in it, the same on every device: splitmix64's mixer."""
    mixed = torch.full_like(chat, seed)
    for part in (chat, place):
        mixed = mixed * -7046029254386353131 + part
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
            # the arithmetic shift of a signed integer, made a logical one
            mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    return (mixed >> 40 & 0xFFFFFF) / 2**24


def read_prompts(path: Path) -> list[list[dict]]:
    """Prompts of a text file as chat messages, one per line, in which "\\n" is a line break."""
    prompts = []
    for line in read_text(path, "give a file of prompts").split("\n"):
        content = line.strip().replace("\\n", "\n")
        if content:
            prompts.append([{"role": "user", "content": content}])
    if not prompts:
        raise SpecdecError(f"{path} holds no prompt; write one a line.")
    return prompts
