"""Training text from the target itself: chats generated in parallel into a folder.

    chats-00000.jsonl ...   64 chat numbers each, in order; a line: number, part, temperature,
                            messages, answer_ids
    manifest.json           target, settings and counts
    *.jsonl                 other files there count and are not repeated

The folder can be continued, and holds neither repetitions nor benchmark text. A chat answers one
of PROMPTS, or the target makes one up: it continues one of OPENINGS inside the user's turn. A chat
depends only on (seed, number), up to rounding in products shared with other chats.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from specdec import runs
from specdec.core.decode import drive
from specdec.core.pair import Pair
from specdec.core.protocols import TargetForward
from specdec.data.suites import DATA_VARIABLE, SUITES, load_suite, prompt_digest
from specdec.errors import SpecdecError
from specdec.models.pairs import describe_pair
from specdec.stored import read_text
from specdec.training.drafter.chats import read_chats

SHARD = 64  # chat numbers in a shard
OPENINGS = Path(__file__).with_name("openings.txt")
PROMPTS = Path(__file__).with_name("prompts.txt")
MARKER = "USERTEXT"  # placeholder for the user's text in the template
PROMPT_TEMPERATURE = 0.9  # of made-up prompts
TEMPERATURES = ((0.0, 0.6), (0.7, 0.2), (1.0, 0.2))  # of answers, each with its share
HOLD_OUT = 0.02  # fraction of chats marked for measurements


@dataclass(frozen=True)
class ChatConfig:
    """What is written."""

    seed: int = 0
    rows: int = 64  # chats in parallel
    prompt_tok: int = 256  # a made-up prompt that does not end by then is dropped
    answer_tok: int = 320  # longer answers are cut


def generate_chats(
    pair, config=ChatConfig(), out="chats", *, tokens=3_000_000, minutes=None, progress=True
) -> ChatFiles:
    """Let the pair's target write chats into the folder `out`, and continue those in it.

    It ends when the folder holds `tokens` answer tokens, or after `minutes`. Chats whose prompt or
    answer occurs in a suite (embedded, or of SPECDEC_DATA) are dropped, and so are repetitions.
    Raises SpecdecError for a target without a chat template, and for a folder of
    another target or other settings.
    """
    # 1. the writer, and the folder of this target and these settings
    writer = ChatWriter(pair, config)
    settings = dataclasses.asdict(config)
    # it only affects rounding
    del settings["rows"]
    settings["prompt_temperature"] = PROMPT_TEMPERATURE
    settings["temperatures"] = TEMPERATURES
    settings["hold_out"] = HOLD_OUT
    for name, path in (("openings", OPENINGS), ("prompts", PROMPTS)):
        settings[name] = runs.content_key(texts=read_text(path, "give a file of prompts"))[:16]
    target = describe_pair(dataclasses.replace(pair, drafter=None, name="target"))
    files = ChatFiles(Path(out), {"target": target, "settings": settings})
    # 2. chats of later shards begin while the last ones of a shard are still being written
    ended: dict[int, dict | None] = {}
    began_s = time.monotonic()
    bar = tqdm(total=tokens, initial=files.answer_tok, unit="tok", disable=not progress)
    with pair.inference(plain=True), bar:
        numbers = itertools.count(files.next_numbers.start)
        chats = drive(map(writer.chat, numbers), config.rows)
        while files.answer_tok < tokens:
            if minutes is not None and time.monotonic() - began_s >= 60 * minutes:
                break
            _, (number, row) = next(chats)
            ended[number] = row
            # 3. a shard is stored when all of its chats have ended
            shard = files.next_numbers
            if all(number in ended for number in shard):
                files.write([(number, ended.pop(number)) for number in shard])
                bar.update(files.answer_tok - bar.n)
        chats.close()
    return files


class ChatFiles:
    """The folder; `identity` is everything that its chats depend on."""

    def __init__(self, folder: Path, identity: dict):
        self.folder = Path(folder)
        self.manifest = self.folder / "manifest.json"
        self.identity = runs.plain(identity)
        self.counts: Counter[str] = Counter()
        self._benchmark = {prompt_digest(text) for text in benchmark_texts()}
        self._texts: set[bytes] = set()
        # 1. the counts of the manifest; a shard written after it is written again
        if self.manifest.is_file():
            manifest = runs.read_json(self.manifest)
            for name, value in self.identity.items():
                if manifest.get(name) != value:
                    why = f"{self.folder} holds chats made with another {name}"
                    raise SpecdecError(f"{why}; choose another folder.")
            self.counts.update(manifest["counts"])
            self._next_shard.unlink(missing_ok=True)
        # 2. what may not be repeated; tokens are counted again
        del self.counts["train_tok"], self.counts["held_out_tok"]
        for path in sorted(self.folder.glob("*.jsonl")):
            for messages in read_chats(path):
                self._note({**messages[-1], "messages": messages})

    @property
    def next_numbers(self) -> range:
        begin = self.counts["shards"] * SHARD
        return range(begin, begin + SHARD)

    @property
    def answer_tok(self) -> int:
        return self.counts["train_tok"] + self.counts["held_out_tok"]

    @property
    def _next_shard(self) -> Path:
        return self.folder / f"chats-{self.counts['shards']:05d}.jsonl"

    def write(self, chats: Iterable[tuple[int, dict | None]]) -> None:
        """Store the next shard: (number, row) of all `next_numbers`; None for a failed chat."""
        lines = []
        for number, row in chats:
            fate = self._fate(row)
            self.counts[fate] += 1
            if row is not None and fate == "kept":
                # later turns of a chat stay in the part of its first question
                first = next(turn for turn in row["messages"] if turn["role"] == "user")
                place = int.from_bytes(prompt_digest(first["content"])[8:12], "big") / 2**32
                part = "held-out" if place < HOLD_OUT else "train"
                stored = {"number": number, "part": part, **row}
                self._note(stored)
                lines.append(json.dumps(stored, ensure_ascii=False) + "\n")
        runs.write_text(self._next_shard, "".join(lines))
        self.counts["shards"] += 1
        written = {**self.identity, "hold_out": HOLD_OUT, "counts": dict(self.counts)}
        runs.write_json(self.manifest, written)

    def _fate(self, row: dict | None) -> str:
        """Why a chat is dropped, or "kept"."""
        if row is None:
            return "unfinished"
        contents = [message["content"] for message in row["messages"]]
        if not contents[-1].strip():
            return "empty"
        if not self._benchmark.isdisjoint(map(prompt_digest, contents)):
            return "benchmark"
        return "repeated" if self._texts & _digests(row) else "kept"

    def _note(self, row: dict) -> None:
        self._texts |= _digests(row)
        part = row.get("part", "train").replace("-", "_")
        self.counts[f"{part}_tok"] += len(row.get("answer_ids", ()))


def _digests(row: dict) -> set[bytes]:
    """Of everything before the answer, since many chats may share a question; and of the answer."""
    *before, answer = [message["content"] for message in row["messages"]]
    return {b"prompt " + prompt_digest("\n".join(before)), b"answer " + prompt_digest(answer)}


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
    """Writes chat number n; the first ones answer `prompts`, all others are made up."""

    def __init__(self, pair: Pair, config: ChatConfig):
        self.pair = pair
        self.target = pair.target
        self.config = config
        # the template's ids before a user's text, and after it
        messages = [{"role": "user", "content": MARKER}]
        pair.ids_of(messages)  # reports a missing template
        text = pair.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        before, _, after = text.partition(MARKER)
        self.before = pair.tokenizer.encode(before, add_special_tokens=False)
        following = pair.tokenizer.encode(after, add_special_tokens=False)
        special = frozenset(pair.tokenizer.all_special_ids)
        self.turn_ends = pair.stop_tokens | (special & {following[0]})
        self.breaks = special | pair.stop_tokens
        self.openings = [messages[-1]["content"] for messages in read_prompts(OPENINGS)]
        self.prompts = read_prompts(PROMPTS)
        self.limit = self.target.position_limit or 1 << 30
        longest = len(self.before) + config.prompt_tok + config.answer_tok
        if longest > self.limit:
            why = f"a chat may grow to {longest} tokens, the target reads {self.limit}"
            raise SpecdecError(f"{why}; lower prompt_tok or answer_tok.")

    def chat(self, number: int) -> Generator:
        """Forwards that return (number, row); the row is None if its prompt did not end or fit."""
        config = self.config
        rng = random.Random(f"chats/{config.seed}/{number}")
        temperatures, shares = zip(*TEMPERATURES, strict=True)
        temperature = rng.choices(temperatures, shares)[0]
        # 1. the prompt
        if number < len(self.prompts):
            messages = self.prompts[number]
        else:
            messages = yield from self._made_up(rng)
        if messages is None:
            return number, None
        prompt = self.pair.ids_of(messages)
        if len(prompt) + config.answer_tok > self.limit:
            return number, None
        # 2. its answer
        stops = self.pair.stop_tokens
        answer = yield from self._continued(prompt, config.answer_tok, stops, temperature, rng)
        messages = [*messages, {"role": "assistant", "content": self.pair.text_of(answer)}]
        return number, {"temperature": temperature, "messages": messages, "answer_ids": answer}

    def _made_up(self, rng: random.Random) -> Generator:
        """A prompt in the target's own words, as messages; None if it does not end."""
        tokenizer = self.pair.tokenizer
        opening = tokenizer.encode(rng.choice(self.openings), add_special_tokens=False)
        limit = self.config.prompt_tok - len(opening)
        begun = [*self.before, *opening]
        written = yield from self._continued(begun, limit, self.breaks, PROMPT_TEMPERATURE, rng)
        if not written or written[-1] not in self.turn_ends:
            return None
        content = tokenizer.decode([*opening, *written[:-1]]).strip()
        return [{"role": "user", "content": content}]

    def _continued(self, ids: list[int], limit: int, stops, temperature: float, rng) -> Generator:
        """At most `limit` tokens after `ids`, up to the first of `stops`."""
        cache = self.target.new_cache(len(ids) + max(0, limit))
        unread = ids
        written: list[int] = []
        while len(written) < limit and not (written and written[-1] in stops):
            tokens = torch.tensor(unread, device=self.target.device)
            rows = yield TargetForward(self.target, tokens, cache, last_only=True)
            written.append(draw(rows.logits[-1], temperature, rng))
            unread = written[-1:]
        return written


def draw(logits: Tensor, temperature: float, rng: random.Random) -> int:
    """A token sampled from `logits` [V] at a temperature; the likeliest at 0."""
    # one random number: a tenth of the cost of `Picker`'s noise, whose coupling data does not need
    logits = logits.float()
    if temperature == 0:
        return int(logits.argmax())
    mass = (logits / temperature).softmax(-1).cumsum(-1)
    return int(torch.searchsorted(mass, rng.random() * float(mass[-1])))


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
