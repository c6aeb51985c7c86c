"""The board says what the cards say, the cards what the recording says; its rules of 2026 step by step."""

import numpy as np
import pandas as pd
import pytest
from fakes.questions import finished, question
from fakes.traces import round_costs

from specdec import runs
from specdec.core.records import EXTEND, PLAN, Question
from specdec.errors import SpecdecError
from specdec.evaluation import score, visitor

from workbook import board

ASK = Question(PLAN, 20, 0, 0, None, None, None)


def made(name: str):
    return visitor.made(board.folder() / f"{name}.py", vars(round_costs()))


def test_the_board_is_that_of_its_cards_and_a_card_comes_out_again():
    assert (runs.workbook() / "figures" / "board.md").read_text() == board.page()
    file = board.folder() / "two_thresholds.py"
    rows = runs.read_json(file.with_suffix(".json"))["rows"]
    found = score.score(file, policy_ms=rows[0]["policy_ms"], progress=False)
    for own, row in zip(found.table.to_dict("records"), rows, strict=True):
        numbers = {name: value if isinstance(value, str) else pytest.approx(value) for name, value in row.items()}
        assert {**own, "policy": file.stem} == numbers


def test_a_card_of_another_file_is_refused(tmp_path, monkeypatch):
    for place in board.folder().glob("*.*"):
        (tmp_path / place.name).write_bytes(place.read_bytes())
    monkeypatch.setattr(board, "folder", lambda: tmp_path)
    (tmp_path / "hedge.py").write_text("changed")
    with pytest.raises(SpecdecError, match="the card of hedge belongs to another file"):
        board.cards()
    assert len(runs.read_json(tmp_path / "hidden.json")["checksum"]) == 64
    turns = pd.DataFrame([{"suite": suite, "prompt": f"{suite}/{n // 2}"} for suite in ("a", "b") for n in range(40)])
    shown = [board.shown_prompts(turns, secret) for secret in ("one", "one", "two")]
    assert shown[0] == shown[1] != shown[2] and len(shown[0]) == 2 * board.PUBLIC


def test_bandits_and_hedge_choose_what_paid():
    trees = made("fastrl_bandit")
    trees.epsilon = 0.0
    for nodes, tokens in (
        (47, 2),
        (31, 5),
        (15, 3),
        (7, 1),
        (31, 1),
        (31, 1),
        (15, 3),
    ):  # a median of 1 sends it elsewhere
        assert trees.answer(ASK).verify_nodes == nodes
        trees.observe(finished(tokens - 1, 8))
    flags = made("ik_autotune")
    flags.epsilon = 0.0
    for cycle in range(31):  # a fast one, and thirty slow ones: it starts anew with llama.cpp's values
        assert flags.answer(ASK).depth == 0 and flags.rule.p_min == 0
        flags.observe(finished(0, 1, total_ms=10.0 if cycle else 1.0))
    assert flags.answer(ASK).depth == 8 and flags.rule.p_min == 0.75
    hedge = made("hedge")
    hedge.answer(ASK)
    hedge.levels = hedge.most_levels
    hedge.observe(finished(1, 8))  # two tokens by any length: the shortest was the best
    assert hedge.regrets[0] > 0 > hedge.regrets[-1] and hedge.weights()[-1] == 0
    assert np.exp(np.maximum(hedge.regrets, 0) ** 2).mean() > 1 and hedge.weights().sum() == pytest.approx(1)


def test_cast_grows_while_a_level_pays():
    cast = made("cast")
    sure, unsure = (
        question(np.log(chances), 0, EXTEND, 4, 1, plan=cast.plan) for chances in ([0.9] + [0.02] * 3, [0.1] * 4)
    )
    assert cast.answer(sure) is True and cast.answer(unsure) is False
