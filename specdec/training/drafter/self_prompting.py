"""Chats that a target makes up by itself, and its answers to given prompts.

    template, user's turn opened   computed once, copied into every chat
       opening                        "Write a Python function to"; the target continues until it ends the turn
       cue for the answer             after the prompt just made up, or a given one
    answer                         greedy or sampled

All of a chat stays in one cache. A chat is a generator of forwards, for `core.decode.drive`, and depends only on (seed,
number), up to rounding in products shared with other chats. Knows nothing about files, duplicates or benchmarks.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.core.pair import Pair
from specdec.core.protocols import Forward, TargetForward
from specdec.core.tree_config import check_memory
from specdec.errors import SpecdecError, check_integer
from specdec.stored import json_line, read_text

OPENINGS, PROMPTS = (Path(__file__).with_name(name) for name in ("openings.txt", "prompts.txt"))
MARKER = "USERTEXT"  # placeholder for the user's text in the template
SLACK_TOK = 32  # between prompt and answer: the template's cue, and tokens gained by re-reading the prompt
TEMPERATURES = ((0.0, 0.6), (0.7, 0.2), (1.0, 0.2))


@dataclass(frozen=True)
class ChatConfig:
    """What is written, and how many chats in parallel (rows).

    prompt_tok, answer_tok: token limits; a made-up prompt that does not end by then is dropped, an answer is cut.
    temperatures: of answers, each with its share. prompts: file of prompts to answer before others are made up.
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
    on: str | None = None  # run elsewhere: local, ray, ray://host:port or slurm (`fanout`)
    jobs: int | None = None  # the most workers at once there


class ChatWriter:
    """Writes chat number n of a target. Numbers below `len(prompts)` answer these, all others are made up."""

    def __init__(self, pair: Pair, config: ChatConfig):
        self.pair, self.target, self.config = pair, pair.target, config
        for name in ("rows", "prompt_tok", "answer_tok"):
            check_integer(name, getattr(config, name), 1)
        self.before, after = around_user_text(pair)
        special = frozenset(pair.tokenizer.all_special_ids)
        self.turn_ends = pair.stop_tokens | (special & {after[0]})
        self.breaks = special | pair.stop_tokens
        self.openings = [message[-1]["content"] for message in read_prompts(config.openings)]
        self.prompts = read_prompts(config.prompts)
        self.limit = self.target.position_limit or 1 << 30
        longest = len(self.before) + config.prompt_tok + SLACK_TOK + config.answer_tok
        if longest > self.limit:
            raise SpecdecError(
                f"a chat may grow to {longest} tokens, but the target's context ends at {self.limit}; lower prompt_tok or "
                "answer_tok."
            )
        least = config.rows * (len(self.before) + 1) * self.target.cache_bytes_per_tok
        check_memory(f"the beginning of {config.rows} chats at a time", least, self.target.device, "lower rows")

    def chats(self, numbers: Iterable[int]) -> Iterator[Generator[Forward, Any, tuple[int, dict | None]]]:
        """A generator of forwards for each number; start it inside `pair.inference(plain=True)`.

        It returns (number, row): temperature, messages and answer_ids; None if a prompt did not end, or is too long.
        """
        memory, opened = self.target.new_memory(), self.target.new_cache(len(self.before))
        self.target.forward(torch.tensor(self.before, device=self.target.device), opened, last_only=True)
        for number in numbers:
            yield self._chat(number, memory, opened)

    def _chat(self, number: int, memory, opened) -> Generator[Forward, Any, tuple[int, dict | None]]:
        config, rng = self.config, random.Random(f"chats/{self.config.seed}/{number}")
        values, shares = zip(*config.temperatures, strict=True)
        temperature = rng.choices(values, shares)[0]
        text = _Text(self.target, memory.new_cache(self.limit), opened, self.before)
        if number < len(self.prompts):
            messages = self.prompts[number]
        else:
            messages = yield from self._made_up(text, rng)
        asked = [] if messages is None else self.pair.ids_of(messages)
        if not asked or len(asked) + config.answer_tok > self.limit:
            return number, None
        answer = yield from text.continued(asked, config.answer_tok, self.pair.stop_tokens, temperature, rng)
        messages = [*messages, {"role": "assistant", "content": self.pair.text_of(answer)}]
        return number, {"temperature": temperature, "messages": messages, "answer_ids": answer}

    def _made_up(self, text: _Text, rng: random.Random) -> Generator[Forward, Any, list[dict] | None]:
        """A prompt in the target's own words, None if it does not end.

        It is tokenised again as one text before it is answered, since it may have been written in other tokens.
        """
        tokenizer, config = self.pair.tokenizer, self.config
        opening = tokenizer.encode(rng.choice(self.openings), add_special_tokens=False)
        most = config.prompt_tok - len(opening)
        written = yield from text.continued([*self.before, *opening], most, self.breaks, config.prompt_temperature, rng)
        if not written or written[-1] not in self.turn_ends:
            return None
        said = tokenizer.decode([*opening, *written[:-1]]).strip()
        return [{"role": "user", "content": said}]


