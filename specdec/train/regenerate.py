"""What a drafter is trained on: conversations whose answers the target has written anew, mixed with given text.

Knows nothing about drafters or losses. A drafter learns the target's distribution on any text, but at decoding time it
only ever meets contexts the target wrote (EAGLE-3 section 4 regenerates its training answers).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tqdm.auto import tqdm

from specdec import runs
from specdec.config import SpecdecError
from specdec.train import data


def corpus_conversations(seed: int, count: int) -> list[list[dict]]:
    """`count` conversations of the generated corpus, never a held-out prompt; not the target's own training stream."""
    from specdec.corpus import training_examples

    return [data.example_messages(example) for example in training_examples(f"drafter/{seed}", count)]


def mixed_chats(tokenizer, conversations: Sequence[list[dict]] | None, own: Sequence[list[dict]], own_frac: float):
    """A `chats` source for data.Rows: the target's own answers `own` with probability own_frac, else the given text.

    conversations None: the given text is the generated corpus, fresh in every block.
    """
    given = data.corpus_chats(tokenizer) if conversations is None else data.file_chats(tokenizer, conversations)
    if not own:
        return given
    documents = [data.conversation_document(tokenizer, chat) for chat in own]

    def chats(block_seed: str) -> Iterator[data.Document]:
        rng, fresh, queue = random.Random(f"mixed/{block_seed}"), given(f"drafter/{block_seed}"), []
        while True:
            if rng.random() >= own_frac:
                yield next(fresh)
                continue
            queue = queue or rng.sample(range(len(documents)), len(documents))
            yield documents[queue.pop()]

    return chats


def regenerate(
    model,
    tokenizer,
    conversations: Sequence[list[dict]],
    *,
    path: Path | None = None,
    greedy_frac: float = 0.5,
    temperature: float = 0.8,
    batch: int = 64,
    max_new_tokens: int = 256,
    minutes: float | None = None,
    seed: int = 0,
) -> list[list[dict]]:
    """Each conversation with every assistant turn written anew by the model, turn after turn.

    model: a transformers causal LM. greedy_frac of the batches are decoded greedily, the rest sampled at `temperature`.
    path: a JSONL file (UltraChat style) that is continued if it exists, batch by batch. minutes: stop after this time
    with what is done. Conversations of like length share a batch, so that few rows wait for the longest.
    """
    limit_s = float("inf") if minutes is None else 60 * minutes
    done = _finished_batches(path)
    order = sorted(range(len(conversations)), key=lambda index: _answer_length(conversations[index]))
    groups = [order[begin : begin + batch] for begin in range(0, len(order), batch)]
    generator = torch.Generator().manual_seed(seed)
    groups = [groups[index] for index in torch.randperm(len(groups), generator=generator).tolist()]
    started_s, written = time.perf_counter(), []
    for number, group in enumerate(tqdm(groups, desc="regenerate", unit="batch")):
        if number in done:
            written += done[number]
            continue
        if time.perf_counter() - started_s > limit_s:
            break
        torch.manual_seed(seed * 1_000_003 + number)  # sampling inside generate reads the global generator
        sampled = (number + 1) * greedy_frac % 1.0 >= greedy_frac  # spreads the greedy batches evenly
        answered = _answer(
            [conversations[index] for index in group], model, tokenizer, temperature * sampled, max_new_tokens
        )
        written += answered
        done[number] = answered
        if path is not None:
            lines = (json.dumps({"batch": key, "messages": chat}) for key in sorted(done) for chat in done[key])
            runs.write_text(path, "\n".join(lines) + "\n")
    return written


def _finished_batches(path: Path | None) -> dict[int, list[list[dict]]]:
    if path is None or not Path(path).is_file():
        return {}
    chats, done = data.load_conversations(path), {}
    lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    for line, chat in zip(lines, chats, strict=True):
        done.setdefault(json.loads(line)["batch"], []).append(chat)
    return done


def _answer_length(messages: list[dict]) -> int:
    return max(len(message["content"]) for message in messages if message["role"] == "assistant")


def _answer(conversations, model, tokenizer, temperature: float, max_new_tokens: int) -> list[list[dict]]:
    """The conversations with all assistant turns replaced; greedy where temperature is 0."""
    chats: list[list[dict]] = [[] for _ in conversations]
    for turn in range(max(map(len, conversations))):
        waiting = []
        for chat, messages in zip(chats, conversations, strict=True):
            if turn < len(messages) and messages[turn]["role"] != "assistant":
                chat.append(messages[turn])
            elif turn < len(messages):
                waiting.append(chat)
        if waiting:
            for chat, text in zip(
                waiting, generate_texts(waiting, model, tokenizer, temperature, max_new_tokens), strict=True
            ):
                chat.append({"role": "assistant", "content": text})
    return chats


@torch.no_grad()
def generate_texts(chats, model, tokenizer, temperature: float, max_new_tokens: int) -> list[str]:
    """The next assistant message of each chat; greedy where temperature is 0."""
    if tokenizer.pad_token_id is None:
        raise SpecdecError(
            "the tokenizer has no padding token; set tokenizer.pad_token (the end-of-text token will do)."
        )
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    inputs = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False,
        return_token_type_ids=False,
    ).to(model.device)  # fmt: skip
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    room = (getattr(model.config, "max_position_embeddings", None) or 10**9) - inputs["input_ids"].shape[1]
    if room < 1:
        raise SpecdecError("a conversation fills the target's whole context; shorten or drop it before training.")
    ids = model.generate(
        **inputs, max_new_tokens=min(max_new_tokens, room), pad_token_id=tokenizer.pad_token_id, **sampling
    )
    return tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
