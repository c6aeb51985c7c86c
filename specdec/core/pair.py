"""A target, its drafter and its tokenizer; conversion between prompts and token ids.

Knows nothing about loading, cycles, policies or trees.
"""

from __future__ import annotations

import contextlib
import json
import operator
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    """What a tokenizer needs to have. Chats also need `chat_template` and `apply_chat_template`, as in transformers."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def apply_chat_template(
        self, conversation: Any, *, add_generation_prompt: bool, return_dict: bool
    ) -> Any: ...


class InStep(Protocol):
    """Keeps processes that share a target in step: it wraps the picker, engine and policy of a turn."""

    def picker(self, picker: OnePicker) -> OnePicker: ...
    def turn(self, engine: OneEngine, policy: OnePolicy) -> tuple[OneEngine, OnePolicy]: ...


@dataclass
class Pair:
    """A target and its drafter. stop_tokens: the ids that end a text, from the model's generation settings.

    in_step: keeps the processes in step that hold shares of one target (`models/spread.py`).
    tree: the tree tuned for this pair, used without a policy; None: see `usual_tree`.
    source: the arguments of `load_pair`, with which another process loads the same pair; None for a model in memory.

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
        """The tree used without a policy: the tuned one, else a small one on a CPU and EAGLE-3's on a GPU.

        >>> import specdec
        >>> specdec.load_pair("tiny", device="cpu").usual_tree == specdec.TreeConfig(6, 2, 3)
        True
        """
        return self.tree or (
            CPU_TREE if torch.device(self.target.device).type == "cpu" else TREES["eagle3"]
        )

    @contextlib.contextmanager
    def inference(self, plain: bool = False) -> Iterator[None]:
        """Target and drafter ready to decode; outside this block they behave as usual. plain: the target alone, untapped."""
        if plain:
            with self.target.inference(taps=False):
                yield
            return
        drafter = self.needed_drafter()
        self.target.taps = drafter.taps  # drafters that share a target may tap other layers
        with self.target.inference(taps=True):
            drafter.refresh()
            with drafter.inference():
                yield

    def refresh(self) -> None:
        """Update to changes of the models since their last use: adapters, other layers, weights cast or loaded."""
        self.target.refresh()
        if self.drafter is not None:
            self.drafter.refresh()

    def needed_drafter(self) -> Drafter:
        """The drafter; SpecdecError where there is none."""
        if self.drafter is None:
            raise SpecdecError(NO_DRAFTER)
        return self.drafter

    def ids_of(
        self, prompt: str | Sequence[int] | Tensor | list[dict[str, Any]], raw: bool = False
    ) -> list[int]:
        """Token ids of a text, of ids (list or 1-D tensor), or of chat messages [{"role", "content"}, ...].

        Messages go through the tokenizer's chat template with the assistant's cue. Where there is a template, a text is a user's
        message. Without one, or with raw=True, it is tokenised as it is, with the tokenizer's own begin token. SpecdecError says
        what is wrong with a prompt.
        """
        check_kind("raw", raw, bool)
        if isinstance(prompt, str) and not raw and self.chats:
            prompt = (
                [{"role": "user", "content": check_text("the prompt", prompt)}] if prompt else []
            )
        if isinstance(prompt, str):
            ids = self._tokenizer("text").encode(check_text("the prompt", prompt)) if prompt else []
        elif isinstance(prompt, list | tuple) and any(isinstance(item, dict) for item in prompt):
            ids = self._ids_of_chat(prompt)
        else:
            ids = _integers(prompt)
        if not ids:
            raise SpecdecError("the prompt is empty; give at least one token.")
        size = self.target.vocab_size
        for token in ids:
            if not 0 <= token < size:
                why = f"token id {token} is outside the target's vocabulary of {size}"
                raise SpecdecError(f"{why}; check the prompt or the tokenizer.")
        return ids

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template, so that a text is taken as a user's message."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def text_of(self, tokens: Sequence[int]) -> str | None:
        """The text of token ids without special tokens, or None when the pair has no tokenizer."""
        return None if self.reader is None else self.reader(tokens)

    @property
    def reader(self) -> Callable[[Sequence[int]], str] | None:
        """`text_of` as a function that keeps no model alive."""
        tokenizer = self.tokenizer
        return (
            None
            if tokenizer is None
            else lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True)
        )

    def _tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            why = f"pair {self.name!r} has no tokenizer to read {what}"
            raise SpecdecError(f"{why}; pass token ids, or load it with a tokenizer.")
        return self.tokenizer

    def _ids_of_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        tokenizer = self._tokenizer("chat messages")
        if not all(
            isinstance(message, dict) and {"role", "content"} <= set(message)
            for message in messages
        ):
            raise SpecdecError(
                'chat messages are a list of {"role": ..., "content": ...}; one has another shape.'
            )
        for message in messages:
            if not _is_text(message):
                raise SpecdecError(
                    f"the content of a chat message is a text, got {reprlib.repr(message['content'])}."
                )
        check_text("a chat message", json.dumps(messages, ensure_ascii=False, default=str))
        if not self.chats:
            raise SpecdecError(
                f"the tokenizer of {self.name!r} has no chat template; pass plain text or token ids."
            )
        from jinja2 import TemplateError

        try:
            return list(
                tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=True, return_dict=False
                )
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise SpecdecError(f"the chat template refuses these messages: {error}.") from error


def _is_text(message: dict[str, Any]) -> bool:
    """Whether the template can write the message's content; a tool call has none, and parts of it may be texts."""
    content = message["content"]
    if content is None:
        return bool(message.get("tool_calls"))
    parts = content if isinstance(content, list) else [content]
    texts = (
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        for part in parts
    )
    return all(isinstance(text, str) for text in texts)


def _integers(prompt: Any) -> list[int]:
    """The ids of a sequence or 1-D tensor of integers; a leading batch dimension of one is dropped."""
    values = (
        prompt.tolist() if hasattr(prompt, "tolist") else prompt
    )  # a tensor, an array, a column
    if (
        isinstance(values, list | tuple)
        and len(values) == 1
        and isinstance(values[0], list | tuple)
    ):
        values = values[0]
    if isinstance(values, list | tuple | range) and not any(
        isinstance(value, bool) for value in values
    ):
        try:
            return [operator.index(value) for value in values]
        except TypeError:
            pass
    kind = (
        f"{type(prompt).__name__} of other things"
        if isinstance(values, list | tuple)
        else type(prompt).__name__
    )
    raise SpecdecError(
        f"a prompt is text, token ids (a list or 1-D tensor) or a list of chat messages; got a {kind}."
    )


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a torch dtype in files, tables and on the command line: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
