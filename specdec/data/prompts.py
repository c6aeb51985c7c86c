"""What is measured on what, and by which name: methods from text, prompts from suites, fingerprints of both.

A method is a policy, or plain decoding. A fingerprint holds whatever could change a result, so that a run is continued
only where nothing changed. Knows nothing about timing, tables or files of results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from specdec import runs
from specdec.core.pair import Pair
from specdec.data import suites as suites_module
from specdec.errors import SpecdecError, nearest_name_error

PARTS = ("train", "tune", "test")


@dataclass(frozen=True)
class Item:
    """One prompt to decode. turns: texts, or a single turn of token ids. prompt: where it came from, for its check."""

    suite: str
    id: str
    turns: tuple
    prompt: suites_module.Prompt | None = None

    @property
    def digest(self) -> str:
        """What the prompt says, whatever it is called: two prompts with the same turns have the same digest."""
        return runs.content_key(turns=list(self.turns))[:16]


# --- prompts ----------------------------------------------------------------------------------------------------------


def gather(
    suites, *, limit: int | None = None, folder: str | Path | None = None, part: str | None = None, seed: int = 0
) -> list[Item]:
    """The items to decode, from suite names, prompts, or a dict {suite: prompts}.

    suites: one name or a list of names of `tasks.SUITES`; a list of `tasks.Prompt`, of `Item` or of token-id lists; or
    a dict whose values are lists of those or of texts. limit: prompts per suite. part: "train", "tune" or "test" of
    `tasks.split`, taken before the limit. folder: of JSONL files, for suites that are not embedded.
    """
    if part is not None and part not in PARTS:
        raise nearest_name_error("part", part, PARTS)
    suites = [suites] if isinstance(suites, str) else suites
    if isinstance(suites, dict):
        groups = list(suites.items())
    elif all(isinstance(one, str) for one in suites):
        groups = [(name, suites_module.load_suite(name, folder, None if part else limit, seed)) for name in suites]
    else:
        groups = [(None, suites)]
    items = [item for suite, prompts in groups for item in _items(prompts, suite, limit, part)]
    if not items:
        raise SpecdecError(
            "there are no prompts to decode; name suites or give prompts, or choose a larger part of them."
        )
    twice = [name for name, count in Counter(item.id for item in items).items() if count > 1]
    if twice:
        raise SpecdecError(f"prompt {twice[0]!r} occurs twice; every prompt is measured once per repeat.")
    return items


def _items(prompts: Iterable, suite: str | None, limit: int | None, part: str | None) -> list[Item]:
    items = [_item(prompt, suite, number) for number, prompt in enumerate(prompts)]
    if part is not None:
        kept = suites_module.split([item.prompt for item in items if item.prompt is not None])[part]
        chosen = {prompt.id for prompt in kept}
        items = [item for item in items if item.prompt is not None and item.prompt.id in chosen]
    return items if limit is None else items[:limit]


def _item(prompt, suite: str | None, number: int) -> Item:
    if isinstance(prompt, Item):
        return prompt
    if isinstance(prompt, suites_module.Prompt):
        return Item(suite or prompt.suite, prompt.id, prompt.turns, prompt)
    suite = suite or "prompts"
    if isinstance(prompt, str):
        return Item(suite, f"{suite}/{number}", (prompt,), suites_module.Prompt(f"{suite}/{number}", suite, (prompt,)))
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, list | tuple) or not all(isinstance(one, int) for one in ids):
        raise SpecdecError(f"prompt {number} is neither a tasks.Prompt nor text nor a list of token ids.")
    return Item(suite, f"{suite}/{number}", (list(ids),))


def conversation(pair: Pair, item: Item, turn: int, answers: list[str]) -> str | list:
    """What is decoded at `turn` (from 0): chat messages where the tokenizer has a template, else text, or token ids.

    answers: those to the turns before. Without a template, turns and answers are joined by blank lines.
    """
    if not isinstance(item.turns[turn], str):
        return item.turns[turn]
    if not getattr(pair.tokenizer, "chat_template", None):
        said = [text for both in zip(item.turns, answers, strict=False) for text in both]
        return "\n\n".join([*said, item.turns[turn]])
    messages = []
    for question, answer in zip(item.turns, answers, strict=False):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": item.turns[turn]}]


def describe_items(items: list[Item]) -> str:
    """Hash of all prompts and their order."""
    return runs.content_key(items=[[item.suite, item.id, list(item.turns)] for item in items])
