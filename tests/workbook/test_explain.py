"""The tables that explain a run, held against rows in which the causes were planted."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from fakes.pairs import shared_bigrams

from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.evaluation import bench

from workbook import explain

# suite -> (accepted tokens of every cycle, ms per cycle, ms of the prefill); plain decoding takes 10 ms a token
PLANTED = {
    "maths": (5, 25.0, 10.0),
    "stories": (2, 25.0, 10.0),
    "articles": (3, 25.0, 400.0),
    "code": (4, 25.0, 20.0),
}


def planted_run():
    prompts, cycles = [], []
    for suite, (accepted, cycle_ms, prefill_ms) in PLANTED.items():
        for prompt in range(3):
            keys = {"suite": suite, "prompt": f"{suite}/{prompt}", "turn": 0, "repeat": 0}
            count = 4
            new_tok = 1 + count * (accepted + 1)
            for method, decode_ms in (("plain", 10.0 * (new_tok - 1)), ("tree", cycle_ms * count)):
                row = {
                    **keys,
                    "method": method,
                    "new_tok": new_tok,
                    "prefill_ms": prefill_ms,
                    "decode_ms": decode_ms,
                }
                row |= {
                    "total_ms": prefill_ms + decode_ms,
                    "cycles": count if method == "tree" else 0,
                }
                prompts.append(row | {"cycle_tok": row["cycles"] * (accepted + 1)})
            times = {
                "draft_ms": 0.2,
                "policy_ms": 0.0,
                "verify_ms": 0.7,
                "commit_ms": 0.02,
                "host_ms": 0.08,
            }
            times = {part: share * cycle_ms for part, share in times.items()}
            row = {
                **keys,
                "method": "tree",
                "accepted_tok": accepted,
                "total_ms": cycle_ms,
                **times,
            }
            cycles += [row] * (count - 1) + [row | {"accepted_tok": 0}]
    rows = {"prompts": pd.DataFrame(prompts), "cycles": pd.DataFrame(cycles)}
    return SimpleNamespace(read_table=lambda name: rows[name])


@pytest.fixture(scope="module")
def planted():
    run = planted_run()
    return run, bench.stats.compare(run.read_table("prompts"), "plain")


def test_each_suite_with_cycles_gets_its_own_numbers_and_ranks_tell_what_goes_with_the_speed(
    planted,
):
    run, table = planted
    by_suite = explain.suites(run, table, "tree", "plain")
    assert sorted(by_suite.index[:-1]) == sorted(PLANTED) and by_suite.index[-1] == "all"
    assert by_suite["cycle_steps"].tolist() == pytest.approx([2.5] * 5)
    assert by_suite["first_frac"].tolist() == pytest.approx([0.75] * 5)
    assert by_suite.loc["maths", "tau"] == 6 and by_suite.loc["maths", "answer_tok"] == 25
    assert by_suite.loc["articles", "prefill_frac"] == pytest.approx(400 / 500)
    # 10 + 240 plain against 10 + 100 with the tree
    assert by_suite.loc["maths", "speedup"] == pytest.approx(250 / 110)
    ranks = explain.drivers(by_suite)
    speed, tau = by_suite["speedup"].drop("all").rank(), by_suite["tau"].drop("all").rank()
    assert ranks["tau"] == pytest.approx(np.corrcoef(speed, tau)[0, 1])
    assert np.isnan(ranks["cycle_steps"]) and np.isnan(ranks["first_frac"]), (
        "what never varies orders nothing"
    )
    assert explain.drivers(by_suite.iloc[:2]).isna().all()
    pytest.raises(SpecdecError, explain.suites, run, table, "tre", "plain").match(
        "did you mean 'tree'"
    )
    pytest.raises(SpecdecError, explain.suites, run, table, "plain", "plain").match(
        "no cycles to explain"
    )


def test_the_hosts_work_is_read_off_the_profile_and_a_real_run_is_explained(home):
    pair = shared_bigrams()
    host = explain.host_work(pair, [[1, 2, 3], [4, 5]], Static(9, 2, 3), 16)
    assert (
        set(host.index) == set(explain.HOST_WORK.values())
        and host["own_ms"].is_monotonic_decreasing
    )
    assert host["frac"].sum() == pytest.approx(1) and (host["own_ms"] > 0).all()
    pytest.raises(SpecdecError, explain.host_work, pair, [[1, 2, 3]], Static(9, 2, 3), 1).match(
        "no cycle to profile"
    )
    run = bench.evaluate(
        {"plain": "autoregressive", "tree": Static(9, 2, 3)},
        {"a": [[1, 2], [3, 4]], "b": [[5, 6]]},
        shared_bigrams(),
        max_new_tokens=8,
        progress=False,
        warmup=0,
    )
    table = bench.summary(run)
    by_suite = explain.suites(run, table, "tree", "plain")
    assert by_suite.notna().drop(columns=["speedup_low", "speedup_high"]).all(axis=None)
