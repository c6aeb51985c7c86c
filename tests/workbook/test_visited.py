"""Where cycles begin: hand-made lengths, rows cut to fit on, copies without a model, and fits compared on the shipped recording."""

import numpy as np
import pandas as pd
import pytest

import specdec
from specdec.core.policy import Static
from specdec.core.tree_config import TreeConfig
from specdec.costs.profiles import prices
from specdec.evaluation.score import RECORDING
from specdec.models.ngrams import CopyOdds
from specdec.replays.copies import copy_odds_of
from specdec.replays.form import trace_of
from specdec.replays.trace import open_trace

from workbook import chains, visited

LENGTHS = [np.array([3, 1, 4, 3, 2, 1]), np.array([1, 2, 2])]
TURNS = pd.DataFrame({"suite": "s", "prompt": ["s/0", "s/1"], "turn": 0, "part": ["tune", "test"], "prompt_tok": 10})


def test_cycles_begin_after_what_was_accepted_and_rates_are_taken_there():
    trace, tree, costs = trace_of(TURNS, LENGTHS, "made up"), TreeConfig(4, 2, 1), chains.h100(1, 3)
    begun = visited.starts_of(trace, Static.of(tree), costs)
    assert begun.tolist() == [0, 3, 6, 7]  # three tokens, then three; one, then two
    table = visited.rates(trace, tree, costs).iloc[0]
    assert (table["positions"], table["cycles"]) == (9, 4)
    assert table["mean_all"] == pytest.approx(19 / 9) and table["mean_visited"] == pytest.approx(9 / 4)
    assert table["visited_over_all"] == pytest.approx(9 / 4 / (19 / 9))
    cut = visited.only(trace, begun)
    assert len(cut) == 4 and cut.turns["positions"].tolist() == [2, 2] and cut.turns["first"].tolist() == [0, 2]
    assert (cut.ranks[1] == trace.ranks[1][begun]).all() and (cut.context_tok == [10, 13, 10, 11]).all()


def test_copies_of_a_text_need_no_model():
    pair = specdec.load_pair("tiny", dtype="float32", drafter="suffix")
    recorded = specdec.record(pair, {"mine": ["one two one two"]}, depth=9, max_new_tokens=24, progress=False)
    again = visited.copying(recorded, CopyOdds())
    inside = np.arange(len(recorded)) + 10 < recorded.turns["kept_tok"][0]
    assert inside.any() and (again.column("copied_ranks") == recorded.column("copied_ranks"))[inside].all()
    width = recorded.column("copied_scores").shape[1]
    assert (again.column("copied_scores")[:, :width] == recorded.column("copied_scores")).all()
    every = copy_odds_of(recorded, rows=np.arange(len(recorded)))
    few = copy_odds_of(recorded, rows=np.array([2]))
    total = [int(np.sum(odds.outcomes)) for odds in (copy_odds_of(recorded), every, few)]
    assert total[1] > total[0] and total[1] > total[2] > 0


def test_what_is_fitted_twice_is_compared_with_a_fit_to_as_few_positions(monkeypatch):
    costs, whole = prices(RECORDING / "costs.json"), visited.fits
    monkeypatch.setattr(visited.classifiers, "EPOCHS", {"C2T": 2})
    monkeypatch.setattr(visited, "fits", lambda *given: {n: f for n, f in whole(*given).items() if n != "RADAR"})
    table = visited.fitted_twice(open_trace(RECORDING), costs, seeds=(0,)).set_index("fit")
    assert table.index.tolist() == ["C2T", "temperatures", "odds of copies"]
    assert (table["visited"] < table["positions"]).all()
    assert (table[["ms_all", "ms_visited", "ms_as_few"]] > 0).all(axis=None)
    assert np.allclose(table["over_all"], table["ms_all"] / table["ms_visited"])
    apart = [(table[f"{over}_low"] > 1, table[f"{over}_high"] < 1) for over in ("over_all", "over_as_few")]
    assert (table["differs"] == (apart[0][0] & apart[1][0] | apart[0][1] & apart[1][1])).all()
