"""Several texts at once: every turn keeps its own cycle, tree and policy; their forwards run together.

    turns     ──▶ each runs until it needs a forward
    drafts    ──▶ together, until every turn waits for the target
    target    ──▶ one forward over the new rows of all turns
       ended     ──▶ the next prompt takes the place at once

Rows lie side by side in one product, without padding. Knows nothing about trees, policies or models.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from tqdm.auto import tqdm

from specdec.core.decode import Prompt, ids_of_all, opened, plain_steps, steps
from specdec.core.pair import Pair
from specdec.core.policy import Policy, Static
from specdec.core.protocols import Forward, T, TargetForward, together
from specdec.core.records import Generation
from specdec.errors import SpecdecError, check_integer, check_kind, keeping

ROWS = 16  # texts at once; more bring little on a CPU, whose products are busy by then


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
        raise SpecdecError("several texts need a policy each: pass a function of the prompt's number that makes one.")
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
    with keep, pair.inference(plain), tqdm(total=len(prompts), unit="text") if progress else nullcontext() as bar:
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
        drafts = [number for number, forward in wanted.items() if not isinstance(forward, TargetForward)]
        numbers = drafts or list(wanted)
        for number, result in zip(numbers, together([wanted[number] for number in numbers]), strict=True):
            yield from go_on(number, result)