class _Text:
    """The content of one cache, and its continuation."""

    def __init__(self, target, cache, opened, held: Sequence[int]):
        self.target, self.cache, self.held = target, cache, list(held)
        cache.append(opened)

    def continued(
        self, ids: list[int], most: int, stops: frozenset[int], temperature: float, rng: random.Random
    ) -> Generator[Forward, Any, list[int]]:
        """At most `most` tokens after `ids`, up to the first of `stops`. Only the part of `ids` missing in the cache is read."""
        shared = len(commonprefix([self.held, ids[:-1]]))  # the last one is always read: its row picks the first token
        self.cache.truncate(shared)
        unread, written = ids[shared:], []
        while len(written) < most and not (written and written[-1] in stops):
            tokens = torch.tensor(unread, device=self.target.device)
            rows = yield TargetForward(self.target, tokens, self.cache, last_only=True)
            written.append(draw(rows.logits[-1], temperature, rng))
            unread = written[-1:]
        self.held = [*ids, *written[:-1]]
        return written


def draw(logits: Tensor, temperature: float, rng: random.Random) -> int:
    """A token sampled from `logits` [V] at a temperature; the likeliest at 0.

    One random number and one sum over the vocabulary: a tenth of the cost of `Picker`'s noise, whose coupling is not needed
    for data.
    """
    logits = logits.float()
    if temperature == 0:
        return int(logits.argmax())
    mass = (logits / temperature).softmax(-1).cumsum(-1)
    return int(torch.searchsorted(mass, rng.random() * float(mass[-1])))


def around_user_text(pair: Pair) -> tuple[list[int], list[int]]:
    """The ids that the chat template puts before a user's text, and after it up to the answer."""
    messages = [{"role": "user", "content": MARKER}]
    pair.ids_of(messages)  # reports problems of the tokenizer or its template
    text = pair.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if text.count(MARKER) != 1:
        raise SpecdecError(f"the chat template of {pair.name!r} does not show a user's text once, as it was said.")
    before, after = (pair.tokenizer.encode(part, add_special_tokens=False) for part in text.split(MARKER))
    if not before or not after:
        raise SpecdecError(f"the chat template of {pair.name!r} puts nothing before or after a user's text.")
    return before, after


def read_prompts(path: Path) -> list[list[dict]]:
    """Prompts as chat messages: a file with one per line, plain ("\\n" is a line break), or JSON with `prompt` or `messages`.

    Of `messages`, all up to the last user's are used.
    """
    lines = prompt_text(path).split("\n")  # texts may contain other line ends
    jsonl = Path(path).suffix == ".jsonl"
    prompts = [_prompt(line, jsonl, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise SpecdecError(f"{path} holds no prompt; write one a line.")
    return prompts


def prompt_text(path: Path) -> str:
    """The content of a file of prompts. SpecdecError if it cannot be read."""
    return read_text(path, "give a file with one prompt a line")


def _prompt(line: str, jsonl: bool, where: str) -> list[dict]:
    if not jsonl:
        return [{"role": "user", "content": line.strip().replace("\\n", "\n")}]
    row = json_line(line, where, "write one JSON object per line")
    try:
        messages = row["messages"] if "messages" in row else [{"role": "user", "content": row["prompt"]}]
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        messages = [{"role": message["role"], "content": message["content"]} for message in messages[: last + 1]]
    except (ValueError, KeyError, TypeError) as error:
        raise SpecdecError(
            f"{where}: give a JSON object with `prompt` (a text) or `messages` with a user's ({error})."
        ) from None
    if not all(isinstance(text, str) for message in messages for text in message.values()):
        raise SpecdecError(f"{where}: roles and contents must be texts.")
    return messages
