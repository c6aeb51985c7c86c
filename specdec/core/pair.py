"""A target, its drafter and its tokenizer; conversion between prompts and token ids."""

from __future__ import annotations

import contextlib
import operator
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specdec.core.protocols import Drafter, TargetModel
from specdec.core.tree_config import CPU_TREE, TREES, TreeConfig
from specdec.errors import SpecdecError, check_text


class Tokenizer(Protocol):
    """What a tokenizer needs, as in transformers. Chats also need its `chat_template`."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...
    def apply_chat_template(
        self, conversation: Any, *, add_generation_prompt: bool, return_dict: bool
    ) -> Any: ...


@dataclass
class Pair:
    """A target and its drafter.

    stop_tokens: the ids that end a text. source: the arguments of `load_pair`; None for a model in
    memory. tree: the tree tuned for this pair; None: see `usual_tree`.

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
    source: dict[str, Any] | None = None
    tree: TreeConfig | None = None

    @property
    def usual_tree(self) -> TreeConfig:
        """The tree used without a policy: the tuned one, else a small one on a CPU or EAGLE-3's."""
        if self.tree is not None:
            return self.tree
        if torch.device(self.target.device).type == "cpu":
            return CPU_TREE
        return TREES["eagle3"]

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

    def needed_drafter(self) -> Drafter:
        """The drafter; SpecdecError where there is none."""
        if self.drafter is None:
            raise SpecdecError(
                "this pair has no drafter; load one with load_pair(target=..., drafter=...) or use "
                "autoregress()."
            )
        return self.drafter

    def ids_of(
        self, prompt: str | Sequence[int] | Tensor | list[dict[str, Any]], raw: bool = False
    ) -> list[int]:
        """Token ids of a text, of ids (list or 1-D tensor), or of chat messages.

        A text is a user's message where the tokenizer has a chat template. Without one, or with
        raw=True, it is tokenised as it is.
        """
        if isinstance(prompt, str) and self.chats and not raw and prompt:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            ids = self._tokenizer().encode(check_text("the prompt", prompt)) if prompt else []
        elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
            ids = self._ids_of_chat(prompt)
        else:
            ids = _integers(prompt)
        if not ids:
            raise SpecdecError("the prompt is empty; give at least one token.")
        size = self.target.vocab_size
        for token in ids:
            if not 0 <= token < size:
                raise SpecdecError(
                    f"token id {token} is outside the target's vocabulary of {size}."
                )
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

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise SpecdecError(f"pair {self.name!r} has no tokenizer to read text; pass token ids.")
        return self.tokenizer

    def _ids_of_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        for message in messages:
            content = message.get("content")
            if not isinstance(content, str) or "role" not in message:
                raise SpecdecError(
                    'chat messages are a list of {"role": ..., "content": text}, got '
                    f"{reprlib.repr(message)}."
                )
            check_text("a chat message", content)
        if not self.chats:
            raise SpecdecError(
                f"the tokenizer of {self.name!r} has no chat template; pass text or token ids."
            )
        from jinja2 import TemplateError

        try:
            ids = self._tokenizer().apply_chat_template(
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
        raise SpecdecError(
            "a prompt is text, token ids (a list or 1-D tensor) or a list of chat messages; got "
            f"{reprlib.repr(prompt)}."
        ) from None


def dtype_name(dtype: torch.dtype | str) -> str:
    """The name of a torch dtype in files, tables and on the command line: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
