"""What a drafter's card says of its first drafts is counted while it drafts; no more than one warning, and no false one."""

import json
import random
import shutil
import warnings

import pytest
import torch

from specdec.core.decode import decode
from specdec.core.policy import Static
from specdec.core.protocols import CHECKED_AT, FEWER, Claims, at_most
from specdec.data.suites import TOY, conversation, gather
from specdec.errors import SpecdecError
from specdec.models.load import load_pair, shipped_folder


def counted(claims: Claims, chance: float, sure: float, seed: int = 0, cycles: int = CHECKED_AT[-1]) -> list[str]:
    """What is said where first drafts are right with this chance, and the drafter gives them another."""
    draw = random.Random(seed)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(cycles):
            claims.count(torch.tensor(1), torch.tensor(sure).log(), int(draw.random() < chance))
    return [str(one.message) for one in said]


def test_it_warns_once_where_far_fewer_are_right_and_bad_claims_are_refused():
    assert counted(Claims(0.7), 0.2, 0.5)[0].startswith("in 64 cycles ")
    assert [len(counted(Claims(0.7), chance, 0.6)) for chance in (0.0, 0.2, 0.45)] == [1, 1, 1]
    assert not any(counted(Claims(0.7), 0.7 * FEWER, 0.9, seed) for seed in range(20)), "as good as the card says"
    assert not any(counted(Claims(0.7), 0.3, 0.3, seed) for seed in range(20)), "on hard text it is not sure either"
    assert not counted(Claims(), 0.0, 0.9), "no card, no warning"
    assert not counted(Claims(0.7), 0.0, 0.9, cycles=63), "a few cycles tell nothing"
    assert at_most(0, 3, 0.5) == pytest.approx(1 / 8) and at_most(2, 3, 0.5) == pytest.approx(7 / 8)
    assert at_most(64, 64, 0.3) == pytest.approx(1.0)
    for fields, message in (
        (dict(first_drafts_frac=1.5), "first_drafts_frac of Claims must be between 0 and 1"),
        (dict(outside_frac={"French": 2.0}), "outside_frac of French must be between 0 and 1"),
        (dict(taught_drafts="4"), "taught_drafts of Claims must be"),
    ):
        pytest.raises(SpecdecError, Claims, **fields).match(message)


def misfit(folder, taps):
    """A copy of small's drafter that reads other layers than it was trained on."""
    shutil.copytree(shipped_folder("small") / "drafter", folder)
    config = json.loads((folder / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = taps
    (folder / "config.json").write_text(json.dumps(config))
    return load_pair("small", drafter=folder, dtype="float32")


def warned(pair, per_suite: int, **settings) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for item in gather(list(TOY), part="test", limit=per_suite):
            decode(pair, conversation(pair, item, 0, []), Static(6, 2, 3), 64, **settings)
            if said:
                break
    return [str(one.message) for one in said]


@pytest.mark.parametrize("taps", [[8, 5, 1], pytest.param([0, 3, 6], marks=pytest.mark.nightly)], ids=str)
def test_other_taps_are_warned_of(tmp_path, taps):
    (said,) = warned(misfit(tmp_path / "drafter", taps), 4)
    assert "cycles" in said and "reads other layers (taps)" in said


def test_greedy_text_alone_is_counted_and_shipped_pairs_bear_out_their_card(tmp_path):
    pair = load_pair("tiny", dtype="float32")
    assert warned(pair, 1) == [] and pair.drafter.claims.cycles > 64
    claims = pair.drafter.claims
    before = claims.cycles
    decode(pair, "Once upon a time", Static(6, 2, 3), 16, temperature=1.0)
    claims.settle()
    assert claims.cycles == before
    found = claims.right / claims.cycles
    assert found == pytest.approx(claims.first_drafts_frac, abs=0.15) and claims.taught_drafts == 7
    assert claims.confident / claims.cycles == pytest.approx(found, abs=0.15)
