"""Pairs: a target, its drafter and its tokenizer, from a preset, from folders or from the Hugging Face hub.

Presets name the pairs shipped with the package and the published ones of the papers. Loading checks that the drafter
fits the target. Knows nothing about cycles, policies, trees or file formats. The published pairs were NOT downloaded
where this was developed (no network): their ids are what papers and code name.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from specdec import fetch
from specdec.checkpoints import Checkpoint, named_target, read_checkpoint
from specdec.config import SpecdecError, nearest_name_error
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.eagle_layouts import EMBEDDING
from specdec.drafters.eagle_reading import calibrate_reading
from specdec.target import Target

SHIPPED = ("tiny", "mini", "small")  # under specdec/weights/<name>/{target,drafter}


@dataclass(frozen=True)
class Preset:
    """A published pair by its hub ids. tree: the name in `config.TREES` its publishers evaluate with."""

    target: str
    drafter: str
    tree: str = "eagle3-scripts"
    note: str = ""


PRESETS = {
    # The official checkpoints; the pairs of Re-SpS (section 5), LTD (section 4) and RADAR (section 4).
    "llama-3.1-8b": Preset(
        "meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", note="licence to accept on the hub"
    ),
    "llama-3.3-70b": Preset(
        "meta-llama/Llama-3.3-70B-Instruct", "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", note="licence to accept on the hub"
    ),
    "vicuna-13b": Preset("lmsys/vicuna-13b-v1.3", "yuhuili/EAGLE3-Vicuna1.3-13B"),
    "deepseek-r1-8b": Preset("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"),
    # Community checkpoints, those of LTD.
    "qwen3-14b": Preset("Qwen/Qwen3-14B", "AngelSlim/Qwen3-14B_eagle3", "eagle3-qwen3"),
    "qwen3-32b": Preset("Qwen/Qwen3-32B", "AngelSlim/Qwen3-32B_eagle3", "eagle3-qwen3"),
}


@dataclass
class Pair:
    """A target and what drafts for it. stop_tokens: the ids that end a text, as the model's generation settings say."""

    target: Target
    drafter: EagleDrafter | None = None
    tokenizer: object | None = None
    name: str = "pair"
    stop_tokens: frozenset[int] = frozenset()

    def ids_of(self, prompt: str | Sequence[int] | Tensor | list[dict]) -> list[int]:
        """Token ids of a text, of ids (list or 1-D tensor), or of chat messages [{"role", "content"}, ...].

        Text is tokenised as the tokenizer does by default (its own begin token included); messages go through its chat
        template with the cue for the assistant's answer. SpecdecError says what is wrong with a prompt.
        """
        if isinstance(prompt, str):
            ids = self._tokenizer("text").encode(prompt) if prompt else []
        elif _is_chat(prompt):
            ids = self._ids_of_chat(prompt)
        else:
            ids = _integers(prompt)
        if not ids:
            raise SpecdecError("the prompt is empty; give at least one token.")
        size = self.target.vocab_size
        if not 0 <= min(ids) <= max(ids) < size:
            wrong = next(i for i in ids if not 0 <= i < size)
            raise SpecdecError(
                f"token id {wrong} is outside the target's vocabulary of {size}; check the prompt or the tokenizer."
            )
        return ids

    def text_of(self, tokens: Sequence[int]) -> str | None:
        """The text of token ids without special tokens, or None when the pair has no tokenizer."""
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _tokenizer(self, what: str):
        if self.tokenizer is None:
            raise SpecdecError(
                f"pair {self.name!r} has no tokenizer to read {what}; pass token ids, or load it with a tokenizer."
            )
        return self.tokenizer

    def _ids_of_chat(self, messages) -> list[int]:
        tokenizer = self._tokenizer("chat messages")
        if not all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in messages):
            raise SpecdecError(
                'chat messages are a list of {"role": ..., "content": ...}; one of them has another shape.'
            )
        if not getattr(tokenizer, "chat_template", None):
            raise SpecdecError(
                f"the tokenizer of pair {self.name!r} has no chat template; pass plain text or token ids."
            )
        from jinja2 import TemplateError

        try:
            ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        except (TemplateError, TypeError, KeyError) as error:
            raise SpecdecError(f"the chat template refuses these messages: {error}.") from error
        return list(ids)


def _is_chat(prompt) -> bool:
    return isinstance(prompt, list | tuple) and any(isinstance(item, dict) for item in prompt)


def _integers(prompt) -> list[int]:
    """The ids of a sequence or 1-D tensor of integers; a leading batch of one is taken off."""
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(values, list | tuple) and len(values) == 1 and isinstance(values[0], list | tuple):
        values = values[0]
    if isinstance(values, list | tuple | range) and not any(isinstance(value, bool) for value in values):
        try:
            return [operator.index(value) for value in values]
        except TypeError:
            pass
    kind = f"{type(prompt).__name__} of other things" if isinstance(values, list | tuple) else type(prompt).__name__
    raise SpecdecError(f"a prompt is text, token ids (a list or 1-D tensor) or a list of chat messages; got a {kind}.")


# --- loading ----------------------------------------------------------------------------------------------------------


