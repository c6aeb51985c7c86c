"""The audit of other engines: their texts, from logs or a server on this machine, judged by the target's own scores.

A log is JSONL with one answer a line:

    prompt or prompt_ids       a text or chat messages as `decode` takes them, or token ids
    output_ids or text         the answer's token ids, or its text, which the pair's tokenizer turns into ids
    finish_reason              "stop" for a text that ended by itself, if the token that ends it may be left out

The names of servers are known too: prompt_token_ids, token_ids. The rules are those of `lossless`.
"""

from __future__ import annotations

import http.client
import json
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from specdec.core.decode import autoregress
from specdec.core.pair import Pair
from specdec.core.verification import Picker
from specdec.errors import SpecdecError, door
from specdec.evaluation.lossless import COLUMNS, Audit, ChiSquare, _NearTies, law_of_draws
from specdec.stored import json_line, read_text

HERE = ("localhost", "127.0.0.1", "::1")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy sees the prompts
DTYPE = "log"  # in the column dtype: the engine's rounding is unknown, so near-ties are forgiven in every format


@dataclass(frozen=True)
class LoggedText:
    """One answer. ids: its token ids; exact: as the engine gave them, not read from its text by our tokenizer."""

    prompt: list[int]
    ids: list[int]
    exact: bool = True

    @classmethod
    def of(cls, pair: Pair, given: dict, where: str) -> LoggedText:
        """The answer in an object of a log or a server. SpecdecError names what is missing `where`."""
        prompt, ids = (
            next((given[name] for name in names if given.get(name) is not None), None)
            for names in (("prompt_ids", "prompt_token_ids", "prompt"), ("output_ids", "token_ids"))
        )
        exact, text = ids is not None, given.get("text")
        if prompt is None or not exact and not isinstance(text, str):
            raise SpecdecError(f"{where}: an answer needs prompt or prompt_ids, and output_ids or text.")
        given_ids = ids if exact else text
        ids = pair.ids_of(given_ids, raw=True) if given_ids else []
        if given.get("finish_reason") == "stop" and pair.stop_tokens.isdisjoint(ids[-1:]):
            ids = [*ids, *sorted(pair.stop_tokens)[:1]]
        return cls(pair.ids_of(prompt), ids, exact)


def read_log(path: str | Path, pair: Pair) -> list[LoggedText]:
    """The answers of a log. SpecdecError names the line that holds none."""
    texts, advice = [], "write one JSON object per line"
    for number, line in enumerate(read_text(Path(path), "give a JSONL file of answers").split("\n"), 1):
        where = f"{path}, line {number}"
        record = json_line(line, where, advice) if line.strip() else None
        if line.strip():
            texts.append(LoggedText.of(pair, record if isinstance(record, dict) else {}, where))
    if not texts:
        raise SpecdecError(f"{path} holds no answer; {advice}.")
    return texts


@door
def audit_texts(pair: Pair, plain: Sequence[LoggedText], others: Sequence[LoggedText], name: str = "other") -> Audit:
    """Compare another engine's greedy answers with plain ones, as `audit` compares ours.

    Where two texts part, the target's scores decide: both tokens must be within `audit`'s tolerance of the best one. So load
    the target in the engine's dtype.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> answer = LoggedText([5, 6], specdec.autoregress(pair, [5, 6], max_new_tokens=4).tokens)
    >>> audit_texts(pair, [answer], [answer]).passed
    True
    """
    if [text.prompt for text in plain] != [text.prompt for text in others]:
        why = f"the {len(plain)} plain answers and the {len(others)} others have different prompts"
        raise SpecdecError(f"{why}; log the same prompts in one order.")
    rows = []
    for number, (own, other) in enumerate(zip(plain, others, strict=True)):
        both = [text.ids for text in (own, other)]
        if not own.exact or not other.exact:
            both = [pair.ids_of(text, raw=True) if (text := pair.text_of(ids)) else [] for ids in both]
        if both[0][:-1] == both[1][:-1] and pair.stop_tokens.issuperset(both[0][-1:] + both[1][-1:]):
            both[1] = both[0]  # ended by different tokens, or both empty
        found = _NearTies(pair, own.prompt, both[0], Picker.from_settings(0.0), 0.0).compare(both[1])
        rows.append((number, name, 0.0, DTYPE, len(both[1]), 0, 0, *found))
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return Audit(frame.astype({"first_divergence": "Int64", "equal": bool, "near_tie": bool}))


