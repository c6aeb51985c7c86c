"""A target, its drafter and its tokenizer; from what people call a prompt to token ids, and back.

Knows nothing about loading, cycles, policies or trees.
"""

from __future__ import annotations

import contextlib
import json
import operator
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specdec.core.protocols import Drafter, TargetModel
from specdec.core.tree_config import CPU_TREE, TREES, TreeConfig
from specdec.errors import SpecdecError, check_kind, check_text

NO_DRAFTER = "this pair has no drafter; load one with load_pair(target=..., drafter=...) or use autoregress()."
OneEngine = TypeVar("OneEngine")
OnePolicy = TypeVar("OnePolicy")
OnePicker = TypeVar("OnePicker")


class Tokenizer(Protocol):
    """What is asked of a tokenizer. Chats need a `chat_template` and `apply_chat_template` as well, as transformers has them."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool, return_dict: bool) -> Any: ...


class InStep(Protocol):
    """What makes the processes decode alike that share a target: picker, engine and policy of a turn become those of all."""

    def picker(self, picker: OnePicker) -> OnePicker: ...

    def turn(self, engine: OneEngine, policy: OnePolicy) -> tuple[OneEngine, OnePolicy]: ...


@dataclass
class Pair:
    """A target and what drafts for it. stop_tokens: the ids that end a text, as the model's generation settings say.

    in_step: for a target that lies in shares among several processes, what makes them decode alike (`models/spread.py`).
    tree: the tree where no policy is given, as it was tuned for this pair; None: see `usual_tree`.
    source: what `load_pair` was given, for another process to load the same; None where a model in memory was.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny")
    >>> pair.text_of(pair.ids_of("Good morning.", raw=True))
    'Good morning.'
    """

    target: TargetModel
    drafter: Drafter | None = None
    tokenizer: Tokenizer | None = None
    name: str = "pair"
    stop_tokens: frozenset[int] = frozenset()
    in_step: InStep | None = None
    source: dict[str, Any] | None = None
    tree: TreeConfig | None = None

    @property
    def usual_tree(self) -> TreeConfig:
        """The tree where no policy is given: the tuned one, else a small one on a CPU and EAGLE-3's on a GPU.

        >>> import specdec
        >>> specdec.load_pair("tiny", device="cpu").usual_tree == specdec.TreeConfig(6, 2, 3)
        True
        """
        return self.tree or (CPU_TREE if torch.device(self.target.device).type == "cpu" else TREES["eagle3"])

    @contextlib.contextmanager
    def inference(self, plain: bool = False) -> Iterator[None]:
        """Target and drafter ready to decode; outside, the models are their owner's. plain: the target alone, untapped."""
        if plain:
            with self.target.inference(taps=False):
                yield
            return
        drafter = self.needed_drafter()
        self.target.taps = drafter.taps  # drafters that share a target tap it differently
        with self.target.inference(taps=True):
            drafter.refresh()
            with drafter.inference():
                yield

    def refresh(self) -> None:
        """See changes of the models since they were last used: adapters, other layers, weights that were cast or loaded."""
        self.target.refresh()
        if self.drafter is not None:
            self.drafter.refresh()

    def needed_drafter(self) -> Drafter:
        """The drafter; SpecdecError where there is none."""
        if self.drafter is None:
            raise SpecdecError(NO_DRAFTER)
        return self.drafter

    def ids_of(self, prompt: str | Sequence[int] | Tensor | list[dict[str, Any]], raw: bool = False) -> list[int]:
        """Token ids of a text, of ids (list or 1-D tensor), or of chat messages [{"role", "content"}, ...].

        Messages go through the tokenizer's chat template with the cue for the assistant's answer. A text is the message of a
        user where there is a template. Without one, or with raw=True, it is tokenised as it is (the tokenizer's own begin
        token included). SpecdecError says what is wrong with a prompt.
        """
        check_kind("raw", raw, bool)
        if isinstance(prompt, str):
            ids = self._ids_of_text(check_text("the prompt", prompt), raw) if prompt else []
        elif isinstance(prompt, list | tuple) and any(isinstance(item, dict) for item in prompt):
            ids = self._ids_of_chat(prompt)
        else:
            ids = _integers(prompt)
        if not ids:
            raise SpecdecError("the prompt is empty; give at least one token.")
        size = self.target.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise SpecdecError(
                    f"token id {token} is outside the target's vocabulary of {size}; check the prompt or the tokenizer."
                )
        return ids

    def _ids_of_text(self, text: str, raw: bool) -> list[int]:
        if self.chats and not raw:
            return self._ids_of_chat([{"role": "user", "content": text}])
        return self._tokenizer("text").encode(text)

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template, so that a text is a user's message."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def text_of(self, tokens: Sequence[int]) -> str | None:
        """The text of token ids without special tokens, or None when the pair has no tokenizer."""
        return None if self.reader is None else self.reader(tokens)

    @property
    def reader(self) -> Callable[[Sequence[int]], str] | None:
        """`text_of` without the pair: who keeps it keeps no model."""
        return None if self.tokenizer is None else partial(_text_of, self.tokenizer)

    def _tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise SpecdecError(
                f"pair {self.name!r} has no tokenizer to read {what}; pass token ids, or load it with a tokenizer."
            )
        return self.tokenizer

    def _ids_of_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        tokenizer = self._tokenizer("chat messages")
        if not all(isinstance(message, dict) and {"role", "content"} <= set(message) for message in messages):
            raise SpecdecError('chat messages are a list of {"role": ..., "content": ...}; one has another shape.')
        for message in messages:
            if not _is_text(message):
                raise SpecdecError(f"the content of a chat message is a text, got {reprlib.repr(message['content'])}.")
        check_text("a chat message", json.dumps(messages, ensure_ascii=False, default=str))
        if not self.chats:
            raise SpecdecError(f"the tokenizer of {self.name!r} has no chat template; pass plain text or token ids.")
        from jinja2 import TemplateError

        try:
            return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))
        except (TemplateError, TypeError, KeyError) as error:
            raise SpecdecError(f"the chat template refuses these messages: {error}.") from error


def _is_text(message: dict[str, Any]) -> bool:
    """Whether a template can write the message's content; a call of tools has none, and parts of it may be texts."""
    content = message["content"]
    if content is None:
        return bool(message.get("tool_calls"))
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts)
    return all(isinstance(text, str) for text in texts)


def _integers(prompt: Any) -> list[int]:
    """The ids of a sequence or 1-D tensor of integers; a leading batch of one is taken off."""
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # a tensor, an array, a column
    if isinstance(values, list | tuple) and len(values) == 1 and isinstance(values[0], list | tuple):
        values = values[0]
    if isinstance(values, list | tuple | range) and not any(isinstance(value, bool) for value in values):
        try:
            return [operator.index(value) for value in values]
        except TypeError:
            pass
    kind = f"{type(prompt).__name__} of other things" if isinstance(values, list | tuple) else type(prompt).__name__
    raise SpecdecError(f"a prompt is text, token ids (a list or 1-D tensor) or a list of chat messages; got a {kind}.")


def dtype_name(dtype: torch.dtype | str) -> str:
    """What a torch dtype is called in files, tables and on the command line: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True)
