"""Typical acceptance by hand: which nodes pass, which path is taken; and that it is no lossless rule."""

import math

import pytest
import torch
from fakes.pairs import shared_bigrams

import specdec
from specdec.core.tree import DraftTree
from specdec.core.typical import TypicalPicker, decode_typical
from specdec.core.verification import verify
from specdec.errors import SpecdecError

#        0
#      /   \\        tokens: root 0, its children 1 and 2, below 1 a 3, below 2 a 1 and below that a 0
#     1     2
#     3     4 - 5
TREE = DraftTree.from_arrays(token=[0, 1, 2, 3, 1, 0], parent=[-1, 0, 0, 1, 2, 4])


def rows(*probabilities):
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_which_tokens_pass_by_hand():
    flat, sure = [0.25] * 4, [0.97, 0.01, 0.01, 0.01]
    # flat: min(0.09, 0.3 exp(-ln 4)) = 0.075, so all pass; sure: exp(-H) = 0.846.., 0.09 is less than 0.25: only 0 passes
    said = rows(flat, sure, flat, flat, sure, flat)
    path, tokens = verify(TREE, said, TypicalPicker(), torch.tensor([9, 0]))
    assert path == [0, 2, 4, 5] and tokens[:3] == [2, 1, 0] and tokens[3] == int(said[5].argmax())
    # node 3 is not reached: after node 1 the target is sure of 0
    shorter = rows(flat, sure, sure, flat, sure, flat)
    path, tokens = verify(TREE, shorter, TypicalPicker(), torch.tensor([9, 0]))
    assert len(path) == 2  # children of the root alone; both as likely, the first is taken
    assert path == [0, 1] and tokens == [1, 0]


def test_of_equally_long_paths_the_likeliest():
    said = rows([0.2, 0.3, 0.4, 0.1], *([0.97, 0.01, 0.01, 0.01],) * 5)
    assert verify(TREE, said, TypicalPicker(), torch.tensor([0]))[0] == [0, 2]


def test_thresholds_by_hand():
    p = [0.5, 0.3, 0.15, 0.05]
    entropy = -sum(x * math.log(x) for x in p)
    log_p, least = TypicalPicker()._row(rows(p)[0], torch.tensor([0]))
    assert math.exp(least) == pytest.approx(min(0.09, 0.3 * math.exp(-entropy)))
    assert math.exp(TypicalPicker(threshold=0.01)._row(rows(p)[0], torch.tensor([0]))[1]) == pytest.approx(0.01)


def test_it_accepts_more_and_changes_the_text():
    pair, tree, settings = shared_bigrams(), specdec.Static(20, 4, 4), dict(max_new_tokens=40, temperature=1.0)
    lossy = decode_typical(pair, [1, 2, 3], tree, **settings)
    exact = [specdec.decode(pair, [1, 2, 3], tree, seed=seed, **settings) for seed in range(3)]
    assert lossy.tokens == decode_typical(pair, [1, 2, 3], tree, **settings).tokens
    assert lossy.tau > max(out.tau for out in exact)
    assert len({tuple(out.tokens) for out in exact}) > 1 and lossy.tokens not in [out.tokens for out in exact]
    with pytest.raises(SpecdecError, match="temperature above 0"):
        decode_typical(pair, [1, 2, 3], tree, temperature=0)