def law_of_texts(pair: Pair, texts: Sequence[LoggedText], temperature: float) -> ChiSquare:
    """`lossless.law_of_draws` of sampled answers. SpecdecError for answers without token ids."""
    if not all(text.exact for text in texts):
        raise SpecdecError("sampled texts are judged by their token ids, which these answers lack; log output_ids.")
    picker = Picker.from_settings(temperature, 0)
    return law_of_draws(pair, [(text.prompt, text.ids) for text in texts], picker)


class Server:
    """An OpenAI-compatible server: /v1/models, and /v1/completions of token ids. any_host: also on another machine."""

    def __init__(self, url: str, any_host: bool = False):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SpecdecError(f"a server is an address such as http://localhost:8000, got {url!r}.")
        if parts.hostname not in HERE and not any_host:
            raise SpecdecError(f"{parts.hostname} is another machine; --any-host allows sending it prompts.")
        self.url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        self.model = str(self._read("models", "data").get("id", "server"))

    def _read(self, path: str, field: str, body: dict | None = None) -> dict:
        """The first object in a field of the server's answer."""
        data, place = body and json.dumps(body).encode(), f"{self.url}/{path}"
        request = urllib.request.Request(place, data, {"Content-Type": "application/json"})
        try:
            with DIRECT.open(request, timeout=600) as answer:
                return dict(json.load(answer)[field][0])
        except (OSError, http.client.HTTPException) as error:
            raise SpecdecError(f"{place} gave no answer ({error}); check the address and the server's log.") from error
        except (ValueError, TypeError, LookupError) as error:
            raise SpecdecError(f"{place} answered without {field!r}; give an OpenAI-compatible server.") from error

    def complete(self, pair: Pair, prompt: list[int], max_new_tokens: int, **sampling) -> LoggedText:
        """The server's continuation. Its ids: vLLM's token_ids, llama.cpp's beside log-probabilities, else read from the text."""
        body = dict(model=self.model, prompt=prompt, max_tokens=max_new_tokens, logprobs=1, return_token_ids=True)
        given = self._read("completions", "choices", body | sampling) | {"prompt_ids": prompt}
        tokens = (given.get("logprobs") or {}).get("content") or [{}]
        listed = {"output_ids": [token["id"] for token in tokens]} if all("id" in token for token in tokens) else {}
        return LoggedText.of(pair, listed | given, f"{self.url}/completions")


@door
def audit_server(pair: Pair, prompts: Sequence, server: Server, max_new_tokens: int = 32) -> Audit:
    """The server's greedy texts against our own plain decoding of the same target, as `audit_texts` compares."""
    plain, others = [], []
    for prompt in tqdm([pair.ids_of(one) for one in prompts], unit="text"):
        plain.append(LoggedText(prompt, autoregress(pair, prompt, max_new_tokens=max_new_tokens).tokens))
        others.append(server.complete(pair, prompt, max_new_tokens, temperature=0.0, seed=0))
    return audit_texts(pair, plain, others, server.model)


@door
def law_of_server(pair: Pair, prompt, server: Server, draws: int = 200, temperature: float = 1.0) -> ChiSquare:
    """The law of the first three tokens that the server samples after one prompt, with seeds 0, 1, ..."""
    ids, whole = pair.ids_of(prompt), dict(temperature=temperature, top_p=1.0, top_k=-1, min_p=0.0)  # no truncation
    seeds = tqdm(range(draws), unit="draw")
    return law_of_texts(pair, [server.complete(pair, ids, 3, seed=seed, **whole) for seed in seeds], temperature)
