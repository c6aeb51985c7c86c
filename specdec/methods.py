"""What is measured on what, and by which name: methods from text, prompts from suites, fingerprints of both.

A method is a policy, or plain decoding. A fingerprint holds whatever could change a result, so that a run is continued
only where nothing changed. Knows nothing about timing, tables or files of results.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from specdec import runs, tasks
from specdec.config import TREES, SpecdecError, nearest_name_error
from specdec.hub import Pair
from specdec.policy import Policy, Static

AUTOREGRESSIVE = "autoregressive"
PLAIN = (AUTOREGRESSIVE, None)
PARTS = ("train", "tune", "test")


@dataclass(frozen=True)
class Item:
    """One prompt to decode. turns: texts, or a single turn of token ids. prompt: where it came from, for its check."""

    suite: str
    id: str
    turns: tuple
    prompt: tasks.Prompt | None = None

    @property
    def digest(self) -> str:
        """What the prompt says, whatever it is called: two prompts with the same turns have the same digest."""
        return runs.content_key(turns=list(self.turns))[:16]


# --- methods ----------------------------------------------------------------------------------------------------------


def method_from(text: str) -> Policy | None:
    """A method from text: "autoregressive" (None), a name in config.TREES, or "static:total_tokens,depth,top_k"."""
    kind, _, numbers = text.partition(":")
    if kind == AUTOREGRESSIVE and not numbers:
        return None
    if kind in TREES and not numbers:
        tree = TREES[kind]
        return Static.of(tree)
    if kind != "static":
        raise nearest_name_error("method", text, [AUTOREGRESSIVE, *TREES, "static:60,7,10"])
    try:
        total_tokens, depth, top_k = (int(number) for number in numbers.split(","))
    except ValueError:
        raise SpecdecError(f"{text!r} is not a static tree; write static:total_tokens,depth,top_k.") from None
    return Static(total_tokens, depth, top_k)


def named_methods(methods) -> dict[str, Policy | None]:
    """{name: policy, or None for plain decoding}; values may be policies or texts for `method_from`."""
    if not isinstance(methods, dict) or not methods:
        raise SpecdecError(
            "methods is a dict of names and policies, such as {'plain': 'autoregressive', 'tree': Static()}."
        )
    found = {}
    for name, method in methods.items():
        policy = method_from(method) if isinstance(method, str) else method
        if policy is not None and not all(hasattr(policy, part) for part in ("asks", "limits", "plan", "answer")):
            raise SpecdecError(
                f"method {name!r} is a {type(policy).__name__}; give a policy, 'autoregressive' or 'static:60,7,10'."
            )
        found[str(name)] = policy
    return found


def baseline_of(methods: dict[str, Policy | None]) -> str:
    """The method everything is compared with: plain decoding where it takes part, else the first."""
    return next((name for name, policy in methods.items() if policy is None), next(iter(methods)))


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
        groups = [(name, tasks.load_suite(name, folder, None if part else limit, seed)) for name in suites]
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
        kept = tasks.split([item.prompt for item in items if item.prompt is not None])[part]
        chosen = {prompt.id for prompt in kept}
        items = [item for item in items if item.prompt is not None and item.prompt.id in chosen]
    return items if limit is None else items[:limit]


def _item(prompt, suite: str | None, number: int) -> Item:
    if isinstance(prompt, Item):
        return prompt
    if isinstance(prompt, tasks.Prompt):
        return Item(suite or prompt.suite, prompt.id, prompt.turns, prompt)
    suite = suite or "prompts"
    if isinstance(prompt, str):
        return Item(suite, f"{suite}/{number}", (prompt,), tasks.Prompt(f"{suite}/{number}", suite, (prompt,)))
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


# --- fingerprints -----------------------------------------------------------------------------------------------------


def fingerprint(value, depth: int = 6):
    """`value` as small JSON that changes when anything inside does: settings as they are, arrays and weights hashed."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _hash_of(value)
    if isinstance(value, torch.nn.Module):
        value = {"class": type(value).__name__, **value.state_dict()}
    if isinstance(value, dict):
        return {str(name): fingerprint(one, depth) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [fingerprint(one, depth) for one in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, random.Random):
        return hashlib.sha256(repr(value.getstate()).encode()).hexdigest()
    if depth == 0 or isinstance(value, type) or callable(value) and not hasattr(value, "__dict__"):
        return getattr(value, "__qualname__", type(value).__qualname__)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    inside = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})
    name = getattr(value, "__qualname__", type(value).__qualname__)
    return {"class": name, **{key: fingerprint(one, depth - 1) for key, one in sorted(inside.items())}}


def _hash_of(array) -> str:
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    array = np.ascontiguousarray(array)
    return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def describe_pair(pair: Pair, samples: int = 64) -> dict:
    """What a result depends on in a pair: name, dtype, device, and a hash of `samples` values of every weight."""
    digest = hashlib.sha256()
    network = getattr(pair.drafter, "network", None)
    modules = [pair.target.model] + ([network] if network is not None else [])
    weights = [one for module in modules for one in sorted(module.state_dict().items())]
    with torch.inference_mode():
        for name, weight in weights:
            flat = weight.detach().flatten()
            chosen = torch.linspace(0, max(0, len(flat) - 1), min(samples, len(flat)), device=flat.device).long()
            digest.update(f"{name} {tuple(weight.shape)} {flat[chosen].double().tolist()}".encode())
    taps = list(pair.drafter.taps) if pair.drafter is not None else None
    return {
        "pair": pair.name,
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": pair.target.device.type,
        "taps": taps,
        "stop_tokens": sorted(pair.stop_tokens),
        "weights": digest.hexdigest()[:16],
    }


def describe_items(items: list[Item]) -> str:
    """Hash of all prompts and their order."""
    return runs.content_key(items=[[item.suite, item.id, list(item.turns)] for item in items])
