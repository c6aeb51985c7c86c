"""Embeddings of the text so far, beside a recording: what Re-SpS's state "text" looks at.

A recording holds no text. Its answers are decoded plainly once more, which is quick, and must have
the recorded lengths. Knows nothing about policies, nor about what encodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tqdm.auto import tqdm

from specdec.core.decode import decode_many
from specdec.core.pair import Pair
from specdec.data.suites import conversation, gather
from specdec.errors import SpecdecError
from specdec.replays.trace import Trace

from experiments import sentences

EVERY_TOK = 8  # tokens between two embeddings of a text: a tree is kept for longer than that


def with_text_states(
    pair: Pair, trace: Trace, encoder, *, every_tok: int = EVERY_TOK, progress: bool = True
) -> Trace:
    """The recording, with a column text_state float32 [R, E]: the encoder's of the text before each
    position.

    encoder: its `of` takes texts and gives float32 [N, E], its `name` is noted. every_tok: a text
    is embedded anew after so many tokens. SpecdecError where the pair does not say what was
    recorded.

    >>> import specdec
    >>> class Lengths:
    ...     name = "lengths"
    ...     def of(self, texts): return np.array([[len(text)] for text in texts], dtype=np.float32)
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> small = dict(depth=3, top_ks=(3,), trees=(), max_new_tokens=8, limit=4, progress=False)
    >>> trace = with_text_states(pair, specdec.record(pair, ["toy/gsm8k"], **small), Lengths(),
    progress=False)
    >>> trace.column("text_state").shape == (len(trace), 1)
    True
    """
    states: list[np.ndarray] = []
    for prompt, answer in tqdm(texts_of(pair, trace), desc="texts", disable=not progress):
        starts = range(0, max(1, len(answer) - 1), every_tok)
        texts = [
            pair.tokenizer.decode([*prompt, *answer[: start + 1]], skip_special_tokens=True)
            for start in starts
        ]
        states.append(np.repeat(encoder.of(texts), every_tok, axis=0)[: max(0, len(answer) - 1)])
    return trace.beside(
        "text_state", np.concatenate(states), f"{encoder.name}, every {every_tok} tokens"
    )


def embedded(trace: Trace, load: Callable[[], Pair]) -> Trace:
    """The recording with the sentence encoder's embeddings, where that is available. load: gives
    the recorded pair.
    """
    encoder, why = sentences.encoder_at_hand()
    if encoder is None:
        raise SpecdecError(why)
    return with_text_states(load(), trace, encoder)


def texts_of(pair: Pair, trace: Trace) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) as token ids of every recorded turn, in order: decoded again, first turns
    together, then second ones.
    """
    config, turns = trace.header, trace.turns
    known = {
        item.id: item for item in gather(list(dict.fromkeys(turns["suite"])), seed=config["seed"])
    }
    found: dict[tuple, tuple] = {}
    decoding = dict(
        max_new_tokens=config["max_new_tokens"],
        temperature=config["temperature"],
        seed=config["seed"],
    )
    for number, rows in turns.groupby("turn", sort=True):
        said = [
            [pair.text_of(found[prompt, turn][1]) or "" for turn in range(number)]
            for prompt in rows["prompt"]
        ]
        asked = zip(rows["prompt"], said, strict=True)
        prompts = [
            pair.ids_of(conversation(pair, known[prompt], number, own)) for prompt, own in asked
        ]
        answers = decode_many(pair, prompts, plain=True, **decoding)
        for row, ids, answer in zip(rows.itertuples(), prompts, answers, strict=True):
            if (len(ids), len(answer.tokens)) != (row.prompt_tok, row.kept_tok):
                raise SpecdecError(
                    f"{pair.name} answers {row.prompt} otherwise than in the recording; load it with the recorded dtype."
                )
            found[row.prompt, number] = ids, answer.tokens
    return [found[key] for key in turns[["prompt", "turn"]].itertuples(index=False, name=None)]
