"""A target, its drafter and its tokenizer; conversion of prompts to token ids and back to text."""

from __future__ import annotations

import contextlib
import operator
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor

from specdec.core.protocols import Drafter, TargetModel
from specdec.core.tree_config import CPU_TREE, TREES, TreeConfig
from specdec.errors import SpecdecError, check_text

Prompt = str | Sequence[int] | Tensor | list[dict[str, Any]]
# Looks of a Generation's pieces in a notebook; the colours work on light and dark pages.
LOOKS = {
    "accepted": "background: rgba(0, 160, 115, 0.28); border-radius: 2px",
    "bonus": "border-bottom: 2px solid #f2a93b",
    "plain": "",
}


@dataclass
class Pair:
    """A target and its drafter.

    tokenizer: as in transformers. stop_tokens: the ids that end a text. source: the arguments of
    `load_pair`; None for a model in memory. tree: the one tuned for this pair (`usual_tree`).

    >>> import specdec
    >>> pair = specdec.load_pair("tiny")
    >>> pair.text_of(pair.ids_of("Good morning.", raw=True))
    'Good morning.'
    """

    target: TargetModel
    drafter: Drafter | None = None
    tokenizer: Any = None
    name: str = "pair"
    stop_tokens: frozenset[int] = frozenset()
    source: dict[str, Any] | None = None
    tree: TreeConfig | None = None
    ends: frozenset[int] | None = None  # the model's end tokens, where a change of them counts

    @property
    def usual_tree(self) -> TreeConfig:
        """The tree used without a policy: the tuned one, else a small one on a CPU or EAGLE-3's."""
        on_cpu = torch.device(self.target.device).type == "cpu"
        return self.tree or (CPU_TREE if on_cpu else TREES["eagle3"])

    @contextlib.contextmanager
    def inference(self, plain: bool = False) -> Iterator[None]:
        """Target and drafter ready to decode; outside this block they behave as usual.

        plain: the target alone, without features for a drafter.
        """
        if plain:
            with self.target.inference(taps=False):
                yield
            return
        drafter = self.needed_drafter()
        # drafters that share a target may tap other layers
        self.target.taps = drafter.taps
        with self.target.inference(taps=True):
            drafter.refresh()
            with drafter.inference():
                yield

    def refresh(self) -> None:
        """Update to changes of the models since their last use, such as adapters or casts."""
        self.target.refresh()
        if self.drafter is not None:
            self.drafter.refresh()

    def current_stops(self) -> frozenset[int]:
        """`stop_tokens`, or the model's end tokens where its generation settings changed since."""
        if self.ends is not None and self.ends != self.target.end_tokens:
            self.stop_tokens = self.ends = self.target.end_tokens
        return self.stop_tokens

    def needed_drafter(self) -> Drafter:
        """The drafter; SpecdecError where there is none."""
        if self.drafter is None:
            advice = "name one, such as suffix (drafter=, --drafter), or decode with autoregressive"
            raise SpecdecError(f"this pair has no drafter; {advice}.")
        return self.drafter

    def ids_of(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a text, of ids (list or 1-D tensor), or of chat messages.

        A text is a user's message where the tokenizer has a chat template. Without one, or with
        raw=True, it is tokenised as it is.
        """
        if isinstance(prompt, str) and self.chats and not raw and prompt:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            if self.tokenizer is None:
                why = f"pair {self.name!r} has no tokenizer to read text"
                raise SpecdecError(f"{why}; pass token ids.")
            ids = self.tokenizer.encode(check_text("the prompt", prompt)) if prompt else []
        elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
            ids = self._ids_of_chat(prompt)
        else:
            ids = _integers(prompt)
        if not ids:
            raise SpecdecError("the prompt is empty; give at least one token.")
        size = self.target.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise SpecdecError(f"token id {token} is outside the vocabulary of {size}.")
        return ids

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template, so that a text is a user's message."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def text_of(self, tokens: Sequence[int]) -> str | None:
        """The text of token ids without special tokens; None without a tokenizer."""
        return None if self.reader is None else self.reader(tokens)

    @property
    def reader(self) -> Callable[[Sequence[int]], str] | None:
        """`text_of` as a function that keeps no model alive."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            return None
        return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _ids_of_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        for message in messages:
            content = message.get("content")
            if not isinstance(content, str) or "role" not in message:
                form = '{"role": ..., "content": text}'
                wrong = reprlib.repr(message)
                raise SpecdecError(f"chat messages are a list of {form}, got {wrong}.")
            check_text("a chat message", content)
        if not self.chats:
            why = f"the tokenizer of {self.name!r} has no chat template"
            raise SpecdecError(f"{why}; pass text or token ids.")
        from jinja2 import TemplateError

        try:
            ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=False
            )
        except TemplateError as error:
            raise SpecdecError(f"the chat template refuses these messages: {error}.") from error
        return list(ids)


def _integers(prompt: Any) -> list[int]:
    """The ids of a sequence or tensor; a leading batch dimension of one is dropped."""
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        if len(values) == 1 and isinstance(values[0], list | tuple):
            values = values[0]
        return [operator.index(value) for value in values]
    except TypeError:
        kinds = "text, token ids (a list or 1-D tensor) or a list of chat messages"
        raise SpecdecError(f"a prompt is {kinds}; got {reprlib.repr(prompt)}.") from None


def html(generation: Any) -> str:
    """A `records.Generation` as HTML: accepted drafts marked, and its speed."""
    words = ""
    for piece, kind in pieces(generation):
        words += f'<span class="{kind}" style="{LOOKS[kind]}">{escape(piece)}</span>'
    facts = f"{generation.new_tok} tokens · {generation.tokens_per_s:.1f} tokens/s"
    if generation.rows:
        facts += f" · tau {generation.tau:.2f} tokens per cycle (drafts are green)"
    return (
        f'<div style="font-size: 13px"><div style="white-space: pre-wrap">{words}</div>'
        f'<div style="font-size: 11px; opacity: 0.8">{facts}</div></div>'
    )


def pieces(generation: Any) -> list[tuple[str, str]]:
    """The text in order as (piece, "accepted" drafts, "bonus" or "plain"); joined, they are it.

    A character of several tokens belongs to the piece that completes it.
    """
    text = generation.text
    read = generation.read_text
    if text is None or read is None or not generation.rows:
        return [(str(generation.tokens) if text is None else text, "plain")]
    # 1. where pieces end, in tokens: the prefill's token, then each cycle's drafts and bonus
    end = generation.new_tok - sum(row.kept_tok for row in generation.rows)
    ends = [(end, "plain")]
    for row in generation.rows:
        ends.append((end + min(row.accepted_tok, row.kept_tok), "accepted"))
        end += row.kept_tok
        ends.append((end, "bonus"))
    # 2. where they end in the text, as far as whole characters reach
    parts = []
    begin = 0
    for end, kind in ends:
        prefix = read(generation.tokens[:end]).rstrip("\N{REPLACEMENT CHARACTER}")
        reach = max(begin, len(prefix)) if text.startswith(prefix) else begin
        parts.append((text[begin:reach], kind))
        begin = reach
    parts.append((text[begin:], "plain"))
    return [part for part in parts if part[0]]


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a torch dtype in files, tables and on the command line: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
