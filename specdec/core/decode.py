"""Decoding for people: `decode`, `stream`, `autoregress`, `chat`, and `generate` for transformers' `custom_generate`.

Everything here opens an engine, drives cycles and packs what they leave behind. The plain baseline runs on the same target,
the same cache and the same picker, one token at a time.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from specdec.core import clock
from specdec.core.cycle import run_cycle
from specdec.core.engine import LiveEngine, check_lengths
from specdec.core.pair import Pair
from specdec.core.policy import Policy, Static
from specdec.core.records import Cycle, Generation
from specdec.core.verification import Picker, truncate
from specdec.errors import SpecdecError


def decode(
    pair: Pair,
    prompt: str | Sequence[int] | Tensor | list[dict],
    policy: Policy | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    stop_tokens: Sequence[int] | None = None,
    clock=None,
    progress: bool = False,
    **sampling,
) -> Generation:
    """Decode `prompt` speculatively with the tree that `policy` shapes (default: EAGLE-3's 60 / 7 / 10).

    prompt: text, token ids, or chat messages ({"role", "content"}) for the tokenizer's chat template.
    stop_tokens: ids that end the text, default the model's own; `()` for none. sampling: top_k, top_p, min_p,
    repetition_penalty, as transformers means them. The text equals `autoregress` with the same arguments, whatever the
    policy. Raises SpecdecError for bad input; if a policy fails midway, the error's `so_far` is the Generation until then.
    """
    turn = _Turn(pair, prompt, policy, max_new_tokens, temperature, seed, stop_tokens, clock, sampling)
    with turn.inference(), tqdm(total=max_new_tokens, unit="tok", disable=not progress) as bar:
        turn.prefill()
        bar.update(len(turn.engine.tokens))
        try:
            while not turn.finished:
                bar.update(turn.step().kept_tok)
        except SpecdecError as error:
            error.so_far = turn.result()
            raise
    return turn.result()


def stream(
    pair: Pair,
    prompt,
    policy: Policy | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    stop_tokens: Sequence[int] | None = None,
    **sampling,
) -> Iterator[list[int]]:
    """Like `decode`, but yields the new token ids as soon as a cycle has finished (first the prefill's own token)."""
    turn = _Turn(pair, prompt, policy, max_new_tokens, temperature, seed, stop_tokens, None, sampling)
    return _streamed(turn)


def _streamed(turn: _Turn) -> Iterator[list[int]]:
    # Attention is patched per step, never across a yield: the caller may do anything with the model in between.
    shown, advance = 0, turn.prefill
    while not turn.finished:
        with turn.inference():
            advance()
        yield turn.engine.tokens[shown:]
        shown, advance = len(turn.engine.tokens), turn.step


def autoregress(
    pair: Pair,
    prompt,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    stop_tokens: Sequence[int] | None = None,
    **sampling,
) -> Generation:
    """Plain decoding on the same target: one token per forward, preallocated cache, logits of one row, no tapped features."""
    ids, stops, picker = _inputs(pair, prompt, temperature, seed, stop_tokens, sampling)
    target = pair.target
    check_lengths(len(ids), max_new_tokens, target.position_limit)
    buffer = torch.zeros(len(ids) + max_new_tokens, dtype=torch.long, device=target.device)
    buffer[: len(ids)] = torch.tensor(ids)
    tokens: list[int] = []
    with target.inference(taps=False):
        begin = clock.now()
        cache = target.new_cache(len(buffer))
        rows = target.forward(buffer[: len(ids)], cache, last_only=True)
        after_prefill = None
        for length in range(len(ids), len(buffer)):
            token = picker.pick(rows.logits[-1], buffer[:length])
            after_prefill = after_prefill or clock.now()
            tokens.append(token)
            buffer[length] = token
            if token in stops or length + 1 == len(buffer):
                break
            rows = target.forward(buffer[length : length + 1], cache, last_only=True)
        end = clock.now()
    tokens = truncate(tokens, stops, max_new_tokens)
    reason = "stop" if tokens[-1] in stops else "length"
    return Generation(
        tokens, len(ids), [], pair.text_of(tokens), 1e3 * (after_prefill - begin), 1e3 * (end - after_prefill), reason
    )


def chat(
    pair: Pair,
    turns: Sequence[str],
    policy: Policy | None = None,
    system: str | None = None,
    *,
    plain: bool = False,
    **settings,
) -> list[Generation]:
    """Answer user `turns` one after the other through the tokenizer's chat template; each answer joins the conversation.

    plain=True answers with `autoregress`. settings: those of `decode`.
    """
    if not turns or isinstance(turns, str):
        raise SpecdecError("chat takes a list of at least one user turn, such as ['Hello.', 'And then?'].")
    messages = [{"role": "system", "content": system}] if system else []
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answer = autoregress(pair, messages, **settings) if plain else decode(pair, messages, policy, **settings)
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer)
    return answers


class _Turn:
    """One decoding run: inputs checked, engine built, cycles counted, result packed."""

    def __init__(self, pair, prompt, policy, max_new_tokens, temperature, seed, stop_tokens, clock, sampling):
        ids, stops, picker = _inputs(pair, prompt, temperature, seed, stop_tokens, sampling)
        check_lengths(len(ids), max_new_tokens, pair.target.position_limit)
        self.pair, self.policy = pair, _checked_policy(policy)
        if pair.drafter is None:
            raise SpecdecError(
                "this pair has no drafter; load one with load_pair(target=..., drafter=...) or use autoregress()."
            )
        self.rows: list[Cycle] = []
        prompt_ids = torch.tensor(ids, device=pair.target.device)
        self.engine = LiveEngine(
            pair.target, pair.drafter, prompt_ids, max_new_tokens, self.policy.limits, picker, tuple(stops), clock
        )

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        with self.pair.target.inference(), self.pair.drafter.inference():
            yield

    @property
    def finished(self) -> bool:
        return self.engine.finished

    def prefill(self) -> None:
        begin = clock.now()
        self.policy.reset()
        self.engine.prefill()
        self.prefill_ms, self.decode_ms = 1e3 * (clock.now() - begin), 0.0

    def step(self) -> Cycle:
        begin = clock.now()
        row = run_cycle(self.engine, self.policy)
        self.rows.append(row)
        self.decode_ms += 1e3 * (clock.now() - begin)
        return row

    def result(self) -> Generation:
        engine = self.engine
        return Generation(
            engine.tokens,
            engine.prompt_tok,
            self.rows,
            self.pair.text_of(engine.tokens),
            self.prefill_ms,
            self.decode_ms,
            engine.finish_reason or "unfinished",
        )


def _inputs(pair, prompt, temperature, seed, stop_tokens, sampling) -> tuple[list[int], frozenset[int], Picker]:
    """Token ids, stop tokens and picker from what people pass; everything is checked here."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SpecdecError(f"seed must be an integer, got {seed!r}.")
    unknown = set(sampling) - {"top_k", "top_p", "min_p", "repetition_penalty"}
    if unknown:
        raise SpecdecError(
            f"unknown setting {', '.join(map(repr, sorted(unknown)))}; sampling takes top_k, top_p, min_p and repetition_penalty."
        )
    picker = Picker.from_settings(temperature, seed, **sampling)
    ids = pair.ids_of(prompt)
    try:
        stops = pair.stop_tokens if stop_tokens is None else frozenset(map(operator.index, stop_tokens))
    except TypeError:
        raise SpecdecError(f"stop_tokens is a list of token ids, () for none; got {stop_tokens!r}.") from None
    return ids, stops, picker


def _checked_policy(policy) -> Policy:
    """The policy, EAGLE-3's default tree for None; anything else is refused."""
    if policy is None:
        return Static()
    if not isinstance(policy, Policy):
        raise SpecdecError(f"policy must be a policy such as specdec.Static(60, 7, 10), got {policy!r}.")
    return policy
