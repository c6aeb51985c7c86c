"""Typical acceptance by hand: which nodes pass, which path is taken; and that it is no lossless rule."""

import math

import pytest
import torch
from fakes.pairs import shared_bigrams
from fakes.reference import typical_acceptance

import specdec
from specdec.core.tree import DraftTree
from specdec.core.verification import TypicalPicker
from specdec.errors import SpecdecError

#        0
#      /   \\        tokens: root 0, its children 1 and 2, below 1 a 3, below 2 a 1 and below that a 0
#     1     2
#     3     4 - 5
TREE = DraftTree.from_arrays(token=[0, 1, 2, 3, 1, 0], parent=[-1, 0, 0, 1, 2, 4])


def rows(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


# FLAT: min(0.09, 0.3 exp(-ln 4)) = 0.075, so all pass. SURE: exp(-H) = 0.846.., 0.09 is less than 0.25: only 0 passes.
FLAT, SURE = [0.25] * 4, [0.97, 0.01, 0.01, 0.01]


def test_paths_and_thresholds_by_hand_and_what_passes_by_the_reference():
    for said, path, tokens in (
        ([FLAT, SURE, FLAT, FLAT, SURE, [0.24, 0.25, 0.25, 0.26]], [0, 2, 4, 5], [2, 1, 0, 3]),
        # Node 3 is not reached, so children of the root alone are: of two as likely ones the first.
        ([FLAT, SURE, SURE, FLAT, SURE, FLAT], [0, 1], [1, 0]),
        ([[0.2, 0.3, 0.4, 0.1], *[SURE] * 5], [0, 2], [2, 0]),  # of equally long paths the likeliest
        # Below a refused node nothing is taken, and others are looked at.
        ([[0.35, 0.001, 0.6, 0.049], *[[0.1, 0.4, 0.1, 0.4]] * 5], [0, 2, 4, 5], [2, 1, 0, 1]),
    ):
        assert TypicalPicker().walk(TREE, rows(*said), torch.tensor([9, 0])) == (path, tokens)
    p = [0.5, 0.3, 0.15, 0.05]
    entropy = -sum(x * math.log(x) for x in p)
    log_p, least = TypicalPicker()._row(rows(p)[0], torch.tensor([0]))
    assert math.exp(least) == pytest.approx(min(0.09, 0.3 * math.exp(-entropy)))
    assert math.exp(TypicalPicker(threshold=0.01)._row(rows(p)[0], torch.tensor([0]))[1]) == pytest.approx(0.01)
    draws, found = torch.Generator().manual_seed(3), set()
    for threshold, alpha in ((0.09, 0.3), (0.5, 0.2), (0.02, 5.0)):
        picker = TypicalPicker(threshold=threshold, alpha=alpha)
        for spread in (0.1, 1.0, 4.0):
            p = (spread * torch.randn(3, 8, generator=draws, dtype=torch.float64)).softmax(-1)
            expected = typical_acceptance(p, threshold, alpha)
            for row, passes in zip(p, expected, strict=True):
                log_p, least = picker._row(row.log(), torch.tensor([0]))
                assert (log_p > least).tolist() == passes.tolist()
                found.add(int(passes.sum()))
    assert len(found) > 3
    assert typical_acceptance(torch.tensor([FLAT, SURE])).tolist() == [[True] * 4, [True, False, False, False]]


def test_the_token_after_a_path_sees_it_and_warping_goes_before_the_rule():
    seen = []

    class Looks(TypicalPicker):
        def pick(self, logits, committed):
            seen.append(committed.tolist())
            return super().pick(logits, committed)

    Looks().walk(TREE, rows([0.1, 0.1, 0.7, 0.1], *([0.1, 0.7, 0.1, 0.1],) * 5), torch.tensor([9, 0]))
    assert seen == [[9, 0, 2, 1, 0]]
    pair, tree, asked = specdec.load_pair("tiny", dtype="float32"), specdec.Static(8, 3, 2), "Name a colour."
    greedy = specdec.decode(pair, asked, tree, 12)
    only = typical(pair, asked, tree, top_k=1)
    assert only.tokens == greedy.tokens, "one token is left of each row, and it is sure of itself"
    assert only.text == pair.text_of(only.tokens) == greedy.text
    wide, strict = specdec.Static(20, 4, 4), dict(threshold=0.3, alpha=1e9)
    hot, cold = (typical(pair, asked, wide, temperature=temperature, **strict) for temperature in (5.0, 0.05))
    assert hot.tau == 1.0 < cold.tau, "at a high temperature no token is likelier than three in ten"


def typical(pair, prompt, policy, max_new_tokens=12, **rule):
    return specdec.decode(pair, prompt, policy, max_new_tokens, picker=TypicalPicker(**rule))


def test_settings_reach_the_rule_which_accepts_more_in_place_of_sampling():
    pair, tree = shared_bigrams(), specdec.Static(6, 2, 2)
    for everything in (dict(threshold=0.0), dict(alpha=0.0)):
        out = typical(pair, [1, 2, 3], tree, **everything)
        assert {row.accepted_tok for row in out.rows[:-1]} <= {2, 3} and out.new_tok == 12
    nothing = typical(pair, [1, 2, 3], tree, threshold=1.0, alpha=1e9)
    assert {row.accepted_tok for row in nothing.rows} == {0} and nothing.prompt_tok == 3
    for bad in (dict(threshold=-0.1), dict(threshold=1.1), dict(alpha=-1.0)):
        pytest.raises(SpecdecError, TypicalPicker, **bad).match(f"^{next(iter(bad))} must")
    medusas = TypicalPicker()
    assert (medusas.threshold, medusas.alpha, medusas.sample, list(medusas.warpers)) == (0.09, 0.3, False, [])
    pair = shared_bigrams()
    pytest.raises(SpecdecError, TypicalPicker, temperature=0).match("temperature above 0")
    for beside in (dict(temperature=1.0), dict(seed=1), dict(top_k=2)):
        with pytest.raises(SpecdecError, match="^a picker has its own temperature"):
            specdec.decode(pair, [1, 2, 3], picker=TypicalPicker(), **beside)
    pytest.raises(SpecdecError, specdec.decode, pair, [1, 2, 3], picker="typical").match("^picker must be Picker")
    pair, tree = shared_bigrams(), specdec.Static(20, 4, 4)
    lossy = typical(pair, [1, 2, 3], tree, 40)
    exact = [specdec.decode(pair, [1, 2, 3], tree, 40, temperature=1.0, seed=seed) for seed in range(3)]
    assert lossy.tokens == typical(pair, [1, 2, 3], tree, 40).tokens
    assert lossy.tau > max(out.tau for out in exact)
    assert len({tuple(out.tokens) for out in exact}) > 1 and lossy.tokens not in [out.tokens for out in exact]
