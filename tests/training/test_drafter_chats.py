"""What drafters learn from: order, limits and sampling of the target's own answers, mixing,
packing, and learning curves.
"""

import itertools
import json
import random
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from fakes.chats import CHATS, chat_target
from scipy import stats

from specdec import runs
from specdec.errors import SpecdecError
from specdec.training.drafter import chats
from specdec.training.drafter.accuracy import TAU, TOP1, fit_doubling, learning_curve
from specdec.training.drafter.chats import (
    ANSWER,
    PADDING,
    PROMPT,
    ChatList,
    Document,
    Regeneration,
    Rows,
)


def said(length: int) -> list[dict]:
    return [{"role": "user", "content": "q" * 30}, {"role": "assistant", "content": "a" * length}]


@pytest.fixture
def asked(monkeypatch):
    """(lengths of the answers that were replaced, temperature, limit, a number that was drawn) of
    every batch.
    """
    asked = []

    def answer(batch, model, tokenizer, temperature, most):
        lengths = [len(chat[1]["content"]) for chat in batch]
        asked.append((lengths, temperature, most, float(torch.rand(1))))
        return [
            [chat[0], {"role": "assistant", "content": f"new {len(chat[1]['content'])}"}]
            for chat in batch
        ]

    monkeypatch.setattr(chats, "_answer", answer)
    return asked


def regenerate(given, how, folder, **options):
    return chats.regenerate("model", "tokenizer", given, how, folder=folder, **options)


def test_answers_of_like_length_are_written_together_half_of_them_greedily(tmp_path, asked):
    given, how = (
        [said(n) for n in (5, 1, 4, 8, 2, 7, 3, 6)],
        Regeneration(batch=2, temperature=0.7, max_new_tokens=9),
    )
    written = regenerate(given, how, tmp_path, seed=3)
    groups = [lengths for lengths, *_ in asked]
    assert sorted(groups) == [[1, 2], [3, 4], [5, 6], [7, 8]] and groups != sorted(groups), (
        "in random order"
    )
    assert [one[1] for one in asked] == [0.7, 0.0, 0.7, 0.0] and {one[2] for one in asked} == {9}
    assert [chat[1]["content"] for chat in written] == [
        f"new {n}" for n in itertools.chain(*groups)
    ]
    for number, (*_, drawn) in enumerate(asked):
        torch.manual_seed(3 * 1_000_003 + number)
        assert drawn == float(torch.rand(1))
    asked.clear()
    assert regenerate(given, how, tmp_path, seed=3) == written and asked == []
    assert runs.Shards(tmp_path).done() == [0, 1, 2, 3]
    assert json.loads(runs.read_table(runs.Shards(tmp_path).path(0))["messages"][0]) == written[0]
    orders = []
    for seed in (0, 1, 2):
        asked.clear()
        regenerate(given, how, tmp_path / str(seed), **({"seed": seed} if seed else {}))
        orders.append([one[0] for one in asked])
    assert len({str(order) for order in orders}) > 1
    for frac, temperatures in ((0.25, [0.8, 0.8, 0.8, 0.0]), (0.0, [0.8] * 4)):
        asked.clear()
        regenerate(given, Regeneration(greedy_frac=frac, batch=2), tmp_path / f"frac-{frac}")
        assert [one[1] for one in asked] == temperatures


