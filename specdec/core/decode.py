"""The functions for decoding: `decode`, `stream`, `autoregress` and `decode_many`.

The baseline, `autoregress`, uses the same target, cache and picker, one token at a time. In
`decode_many` every turn keeps its own cycle, tree and policy, and their forwards run together:

    turns     ──▶ each runs until it needs a forward
    drafts    ──▶ together, until every turn waits for the target
    target    ──▶ one forward over the new rows of all turns, without padding
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from specdec.core.clock import now
from specdec.core.cycle import begin_turn, driven
from specdec.core.engine import LiveEngine
from specdec.core.pair import Pair, Prompt
from specdec.core.policy import Policy, Static, checked_policy
from specdec.core.protocols import Forward, Step, T, TargetForward, at_once, finish, together
from specdec.core.records import Generation
from specdec.core.verification import Picker
from specdec.errors import SpecdecError, check_integer, check_kind, keeping

ROWS = 16  # texts at once; more bring little on a CPU, whose products are busy by then


def decode(
    pair: Pair,
    prompt: Prompt,
    policy: Policy | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    *,
    stop_tokens: Sequence[int] | None = None,
    raw: bool = False,
    **sampling: Any,
) -> Generation:
    """Decode `prompt` speculatively with trees shaped by `policy`.

    prompt: text (a user's message where the tokenizer has a chat template; raw=True: as it is),
    token ids, or chat messages ({"role", "content"}).
    policy: None for the tree tuned for the pair, else a small one on a CPU and EAGLE-3's,
    `Static(60, 7, 10)`, on a GPU.
    stop_tokens: ids that end the text, default the model's own; `()` for none.
    sampling: top_k, top_p, min_p, repetition_penalty, as transformers means them; and visit=k for
    another sample of the same prompt and seed, that of the k-th equal prompt in `decode_many`.

    The text equals that of `autoregress` with the same arguments, whatever the policy. If a policy
    fails midway or Ctrl-C ends it, the exception's `so_far` holds the Generation until then.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny")
    >>> from specdec.core.policy import Static
    >>> drafted = decode(pair, "What is 3 plus 4?", Static(12, 3, 4), max_new_tokens=8)
    >>> drafted.tokens == autoregress(pair, "What is 3 plus 4?", max_new_tokens=8).tokens
    True
    """
    engine, policy = opened(
        pair, prompt, policy, max_new_tokens, temperature, seed, stop_tokens, raw, **sampling
    )
    generation = engine.generation
    try:
        with engine.inference(), keeping(lambda _: generation):
            for _ in turn(engine, policy):
                pass
    finally:
        generation.read(pair.reader)
    return generation


def stream(
    pair: Pair, prompt: Prompt, policy: Policy | None = None, *settings: Any, **sampling: Any
) -> Iterator[list[int]]:
    """Like `decode`, but yields the new token ids after each cycle (first the prefill's token).

    >>> import specdec
    >>> sum(map(len, stream(specdec.load_pair("tiny"), "Hello", max_new_tokens=4, stop_tokens=())))
    4
    """
    engine, policy = opened(pair, prompt, policy, *settings, **sampling)
    steps_of_turn = turn(engine, policy)

    def streamed() -> Iterator[list[int]]:
        while not engine.finished:
            # never across a yield: the caller may use the model in between
            with engine.inference():
                tokens = next(steps_of_turn)
            yield tokens

    return streamed()


def turn(engine: LiveEngine, policy: Policy) -> Iterator[list[int]]:
    """One turn: prefill, then cycles. Yields the tokens of each step."""
    return at_once(steps(engine, policy))


def steps(engine: LiveEngine, policy: Policy) -> Generator[Forward | list[int], Any, Generation]:
    """`turn` that yields its forwards to the driver. Returns `engine.generation`, filled."""
    # 1. the prompt in one forward, whose last row gives the first token
    generation = engine.generation
    begin = now()
    begin_turn(policy, engine.prompt_tok)
    yield from engine.prefilling()
    generation.prefill_ms = 1e3 * (now() - begin)
    yield engine.tokens[:]

    # 2. cycles of drafting and verification until the text ends
    while not engine.finished:
        begin = now()
        tokens_before = len(engine.tokens)
        row = yield from driven(engine, policy)
        generation.rows.append(row)
        generation.decode_ms += 1e3 * (now() - begin)
        yield engine.tokens[tokens_before:]
    return generation


def autoregress(
    pair: Pair, prompt: Prompt, max_new_tokens: int = 128, *settings: Any, **sampling: Any
) -> Generation:
    """Plain decoding on the same target: one token per forward, logits of one row, no features.

    settings, sampling: those of `decode`, from the temperature on.

    >>> import specdec
    >>> autoregress(specdec.load_pair("tiny"), "Hello", 4, stop_tokens=()).new_tok
    4
    """
    check_kind("pair", pair, Pair)
    with pair.inference(plain=True):
        return finish(plain_steps(pair, prompt, max_new_tokens, *settings, **sampling))


def plain_steps(pair: Pair, prompt: Prompt, *settings: Any, **sampling: Any) -> Step[Generation]:
    """`autoregress` that yields its forwards to the driver."""
    # 1. the prompt in one forward
    ids, max_new_tokens, stops, picker = _checked(pair, prompt, *settings, **sampling)
    target = pair.target
    buffer = torch.zeros(len(ids) + max_new_tokens, dtype=torch.long, device=target.device)
    buffer[: len(ids)] = torch.tensor(ids)
    generation = Generation([], len(ids))
    tokens = generation.tokens
    begin = now()
    cache = target.new_cache(len(buffer))
    rows = yield TargetForward(target, buffer[: len(ids)], cache, last_only=True)

    # 2. pick a token, and read it for the next one
    for length in range(len(ids), len(buffer)):
        token = picker.pick(rows.logits[-1], buffer[:length])
        if not tokens:
            generation.prefill_ms = 1e3 * (now() - begin)
        tokens.append(token)
        buffer[length] = token
        if token in stops:
            generation.finish_reason = "stop"
        if token in stops or length + 1 == len(buffer):
            break
        rows = yield TargetForward(target, buffer[length : length + 1], cache, last_only=True)
    generation.decode_ms = 1e3 * (now() - begin) - generation.prefill_ms
    return generation.read(pair.reader)


def ids_of_all(
    pair: Pair,
    prompts: Sequence[Any],
    new_tok: int = 1,
    names: Sequence[Any] | None = None,
    raw: bool = False,
) -> list[list[int]]:
    """Token ids of every prompt; SpecdecError names the first that is invalid or too long."""
    all_ids = []
    for name, prompt in zip(names or range(len(prompts)), prompts, strict=True):
        try:
            all_ids.append(pair.ids_of(prompt, raw))
            check_lengths(len(all_ids[-1]), new_tok, pair.target.position_limit)
        except SpecdecError as error:
            raise SpecdecError(f"prompt {name}: {error}") from None
    return all_ids


def opened(
    pair: Pair, prompt: Prompt, policy: Policy | None, *settings: Any, **sampling: Any
) -> tuple[LiveEngine, Policy]:
    """The engine and the policy of a turn. settings, sampling: as in `autoregress`."""
    ids, max_new_tokens, stops, picker = _checked(pair, prompt, *settings, **sampling)
    pair.refresh()
    # a pair knows a tree that suits it
    policy = Static.of(pair.usual_tree) if policy is None else checked_policy(policy)
    prompt_ids = torch.tensor(ids, device=pair.target.device)
    engine = LiveEngine(pair, prompt_ids, max_new_tokens, policy.limits, picker, tuple(stops))
    return engine, policy


def _checked(
    pair: Pair,
    prompt: Prompt,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    stop_tokens: Sequence[int] | None = None,
    raw: bool = False,
    visit: int = 0,
    noise_of: Sequence[int] | None = None,
    **sampling: Any,
) -> tuple[list[int], int, frozenset[int], Picker]:
    """Token ids, the length limit, stop tokens and the picker of a turn.

    noise_of: the prompt whose noise continues, by default this one.
    """
    check_kind("pair", pair, Pair)
    seed = check_integer("seed", seed)
    picker = Picker.from_settings(temperature, seed, **sampling)
    pair.target.refresh()
    ids = pair.ids_of(prompt, raw)
    picker = picker.of_text(noise_of or ids, check_integer("visit", visit))
    max_new_tokens = check_lengths(len(ids), max_new_tokens, pair.target.position_limit)
    if stop_tokens is None:
        return ids, max_new_tokens, pair.current_stops(), picker
    check_kind("stop_tokens", stop_tokens, Iterable)
    stops = frozenset(check_integer("a stop token", token) for token in stop_tokens)
    return ids, max_new_tokens, stops, picker


def check_lengths(prompt_tok: int, max_new_tokens: int, position_limit: int | None) -> int:
    """max_new_tokens. SpecdecError for lengths that cannot work, before anything is computed."""
    max_new_tokens = check_integer("max_new_tokens", max_new_tokens, 1)
    if position_limit is not None and prompt_tok + max_new_tokens > position_limit:
        why = f"the prompt has {prompt_tok} tokens and {max_new_tokens} more are asked for"
        limit = f"the target's context ends at {position_limit}"
        raise SpecdecError(f"{why}, but {limit}; shorten the prompt or lower max_new_tokens.")
    return max_new_tokens


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
    """Decode `prompts`, `rows` at a time. Each text equals that of its prompt alone.

    policy: a `Static`, or a function that returns the policy of prompt number i. plain: as
    `autoregress`. settings: those of `decode`. Times include waiting for the other texts. In low
    precision products of more rows round differently. An interruption carries the Generations as
    `so_far`, None where unfinished.

    >>> import specdec
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> both = decode_many(pair, ["Hello", "What is 2 + 3?"], max_new_tokens=8)
    >>> both[1].tokens == decode(pair, "What is 2 + 3?", max_new_tokens=8).tokens
    True
    """
    # 1. refuse what cannot be decoded
    check_kind("pair", pair, Pair)
    check_integer("rows", rows, 1)
    if isinstance(prompts, str):
        raise SpecdecError("decode_many takes a list of prompts; for one prompt use decode().")
    if isinstance(policy, Policy) and policy.asks:
        raise SpecdecError("several texts need a policy each: pass a function of their number.")
    pair.target.refresh()
    ids_of_prompts = ids_of_all(pair, prompts, max_new_tokens, raw=raw)

    # 2. one turn per prompt, each a generator of its forwards; equal prompts get other samples
    visits: Counter[tuple[int, ...]] = Counter()

    def turn_of(number: int, ids: list[int]) -> Generator[Any, Any, Generation]:
        visit = visits[tuple(ids)]
        visits[tuple(ids)] += 1
        if plain:
            return (yield from plain_steps(pair, ids, max_new_tokens, visit=visit, **settings))
        rule = policy(number) if callable(policy) else policy
        engine, rule = opened(pair, ids, rule, max_new_tokens, visit=visit, **settings)
        generation = yield from steps(engine, rule)
        return generation.read(pair.reader)

    # 3. their forwards run together
    generations: list[Any] = [None] * len(prompts)
    turns = (turn_of(number, ids) for number, ids in enumerate(ids_of_prompts))
    with keeping(lambda _: generations), pair.inference(plain):
        ended = drive(turns, rows)
        if progress:  # without a bar no tqdm, whose lock Ctrl-C may block
            ended = tqdm(ended, total=len(prompts), unit="text")
        for number, generation in ended:
            generations[number] = generation
    return generations


def drive(turns: Iterable[Generator[Any, Any, T]], rows: int) -> Iterator[tuple[int, T]]:
    """Drive generators of forwards, at most `rows` at a time; (number, value) as each one ends.

    Drafts go first, so that all turns share the target's forward.
    """
    waiting = enumerate(turns)
    running: dict[int, Generator[Any, Any, T]] = {}
    forwards: dict[int, Forward] = {}  # what each running turn waits for
    while True:
        # 1. free places are taken over at once
        replies: dict[int, Any] = {}
        for number, new_turn in itertools.islice(waiting, rows - len(running)):
            running[number] = new_turn
            replies[number] = None
        if not running:
            return

        # 2. all drafts together; when none is left, one forward of the target for all turns
        if not replies:
            drafts = [n for n, item in forwards.items() if not isinstance(item, TargetForward)]
            numbers = drafts or list(forwards)
            results = together([forwards[number] for number in numbers])
            replies = dict(zip(numbers, results, strict=True))

        # 3. these turns run to their next forward, or end
        for number, reply in replies.items():
            try:
                item = running[number].send(reply)
                while not isinstance(item, Forward):
                    item = next(running[number])
                forwards[number] = item
            except StopIteration as ended:
                del running[number]
                forwards.pop(number, None)
                yield number, ended.value
