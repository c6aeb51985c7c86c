"""The tables that explain a run, held against rows in which the causes were planted."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from specdec.errors import SpecdecError
from specdec.evaluation import bench

from workbook import explain

# suite -> (accepted tokens of every cycle, ms of the prefill); a cycle takes 25 ms, plain decoding
# 10 ms a token
PLANTED = {"maths": (5, 10.0), "stories": (2, 10.0), "articles": (3, 400.0), "code": (4, 20.0)}
CYCLES = 4


@pytest.fixture(scope="module")
def planted():
    prompts, cycles = [], []
    for suite, (accepted, prefill_ms) in PLANTED.items():
        for prompt in range(3):
            keys = {"suite": suite, "prompt": f"{suite}/{prompt}", "turn": 0, "repeat": 0}
            new_tok = 1 + CYCLES * (accepted + 1)
            for method, decode_ms, count in (
                ("plain", 10.0 * (new_tok - 1), 0),
                ("tree", 25.0 * CYCLES, CYCLES),
            ):
                row = {**keys, "method": method, "new_tok": new_tok, "cycles": count}
                row |= {"prefill_ms": prefill_ms, "decode_ms": decode_ms}
                row |= {"total_ms": prefill_ms + decode_ms, "cycle_tok": count * (accepted + 1)}
                prompts.append(row)
            for tokens in [accepted] * (CYCLES - 1) + [0]:
                row = {"method": "tree", "accepted_tok": tokens, "total_ms": 25.0}
                cycles.append({**keys, **row})
    tables = {"prompts": pd.DataFrame(prompts), "cycles": pd.DataFrame(cycles)}
    run = SimpleNamespace(read_table=lambda name: tables[name])
    return run, bench.stats.compare(tables["prompts"], "plain")


def test_each_suite_gets_its_own_numbers(planted):
    by_suite = explain.suites(*planted, "tree", "plain")
    assert sorted(by_suite.index[:-1]) == sorted(PLANTED) and by_suite.index[-1] == "all"
    assert by_suite["cycle_steps"].tolist() == pytest.approx([2.5] * 5)
    assert by_suite["first_frac"].tolist() == pytest.approx([0.75] * 5)
    assert by_suite.loc["maths", "tau"] == 6 and by_suite.loc["maths", "answer_tok"] == 25
    assert by_suite.loc["articles", "prefill_frac"] == pytest.approx(400 / 500)
    # 10 + 240 plain against 10 + 100 with the tree
    assert by_suite.loc["maths", "speedup"] == pytest.approx(250 / 110)
    pytest.raises(SpecdecError, explain.suites, *planted, "tre", "plain").match("'tree'")
    pytest.raises(SpecdecError, explain.suites, *planted, "plain", "plain").match("no cycles")


def test_ranks_say_what_goes_with_the_speed(planted):
    by_suite = explain.suites(*planted, "tree", "plain")
    ranks = explain.drivers(by_suite)
    speed, tau = (by_suite[name].drop("all").rank() for name in ("speedup", "tau"))
    assert ranks["tau"] == pytest.approx(np.corrcoef(speed, tau)[0, 1])
    assert np.isnan(ranks["cycle_steps"]), "what never varies orders nothing"
    assert explain.drivers(by_suite.iloc[:2]).isna().all()
