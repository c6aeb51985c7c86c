"""Training text from the target itself: chats generated in parallel into a folder.

    chats-00000.jsonl ...   64 chat numbers each, in order; a line: number, part, temperature,
                            messages, answer_ids
    manifest.json           target, settings and counts
    *.jsonl                 other files there count and are not repeated

The folder can be continued, and holds neither repetitions nor benchmark text. Shards are written in
order, so that what is dropped depends on the numbers alone. A chat is made up by the target itself,
or answers a given prompt:

    template, user's turn opened   computed once, copied into every chat
    opening                        "Write a Python function to"; the target continues until it ends
    the turn cue for the answer    after the prompt just made up, or a given one
    answer                         greedy or sampled

All of a chat stays in one cache. A chat is a generator of forwards, for `core.decode.drive`, and
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
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from specdec import runs
from specdec.core.decode import drive
from specdec.core.pair import Pair
from specdec.core.protocols import Forward, TargetForward, together
from specdec.core.tree_config import check_memory
from specdec.data.suites import DATA_VARIABLE, SUITES, load_suite, prompt_digest
from specdec.errors import SpecdecError, check_integer, check_number
from specdec.models.fingerprint import describe_pair
from specdec.stored import json_line, read_text

# chat numbers in a shard
SHARD = 64
# of all tokens written by SmolLM2-135M-Instruct; the rest are prompts, many of which never end
ANSWER_SHARE = 0.6
# of its chats, per step
MEAN_CONTEXT_TOK = 200
# size of a shard's line per answer token: its id and its text
ROW_BYTES = 12
OPENINGS = Path(__file__).with_name("openings.txt")
PROMPTS = Path(__file__).with_name("prompts.txt")
# placeholder for the user's text in the template
MARKER = "USERTEXT"
# between prompt and answer: the template's cue, and tokens gained by re-reading the prompt
SLACK_TOK = 32
# of answers, each with its share
TEMPERATURES = ((0.0, 0.6), (0.7, 0.2), (1.0, 0.2))


def generate_chats(
    pair: Pair,
    config: ChatConfig | None = None,
    out: str | Path = "chats",
    *,
    tokens: int = 3_000_000,
    minutes: float | None = None,
    benchmarks: str | Path | None = None,
    progress: bool = True,
) -> ChatFiles:
    """Let the pair's target write chats into the folder `out`.

    It ends when the folder holds `tokens` answer tokens, or after `minutes`. Prompts of a file come
    first, then the target makes up its own. Existing chats are continued. Chats whose prompt or
    answer occurs in a suite (embedded, or of the folder `benchmarks`) are dropped, and so are
    repetitions. Raises SpecdecError for a target without a chat template, and for a folder of
    another target or other settings.
    """
    config = config or ChatConfig()
    check_integer("tokens", tokens, 1)
    if minutes is not None:
        check_number("minutes", minutes)
    writer = ChatWriter(pair, config)
    files = open_chats(pair, config, out, benchmarks)
    until = float("inf") if minutes is None else time.monotonic() + 60 * minutes

    def enough() -> bool:
        return files.answer_tok >= tokens or time.monotonic() >= until

    # chats of later shards begin while the last ones of a shard are still being written
    numbers = itertools.count(files.next_numbers.start)
    ended: dict[int, dict | None] = {}
    bar = tqdm(
        total=tokens, initial=files.answer_tok, unit="tok", unit_scale=True, disable=not progress
    )
    with pair.inference(plain=True), bar:
        chats = drive(writer.chats(numbers), config.rows)
        while not enough():
            _, (number, row) = next(chats)
            ended[number] = row
            # a shard is stored when all of its chats have ended
            shard = files.next_numbers
            if all(number in ended for number in shard):
                files.write([(number, ended.pop(number)) for number in shard])
            waiting_tok = sum(len(row["answer_ids"]) for row in ended.values() if row)
            bar.update(files.answer_tok + waiting_tok - bar.n)
        chats.close()
    return files


def open_chats(
    pair: Pair, config: ChatConfig, out: str | Path, benchmarks: str | Path | None = None
) -> ChatFiles:
    """The folder of chats for a target and settings; SpecdecError if it holds others."""
    settings = dataclasses.asdict(config)
    for name in ("openings", "prompts"):
        settings[name] = runs.content_key(texts=prompt_text(settings[name]))[:16]
    # it only affects rounding
    del settings["rows"]
    target = describe_pair(dataclasses.replace(pair, drafter=None, name="target"))
    identity = {"target": target, "settings": settings}
    return ChatFiles(Path(out), identity, config.hold_out, benchmarks)


def estimate_chats(pair: Pair, config: ChatConfig, tokens: int, steps: int = 3) -> str:
    """Time and disk space for so many answer tokens, by a few timed steps, as a sentence."""
    target = pair.target
    writer = ChatWriter(pair, config)
    ids = (writer.before * MEAN_CONTEXT_TOK)[:MEAN_CONTEXT_TOK]
    context = torch.tensor(ids, device=target.device)
    rng = random.Random(0)
    with pair.inference(plain=True):
        # 1. rows of the usual length
        prefix = target.new_cache(len(ids))
        target.forward(context, prefix, last_only=True)
        forwards = []
        for _ in range(config.rows):
            cache = target.new_cache(len(ids) + steps + 1)
            cache.append(prefix)
            forwards.append(TargetForward(target, context[:1], cache, last_only=True))
        together(forwards)
        # 2. steps of all rows together
        begin = time.perf_counter()
        for _ in range(steps):
            for rows in together(forwards):
                draw(rows.logits[-1], 1.0, rng)
        rate = ANSWER_SHARE * steps * config.rows / (time.perf_counter() - begin)
    hours = tokens / rate / 3600
    duration = f"{hours:.1f} hours" if hours > 1.5 else f"{60 * hours:.0f} minutes"
    megabytes = ROW_BYTES * tokens / 1e6
    here = f"{duration} here ({rate:.0f} a second, by a few steps)"
    return f"{tokens:,} answer tokens take about {here} and {megabytes:.0f} MB."


class ChatFiles:
    """The folder and its contents.

    identity: everything that chats depend on; it must equal the manifest's. hold_out: share of
    chats, by the hash of the first turn, that are marked "held-out" in place of "train".
    benchmarks: a folder of real suites, default SPECDEC_DATA's.
    """

    def __init__(
        self, folder: Path, identity: dict, hold_out: float = 0.02, benchmarks: Path | None = None
    ):
        self.folder = Path(folder)
        self.identity = runs.plain(identity)
        self.hold_out = hold_out
        self.counts: Counter[str] = Counter()
        self._benchmark = {prompt_digest(text) for text in benchmark_texts(benchmarks)}
        self._prompts: set[bytes] = set()
        self._answers: set[bytes] = set()
        if self.manifest.is_file():
            self._continue()
        elif (self.folder / _shard(0)).exists():
            why = f"{self.folder} holds chats but no manifest.json"
            raise SpecdecError(f"{why}; choose another folder.")
        for path in sorted(self.folder.glob("*.jsonl")):
            for row in _rows(path):
                self._note(row)

    def _continue(self) -> None:
        """Take up the counts of the manifest. SpecdecError if it is of other chats."""
        manifest = runs.read_json(self.manifest)
        for name, value in self.identity.items():
            if manifest.get(name) != value:
                why = f"{self.folder} holds chats made with another {name}"
                raise SpecdecError(f"{why}; choose another folder.")
        for name, count in manifest.get("counts", {}).items():
            # tokens are counted again as the files are read
            if not name.endswith("_tok"):
                self.counts[name] = count
        # a shard written after the manifest is written again
        (self.folder / _shard(self.shards)).unlink(missing_ok=True)

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def shards(self) -> int:
        """Number of written shards, which is also the number of the next."""
        return self.counts["shards"]

    @property
    def next_numbers(self) -> range:
        """Numbers of the chats of the next shard."""
        return numbers_of(self.shards)

    @property
    def answer_tok(self) -> int:
        """Tokens of all answers in the folder."""
        return self.counts["train_tok"] + self.counts["held_out_tok"]

    def write(self, chats: Iterable[tuple[int, dict | None]]) -> None:
        """Store the next shard.

        chats: (number, row) of all `next_numbers`, in order; the row is None for a failed chat.
        """
        lines = []
        for number, row in chats:
            reason = self._why_not(row)
            self.counts[reason or "kept"] += 1
            if reason is None:
                stored = {"number": number, "part": self._part_of(row), **row}
                self._note(stored)
                lines.append(json.dumps(stored, ensure_ascii=False) + "\n")
        runs.write_text(self.folder / _shard(self.shards), "".join(lines))
        self.counts["shards"] += 1
        written = {**self.identity, "hold_out": self.hold_out, "counts": dict(self.counts)}
        runs.write_json(self.manifest, written)

    def _part_of(self, row: dict) -> str:
        """By the hash of the first question: later turns of a chat stay in its part."""
        first = next(message for message in row["messages"] if message["role"] == "user")
        digest = prompt_digest(first["content"])
        place = int.from_bytes(digest[8:12], "big") / 2**32
        return "held-out" if place < self.hold_out else "train"

    def _why_not(self, row: dict | None) -> str | None:
        """Why a chat is dropped; None if it is kept."""
        if row is None:
            return "unfinished"
        contents = [message["content"] for message in row["messages"]]
        if not contents[-1].strip():
            return "empty"
        if any(prompt_digest(text) in self._benchmark for text in contents):
            return "benchmark"
        prompt, answer = _digests(row)
        if prompt in self._prompts or answer in self._answers:
            return "repeated"
        return None

    def _note(self, row: dict) -> None:
        prompt, answer = _digests(row)
        self._prompts.add(prompt)
        self._answers.add(answer)
        part = row.get("part", "train").replace("-", "_")
        self.counts[f"{part}_tok"] += len(row.get("answer_ids", ()))


def numbers_of(shard: int) -> range:
    """Numbers of the chats of a shard."""
    return range(shard * SHARD, (shard + 1) * SHARD)


def _shard(number: int) -> str:
    return f"chats-{number:05d}.jsonl"


def _digests(row: dict) -> tuple[bytes, bytes]:
    """Digests of everything before the answer, and of the answer.

    A second question alone may occur in many chats.
    """
    *before, answer = [message["content"] for message in row["messages"]]
    return prompt_digest("\n".join(before)), prompt_digest(answer)


def _rows(path: Path) -> Iterator[dict]:
    # texts may contain other line ends
    text = read_text(path, "move the file away").removesuffix("\n")
    if not text:
        return
    for number, line in enumerate(text.split("\n"), 1):
        try:
            row = json.loads(line)
            _digests(row)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f"{path}, line {number}: not a chat with its answer"
            raise SpecdecError(f"{why}; move the file away ({error}).") from None
        yield row


def benchmark_texts(folder: Path | None = None) -> Iterator[str]:
    """Prompts and references of every available suite.

    These are the embedded ones, and those of a folder (default SPECDEC_DATA's).
    """
    folder = folder or os.environ.get(DATA_VARIABLE)
    for name, suite in SUITES.items():
        in_folder = folder and (Path(folder) / suite.file).is_file()
        if suite.hub is not None and not in_folder:
            continue
        for prompt in load_suite(name, folder):
            for text in (*prompt.turns, prompt.reference):
                if text:
                    yield text


@dataclass(frozen=True)
class ChatConfig:
    """What is written, and how many chats in parallel (rows).

    prompt_tok, answer_tok: token limits; a made-up prompt that does not end by then is dropped, an
    answer is cut.
    temperatures: of answers, each with its share. prompts: file of prompts to answer before others
    are made up.
    """

    seed: int = 0
    rows: int = 64
    prompt_tok: int = 256
    answer_tok: int = 320
    prompt_temperature: float = 0.9
    temperatures: tuple[tuple[float, float], ...] = TEMPERATURES
    openings: Path = OPENINGS
    prompts: Path = PROMPTS
    hold_out: float = 0.02  # fraction of chats marked for measurements


class ChatWriter:
    """Writes chat number n of a target.

    Numbers below `len(prompts)` answer these, all others are made up.
    """

    def __init__(self, pair: Pair, config: ChatConfig):
        self.pair = pair
        self.target = pair.target
        self.config = config
        for name in ("rows", "prompt_tok", "answer_tok"):
            check_integer(name, getattr(config, name), 1)
        self.before, after = around_user_text(pair)
        special = frozenset(pair.tokenizer.all_special_ids)
        self.turn_ends = pair.stop_tokens | (special & {after[0]})
        self.breaks = special | pair.stop_tokens
        self.openings = [message[-1]["content"] for message in read_prompts(config.openings)]
        self.prompts = read_prompts(config.prompts)
        self.limit = self.target.position_limit or 1 << 30
        self.longest = len(self.before) + config.prompt_tok + SLACK_TOK + config.answer_tok
        if self.longest > self.limit:
            why = f"a chat may grow to {self.longest} tokens, the target reads {self.limit}"
            raise SpecdecError(f"{why}; lower prompt_tok or answer_tok.")
        least = config.rows * (len(self.before) + 1) * self.target.cache_bytes_per_tok
        use = f"the beginning of {config.rows} chats at a time"
        check_memory(use, least, self.target.device, "lower rows")

    def chats(
        self, numbers: Iterable[int]
    ) -> Iterator[Generator[Forward, Any, tuple[int, dict | None]]]:
        """A generator of forwards for each number; start it inside `pair.inference(plain=True)`.

        It returns (number, row): temperature, messages and answer_ids; None if a prompt did not
        end, or is too long.
        """
        opened = self.target.new_cache(len(self.before))
        ids = torch.tensor(self.before, device=self.target.device)
        self.target.forward(ids, opened, last_only=True)
        for number in numbers:
            yield self._chat(number, opened)

    def _chat(self, number: int, opened) -> Generator[Forward, Any, tuple[int, dict | None]]:
        config = self.config
        rng = random.Random(f"chats/{config.seed}/{number}")
        temperatures = [value for value, _ in config.temperatures]
        shares = [share for _, share in config.temperatures]
        temperature = rng.choices(temperatures, shares)[0]
        # 1. room for the longest chat: a made-up prompt, or a given one, and the answer
        is_given = number < len(self.prompts)
        room = self.longest
        if is_given:
            prompt_tok = len(self.pair.ids_of(self.prompts[number]))
            room = max(room, prompt_tok + config.answer_tok)
        cache = self.target.new_cache(min(room, self.limit))
        text = _Text(self.target, cache, opened, self.before)
        # 2. the prompt
        if is_given:
            messages = self.prompts[number]
        else:
            messages = yield from self._made_up(text, rng)
        if messages is None:
            return number, None
        prompt = self.pair.ids_of(messages)
        if len(prompt) + config.answer_tok > self.limit:
            return number, None
        # 3. its answer
        stops = self.pair.stop_tokens
        answer = yield from text.continued(prompt, config.answer_tok, stops, temperature, rng)
        messages = [*messages, {"role": "assistant", "content": self.pair.text_of(answer)}]
        return number, {"temperature": temperature, "messages": messages, "answer_ids": answer}

    def _made_up(
        self, text: _Text, rng: random.Random
    ) -> Generator[Forward, Any, list[dict] | None]:
        """A prompt in the target's own words, None if it does not end.

        It is returned as text, since it may be written in other tokens.
        """
        tokenizer = self.pair.tokenizer
        config = self.config
        opening = tokenizer.encode(rng.choice(self.openings), add_special_tokens=False)
        limit = config.prompt_tok - len(opening)
        begun = [*self.before, *opening]
        temperature = config.prompt_temperature
        written = yield from text.continued(begun, limit, self.breaks, temperature, rng)
        if not written or written[-1] not in self.turn_ends:
            return None
        content = tokenizer.decode([*opening, *written[:-1]]).strip()
        return [{"role": "user", "content": content}]


class _Text:
    """The content of one cache, and its continuation."""

    def __init__(self, target, cache, opened, held: Sequence[int]):
        self.target = target
        self.cache = cache
        self.held = list(held)
        cache.append(opened)

    def continued(
        self,
        ids: list[int],
        most: int,
        stops: frozenset[int],
        temperature: float,
        rng: random.Random,
    ) -> Generator[Forward, Any, list[int]]:
        """At most `most` tokens after `ids`, up to the first of `stops`.

        Only the part of `ids` missing in the cache is read.
        """
        # the last one is always read: its row picks the first token
        shared = len(commonprefix([self.held, ids[:-1]]))
        self.cache.truncate(shared)
        unread = ids[shared:]
        written: list[int] = []
        while len(written) < most and (not written or written[-1] not in stops):
            tokens = torch.tensor(unread, device=self.target.device)
            rows = yield TargetForward(self.target, tokens, self.cache, last_only=True)
            written.append(draw(rows.logits[-1], temperature, rng))
            unread = written[-1:]
        self.held = [*ids, *written[:-1]]
        return written


def draw(logits: Tensor, temperature: float, rng: random.Random) -> int:
    """A token sampled from `logits` [V] at a temperature; the likeliest at 0.

    One random number and one sum over the vocabulary: a tenth of the cost of `Picker`'s noise,
    whose coupling is not needed for data.
    """
    logits = logits.float()
    if temperature == 0:
        return int(logits.argmax())
    mass = (logits / temperature).softmax(-1).cumsum(-1)
    return int(torch.searchsorted(mass, rng.random() * float(mass[-1])))


def around_user_text(pair: Pair) -> tuple[list[int], list[int]]:
    """The ids that the chat template puts before a user's text, and after it up to the answer."""
    messages = [{"role": "user", "content": MARKER}]
    # reports problems of the tokenizer or its template
    pair.ids_of(messages)
    text = pair.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    template = f"the chat template of {pair.name!r}"
    if text.count(MARKER) != 1:
        raise SpecdecError(f"{template} does not show a user's text once, as it was said.")
    left, right = text.split(MARKER)
    before = pair.tokenizer.encode(left, add_special_tokens=False)
    after = pair.tokenizer.encode(right, add_special_tokens=False)
    if not before or not after:
        raise SpecdecError(f"{template} puts nothing before or after a user's text.")
    return before, after


def read_prompts(path: Path) -> list[list[dict]]:
    """Prompts of a file as chat messages, one per line.

    A line is plain text ("\\n" is a line break) or, in a .jsonl file, JSON with `prompt` or
    `messages`. Of `messages`, all up to the last user's are used.
    """
    is_json = Path(path).suffix == ".jsonl"
    prompts = []
    # texts may contain other line ends
    for number, line in enumerate(prompt_text(path).split("\n"), 1):
        if not line.strip():
            continue
        if is_json:
            prompts.append(_json_prompt(line, f"{path}, line {number}"))
        else:
            content = line.strip().replace("\\n", "\n")
            prompts.append([{"role": "user", "content": content}])
    if not prompts:
        raise SpecdecError(f"{path} holds no prompt; write one a line.")
    return prompts


def prompt_text(path: Path) -> str:
    """The content of a file of prompts. SpecdecError if it cannot be read."""
    return read_text(path, "give a file with one prompt a line")


def _json_prompt(line: str, where: str) -> list[dict]:
    row = json_line(line, where, "write one JSON object per line")
    prompt: list[dict] = []
    length = 0
    try:
        messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        for message in messages:
            prompt.append({"role": message["role"], "content": message["content"]})
            if message["role"] == "user":
                length = len(prompt)
    except (KeyError, TypeError, AttributeError):
        length = 0
    texts = [text for message in prompt for text in message.values()]
    if not length or not all(isinstance(text, str) for text in texts):
        why = f"{where}: give a JSON object with `prompt` (a text) or `messages` with a user's"
        raise SpecdecError(f"{why}.")
    return prompt[:length]
