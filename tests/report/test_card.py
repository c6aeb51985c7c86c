"""The card of a drafter that ships: what it says stands in the files beside it, and it belongs to its weights."""

import json
import shutil
from dataclasses import replace

import pandas as pd
import pytest
from fakes.chats import CHATS, chat_target
from fakes.traces import round_costs, synthetic_trace
from safetensors.torch import load_file

from specdec import machine, runs
from specdec.core.decode import decode
from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.models.load import load_drafter, load_pair, shipped_folder
from specdec.replays.replay import replay
from specdec.replays.static_trees import best_static
from specdec.report import card
from specdec.tools import cli
from specdec.training.drafter.accuracy import learning_curve
from specdec.training.drafter.eagle3 import train_drafter
from specdec.training.drafter.presets import Budget, CacheConfig, Settings, objective_named
from specdec.training.drafter.ttt import LossRules, TrainingTimeTest

SETTINGS = Settings(48, batch=1, length=48, steps=None, passes=16, held_out=2, held_out_frac=0.4, average_frac=0.3)
OBJECTIVE = TrainingTimeTest(LossRules(steps=2))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    budget = Budget(features=CacheConfig(out / "features"))
    train_drafter(chat_target(), CHATS, out_dir=out, objective=OBJECTIVE, settings=SETTINGS, budget=budget)
    return out


def test_a_trained_drafter_is_put_in_place_with_its_card(trained, tmp_path):
    place = tmp_path / "ours"
    readme = card.ship(trained, place)
    text, facts = readme.read_text(), json.loads((place / "card.json").read_text())
    shipped, log = place / "drafter" / "model.safetensors", runs.read_json(trained / "drafter_training" / "plan.json")
    assert machine.file_hash(shipped) == machine.file_hash(trained / "drafter" / "model.safetensors")
    parameters = sum(value.numel() for value in load_file(shipped).values() if value.is_floating_point())
    assert f"{parameters:,}" in text and machine.file_hash(shipped)[:16] in text
    learned = learning_curve(trained)
    assert [row["held_out_tau_chain"] for row in facts["learned"]] == pytest.approx(learned["held_out_tau_chain"])
    assert f"{learned['held_out_tau_chain'].iloc[-1]:.3f}" in text and f"{log['results']['distinct_tok']}" in text
    assert facts["training"]["drafter"]["stages"] == [len(CHATS)] and "0.4" in text
    assert "Gain per doubling" not in text and "Limitations" in text


def test_the_card_tells_of_the_runs_before(trained, tmp_path):
    budget = Budget(steps=6, seed=1, features=CacheConfig(trained / "features"))
    more = dict(objective=OBJECTIVE, settings=replace(SETTINGS, linear_end=6), budget=budget)
    train_drafter(chat_target(), CHATS, out_dir=tmp_path / "more", start_from=trained / "drafter", **more)
    assert card.lineage(tmp_path / "more") == [trained, tmp_path / "more"] and card.lineage(trained) == [trained]
    text = card.ship(tmp_path / "more", tmp_path / "ours").read_text()
    facts = json.loads((tmp_path / "ours" / "card.json").read_text())
    assert facts["training"]["drafter"] == card.run_facts(trained / "drafter_training")
    assert "Then 6 more steps" in text and "`linear_end` 6, `seed` 1" in text
    last = learning_curve(tmp_path / "more")["held_out_tau_chain"].iloc[-1]
    assert facts["learned_later"][0][-1]["held_out_tau_chain"] == pytest.approx(last) and f"{last:.3f}" in text
    assert machine.file_hash(tmp_path / "ours/drafter/model.safetensors") == facts["weights"]["drafter"]["sha256"]


