"""Embeddings of the text so far, beside a recording: what Re-SpS's state "text" looks at.

A recording holds no text. Its answers are decoded plainly once more, which is quick, and must have
the recorded lengths.
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

# tokens between two embeddings of a text: a tree is kept for longer than that
EVERY_TOK = 8


def with_text_states(pair: Pair, trace: Trace, encoder, *, progress: bool = True) -> Trace:
    """The recording, with a column text_state float32 [R, E]: the encoder's of the text before each
    position.

    encoder: its `of` takes texts and gives float32 [N, E], its `name` is noted. A text is
    embedded anew after EVERY_TOK tokens. SpecdecError where the pair does not say what was
    recorded.

    >>> import specdec
    >>> class Lengths:
    ...     name = "lengths"
    ...     def of(self, texts): return np.array([[len(text)] for text in texts], dtype=np.float32)
    >>> pair = specdec.load_pair("tiny", dtype="float32")
    >>> small = dict(depth=3, top_ks=(3,), trees=(), max_new_tokens=8, limit=4, progress=False)
    >>> trace = specdec.record(pair, ["toy/gsm8k"], **small)
    >>> trace = with_text_states(pair, trace, Lengths(), progress=False)
    >>> trace.column("text_state").shape == (len(trace), 1)
    True
    """
    states: list[np.ndarray] = []
    for prompt, answer in tqdm(texts_of(pair, trace), desc="texts", disable=not progress):
        texts = []
        for start in range(0, max(1, len(answer) - 1), EVERY_TOK):
            ids = [*prompt, *answer[: start + 1]]
            texts.append(pair.tokenizer.decode(ids, skip_special_tokens=True))
        repeated = np.repeat(encoder.of(texts), EVERY_TOK, axis=0)
        states.append(repeated[: max(0, len(answer) - 1)])
    note = f"{encoder.name}, every {EVERY_TOK} tokens"
    return trace.beside("text_state", np.concatenate(states), note)


def embedded(trace: Trace, load: Callable[[], Pair]) -> Trace:
    """The recording with the sentence encoder's embeddings. load: gives the recorded pair."""
    encoder, how = sentences.encoder_at_hand()
    if encoder is None:
        raise SpecdecError(how)
    return with_text_states(load(), trace, encoder)


def texts_of(pair: Pair, trace: Trace) -> list[tuple[list[int], list[int]]]:
    """(prompt, answer) as token ids of every recorded turn, in order.

    They are decoded again, first turns together, then second ones.
    """
    config = trace.header
    turns = trace.turns
    suites = list(dict.fromkeys(turns["suite"]))
    items = {item.id: item for item in gather(suites, seed=config["seed"])}
    settings = {name: config[name] for name in ("max_new_tokens", "temperature", "seed")}
    decoded: dict[tuple, tuple] = {}
    for number, rows in turns.groupby("turn", sort=True):
        # 1. the prompts of this turn, after what was answered before
        prompts = []
        for prompt in rows["prompt"]:
            answers = []
            for turn in range(number):
                answers.append(pair.text_of(decoded[prompt, turn][1]) or "")
            prompts.append(pair.ids_of(conversation(pair, items[prompt], number, answers)))
        # 2. the answers, which must be the recorded ones
        outs = decode_many(pair, prompts, plain=True, **settings)
        for row, ids, out in zip(rows.itertuples(), prompts, outs, strict=True):
            if (len(ids), len(out.tokens)) != (row.prompt_tok, row.kept_tok):
                why = f"{pair.name} answers {row.prompt} otherwise than in the recording"
                raise SpecdecError(f"{why}; load it with the recorded dtype.")
            decoded[row.prompt, number] = ids, out.tokens
    return [decoded[key] for key in zip(turns["prompt"], turns["turn"], strict=True)]
