"""A pair from nothing at toy size: train, measure, card, install; every figure of the card against its file."""

import os
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec
from specdec import machine, runs
from specdec.data import suites
from specdec.errors import SpecdecError
from specdec.models import load
from specdec.models.drafters import KINDS
from specdec.report.card import thin, weight_facts

from workbook import toy_card as cards
from workbook import toy_pair as pairs


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """One trained toy pair for all tests that leave it as it is."""
    return pairs.train_pair("toy", tmp_path_factory.mktemp("pair") / "toy")


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """An empty place for shipped pairs."""
    monkeypatch.setattr(load, "shipped_folder", lambda name: tmp_path / "weights" / name)
    return tmp_path / "weights"


def test_the_folder_is_a_pair_whose_measured_answers_are_the_targets_own(toy, monkeypatch):
    pair = specdec.load_pair(target=str(toy / "target"), drafter=str(toy / "drafter"))
    table = pairs.measure_pair(pair, ["toy/mt_bench", "toy/gsm8k"], prompts=1, max_new_tokens=5, progress=False)
    assert table["turn"].tolist() == [0, 1, 0] and table["correct"].isna().tolist()[0]
    prompt = suites.load_suite("toy/gsm8k", limit=1)[0].turns[0]
    base = specdec.autoregress(pair, [{"role": "user", "content": prompt}], 5)
    assert table["text"].iloc[-1] == base.text and (table["cycle_tok"] >= table["new_tok"] - 1).all()
    messages = [{"role": "user", "content": "Add 2 and 3."}]
    assert specdec.decode(pair, messages, max_new_tokens=6).tokens == specdec.autoregress(pair, messages, 6).tokens
    before = {file: machine.file_hash(file) for file in toy.rglob("*") if file.is_file()}
    monkeypatch.setattr(pairs, "measure_pair", None)  # calling it again would fail
    assert pairs.train_pair("toy", toy) == toy
    assert before == {file: machine.file_hash(file) for file in toy.rglob("*") if file.is_file()}


def test_a_stopped_run_continues_with_what_is_done(toy, tmp_path, monkeypatch):
    out, apart = tmp_path / "cut", tmp_path / "apart"
    shutil.copytree(toy, out)
    for name in ("card.json", "README.md"):
        (out / name).unlink()
    plan = runs.read_json(out / "drafter_training" / "plan.json")
    plan["settings"]["target"] = str(out / "target")
    runs.write_json(out / "drafter_training" / "plan.json", plan)
    monkeypatch.setattr("specdec.training.loop.TrainingRun.run", None)
    pairs.train_pair("toy", out)
    pairs.finish_pair("toy", apart, out, out)
    assert sorted(one.name for one in apart.iterdir()) == ["README.md", "card.json", "drafter", "target"]
    first, *others = [pairs.read_card(folder) for folder in (toy, out, apart)]
    for card in others:
        assert card["weights"] == first["weights"] and card["measured"] == first["measured"]


def test_the_card_says_what_the_files_say_and_notes_of_a_run_reach_it(toy, tmp_path):
    card, text = pairs.read_card(toy), (toy / "README.md").read_text()
    for part, log in (("target", "."), ("drafter", "drafter_training")):
        curve = pd.read_parquet(toy / log / "loss.parquet")
        facts, weights = card["training"][part], card["weights"][part]
        assert facts["steps"] == len(curve) and facts["seen_tok"] == curve["batch_tok"].sum() and facts["finished"]
        assert np.isclose(facts["minutes"], curve["elapsed_s"].max() / 60)
        stored = load_file(toy / part / "model.safetensors")
        floats = [value for value in stored.values() if value.is_floating_point()]
        assert weights["parameters"] == sum(value.numel() for value in floats)
        assert weights["dtypes"] == ["BF16"] and {value.dtype for value in floats} == {torch.bfloat16}
        assert f"{weights['parameters']:,}" in text and weights["sha256"][:16] in text
        assert f"| {len(curve)} " in text
    drafter = pd.read_parquet(toy / "drafter_training" / "loss.parquet")
    assert f"{drafter['missing_mass_frac'].mean():.4g}" in text
    assert card["training"]["drafter"]["own_chats"] == pairs.PAIRS["toy"].drafter.regenerate_chats
    assert "**Toy scale" in text and card["licence"] in text
    assert not re.search(r"(?<!\w)/(home|root|tmp|work|usr)/", text + (toy / "card.json").read_text())
    log = tmp_path / "log"
    log.mkdir()
    for name in ("plan.json", "loss.parquet"):
        shutil.copy(toy / name, log / name)
    (log / "notes.md").write_text("The schedule was changed by hand.\n")
    card = cards.card_of(toy, (log, toy / "drafter_training"), name="toy")
    text = cards.card_text(card)
    assert "The schedule was changed by hand." in text and "Not measured." in text