def test_what_was_measured_joins_the_card_and_must_be_of_these_weights(trained, tmp_path):
    place = tmp_path / "ours"
    card.ship(trained, place)
    sha256 = machine.file_hash(place / "drafter" / "model.safetensors")
    rows = [{"suite": "gsm8k", "temperature": 0, "tau": 2.25}, {"suite": "all", "temperature": 1, "tau": None}]
    measured = {
        "Tokens per cycle": {"drafter": sha256, "how": "Greedy, 20 prompts.", "rows": rows},
        "Acceptance by depth": {"drafter": "0" * 64, "how": "The same.", "rows": [{"depth": 1, "accept_frac": 0.5}]},
    }
    runs.write_json(place / "measured.json", measured)
    text = card.write(place).read_text()
    first, second = text.split("## Tokens per cycle")[1].split("## Acceptance by depth")
    assert "Greedy, 20 prompts." in first and "2.250" in first and "earlier drafter" not in first
    assert "0.500" in second and "earlier drafter" in second
    again = card.ship(trained, place)
    assert again.read_text() == text, "what was measured stays"
    shutil.copy(place / "card.json", place / "drafter" / "model.safetensors")
    pytest.raises(SpecdecError, card.write, place).match("other weights")
    pytest.raises(SpecdecError, card.ship, tmp_path / "nowhere", place).match("no trained drafter")


def test_the_drafter_of_the_real_model_ships_with_the_card_of_its_weights():
    folder = shipped_folder("smollm2")
    facts, shipped = runs.read_json(folder / "card.json"), folder / "drafter" / "model.safetensors"
    assert shipped.stat().st_size < 25e6 and machine.file_hash(shipped) == facts["weights"]["drafter"]["sha256"]
    measured = folder / "measured.json"
    text = card.text(facts, runs.read_json(measured) if measured.is_file() else {})
    assert (folder / "README.md").read_text() == text, "run `specdec card smollm2`"
    learned = facts["learned"]
    assert learned[-1]["held_out_tau_chain"] > learned[0]["held_out_tau_chain"] > 1


def test_other_kinds_have_their_card_beside_their_weights(tmp_path, monkeypatch):
    budget = Budget(features=CacheConfig(tmp_path / "features"))
    settings = replace(SETTINGS, draft_vocab_size=24, passes=2)
    objective = objective_named("medusa", {})
    train_drafter(chat_target(), CHATS, out_dir=tmp_path / "run", objective=objective, settings=settings, budget=budget)
    readme = card.ship(tmp_path / "run", tmp_path / "ours", "medusa")
    facts = json.loads((tmp_path / "ours" / "medusa" / "card.json").read_text())
    assert readme == tmp_path / "ours" / "medusa" / "README.md" and facts["name"] == "ours"
    assert readme.read_text().startswith("# Medusa heads for") and "('ours', drafter='medusa')" in readme.read_text()
    measured = {"Tokens per cycle": {"drafter": "0" * 64, "how": "Of another.", "rows": [{"tau": 1.5}]}}
    runs.write_json(tmp_path / "ours" / "medusa" / "measured.json", measured)
    again = card.ship(tmp_path / "run", tmp_path / "ours", "medusa").read_text()
    assert "Of another." in again, "what was measured stays"
    monkeypatch.setattr(card.load, "shipped_folder", lambda name: tmp_path / name)
    table = card.with_training(pd.DataFrame({"drafter": ["suffix", "medusa", "hydra"]}, index=[5, 6, 7]), "ours")
    assert table["learned_tok"].isna().tolist() == table["trained_min"].isna().tolist() == [True, False, True]
    assert table.loc[6, "learned_tok"] == facts["learned"][-1]["distinct_tok"]
    assert table.loc[6, "trained_min"] == pytest.approx(facts["training"]["drafter"]["minutes"])
    pytest.raises(SpecdecError, card.ship, tmp_path / "run", tmp_path / "ours", "eagel3").match("kind of drafter")
    pytest.raises(SpecdecError, card.write, tmp_path / "ours", "lm").match("kind of drafter")
    (tmp_path / "ours" / "medusa" / "medusa_lm_head.safetensors").unlink()
    pytest.raises(SpecdecError, card.write, tmp_path / "ours", "medusa").match("there is no drafter in")