def test_what_was_written_in_time_is_kept(tmp_path, asked, monkeypatch):
    clock = itertools.count(
        0, 50
    )  # seconds; looked at once as it begins, and once before each batch
    monkeypatch.setattr(chats, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    given = [said(n) for n in range(1, 7)]
    assert len(regenerate(given, Regeneration(batch=2), tmp_path, minutes=1.0)) == 2
    assert len(asked) == 1 and len(regenerate(given, Regeneration(batch=2), tmp_path)) == 6


def test_generation_is_told_how_to_sample_and_every_turn_of_an_assistant_is_written_anew(
    monkeypatch,
):
    model, tokenizer = chat_target()
    given, prompts = [], [[CHATS[0][0]], [CHATS[1][0]]]

    class Model:
        device, config = model.device, SimpleNamespace(max_position_embeddings=64)

        def generate(self, input_ids, attention_mask, **options):
            given.append((input_ids.shape, options))
            return torch.cat((input_ids, torch.full((len(input_ids), 3), 9)), 1)

    for temperature, most in ((0.0, 1000), (0.7, 5)):
        texts = chats.generate_texts(prompts, Model(), tokenizer, temperature, most)
        assert texts == [tokenizer.decode([9, 9, 9], skip_special_tokens=True)] * 2
    (shape, greedy), (_, sampled) = given
    padded = {"pad_token_id": tokenizer.pad_token_id}
    assert greedy == padded | {"max_new_tokens": 64 - shape[1], "do_sample": False}
    assert sampled == padded | {
        "max_new_tokens": 5,
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 0,
    }
    Model.config = SimpleNamespace(max_position_embeddings=shape[1])
    full = pytest.raises(SpecdecError, chats.generate_texts, prompts, Model(), tokenizer, 0.0, 5)
    full.match("fills the target's whole context")
    Model.config = SimpleNamespace()
    chats.generate_texts(prompts, Model(), tokenizer, 0.0, 2000)
    assert given[-1][1]["max_new_tokens"] == 2000, "a context that nobody states has no end"
    asked = []

    def texts(waiting, model, tokenizer, temperature, most):
        asked.append(
            ([[message["content"] for message in chat] for chat in waiting], temperature, most)
        )
        return [f"{len(chat)}." for chat in waiting]

    monkeypatch.setattr(chats, "generate_texts", texts)
    user, old = ({"role": role, "content": role[0]} for role in ("user", "assistant"))
    system = {"role": "system", "content": "s"}
    found = chats._answer([[user, old, user, old], [system, user, old]], "m", "t", 0.5, 7)
    assert [[message["content"] for message in chat] for chat in found] == [
        ["u", "1.", "u", "3."],
        ["s", "u", "2."],
    ]
    assert [[message["role"] for message in chat] for chat in found][1] == [
        "system",
        "user",
        "assistant",
    ]
    assert asked == [([["u"]], 0.5, 7), ([["s", "u"]], 0.5, 7), ([["u", "1.", "u"]], 0.5, 7)]


def test_chats_are_read_over_and_over_in_fresh_orders_and_own_answers_mixed_in():
    source = ChatList([said(n) for n in range(1, 6)])
    assert source.prompts(0, 2) == source.conversations[:2]
    assert source.key == runs.content_key(chats=source.conversations)
    read = [len(chat[1]["content"]) for chat in itertools.islice(source.stream("7/0"), 15)]
    passes = [read[:5], read[5:10], read[10:]]
    assert [sorted(one) for one in passes] == [[1, 2, 3, 4, 5]] * 3 and len(
        {str(one) for one in passes}
    ) > 1
    rng = random.Random("chats/7/0")
    assert passes[0] == [1 + index for index in rng.sample(range(5), 5)]
    tokenizer = chat_target()[1]
    coded = [chats.conversation_document(tokenizer, chat).ids.tolist() for chat in CHATS]

    def read(own, own_frac, count):
        mixed = chats.mixed_documents(tokenizer, ChatList(CHATS[:3]), own, own_frac)("b")
        return [item.ids.tolist() for item in itertools.islice(mixed, count)]

    both = read(CHATS[3:], 0.75, 400)
    mine = [ids for ids in both if ids in coded[3:]]
    assert len(mine) == pytest.approx(300, abs=35) and all(
        ids in coded[:3] for ids in both if ids not in mine
    )
    for begin in range(0, 297, 3):  # each of them once before any is read again
        assert sorted(mine[begin : begin + 3]) == sorted(coded[3:])
    assert all(ids in coded[:3] for ids in read([], 1.0, 9))


def document(length: int, token: int = 7, kind: int = ANSWER) -> Document:
    return Document(np.full(length, token), np.full(length, kind, np.uint8))


def test_documents_are_placed_longest_first_and_blocks_keep_their_shares():
    documents = [document(2, 2), document(5, 5), document(3, 3, PROMPT), document(9, 9)]
    packed = chats.pack(documents, 2, 6)
    assert packed.ids.tolist() == [[9] * 6, [5] * 5 + [0]] and packed.document.tolist() == [
        [0] * 6,
        [1] * 5 + [-1],
    ]
    assert (
        packed.kind.tolist() == [[ANSWER] * 6, [ANSWER] * 5 + [PADDING]]
        and packed.answer_mask.sum() == 11
    )
    assert chats.pack([], 1, 2).ids.tolist() == [[0, 0]]
    options = dict(seed=3, length=20, block_rows=32)

    def given(block_seed):
        seen.append(block_seed)
        return itertools.repeat(document(10))

    seen: list = []
    rows = Rows(given, **options)
    block = rows.block(2)
    assert seen == ["3/2"] and (block.ids == 7).sum() == 640 and (block.kind == ANSWER).all()
    assert not (block.document < 0).any()

    def drawn(block_seed):
        rng = random.Random(block_seed)
        return (document(10, rng.randrange(50)) for _ in itertools.count())

    rows, again, other = (Rows(drawn, **options | {"seed": seed}) for seed in (3, 3, 4))
    assert (rows.block(1).ids == again.block(1).ids).all() and (
        rows.block(1).ids != other.block(1).ids
    ).any()
    first, second = rows.batch(0, 16), rows.batch(1, 16)
    assert (np.concatenate((first.ids, second.ids)) == rows.block(0).ids).all()
    assert (rows.batch(3, 16).ids == rows.block(1).ids[16:]).all()
    pytest.raises(AssertionError, rows.batch, 0, 5)


def test_a_learning_curve_holds_what_was_measured_and_students_interval_of_a_doubling(tmp_path):
    expected = {
        "step": [0, 2],
        "seen_tok": [0, 20],
        "distinct_tok": [0, 15],
        "rate_frac": [1.0, 1.0],
    }
    expected |= {TOP1: [0.1, 0.2], TAU: [1.0, 1.5]}
    rows = (
        pd.concat([pd.DataFrame(expected), pd.DataFrame({"step": [1]})])
        .assign(loss=1.0)
        .sort_values("step")
    )
    folder = tmp_path / "drafter_training"
    runs.write_json(folder / "plan.json", {"finished": False})
    pytest.raises(SpecdecError, learning_curve, tmp_path).match("measured nothing on held-out text")
    runs.Shards(folder / "loss").write(0, rows)
    curve = learning_curve(tmp_path)
    assert (
        curve.to_dict("list") == expected
        and curve.index.tolist() == [0, 1]
        and curve["seen_tok"].dtype == int
    )
    last = {
        "seen_tok": 30,
        "distinct_tok": 15,
        "rate_frac": 0.5,
        TOP1: 0.3,
        TAU: 1.75,
        "draft_vocab_size": 9,
    }
    runs.write_json(folder / "plan.json", {"finished": True, "steps_done": 3, "results": last})
    runs.write_table(folder / "loss.parquet", rows)
    ended = learning_curve(tmp_path)
    assert ended.iloc[-1].to_dict() == {
        "step": 3,
        **{name: last[name] for name in expected if name != "step"},
    }
    assert len(ended) == 3 and list(ended) == list(expected)
    assert (TAU, TOP1) == ("held_out_tau_chain", "held_out_top1_frac")
    tokens = 30_000 * 2 ** np.arange(5)
    curve = pd.DataFrame({"distinct_tok": tokens, "seen_tok": tokens, "rate_frac": 1.0})
    curve[TAU], curve[TOP1] = [1.0, 1.3, 1.4, 1.8, 1.9], [0.1, 0.15, 0.2, 0.22, 0.3]
    fit = fit_doubling(curve)
    assert list(fit) == ["measure", "per_doubling", "low", "high", "points"] and fit[
        "measure"
    ].tolist() == [TOP1, TAU]
    x = np.arange(5.0)
    slope, cut = np.polyfit(x, curve[TAU], 1)
    margin = np.sqrt(
        ((curve[TAU] - slope * x - cut) ** 2).sum() / 3 / ((x - 2) ** 2).sum()
    ) * stats.t.ppf(0.975, 3)
    assert fit.iloc[1, 1:].tolist() == pytest.approx([slope, slope - margin, slope + margin, 5])
    other = {
        "distinct_tok": [1, 10**9, 10**9],
        "seen_tok": [1, 10**10, 10**9],
        "rate_frac": [1, 1, 0.5],
    }
    others = fit_doubling(pd.concat([curve, pd.DataFrame(other).assign(**{TAU: 9.0, TOP1: 9.0})]))
    pd.testing.assert_frame_equal(
        others, fit, obj="few, repeated and at a lower rate they are another curve"
    )
    assert fit_doubling(curve, from_tok=30_001)["points"].tolist() == [4, 4], (
        "from so many tokens on"
    )
    assert fit_doubling(curve.head(3))["points"].tolist() == [3, 3]
    empty = fit_doubling(curve.head(2))
    assert empty.empty and list(empty) == list(fit)