def test_the_summary_pools_and_curves_keep_ends_and_means():
    rows = [("a", 5, 2, 6, True, "v w x y v w x y"), ("a", 3, 1, 3, False, "x y x y"), ("b", 4, 4, 4, None, "z")]
    measured = pd.DataFrame(rows, columns=["suite", "new_tok", "cycles", "cycle_tok", "correct", "text"])
    measured = measured.astype({"correct": "boolean"})
    table = cards.summary(measured).set_index("suite")
    assert table.loc["a", "tau"] == 3.0 and table.loc["all", "tau"] == pytest.approx(13 / 7)
    assert table["checked"].tolist() == [2, 0, 2] and table.loc["a", "accuracy_frac"] == 0.5
    assert np.isnan(table.loc["b", "accuracy_frac"])
    assert table["loop_frac"].tolist() == pytest.approx([1 / 6, 0, 1 / 6])  # v w x y comes again, of 5 + 1 4-grams
    assert table["distinct_2"].tolist() == [0.5, 1.0, 0.5]  # vw wx xy yv yx of ten pairs
    curve = pd.DataFrame({"step": range(1, 11), "loss": np.arange(10.0)})
    table = thin(curve, 4)
    assert table["step"].iloc[-1] == 10 and len(table) == 4
    assert table["loss"].iloc[0] == curve["loss"][curve["step"] <= table["step"].iloc[0]].mean()
    assert len(thin(curve, 50)) == 10
    assert thin(thin(curve, 4), 2)["step"].iloc[-1] == 10
    curve = [
        {"step": 1, "loss": 2.0, "accuracy_0": 0.1, "accuracy_1": None},
        {"step": 2, "loss": 1.0, "accuracy_0": 0.2, "accuracy_1": 0.15},
    ]
    table = cards.unrolled_accuracy({"training": {"drafter": {"curve": curve}}})
    assert table.values.tolist() == [[1, 1, 0.1], [2, 1, 0.2], [2, 2, 0.15]]


def test_install_puts_a_pair_where_it_is_loaded_from_and_its_card_beside_the_others(toy, weights):
    old = weights / "tiny" / "old.txt"
    old.parent.mkdir(parents=True)
    old.write_text("from before")
    assert pairs.stored_pair("tiny") is None and pairs.shipped_pairs().empty
    place = pairs.install_pair(toy, "tiny")
    assert place == weights / "tiny" and not old.exists()
    assert sorted(one.name for one in weights.iterdir()) == ["tiny"], "a temporary folder is left"
    assert specdec.load_pair("tiny").target.vocab_size == 320
    assert pairs.stored_pair("tiny") == place and pairs.read_card(place) == pairs.read_card(toy)

    table, card = pairs.shipped_pairs(), pairs.read_card(toy)
    assert table.index.tolist() == ["tiny"] and table.index.name == "pair"
    row, measured = table.loc["tiny"], pd.DataFrame(card["measured"]).set_index("suite")
    assert row["target_parameters"] == card["weights"]["target"]["parameters"]
    assert row["target_tok"] == card["training"]["target"]["seen_tok"] > 0
    assert row["tau"] == measured.loc["all", "tau"] and row["tau_low"] <= row["tau"] <= row["tau_high"]
    assert row["tau_high"] == measured["tau"].drop("all").max()


WEIGHTS = load.shipped_folder("small").parent
KIND_FOLDERS = {kind.folder for kind in KINDS.values() if kind.network} - {"drafter"}


def megabytes(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def test_all_drafters_beside_eagle3_stay_small_together():
    places = [place for place in WEIGHTS.glob("*/*") if place.name in KIND_FOLDERS]
    assert len(places) >= 4 and sum(map(megabytes, places)) <= 60


@pytest.mark.parametrize(("name", "most_mb"), [("tiny", 4), ("small", 36)])
def test_every_size_ships_with_its_card(name, most_mb):
    folder = pairs.stored_pair(name)
    assert folder is not None, "no pair, or a card of other weights"
    beside = {place for place in KIND_FOLDERS if (folder / place).is_dir()}
    assert megabytes(folder) - sum(megabytes(folder / place) for place in beside) <= most_mb
    card = pairs.read_card(folder)
    assert card["name"] == name and len(card["measured"]) == len(pairs.TOY) + 1
    pair = specdec.load_pair(name, dtype="float32", device="cpu")
    table = pairs.measure_pair(pair, ("toy/gsm8k", "toy/xsum"), prompts=1, max_new_tokens=40, progress=False)
    assert table["cycle_tok"].sum() / table["cycles"].sum() > 1.6, "drafting does next to nothing"


def test_a_failed_install_leaves_what_was_there(toy, weights, monkeypatch):
    place = pairs.install_pair(toy, "tiny")
    before = machine.file_hash(place / "target" / "model.safetensors")
    replace = os.replace

    def failing(source, destination):
        if str(source).endswith(".tmp"):
            raise OSError(28, "No space left on device")
        replace(source, destination)

    monkeypatch.setattr(os, "replace", failing)
    pytest.raises(SpecdecError, pairs.install_pair, toy, "tiny").match("No space left")
    monkeypatch.undo()
    assert machine.file_hash(place / "target" / "model.safetensors") == before
    assert sorted(one.name for one in place.parent.iterdir()) == ["tiny"]


def test_other_weights_are_neither_overwritten_nor_installed(toy, tmp_path, weights):
    out = tmp_path / "out"
    shutil.copytree(toy / "drafter", out / "drafter")
    file = out / "drafter" / "model.safetensors"
    save_file({name: torch.zeros_like(value) for name, value in load_file(file).items()}, file)
    before = machine.file_hash(file)
    pytest.raises(SpecdecError, pairs.finish_pair, "toy", out, toy, toy).match("holds another drafter")
    assert machine.file_hash(file) == before
    copy = tmp_path / "copy"
    shutil.copytree(toy, copy)
    file = copy / "drafter" / "model.safetensors"
    wide = {name: value.float() if value.is_floating_point() else value for name, value in load_file(file).items()}
    save_file(wide, file)
    pytest.raises(SpecdecError, pairs.install_pair, copy, "tiny").match("no card of these weights")
    card = pairs.read_card(copy)
    card["weights"]["drafter"] = weight_facts(copy / "drafter")
    pairs.write_card(copy, card)
    pytest.raises(SpecdecError, pairs.install_pair, copy, "tiny").match("holds F32")
    assert not weights.exists()
