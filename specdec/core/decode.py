"""The functions for decoding: `decode`, `stream`, `autoregress`, `chat` and, for several texts at once, `decode_many`.

Each opens an engine, runs cycles and packs the results. The baseline, `autoregress`, uses the same target, cache and picker,
one token at a time. Of several texts every turn keeps its own cycle, tree and policy; their forwards run together:

    turns     ──▶ each runs until it needs a forward
    drafts    ──▶ together, until every turn waits for the target
    target    ──▶ one forward over the new rows of all turns, side by side in one product, without padding
    ended     ──▶ the next prompt takes the place at once
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from specdec.core.clock import now
from specdec.core.cycle import begin_turn, driven
from specdec.core.engine import LiveEngine
from specdec.core.pair import Pair
from specdec.core.policy import Policy, PolicyLike, Static, checked_policy
from specdec.core.protocols import Forward, Step, T, TargetForward, at_once, finish, together
from specdec.core.records import Generation
from specdec.core.verification import Picker, truncate
from specdec.errors import SpecdecError, check_integer, check_kind, door, keeping

Prompt = str | Sequence[int] | Tensor | list[dict[str, Any]]
ROWS = 16  # texts at once; more bring little on a CPU, whose products are busy by then
SAMPLING = ("top_k", "top_p", "min_p", "repetition_penalty")


def decode(
    pair: Pair,
    prompt: Prompt,
    policy: PolicyLike | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    stop_tokens: Sequence[int] | None = None,
    raw: bool = False,
    progress: bool = False,
    picker: Picker | None = None,
    **sampling: Any,
) -> Generation:
    """Decode `prompt` speculatively with trees shaped by `policy` (default: the tree tuned for the pair, else a small one on a
    CPU and EAGLE-3's, `Static(60, 7, 10)`, on a GPU).

    prompt: text (a user's message where the tokenizer has a chat template; raw=True: as it is), token ids, or chat messages
    ({"role", "content"}).
    stop_tokens: ids that end the text, default the model's own; `()` for none.
    sampling: top_k, top_p, min_p, repetition_penalty, as transformers means them.
    picker: a picking rule in place of temperature, seed and sampling, such as `verification.TypicalPicker()`.

    Without `picker` the text equals that of `autoregress` with the same arguments, whatever the policy. Raises SpecdecError
    for bad input. If a policy fails midway or Ctrl-C ends it, the error's `so_far` holds the Generation until then.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny")
    >>> from specdec.core.policy import Static
    >>> drafted = decode(pair, "What is 3 plus 4?", Static(12, 3, 4), max_new_tokens=8)
    >>> drafted.tokens == autoregress(pair, "What is 3 plus 4?", max_new_tokens=8).tokens
    True
    """
    settings = dict(
        temperature=temperature, seed=seed, stop_tokens=stop_tokens, raw=raw, **sampling
    )
    engine, own = opened(pair, prompt, policy, max_new_tokens, picker, **settings)
    generation = Generation(engine.tokens, engine.prompt_tok, finish_reason="unfinished")
    # No tqdm without a bar: Ctrl-C while its lock is taken blocks it permanently.
    with (
        engine.inference(),
        tqdm(total=max_new_tokens, unit="tok") if progress else nullcontext() as bar,
    ):
        try:
            with keeping(lambda _: generation):
                for tokens in turn(engine, own, generation):
                    if bar is not None:
                        bar.update(len(tokens))
        finally:
            generation.read(pair.reader)
    return generation


def stream(
    pair: Pair,
    prompt: Prompt,
    policy: PolicyLike | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    stop_tokens: Sequence[int] | None = None,
    raw: bool = False,
    **sampling: Any,
) -> Iterator[list[int]]:
    """Like `decode`, but yields the new token ids after each cycle (first the prefill's token).

    >>> import specdec
    >>> pair = specdec.load_pair("tiny")
    >>> sum(stream(pair, "Hello", max_new_tokens=8), []) == decode(pair, "Hello", max_new_tokens=8).tokens
    True
    """
    settings = dict(
        temperature=temperature, seed=seed, stop_tokens=stop_tokens, raw=raw, **sampling
    )
    engine, own = opened(pair, prompt, policy, max_new_tokens, **settings)
    return _streamed(engine, turn(engine, own))


def _streamed(engine: LiveEngine, steps: Iterator[list[int]]) -> Iterator[list[int]]:
    while not engine.finished:
        with engine.inference():  # never across a yield: the caller may use the model in between
            tokens = next(steps)
        yield tokens


def turn(
    engine: LiveEngine, policy: Policy, generation: Generation | None = None
) -> Iterator[list[int]]:
    """One turn: prefill, then cycles until the text ends. Yields the tokens of each step; fills `generation` on the way."""
    return at_once(
        steps(engine, policy, generation or Generation(engine.tokens, engine.prompt_tok))
    )


def steps(
    engine: LiveEngine, policy: Policy, generation: Generation
) -> Generator[Forward | list[int], Any, None]:
    """`turn` that yields its forwards to the driver."""
    begin = now()
    begin_turn(policy, engine.prompt_tok)
    yield from engine.prefilling()
    generation.prefill_ms = 1e3 * (now() - begin)
    yield engine.tokens[:]
    while not engine.finished:
        begin, shown = now(), len(engine.tokens)
        generation.rows.append((yield from driven(engine, policy)))
        generation.decode_ms += 1e3 * (now() - begin)
        yield engine.tokens[shown:]
    generation.finish_reason = engine.finish_reason or "unfinished"


def autoregress(
    pair: Pair,
    prompt: Prompt,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    stop_tokens: Sequence[int] | None = None,
    raw: bool = False,
    **sampling: Any,
) -> Generation:
    """Plain decoding on the same target: one token per forward, preallocated cache, logits of one row, no tapped features.

    >>> import specdec
    >>> autoregress(specdec.load_pair("tiny"), "Hello", max_new_tokens=4, stop_tokens=()).new_tok
    4
    """
    settings = dict(
        temperature=temperature, seed=seed, stop_tokens=stop_tokens, raw=raw, **sampling
    )
    plain = plain_steps(pair, prompt, max_new_tokens, **settings)
    with pair.inference(plain=True):
        return finish(plain)


def plain_steps(
    pair: Pair, prompt: Prompt, max_new_tokens: int, **settings: Any
) -> Step[Generation]:
    """`autoregress` that yields its forwards to the driver. Bad input is refused at the call."""
    return _plain_steps(pair, max_new_tokens, *_checked(pair, prompt, max_new_tokens, **settings))


def _plain_steps(
    pair: Pair, max_new_tokens: int, ids: list[int], stops: frozenset[int], picker: Picker
) -> Step[Generation]:
    target = pair.target
    buffer = torch.zeros(len(ids) + max_new_tokens, dtype=torch.long, device=target.device)
    buffer[: len(ids)] = torch.tensor(ids)
    tokens: list[int] = []
    begin = now()
    cache = target.new_cache(len(buffer))
    rows = yield TargetForward(target, buffer[: len(ids)], cache, last_only=True)
    for length in range(len(ids), len(buffer)):
        token = picker.pick(rows.logits[-1], buffer[:length])
        if not tokens:
            after_prefill = now()
        tokens.append(token)
        buffer[length] = token
        if token in stops or length + 1 == len(buffer):
            break
        rows = yield TargetForward(target, buffer[length : length + 1], cache, last_only=True)
    prefill_ms, decode_ms = 1e3 * (after_prefill - begin), 1e3 * (now() - after_prefill)
    tokens = truncate(tokens, stops, max_new_tokens)
    reason = "stop" if tokens[-1] in stops else "length"
    return Generation(tokens, len(ids), [], None, prefill_ms, decode_ms, reason).read(pair.reader)


@door
def chat(
    pair: Pair,
    turns: Sequence[str],
    policy: PolicyLike | None = None,
    system: str | None = None,
    *,
    plain: bool = False,
    **settings: Any,
) -> list[Generation]:
    """Answer user `turns` one after the other through the tokenizer's chat template; each answer joins the conversation.

    plain=True answers with `autoregress`. settings: those of `decode`. An interruption carries the answers as `so_far`.

    >>> import specdec
    >>> answers = chat(specdec.load_pair("tiny"), ["Hello.", "And then?"], max_new_tokens=4)
    >>> answers[1].prompt_tok > answers[0].prompt_tok
    True
    """
    if not turns or isinstance(turns, str):
        raise SpecdecError(
            "chat takes a list of at least one user turn, such as ['Hello.', 'And then?']."
        )
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    ids_of_all(pair, [[*messages, {"role": "user", "content": text}] for text in turns])
    answers: list[Generation] = []
    with keeping(lambda unfinished: [*answers, *([unfinished] if unfinished else [])]):
        for text in turns:
            messages.append({"role": "user", "content": text})
            answer = (
                autoregress(pair, messages, **settings)
                if plain
                else decode(pair, messages, policy, **settings)
            )
            messages.append({"role": "assistant", "content": answer.text})
            answers.append(answer)
    return answers


def ids_of_all(
    pair: Pair,
    prompts: Sequence[Any],
    new_tok: int = 1,
    names: Sequence[str] | None = None,
    raw: bool = False,
) -> list[list[int]]:
    """Token ids of every prompt. SpecdecError names the first that is invalid or leaves no room for `new_tok` more tokens."""
    check_integer("max_new_tokens", new_tok, 1)
    read = []
    for name, prompt in zip(names or map(str, range(len(prompts))), prompts, strict=True):
        try:
            read.append(pair.ids_of(prompt, raw))
            check_lengths(len(read[-1]), new_tok, pair.target.position_limit)
        except SpecdecError as error:
            raise SpecdecError(f"prompt {name}: {error}") from None
    return read


def opened(
    pair: Pair,
    prompt: Prompt,
    policy: PolicyLike | None,
    max_new_tokens: int,
    picker: Picker | None = None,
    **own: Any,
) -> tuple[LiveEngine, Policy]:
    """The engine and the policy of a turn. own: settings of `decode`."""
    ids, stops, lossless = _checked(pair, prompt, max_new_tokens, **own)
    if picker is not None:
        check_kind("picker", picker, Picker)
        if own.keys() & set(SAMPLING) or own.get("temperature") or own.get("seed"):
            raise SpecdecError(
                "a picker has its own temperature, seed and sampling; pass these to the picker."
            )
    used = Static.of(pair.usual_tree) if policy is None else checked_policy(policy)
    pair.needed_drafter()
    prompt_ids = torch.tensor(ids, device=pair.target.device)
    engine = LiveEngine(
        pair, prompt_ids, max_new_tokens, used.limits, picker or lossless, tuple(stops)
    )
    return (engine, used) if pair.in_step is None else pair.in_step.turn(engine, used)


def _checked(
    pair: Pair,
    prompt: Prompt,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_tokens: Sequence[int] | None = None,
    raw: bool = False,
    **sampling: Any,
) -> tuple[list[int], frozenset[int], Picker]:
    """Token ids, stop tokens and the picker, from the settings of `decode`, `stream` and `autoregress`."""
    check_kind("pair", pair, Pair)
    check_integer("seed", seed)
    if unknown := ", ".join(map(repr, sorted(set(sampling) - set(SAMPLING)))):
        raise SpecdecError(f"unknown setting {unknown}; sampling takes {', '.join(SAMPLING)}.")
    picker = Picker.from_settings(temperature, seed, **sampling)
    pair.refresh()
    ids = pair.ids_of(prompt, raw)
    try:
        stops = (
            pair.stop_tokens if stop_tokens is None else frozenset(map(operator.index, stop_tokens))
        )
    except TypeError:
        raise SpecdecError(
            f"stop_tokens is a list of token ids, () for none; got {stop_tokens!r}."
        ) from None
    check_lengths(len(ids), max_new_tokens, pair.target.position_limit)
    return ids, stops, picker if pair.in_step is None else pair.in_step.picker(picker)


def check_lengths(prompt_tok: int, max_new_tokens: int, position_limit: int | None) -> None:
    """Refuse lengths that cannot work, before anything is computed."""
    check_integer("max_new_tokens", max_new_tokens, 1)
    if position_limit is not None and prompt_tok + max_new_tokens > position_limit:
        raise SpecdecError(
            f"the prompt has {prompt_tok} tokens and {max_new_tokens} more are asked for, but the target's context ends at "
            f"{position_limit}; shorten the prompt or ask for at most {max(0, position_limit - prompt_tok)} tokens."
        )


def decode_many(
    pair: Pair,
    prompts: Sequence[Any],
    policy: Static | Callable[[int], Policy] | None = None,
    max_new_tokens: int = 128,
    *,
    rows: int = ROWS,
    plain: bool = False,
    raw: bool = False,
    progress: bool = False,
    **settings: Any,
) -> list[Generation]:
    """Decode `prompts`, `rows` at a time. Each text equals `decode` (or `autoregress`, for plain=True) of its prompt alone.

    policy: a `Static`, or a function that returns the policy of prompt number i, since policies remember their own turn.
    raw: take texts as they are, as in `decode`. settings: temperature, seed, stop_tokens and sampling of `decode`. Times of a
    Generation include waiting for the other texts.
    In float32 texts are equal token for token; in low precision, products of more rows round differently.
    All prompts are checked before the first is decoded. An interruption, Ctrl-C included, carries the finished Generations
    as `so_far`, with None for each of the other prompts.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> both = decode_many(pair, ["Hello", "What is 2 + 3?"], max_new_tokens=8)
    >>> both[1].tokens == specdec.decode(pair, "What is 2 + 3?", max_new_tokens=8).tokens
    True
    """
    check_kind("pair", pair, Pair)
    check_kind("prompts", prompts, Sequence)
    for name, flag in (("plain", plain), ("raw", raw), ("progress", progress)):
        check_kind(name, flag, bool)
    if not plain:
        pair.needed_drafter()
    if isinstance(prompts, str):
        raise SpecdecError("decode_many takes a list of prompts; for one prompt use decode().")
    check_integer("rows", rows, 1)
    make_policy = policy if callable(policy) else lambda number: policy
    if policy is not None and not callable(policy) and not isinstance(policy, Static):
        raise SpecdecError(
            "several texts need a policy each: pass a function of the prompt's number that makes one."
        )
    pair.refresh()
    read = ids_of_all(pair, prompts, max_new_tokens, raw=raw)

    def turn(number: int, prompt: Prompt) -> Generator[Any, Any, Generation]:
        if plain:
            return (yield from plain_steps(pair, prompt, max_new_tokens, **settings))
        engine, own = opened(pair, prompt, make_policy(number), max_new_tokens, **settings)
        generation = Generation(engine.tokens, engine.prompt_tok, finish_reason="unfinished")
        yield from steps(engine, own, generation)
        generation.read(pair.reader)
        return generation

    generations: dict[int, Generation] = {}
    turns = (turn(number, ids) for number, ids in enumerate(read))
    keep = keeping(lambda _: [generations.get(number) for number in range(len(prompts))])
    with (
        keep,
        pair.inference(plain),
        tqdm(total=len(prompts), unit="text") if progress else nullcontext() as bar,
    ):
        for number, generation in drive(turns, rows):
            generations[number] = generation
            if bar is not None:
                bar.update()
    return [generations[number] for number in range(len(prompts))]


def drive(turns: Iterable[Generator[Any, Any, T]], rows: int) -> Iterator[tuple[int, T]]:
    """Drive generators of forwards, at most `rows` at a time. Yields (number, return value) as each one ends.

    Drafts go first, so that all turns share the target's forward. Anything else that turns yield is dropped.
    """
    source = enumerate(turns)
    under_way: dict[int, Generator[Any, Any, T]] = {}
    wanted: dict[int, Forward] = {}

    def go_on(number: int, result: Any = None) -> list[tuple[int, T]]:
        """Run a turn to its next forward. Returns [(number, value)] if it has ended, else []."""
        try:
            item = under_way[number].send(result)
            while not isinstance(item, Forward):
                item = next(under_way[number])
        except StopIteration as ended:
            del under_way[number]
            wanted.pop(number, None)
            return [(number, ended.value)]
        wanted[number] = item
        return []

    while True:
        while len(under_way) < rows and (new := next(source, None)) is not None:
            under_way[new[0]] = new[1]
            yield from go_on(new[0])
        if not under_way:
            return
        drafts = [
            number for number, forward in wanted.items() if not isinstance(forward, TargetForward)
        ]
        numbers = drafts or list(wanted)
        for number, result in zip(
            numbers, together([wanted[number] for number in numbers]), strict=True
        ):
            yield from go_on(number, result)
