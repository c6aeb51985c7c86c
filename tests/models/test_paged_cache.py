"""Sequences on borrowed pages say what they say alone, and give their pages back."""

import pytest
import torch
from fakes.families import FAMILIES, VOCAB, model_of
from fakes.pairs import random_target

from specdec.core.protocols import TargetForward, finish
from specdec.core.together import drive
from specdec.errors import SpecdecError
from specdec.models.kv_cache import PAGE, PagedJoin
from specdec.models.target import Target


def text(target, memory, prompt, new_tok):
    """A prompt, twice a few tokens at once, and single tokens: logits of each last row, and the tokens."""
    cache, ids, logits = memory.new_cache(200), [], []
    unread = list(prompt)
    while len(ids) < new_tok:
        rows = yield TargetForward(target, torch.tensor(unread), cache, last_only=True)
        logits.append(rows.logits[-1])
        ids.append(int(rows.logits[-1].argmax()))
        unread = ids[-1:] if len(ids) not in (3, 5) else [ids[-1], *prompt[:4]]
        if len(ids) == 7:  # writes its last token anew, from the one before
            cache.truncate(len(cache) - 1)
            unread = ids[-2:]
    return torch.stack(logits), ids


def prompts(vocabulary, lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_says_what_it_says_alone(name):
    target = Target(model_of(name))
    given = prompts(VOCAB, (5, 3, PAGE - 4, 11))
    with target.inference():
        alone = [finish(text(target, target, prompt, 14)) for prompt in given]
        memory = target.new_memory()
        paged = dict(drive((text(target, memory, prompt, 14) for prompt in given), 3))
    for number, (logits, ids) in enumerate(alone):
        assert paged[number][1] == ids
        torch.testing.assert_close(paged[number][0], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [2, 40])
def test_many_sequences_over_many_pages(rows, monkeypatch):
    joined = []
    monkeypatch.setattr(PagedJoin, "update", lambda *a, f=PagedJoin.update: joined.append(a[0].side_by_side) or f(*a))
    target = Target(random_target(vocab_size=24, layers=2))
    given = prompts(24, range(3, 83, 2))
    with target.inference():
        alone = [finish(text(target, target, prompt, 50))[1] for prompt in given]
        memory = target.new_memory()
        paged = dict(drive((text(target, memory, prompt, 50) for prompt in given), rows))
    assert [paged[number][1] for number in range(len(given))] == alone
    assert max(map(len, joined)) == rows
    pages = memory.stores[0][0].shape[0]
    assert [memory.take_page() for _ in range(pages)] == list(range(pages))  # every page was given back
    assert (pages > 64) == (rows == 40)


def test_two_memories_and_other_caches_share_a_forward():
    target = Target(random_target())
    given = prompts(24, (4, 9, 6))
    with target.inference():
        alone = [finish(text(target, target, prompt, 12))[1] for prompt in given]
        places = (target.new_memory(), target.new_memory(), target)
        mixed = dict(drive((text(target, *pair, 12) for pair in zip(places, given, strict=True)), 3))
    assert [mixed[number][1] for number in range(3)] == alone


def test_no_more_rows_than_were_agreed_on():
    target = Target(random_target())
    cache = target.new_memory().new_cache(4)
    with target.inference():
        target.forward(torch.tensor([1, 2, 3]), cache)
        with pytest.raises(SpecdecError, match="room for 4 tokens but 5 are needed"):
            target.forward(torch.tensor([4, 5]), cache)
    assert len(cache) == 3