def load_pair(
    name: str | None = None,
    *,
    target: str | Path | nn.Module | None = None,
    drafter: str | Path | None = None,
    tokenizer: str | Path | object | None = None,
    dtype: str = "auto",
    device: str = "auto",
    reading: str = "file",
    trust_remote_code: bool = False,
) -> Pair:
    """A preset by name, or any target and drafter.

    name: "tiny", "mini" or "small" (shipped with the package), or one of PRESETS (hub). target: a folder, a hub id or a
    loaded transformers causal LM, which stays untouched; default the one a speculators drafter names. drafter: a folder
    or hub id, or None for a target alone.
    tokenizer: default the target's own. dtype: "float32", "bfloat16", "float16", or "auto", which is float32 on a CPU
    (there, losslessness is exact) and the checkpoint's own on a GPU. device: a torch device or "auto".
    reading: see `load_drafter`. Code from the hub is never run unless trust_remote_code is true.
    """
    if name is None and target is None and drafter is not None:
        target = named_target(fetch.drafter_folder(str(drafter)))
    if (name is None) == (target is None):
        raise SpecdecError(
            f"give either a preset's name ({', '.join([*SHIPPED, *PRESETS])}) or target=..., and not both."
        )
    if name is not None:
        if drafter is not None:
            raise SpecdecError(
                f"preset {name!r} brings its own drafter; name the target with target=... to use another."
            )
        target, drafter = _places(name)
    if isinstance(target, nn.Module):
        if dtype != "auto" or device != "auto":
            raise SpecdecError("a loaded model keeps its dtype and device; move it yourself before load_pair.")
        model = target
    else:
        model = fetch.load_model(str(target), *fetch.placement(dtype, device), trust_remote_code)
        tokenizer = str(target) if tokenizer is None else tokenizer
    if isinstance(tokenizer, str | Path):
        tokenizer = fetch.load_tokenizer(str(tokenizer), trust_remote_code)
    pair = Pair(Target(model), None, tokenizer, name or _name_of(model), fetch.stop_tokens(model))
    if drafter is not None:
        pair.drafter = load_drafter(drafter, pair.target, reading=reading, start=_calibration_prompt(pair))
    return pair


def load_drafter(
    path: str | Path,
    target: Target | nn.Module,
    *,
    reading: str = "file",
    start: Sequence[int] | None = None,
) -> EagleDrafter:
    """The drafter of a folder or hub id, bound to a target (a `Target` or a transformers causal LM, left untouched).

    reading: "file" reads the checkpoint as its config.json says; "calibrate" also tries the readings that files of its
    layout are known to state wrongly on 64 tokens of the target's own, keeps the best and warns if that is another.
    start: token ids the target continues for that, default its begin token; a real prompt tells more.
    """
    if reading not in ("file", "calibrate"):
        raise nearest_name_error("reading", reading, ("file", "calibrate"))
    target = target if isinstance(target, Target) else Target(target)
    checkpoint = read_checkpoint(fetch.drafter_folder(str(path)))
    drafter = EagleDrafter(_borrowing(checkpoint, target).network(), target)
    target.taps = drafter.taps
    if reading == "calibrate":
        begin = getattr(target.config, "bos_token_id", None)
        start = [begin if isinstance(begin, int) else 0] if start is None else start
        calibrate_reading(drafter, checkpoint.doubts, torch.tensor(list(start), dtype=torch.long))
    return drafter


def _name_of(model: nn.Module) -> str:
    """What a pair is called when nobody names it: the last telling part of where its target came from."""
    parts = [part for part in Path(str(getattr(model.config, "_name_or_path", ""))).parts if part != "target"]
    return parts[-1] if parts else type(model).__name__


def _calibration_prompt(pair: Pair) -> list[int] | None:
    if pair.tokenizer is None:
        return None
    text = "Write a short story about a fox, and explain what it teaches."
    chats = getattr(pair.tokenizer, "chat_template", None)
    return pair.ids_of([{"role": "user", "content": text}] if chats else text)


def _borrowing(checkpoint: Checkpoint, target: Target) -> Checkpoint:
    """The checkpoint without its embedding where that is a copy of the target's: nothing is held twice."""
    own, theirs = checkpoint.tensors.get(EMBEDDING), target.embedding.weight
    if own is None or own.shape != theirs.shape or not torch.equal(own.to(theirs.device, theirs.dtype), theirs):
        return checkpoint
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != EMBEDDING}
    return replace(checkpoint, tensors=tensors, config=replace(checkpoint.config, own_embedding=False))


def shipped_folder(name: str) -> Path:
    """Where a shipped pair lies inside the package."""
    return Path(__file__).parent / "weights" / name


def _places(name: str) -> tuple[str, str]:
    if name in PRESETS:
        return PRESETS[name].target, PRESETS[name].drafter
    if name not in SHIPPED:
        raise nearest_name_error("preset", name, [*SHIPPED, *PRESETS])
    folder = shipped_folder(name)
    if not (folder / "target").is_dir() or not (folder / "drafter").is_dir():
        raise SpecdecError(
            f"the pair {name!r} is not in this installation ({folder} is missing); install it again "
            "or choose another preset."
        )
    return str(folder / "target"), str(folder / "drafter")
