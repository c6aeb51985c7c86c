"""The prompts of a measurement: gathered from suites, texts or token ids, and turned into what is decoded.

Knows nothing about timing, tables or files of results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from specdec import runs
from specdec.core.pair import Pair
from specdec.data.suites import PARTS, Prompt, load_suite, split
from specdec.errors import SpecdecError, check_integer, check_kind, nearest_name_error


def gather(
    suites, *, limit: int | None = None, folder: str | Path | None = None, part: str | None = None, seed: int = 0
) -> list[Prompt]:
    """The prompts to decode.

    suites: one name or a list of names of `suites.SUITES`; a list of `suites.Prompt` or of token-id lists; or a dict
    {suite: prompts} whose values are lists of those or of texts. limit: prompts per suite. part: "train", "tune" or
    "test" of `suites.split`, taken before the limit. folder: of JSONL files, for suites that are not embedded.

    >>> [prompt.id for prompt in gather({"mine": ["Add 2 and 3.", "Name a river."]})]
    ['mine/0', 'mine/1']
    """
    if part is not None and part not in PARTS:
        raise nearest_name_error("part", part, PARTS)
    check_integer("seed", seed)
    if limit is not None:
        check_integer("limit", limit, 1)
    suites = [suites] if isinstance(suites, str) else suites
    check_kind("the suites or prompts", suites, Iterable)
    for group in suites.values() if isinstance(suites, dict) else ():
        check_kind("the prompts of a suite", group, Iterable)
    if isinstance(suites, dict):
        groups = list(suites.items())
    elif all(isinstance(suite, str) for suite in suites):
        groups = [(name, load_suite(name, folder, None if part else limit, seed)) for name in suites]
    else:
        groups = [(None, suites)]
    prompts = [prompt for suite, group in groups for prompt in _prompts(group, suite, limit, part)]
    if not prompts:
        raise SpecdecError(
            "there are no prompts to decode; name suites or give prompts, or choose a larger part of them."
        )
    twice = [id for id, count in Counter(prompt.id for prompt in prompts).items() if count > 1]
    if twice:
        raise SpecdecError(f"prompt {twice[0]!r} occurs twice; every prompt is measured once per repeat.")
    return prompts


def _prompts(group: Iterable, suite: str | None, limit: int | None, part: str | None) -> list[Prompt]:
    prompts = [_prompt(source, suite, number) for number, source in enumerate(group)]
    if part is not None:  # token ids belong to no part
        prompts = split(prompt for prompt in prompts if isinstance(prompt.turns[0], str))[part]
    return prompts if limit is None else prompts[:limit]


def _prompt(source, suite: str | None, number: int) -> Prompt:
    if isinstance(source, Prompt):
        return replace(source, suite=suite or source.suite)
    suite = suite or "prompts"
    if isinstance(source, str):
        return Prompt(f"{suite}/{number}", suite, (source,))
    ids = source.tolist() if hasattr(source, "tolist") else source
    if not isinstance(ids, list | tuple) or not all(isinstance(token, int) for token in ids):
        raise SpecdecError(f"prompt {number} is neither a suites.Prompt nor text nor a list of token ids.")
    return Prompt(f"{suite}/{number}", suite, (list(ids),))


def conversation(pair: Pair, prompt: Prompt, turn: int, answers: list[str]) -> str | list:
    """What is decoded at `turn` (from 0): chat messages where the tokenizer has a template, else text, or token ids.

    answers: those to the turns before. Without a template, turns and answers are joined by blank lines.
    """
    if not isinstance(prompt.turns[turn], str):
        return prompt.turns[turn]
    said = list(zip(prompt.turns[:turn], answers, strict=False))
    if not getattr(pair.tokenizer, "chat_template", None):
        return "\n\n".join([*(text for pair_of_texts in said for text in pair_of_texts), prompt.turns[turn]])
    messages = []
    for question, answer in said:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": prompt.turns[turn]}]


def describe_items(prompts: list[Prompt]) -> str:
    """Hash of all prompts and their order."""
    return runs.content_key(items=[[prompt.suite, prompt.id, list(prompt.turns)] for prompt in prompts])
