"""No policy changes the text: the audit passes on what is right and fails on every bug planted into
the engine.
"""

import functools

import pytest
import torch
from fakes.pairs import bigram_pair, random_pair, shared_bigrams

import specdec
from specdec.core.policy import RandomPolicy, Static
from specdec.core.verification import Picker
from specdec.data.suites import load_suite
from specdec.evaluation.lossless import audit, default_policies
from specdec.models.kv_cache import TreeCache
from specdec.models.target import TreeMask

NAMES = ("static 16,3,4", "EAGLE-1", "random plan+extend+size")
FEW = {name: default_policies()[name] for name in NAMES}


def prompts(pair, count: int, seed: int = 0) -> list[list[int]]:
    """Random ids, 2 to 12 per prompt."""
    draw = torch.Generator().manual_seed(seed)
    texts = []
    for length in torch.randint(2, 13, (count,), generator=draw).tolist():
        ids = torch.randint(0, pair.target.vocab_size, (length,), generator=draw)
        texts.append(ids.tolist())
    return texts


@functools.cache
def tiny(dtype: str = "float32"):
    """The shipped tiny pair, trained: what it drafts is often right, and its attention matters."""
    return specdec.load_pair("tiny", dtype=dtype, device="cpu")


@functools.cache
def questions(count: int) -> list[list[int]]:
    """The shortest held-out prompts of three suites the pair was trained for, as ids of a chat."""
    ids = []
    for name in ("alpaca", "mt_bench", "mbpp"):
        for prompt in load_suite(f"toy/{name}"):
            ids.append(tiny().ids_of([{"role": "user", "content": prompt.turns[0]}]))
    return sorted(ids, key=len)[:count]


@pytest.mark.parametrize(
    ("temperature", "count"),
    [(1.0, 6), (0.0, 3), pytest.param(1.0, 50, marks=pytest.mark.nightly)],
    ids=["sampled", "greedy", "many"],
)
def test_all_policies(temperature, count):
    """Mostly sampled: greedy text repeats itself, and lets bugs of the mask pass."""
    result = audit(tiny(), questions(count), None, 10, (temperature,), progress=False)
    assert result.passed and result.rows.equal.all(), result.table
    assert len(result.rows) == count * len(default_policies())
    # A text without accepted drafts proves little.
    accepted_tok = result.rows.groupby("policy").accepted_tok.sum()
    assert (accepted_tok.drop("static 1,0,1") > 0).all() and accepted_tok["static 1,0,1"] == 0


WARPED = [{"top_k": 6, "top_p": 0.9}, {"min_p": 0.05, "repetition_penalty": 1.3}]


@pytest.mark.parametrize("settings", WARPED, ids=lambda settings: "+".join(settings))
def test_warped_sampling(settings):
    pair = shared_bigrams()
    texts = prompts(pair, 4, seed=2)
    temperatures = (0.0, 0.7, 1.6)
    result = audit(pair, texts, FEW, 16, temperatures, seed=9, progress=False, **settings)
    assert result.passed and result.rows.equal.all(), result.table


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("make", [random_pair, bigram_pair])
def test_low_precision_differs_at_near_ties_alone(make, dtype):
    pair = make(dtype=dtype)
    result = audit(pair, prompts(pair, 4, seed=3), FEW, 20, progress=False)
    differing = result.rows[~result.rows.equal]
    assert result.passed, differing.to_string()
    for row in differing.itertuples():
        assert 0 <= row.top2_gap <= row.gap <= row.tolerance
        assert row.near_tie and 0 <= row.first_divergence < 20
    # Rounding is what it allows for: in units of the logits (some 4) the tolerance is small.
    assert not (result.rows.tolerance > 0.5).any()


def causal_mask(monkeypatch):
    plain = TreeMask.__init__

    def wrong(self, positions, prefix, ancestors=None, drawn=None):
        if ancestors is not None:
            ancestors = torch.ones_like(ancestors).tril_()
        plain(self, positions, prefix, ancestors, drawn)

    monkeypatch.setattr(TreeMask, "__init__", wrong)


def rows_not_gathered(monkeypatch):
    def wrong(self, start, rows, index=None):
        self.truncate(start + len(rows))

    monkeypatch.setattr(TreeCache, "keep", wrong)


def consecutive_positions(monkeypatch):
    plain = TreeMask.__init__

    def wrong(self, positions, prefix, ancestors=None, drawn=None):
        positions.copy_(torch.arange(len(positions)) + prefix)
        plain(self, positions, prefix, ancestors, drawn)

    monkeypatch.setattr(TreeMask, "__init__", wrong)


def noise_of_the_root_everywhere(monkeypatch):
    plain = Picker.walk

    def wrong(picker, tree, logits, committed):
        stuck = Picker(picker.warpers, picker.sample, picker.seed)
        stuck.scores = lambda row, ids: picker.scores(row, committed)
        return plain(stuck, tree, logits, committed)

    monkeypatch.setattr(Picker, "walk", wrong)


def accepts_one_too_many(monkeypatch):
    plain = Picker.walk

    def wrong(picker, tree, logits, committed):
        path, picked = plain(picker, tree, logits, committed)
        children = (tree.parent == path[-1]).nonzero().flatten().tolist()
        if not children or len(path) != 2:
            return path, picked
        return [*path, children[0]], [*picked[:-1], int(tree.token[children[0]]), picked[-1]]

    monkeypatch.setattr(Picker, "walk", wrong)


BUGS = [causal_mask, rows_not_gathered, consecutive_positions]
BUGS += [noise_of_the_root_everywhere, accepts_one_too_many]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def sound(request):
    """A pair, prompts and policies that pass, audited once before bugs are planted."""
    tree = Static(40, 4, 6)
    policies = {"static": tree, "random": RandomPolicy(tree.limits)}
    case = (tiny(request.param), questions(6 if request.param == "float32" else 3), policies)
    result = audit(*case, 16, (1.0,), progress=False)
    assert result.passed, result.table
    return case


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_fail(bug, sound, monkeypatch):
    bug(monkeypatch)
    result = audit(*sound, 16, (1.0,), progress=False)
    assert not result.passed
    assert result.table["failures"].sum() == len(result.failures) > 0
