"""What an audit is made of: a row per text, the table, and the verdict on a near-tie by hand."""

import contextlib
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from specdec.core.verification import Picker
from specdec.evaluation import lossless
from specdec.evaluation.lossless import COLUMNS, Audit


def made_up(policy="a", temperature=0.0, dtype="float32", **changes) -> dict:
    row = dict.fromkeys(COLUMNS, float("nan"))
    row.update(prompt=0, policy=policy, temperature=temperature, dtype=dtype, tokens=8)
    row.update(accepted_tok=3, equal=True, near_tie=False, tolerance=0.5)
    return {**row, **changes}


def test_the_table_of_an_audit_is_whole():
    rows = [
        made_up(),
        made_up("b", dtype="bfloat16", equal=False, gap=0.25, near_tie=True),
        made_up("b", dtype="bfloat16", equal=False, gap=0.4, near_tie=True, prompt=1),
        made_up("b", dtype="bfloat16", equal=False, gap=2.0),
        made_up("b", 1.0, tokens=5),
        made_up("c", 1.0, "float16", equal=False, gap=0.125, near_tie=True),
    ]
    result = Audit(pd.DataFrame(rows, columns=COLUMNS))
    names = "temperature prompts policies texts tokens accepted_tok differing failures worst_tie"
    assert list(result.table) == names.split()
    assert result.table.values.tolist() == [
        [0.0, 2, 2, 4, 32, 12, 3, 1, 0.8],
        [1.0, 1, 2, 2, 13, 6, 1, 0, 0.25],
    ]
    assert result.failures.index.tolist() == [3] and not result.passed
    assert Audit(result.rows.drop(index=3)).passed


class Planted:
    """A target of three tokens of text whose token-by-token scores are `steps`, and those of one
    forward `steps` + `moved`.
    """

    device = torch.device("cpu")
    dtype = torch.bfloat16

    def __init__(self, steps, moved):
        self.steps = steps
        self.block = steps + moved
        self.forwards = []

    def inference(self, taps):
        return contextlib.nullcontext()

    def new_cache(self, room):
        return [0, room]

    def forward(self, tokens, cache, last_only=False):
        read = cache[0] + len(tokens)
        assert read <= cache[1]
        cache[0] = read
        self.forwards.append((tokens.tolist(), last_only))
        if last_only:
            return SimpleNamespace(logits=self.steps[read - 2 : read - 1])
        return SimpleNamespace(logits=torch.cat((torch.zeros(1, 12), self.block)))


def planted(moved, logits, temperature):
    target = Planted(logits, moved)
    pair = SimpleNamespace(target=target, ids_of=lambda prompt: prompt)
    picker = Picker.from_settings(temperature, 3)
    return lossless.NearTies(pair, [8, 9], [0, 1, 0], picker, temperature), target


def test_a_near_tie_by_hand(monkeypatch):
    """Of twelve tokens the ten best are rivals; what moves all of them alike is no noise, nor what
    moves the others.
    """
    rows = [(9.0, 8.75, 7), (6.0, 7.0, 5), (9.0, 1.0, 0)]
    logits = torch.tensor(
        [[first, second, *range(third, third - 10, -1)] for first, second, third in rows]
    )
    moved = torch.zeros(3, 12)
    moved[0, :] = 5.0  # all alike
    moved[1, 10:] = 7.0  # of no rival
    moved[2, 0] = 1.0  # ten rivals, one of which moved by one: a variance of a tenth
    ties, target = planted(moved, logits, temperature=0.5)
    noise = (2 * 0.1 / 3) ** 0.5
    assert ties.measured[1] == pytest.approx(noise) and ties.measured[0].tolist() == logits.tolist()
    assert target.forwards == [([8, 9], True), ([0], True), ([1], True), ([8, 9, 0, 1], False)]
    before = []

    def scores(row, ids):
        before.append(ids.tolist())
        return 2 * row

    monkeypatch.setattr(ties.picker, "scores", scores, raising=False)
    tolerance = pytest.approx(6 * noise / 0.5)
    first = (False, 1, pytest.approx(2.0), pytest.approx(2 * 3.0), tolerance, False)
    assert ties.compare([0, 3, 0]) == first
    assert ties.compare([1, 1, 0]) == (False, 0, 0.5, 0.5, tolerance, True)
    assert before == [[8, 9, 0], [8, 9]], "the text before the first token that differs"
    assert ties.compare([0, 1, 0])[:2] == (True, None) and ties.compare([0, 1, 0])[5] is False
    assert ties.compare([0, 1])[:2] == (False, 2)
    assert ties.compare([0, 1, 0, 4])[1:6:2] == (3, float("inf"), False)
    # of a greedy text without noise one rounding is left
    quiet, _ = planted(torch.zeros(3, 12), logits, temperature=0.0)
    monkeypatch.setattr(quiet.picker, "scores", lambda row, ids: row, raising=False)
    rounding = torch.finfo(torch.bfloat16).eps * 9.0
    assert quiet.compare([1, 1, 0])[4] == pytest.approx(rounding)
