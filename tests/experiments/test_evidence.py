"""What a card says was measured: every part on the tiny pair, its numbers equal to what decoding itself counts."""

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

import specdec
from experiments import evidence
from specdec.core.tree_config import TreeConfig
from specdec.data.suites import conversation
from specdec.errors import SpecdecError
from specdec.evaluation import lossless
from specdec.models.load import shipped_folder
from specdec.report import card
from specdec.tools import book, cli

SMALL = dict(suites=("toy/gsm8k", "toy/mt_bench"), prompts=2, max_new_tokens=10, dtypes=("float32",), progress=False)
SMALL |= dict(trees=(TreeConfig(16, 3, 4), TreeConfig(4, 2, 1)), grid=((4, 2, 1), (8, 3, 3)), tune_prompts=1)
SMALL |= dict(timed_prompts=1, peer_prompts=1, audit_prompts=1, audit_tok=8, answer_prompts=2, answer_tok=6)
CONFIG = evidence.EvidenceConfig(**SMALL)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    monkeypatch.delenv("SPECDEC_DATA", raising=False)
    monkeypatch.setattr(evidence, "CHECKED", ("gsm8k",))


def table(measured: dict, title: str) -> pd.DataFrame:
    return pd.DataFrame(measured[title]["rows"])


def test_tokens_per_cycle_are_those_of_decoding(tmp_path):
    out = tmp_path / "measured.json"
    measured = evidence.measure("tiny", out, CONFIG, only=["tau"])
    assert json.loads(out.read_text()) == measured
    taus = table(measured, "Tokens per cycle").set_index(["temperature", "suite"])
    assert list(taus.columns) == ["prompts", "16/3/4", "4/2/1"] and taus.loc[(0, "all"), "prompts"] == 4
    pair = specdec.load_pair("tiny", dtype="float32")
    for temperature in (0.0, 1.0):
        options = dict(max_new_tokens=10, temperature=temperature, seed=CONFIG.seed)
        chats = [conversation(pair, item, 0, []) for item in CONFIG.items(2) if item.suite == "toy/gsm8k"]
        rows = [row for chat in chats for row in specdec.decode(pair, chat, specdec.Static(16, 3, 4), **options).rows]
        live = sum(row.new_tok for row in rows) / len(rows)
        assert taus.loc[(temperature, "toy/gsm8k"), "16/3/4"] == pytest.approx(live)
    depths = table(measured, "Acceptance by depth")
    assert {"temperature", "tree", "1", "2"} <= set(depths) and depths["1"].between(0, 1).all()


def test_an_audit_continues_where_it_was_stopped(monkeypatch):
    pair, config = specdec.load_pair("tiny", dtype="float32"), CONFIG
    whole = evidence.audit_prompts(pair, config)
    assert whole.passed and set(whole.rows["suite"]) == set(config.suites)
    assert len(whole.rows) == 2 * 2 * len(evidence.audited_policies(pair, config))
    assert whole.rows.groupby("policy")["accepted_tok"].sum().gt(0).all()
    monkeypatch.setattr(lossless, "audit", lambda *a, **o: pytest.fail("all of it was done"))
    again = evidence.audit_prompts(pair, config)
    pd.testing.assert_frame_equal(again.rows, whole.rows)


def test_what_differs_is_listed(monkeypatch, tmp_path):
    """A drafted text with another last token: counted, listed with its gap, and no near-tie."""
    together = lossless.decode_many

    def wrong(*args, **options):
        texts = together(*args, **options)
        texts[0].tokens = [*texts[0].tokens[:-1], (texts[0].tokens[-1] + 1) % 512]
        return texts

    monkeypatch.setattr(lossless, "decode_many", wrong)
    measured = evidence.measure("tiny", tmp_path / "m.json", CONFIG, only=["lossless"])
    assert table(measured, "Losslessness")[["differing", "failures"]].sum().tolist() == [4, 4]
    rows = table(measured, "First divergences")
    assert len(rows) == 4 and set(rows["policy"]) == {"16/3/4"} and (rows["gap"] >= rows["top2_gap"]).all()


def test_learned_policies_are_audited_as_well():
    pair, folder = specdec.load_pair("small", dtype="float32"), shipped_folder("small") / "policies" / "ours-bfloat16"
    assert {"policies/ours-float32", "policies/ours-bfloat16"} <= set(evidence.audited_policies(pair, CONFIG))
    tiny = specdec.load_pair("tiny", dtype="float32")
    config = evidence.EvidenceConfig(**SMALL | {"policies": (str(folder),)})
    assert list(evidence.audited_policies(tiny, config))[-1] == "policies/ours-bfloat16"


def test_speed_and_peers_and_answers_make_a_card(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    out = tmp_path / "measured.json"
    measured = evidence.measure("tiny", out, CONFIG, only=["speed", "peers", "accuracy"], cpu_time=True)
    speed = table(measured, "Speed of the tuned static tree over plain decoding")
    assert speed["suite"].tolist() == ["toy/gsm8k", "toy/mt_bench", "all"] and speed["speedup"].gt(0).all()
    assert speed["tree"].isin(["4/2/1", "8/3/3"]).all() and speed["same_frac"].eq(1).all()
    costs = table(measured, "A cycle of the tuned tree").iloc[0]
    assert costs["even_tau"] == pytest.approx(costs[["draft_steps", "verify_steps", "rest_steps"]].sum())
    theirs = measured["Beside other decoders"]
    assert [row["method"] for row in theirs["rows"]] == [
        "plain",
        "tuned",
        "generate",
        "generate, lookup",
        "generate, early exit",
    ]
    assert "`llama.cpp`: the target of tiny comes from no GGUF file" in theirs["how"]
    answers = table(measured, "What the target answers")
    assert answers["suite"].tolist() == ["toy/gsm8k", "laptop/gsm8k"] and answers["checked"].eq(2).all()
    for title, part in measured.items():
        assert title in card._section(title, part, part["drafter"])


def test_bad_input_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SpecdecError, match="unknown part"):
        evidence.measure("tiny", tmp_path / "m.json", CONFIG, only=["tao"])
    assert cli.main(["evidence", "--pair", "tiny", "--drafter", str(tmp_path), "--out", str(tmp_path / "m.json")]) == 2
    assert "there is no drafter" in capsys.readouterr().err


def test_the_command_runs_the_notebook(tmp_path, monkeypatch):
    asked = []

    def run(opened, only, parameters, force):
        (entry,) = opened.choose(only)
        asked.append((entry.name, opened.parameters(entry, parameters), force))
        return pd.DataFrame({"state": ["done"]})

    monkeypatch.setattr(book, "run", run)
    options = [
        "--pair",
        "tiny",
        "--only",
        "tau",
        "speed",
        "--limit",
        "3",
        "--policies",
        "mine",
        "--cpu-time",
        "--seed",
        "4",
    ]
    drafter = shipped_folder("tiny") / "drafter"
    assert cli.main(["evidence", *options, "--drafter", str(drafter), "--out", str(tmp_path / "m.json")]) == 0
    [(name, values, force)] = asked
    assert name == "91_evidence" and force, "its parts know themselves what was measured"
    given = {
        "pair": "tiny",
        "parts": ["tau", "speed"],
        "prompts": 3,
        "cpu_time": True,
        "seed": 4,
        "drafter": str(drafter),
    }
    given |= {"policies": [str(Path("mine").resolve())], "out": str(tmp_path / "m.json")}
    assert given.items() <= values.items()
