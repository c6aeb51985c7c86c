"""Notebook 91: every part on the tiny pair, its numbers equal to what decoding itself counts; and the command that runs it."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from fakes.notebooks import run_cells

import specdec
from specdec import runs
from specdec.core.tree_config import TreeConfig
from specdec.data.suites import conversation, gather
from specdec.errors import SpecdecError
from specdec.evaluation import lossless
from specdec.models.load import shipped_folder
from specdec.report import card
from specdec.tools import cli

from experiments.evidence import audit_by_suite
from workbook import book

SUITES = ["toy/gsm8k", "toy/mt_bench"]
SMALL = dict(pair="tiny", suites=SUITES, prompts=2, max_new_tokens=10, dtypes=["float32"], tune_prompts=1)
SMALL |= dict(trees=[[16, 3, 4], [4, 2, 1]], grid=[[4, 2, 1], [8, 3, 3]], timed_prompts=1, peer_prompts=1)
SMALL |= dict(audit_prompts=1, audit_tok=8, answer_prompts=2, answer_tok=6)


@pytest.fixture
def measured(home, monkeypatch):
    """Run some parts of the notebook; the file that it wrote, and its names."""
    monkeypatch.delenv("SPECDEC_DATA", raising=False)

    def of(*parts: str, **changes) -> tuple[dict, dict]:
        names = run_cells("91_evidence", **SMALL | {"parts": list(parts), "out": str(home / "m.json")} | changes)
        return runs.read_json(home / "m.json"), names

    return of


def table(written: dict, title: str) -> pd.DataFrame:
    return pd.DataFrame(written[title]["rows"])


def test_tokens_per_cycle_are_those_of_decoding(measured, tiny):
    written, _ = measured("tau")
    taus = table(written, "Tokens per cycle").set_index(["temperature", "suite"])
    assert list(taus.columns) == ["prompts", "16/3/4", "4/2/1"] and taus.loc[(0, "all"), "prompts"] == 4
    chats = [conversation(tiny, item, 0, []) for item in gather(["toy/gsm8k"], limit=2, part="test")]
    for temperature in (0.0, 1.0):
        options = dict(max_new_tokens=10, temperature=temperature, seed=0)
        rows = [row for chat in chats for row in specdec.decode(tiny, chat, specdec.Static(16, 3, 4), **options).rows]
        live = sum(row.new_tok for row in rows) / len(rows)
        assert taus.loc[(temperature, "toy/gsm8k"), "16/3/4"] == pytest.approx(live)
    depths = table(written, "Acceptance by depth")
    assert {"temperature", "tree", "1", "2"} <= set(depths) and depths["1"].between(0, 1).all()


def test_an_audit_continues_where_it_was_stopped(tiny, home, monkeypatch):
    items = gather(SUITES, limit=1, part="test")
    policies = {"tree": specdec.Static(16, 3, 4), "random": specdec.RandomPolicy(TreeConfig(24, 5, 6), 1)}
    options = dict(tokens=8, seed=0, temperatures=[0.0, 1.0], scale="laptop")
    whole = audit_by_suite(tiny, items, policies, **options)
    assert lossless.Audit(whole).passed and set(whole["suite"]) == set(SUITES) and len(whole) == 2 * 2 * len(policies)
    assert whole.groupby("policy")["accepted_tok"].sum().gt(0).all()
    monkeypatch.setattr(lossless, "audit", lambda *a, **o: pytest.fail("all of it was done"))
    pd.testing.assert_frame_equal(audit_by_suite(tiny, items, policies, **options), whole)


def test_what_differs_is_listed(measured, monkeypatch):
    together = lossless.decode_many

    def wrong(*args, **options):
        texts = together(*args, **options)
        texts[0].tokens = [*texts[0].tokens[:-1], (texts[0].tokens[-1] + 1) % 512]
        return texts

    monkeypatch.setattr(lossless, "decode_many", wrong)
    written, _ = measured("lossless")
    assert table(written, "Losslessness")[["differing", "failures"]].sum().tolist() == [4, 4]
    rows = table(written, "First divergences")
    assert len(rows) == 4 and set(rows["policy"]) == {"16/3/4"} and (rows["gap"] >= rows["top2_gap"]).all()


@pytest.mark.parametrize("pair", ["small", "tiny"])
def test_learned_policies_that_ship_or_are_named_are_audited_as_well(home, pair):
    mine = shutil.copytree(shipped_folder("small") / "policies" / "ours-float32", home / "mine" / "learned")
    names = run_cells("91_evidence", pair=pair, parts=["peers"], dtypes=[], policies=[str(mine)])["audited"]
    assert list(names)[-1] == "mine/learned"
    assert ({"policies/ours-float32", "policies/ours-bfloat16"} <= set(names)) == (pair == "small")


def test_speed_and_peers_and_answers_make_a_card(measured, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    written, _ = measured("speed", "peers", "accuracy", cpu_time=True)
    speed = table(written, "Speed of the tuned static tree over plain decoding")
    assert speed["suite"].tolist() == [*SUITES, "all"] and speed["speedup"].gt(0).all()
    assert speed["tree"].isin(["4/2/1", "8/3/3"]).all() and speed["same_frac"].eq(1).all()
    costs = table(written, "A cycle of the tuned tree").iloc[0]
    assert costs["even_tau"] == pytest.approx(costs[["draft_steps", "verify_steps", "rest_steps"]].sum())
    theirs = table(written, "Beside other decoders")["method"].tolist()
    assert theirs == ["plain", "tuned", "generate", "generate, lookup", "generate, early exit"]
    assert "`llama.cpp`: the target of tiny comes from no GGUF file" in written["Beside other decoders"]["how"]
    answers = table(written, "What the target answers")
    assert answers["suite"].tolist()[0] == "toy/gsm8k" and answers["checked"].eq(2).all()
    for title, part in written.items():
        assert title in card._section(title, part, part["drafter"])


def test_the_command_runs_the_notebook_and_bad_input_is_one_sentence(measured, home, capsys, tmp_path, monkeypatch):
    pytest.raises(SpecdecError, measured, "tao").match("unknown part 'tao'; did you mean 'tau'")
    assert cli.main(["evidence", "--pair", "tiny", "--drafter", str(home), "--out", str(home / "m.json")]) == 2
    assert "there is no drafter" in capsys.readouterr().err
    run = Mock(return_value=pd.DataFrame({"state": ["done"]}))
    monkeypatch.setattr(book, "run", run)
    options = "--pair tiny --only tau speed --limit 3 --policies mine --cpu-time --seed 4".split()
    drafter = shipped_folder("tiny") / "drafter"
    assert cli.main(["evidence", *options, "--drafter", str(drafter), "--out", str(tmp_path / "m.json")]) == 0
    (opened, only), named = run.call_args
    (entry,) = opened.choose(only)
    assert entry.name == "91_evidence" and named["force"], "its parts know themselves what was measured"
    given = dict(pair="tiny", parts=["tau", "speed"], prompts=3, cpu_time=True, seed=4, drafter=str(drafter))
    given |= {"policies": [str(Path("mine").resolve())], "out": str(tmp_path / "m.json")}
    assert given.items() <= opened.parameters(entry, named["parameters"]).items()