def test_what_bounds_the_tokens_per_cycle_is_measured_and_said(trained, tmp_path):
    card.ship(trained, tmp_path / "ours")
    model, tokenizer = chat_target()
    pair = load_pair(target=model, drafter=tmp_path / "ours" / "drafter", tokenizer=tokenizer)
    prompts, drafted = [[1, 2, 3], [4, 5, 6, 7]], set(pair.drafter.target_id.tolist())
    texts = [decode(pair, prompt, Static(4, 2, 1), 12).tokens for prompt in prompts]
    outside = [sum(token not in drafted for token in text) / len(text) for text in texts]
    kinds = {"one": prompts[:1], "other": prompts[1:]}
    harder = dict(max_new_tokens=12, harder=["other"])
    readme = card.claim(pair, tmp_path / "ours", kinds, Static(4, 2, 1), **harder).read_text()
    claims = load_drafter(tmp_path / "ours" / "drafter", pair.target).claims
    assert claims.outside_frac == pytest.approx(dict(zip(kinds, outside, strict=True)), abs=1e-4)
    assert claims.taught_drafts == 2 and 0 <= claims.first_drafts_frac <= 1
    assert f"{max(outside):.1%}" in readme and "It was trained with 2 draft steps" in readme
    of = {"vocab_size": 4000, "draft_vocab_size": 1000, "specdec": {"outside_frac": {"code": 0.02, "French": 0.14}}}
    assert card.limits(of) == [
        "It drafts 1,000 of its target's 4,000 tokens. Of the target's own tokens 2.0% (code) to 14.0% (French) are outside, "
        "so tau is below 7.14 there."
    ]
    heads = card.limits({"medusa_num_heads": 4, "specdec": {"taught_drafts": 4}})
    assert heads == ["It has 4 heads, so it drafts at most 4 tokens in a row."]
    assert card.limits({"vocab_size": 9, "draft_vocab_size": 9}) == []


def test_the_profile_for_servers_holds_what_a_recording_and_prices_say(trained, tmp_path, monkeypatch, capsys):
    card.ship(trained, tmp_path / "synthetic")
    trace = synthetic_trace(turns=8, positions=30, top_ks=(1, 3))
    many = round_costs(name="full", verify=(4.0, 9.0, 900.0))
    found = runs.read_json(card.profile(tmp_path / "synthetic", trace, [round_costs(), many], texts=(1, 4)))
    assert found["drafter"]["sha256"] == machine.file_hash(tmp_path / "synthetic" / "drafter" / "model.safetensors")
    rates, reached = found["acceptance"]["rates"], []
    for first, positions in zip(trace.turns["first"], trace.turns["positions"], strict=True):
        row = first
        while row < first + positions:
            reached.append(int(trace.accepted_tok(row, 1, trace.depth, trace.depth + 1)))
            row += reached[-1] + 1
    assert rates == [round(sum(n > j for n in reached) / sum(n >= j for n in reached), 4) for j in range(max(reached))]
    tuned = {(one["machine"], one["texts"]): one for one in found["tuned"]}
    assert set(tuned) == {(name, texts) for name in ("round numbers", "full") for texts in (1, 4)}
    choosing, judged = trace.select(part="train"), trace.select(part="test")
    best = best_static(choosing, round_costs())
    assert tuned["round numbers", 1]["speedup"] == pytest.approx(
        replay(judged, Static.of(best), round_costs()).speedup, abs=0.02
    )
    assert tuned["full", 4]["tree"]["total_tokens"] < tuned["round numbers", 1]["tree"]["total_tokens"]
    assert found["provenance"]["recording"]["parts"] == [["train"], ["test"]] and found["provenance"]["full"]
    monkeypatch.setattr("specdec.models.load.shipped_folder", lambda name: tmp_path / name)
    (tmp_path / "synthetic" / "speculation_profile.json").unlink()
    typed = ["card", "synthetic", "--machines", "roofline-a100-llama-8b-eager", "--trace"]
    assert cli.main([*typed, "nowhere"]) == 2 and "no finished recording in nowhere" in capsys.readouterr().err
    monkeypatch.setattr("specdec.tools.places.trace", lambda folder, pair: trace)
    assert cli.main([*typed, "mine"]) == 0 and "speculation_profile.json" in capsys.readouterr().out
    again = runs.read_json(tmp_path / "synthetic" / "speculation_profile.json")
    assert again["acceptance"] == found["acceptance"] and {one["machine"] for one in again["tuned"]} == {typed[3]}
