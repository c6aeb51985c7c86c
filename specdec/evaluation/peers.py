"""Other decoders on a pair's own target, as methods of the bench: the alternatives to this package.

transformers' `generate` as it is, with prompt lookup, and with the target's own first layers as assistant; and, if the
package llama-cpp-python is installed and the target comes from a GGUF file, llama.cpp on that file. They decode greedily
with their own defaults. None of them is required.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.core import clock
from specdec.core.pair import Pair
from specdec.core.records import Generation
from specdec.core.verification import truncate
from specdec.errors import check_name
from specdec.models import load

GENERATE, LOOKUP, ASSISTED, LLAMA = (
    "generate",
    "generate, lookup",
    "generate, early exit",
    "llama.cpp",
)
NAMES = (GENERATE, LOOKUP, ASSISTED, LLAMA)
LOOKUP_TOK = 10  # tokens copied at once by prompt lookup
ASSISTANT_FRAC = 0.2  # fraction of the target's layers used as an assistant
PACKAGE = "llama-cpp-python"


@dataclass(frozen=True)
class Peer:
    """Another decoder. note: a remark for readers."""

    name: str
    note: str

    def decode(self, pair: Pair, ids: list[int], max_new_tokens: int) -> Generation:
        """Greedy text up to the first stop token; all of its time counts as decoding, including the prompt's forward."""
        watch = clock.Clock(pair.target.device)
        tokens = self.tokens(pair, ids, max_new_tokens)
        watch.wait()
        taken_ms = watch.stop()["total_ms"]
        tokens = truncate(tokens, pair.stop_tokens, max_new_tokens)
        reason = "stop" if tokens[-1] in pair.stop_tokens else "length"
        return Generation(tokens, len(ids), [], pair.text_of(tokens), 0.0, taken_ms, reason)

    def tokens(self, pair: Pair, ids: list[int], max_new_tokens: int) -> list[int]:
        """New token ids."""
        raise NotImplementedError


@dataclass(frozen=True)
class Transformers(Peer):
    """`generate` of the target's own model with one setting of its GenerationConfig (a name and a number), or none."""

    setting: tuple[str, int] | None = None

    def tokens(self, pair: Pair, ids: list[int], max_new_tokens: int) -> list[int]:
        prompt = torch.tensor([ids], device=pair.target.device)
        options = dict([self.setting] if self.setting else [])
        options |= dict(
            eos_token_id=sorted(pair.stop_tokens) or None, pad_token_id=0, do_sample=False
        )
        options |= dict(attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the assistant's settings do not concern the user
            return pair.target.model.generate(prompt, **options)[0, len(ids) :].tolist()


@dataclass(frozen=True)
class LlamaCpp(Peer):
    """llama.cpp on a GGUF file, by its Python binding. The prompt's ids are passed unchanged."""

    file: str = ""
    version: str = ""

    def tokens(self, pair: Pair, ids: list[int], max_new_tokens: int) -> list[int]:
        model, tokens = (
            _llama(self.file, pair.target.position_limit or 4096, torch.get_num_threads()),
            [],
        )
        model.reset()  # no reuse of earlier prompts
        for token in model.generate(ids, temp=0.0):
            tokens.append(token)
            if token in pair.stop_tokens or len(tokens) == max_new_tokens:
                return tokens
        return tokens


@functools.lru_cache(maxsize=1)
def _llama(file: str, context: int, threads: int):
    from llama_cpp import Llama

    return Llama(file, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)


def peers_of(pair: Pair, names=NAMES) -> tuple[dict[str, Peer], dict[str, str]]:
    """The peers that can run on this pair here, by name; and the reason for each of the others.

    names: some of NAMES. SpecdecError for another name.

    >>> found, absent = peers_of(load.load_pair("tiny"), ["generate", "llama.cpp"])
    >>> list(found), absent["llama.cpp"]
    (['generate'], 'the target of tiny comes from no GGUF file.')
    """
    names = [check_name("peer", name, NAMES) for name in names]
    layers = max(1, round(ASSISTANT_FRAC * pair.target.num_layers))
    copies = f"transformers' prompt lookup, {LOOKUP_TOK} tokens"
    early = (
        f"transformers' assisted generation; no smaller model shares the tokenizer, so the target's first {layers} "
        "layers, which were not trained to end there, assist"
    )
    known: dict[str, Peer] = {
        GENERATE: Transformers(GENERATE, "transformers, one token per forward"),
        LOOKUP: Transformers(LOOKUP, copies, ("prompt_lookup_num_tokens", LOOKUP_TOK)),
        ASSISTED: Transformers(ASSISTED, early, ("assistant_early_exit", layers)),
    }
    file, absent = load.gguf_of(pair.name), {}
    if file is None:
        absent[LLAMA] = f"the target of {pair.name} comes from no GGUF file."
    else:
        try:
            known[LLAMA] = _llama_peer(file, importlib.metadata.version(PACKAGE))
        except importlib.metadata.PackageNotFoundError:
            absent[LLAMA] = f"{PACKAGE} is not installed here."
    found = {name: known[name] for name in names if name in known}
    return found, {name: why for name, why in absent.items() if name in names}


def _llama_peer(file: Path, version: str) -> LlamaCpp:
    kind = re.search(r"\.(\w+?)(-[0-9a-f]{12})?\.gguf$", file.name)
    note = f"another engine, {PACKAGE} {version}, on the target's own file and with its weights, {kind[1] if kind else 'GGUF'}"
    return LlamaCpp(LLAMA, note, str(file), version)
