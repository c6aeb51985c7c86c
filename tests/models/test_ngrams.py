"""Drafters without a model: beside slow references, and lossless under every policy."""

import dataclasses
import math
import random

import pytest
import torch
from fakes.copies import paths_of
from fakes.pairs import random_pair, shared_pair
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import specdec
from specdec.core.decode import decode_many
from specdec.core.policy import RandomPolicy, Static
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation.lossless import audit
from specdec.models import ngrams
from specdec.models.ngrams import COLUMNS, NGRAM, CopyOdds, Evidence, fit_scale

ODDS = CopyOdds()


def text_of(tokens) -> ngrams.Text:
    text = ngrams.Text()
    text.grow_to(torch.tensor(tokens))
    return text


def test_prompt_lookup_copies_what_transformers_copies():
    draw = random.Random(0)
    theirs = PromptLookupCandidateGenerator(
        ngrams.PROMPT_LOOKUP.levels, max_matching_ngram_size=2, max_length=99
    )
    copied = 0
    for _ in range(200):
        tokens = [draw.randrange(6) for _ in range(draw.randint(1, 30))]
        candidates, _ = theirs.get_candidates(torch.tensor([tokens]))
        trie = ngrams.trie_of(text_of(tokens), ngrams.PROMPT_LOOKUP, ODDS)
        assert list(trie.tokens) == candidates[0, len(tokens) :].tolist(), tokens
        assert list(trie.parents) == list(range(len(trie)))
        copied += len(trie)
    assert copied > 400


def slow_nodes(tokens: list[int], config: ngrams.NgramConfig) -> dict[tuple[int, ...], float]:
    """Every node that any place offers, and its score, by going over the whole text."""
    last = len(tokens) - 1
    ends = []
    for end in range(last):
        match = next((n for n in range(end + 1) if tokens[end - n] != tokens[last - n]), end + 1)
        if match:
            ends.append((min(match, config.longest), end))
    newest = [place for place in ends if place[0] > 1][-config.places :]
    if len(newest) < config.places:
        newest += [place for place in ends[-config.places :] if place not in newest]
    newest = sorted(newest, reverse=True)[: config.places]
    nodes = {}
    paths = [((), 0.0, newest)]
    for path, score, places in paths:
        following = {}
        for match, end in places:
            if end + len(path) + 1 <= last:
                following.setdefault(tokens[end + len(path) + 1], []).append((match, end))
        ranked = sorted(following, key=lambda t: (-following[t][0][0], -len(following[t])))
        for rank, token in enumerate(ranked[: config.children]):
            agreeing = following[token]
            cell = Evidence.of(agreeing[0][0] + len(path), len(agreeing), rank, len(ranked))
            below = (*path, token)
            nodes[below] = score + ODDS.log_probs[cell]
            if len(below) < config.levels:
                paths.append((below, nodes[below], agreeing))
    return nodes


FEW = ngrams.NgramConfig(longest=4, levels=4, nodes=6, places=3, children=2)


@pytest.mark.parametrize("config", [ngrams.NgramConfig(), FEW])
def test_a_suffix_trie_holds_the_best_of_all_copies(config):
    draw = random.Random(1)
    sizes = []
    for _ in range(60):
        tokens = [draw.randrange(4) for _ in range(draw.randint(1, 40))]
        every = slow_nodes(tokens, config)
        trie = paths_of(ngrams.trie_of(text_of(tokens), config, ODDS))
        assert all(trie[path] == pytest.approx(every[path]) for path in trie)
        assert len(trie) == min(config.nodes, len(every))
        rest = [score for path, score in every.items() if path not in trie]
        assert not rest or min(trie.values()) >= max(rest) - 1e-9
        sizes.append(len(trie))
    assert max(sizes) == config.nodes and min(sizes) == 0


class SlowLookahead:
    """The window row by row: each of its rows is a text of its own for the target."""

    def __init__(self, pair, ids: list[int]):
        self.pair = pair
        self.ids = ids
        self.pool = ngrams.LookaheadSession(torch.device("cpu"))
        self.read = 0
        self.levels = [[ids[(7 * c + 3) % len(ids)] for c in range(COLUMNS)]]

    def says(self, ids: list[int]) -> int:
        with torch.inference_mode():
            return int(self.pair.target.model(torch.tensor([ids])).logits[0, -1].argmax())

    def cycle(self, verify_nodes: int) -> int:
        for end in range(max(self.read, NGRAM - 1), len(self.ids)):
            self.pool.add(self.ids[end - NGRAM + 1 : end + 1])
        self.read = len(self.ids)
        ranked = sorted(
            paths_of(self.pool.continuations(self.ids[-1])).items(), key=lambda item: -item[1]
        )
        paths = {path for path, _ in ranked[:verify_nodes]}
        new = []
        for c in range(COLUMNS):
            column = [level[c] for level in self.levels[1:]]
            new.append(self.says([*self.ids, *self.levels[0][: c + 1], *column]))
        self.levels.append(new)
        if len(self.levels) == NGRAM:
            for ngram in zip(*self.levels, strict=True):
                self.pool.add(list(ngram))
            self.levels.pop(0)
        accepted = []
        while (*accepted, token := self.says([*self.ids, *accepted])) in paths:
            accepted.append(token)
        self.ids += [*accepted, token]
        return len(accepted)


def test_lookahead_accepts_what_a_slow_one_accepts():
    target = random_pair(vocab_size=8, seed=5).target
    pair = specdec.Pair(target, ngrams.LookaheadDrafter(target))
    prompt = [1, 2, 3, 1, 2, 5, 1, 2]
    out = specdec.decode(pair, prompt, Static.of(CopiedTree(8)), max_new_tokens=30)
    slow = SlowLookahead(pair, [*prompt, out.tokens[0]])
    assert [row.accepted_tok for row in out.rows] == [slow.cycle(7) for _ in out.rows]
    assert sum(row.accepted_tok for row in out.rows) > 3
    rows = [row.verified_tok - row.verify_nodes - 1 for row in out.rows]
    assert rows[:4] == [4, 8, 12, 12] and set(rows[2:]) == {12}


def pair_with(name: str) -> specdec.Pair:
    pair = shared_pair()
    drafter = {
        "prompt_lookup": lambda: ngrams.NgramDrafter(pair.target, ngrams.PROMPT_LOOKUP),
        "suffix": lambda: ngrams.NgramDrafter(pair.target),
        "lookahead": lambda: ngrams.LookaheadDrafter(pair.target),
        "hybrid": lambda: ngrams.HybridDrafter(pair.drafter),
    }
    return dataclasses.replace(pair, drafter=drafter[name]())


POLICIES = {
    "copies": Static.of(CopiedTree(9)),
    "tree": Static(12, 3, 4),
    "flat": Static.of(TreeConfig(9, 1, 4, flat_nodes=6)),
    "random": RandomPolicy(TreeConfig(16, 4, 4), seed=3, own_beams=True),
}


@pytest.mark.parametrize("name", ["prompt_lookup", "suffix", "lookahead", "hybrid"])
def test_texts_are_plain_decodings_alone_at_once_and_sampled(name):
    pair, tree = pair_with(name), Static(9, 2, 3)
    result = audit(pair, [[1, 2, 3, 4, 1, 2, 3], [5]], POLICIES, max_new_tokens=12, progress=False)
    assert result.passed and result.rows["accepted_tok"].sum() > 20
    # up to the last position
    cycle = list(range(20)) * 24
    drafted = specdec.decode(pair, cycle, tree, max_new_tokens=32)
    assert drafted.tokens == specdec.autoregress(pair, cycle, max_new_tokens=32).tokens
    prompts = [[1, 2, 1, 2, 1], [7, 8, 9, 7, 8, 9, 7], [3]]
    together = decode_many(pair, prompts, tree, max_new_tokens=12)
    for prompt, out in zip(prompts, together, strict=True):
        alone = specdec.decode(pair, prompt, tree, max_new_tokens=12)
        assert out.tokens == alone.tokens
        assert out.cycles["accepted_tok"].tolist() == alone.cycles["accepted_tok"].tolist()


def test_copies_alone_draft_nothing():
    pair = pair_with("hybrid")
    prompt = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]
    copied = specdec.decode(pair, prompt, Static.of(CopiedTree(7)), max_new_tokens=12).cycles
    assert not copied["draft_calls"].any() and not copied["top_k"].any()
    assert (copied["verify_nodes"] == copied["candidates"].clip(upper=6)).all()
    tree = Static(30, 2, 4)
    merged = specdec.decode(pair, prompt, tree, max_new_tokens=12).cycles
    assert (merged["draft_calls"] == 3).all()
    assert merged["candidates"].max() > tree.plan.pool_size


def test_odds_are_counted_kept_and_checked(tmp_path):
    ids = torch.tensor([*range(9)] * 12 + [30, *range(9)])
    copies = list(ngrams.outcomes(ids, 9, ngrams.NgramConfig()))
    odds = CopyOdds.from_outcomes(copies, scale=0.8, learned_from="a round")
    sure, lone = Evidence.of(20, 2, 0, 1), Evidence.of(1, 1, 1, 2)
    assert odds.probability(sure) > 0.9
    assert ODDS.probability(lone) == pytest.approx(0.2 / 2.5)
    assert odds.log_probs[sure] == pytest.approx(math.log(odds.probability(sure)) / 0.8)
    assert sum(row["outcomes"] for row in odds.table) == len(copies) and len(odds.table) == 28
    assert CopyOdds.load(odds.save(tmp_path).parent) == odds
    assert specdec.load_pair("tiny", drafter=f"suffix:{tmp_path}").drafter.odds == odds
    changed = odds.save(tmp_path).read_text().replace('"scale": 0.8', '"scale": 0.9')
    (tmp_path / ngrams.FILE).write_text(changed)
    pytest.raises(SpecdecError, CopyOdds.load, tmp_path).match("copies.json.*count it again")


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.6])
def test_the_scale_of_scores_is_the_likeliest(scale):
    draw = random.Random(0)
    scores = [-draw.expovariate(0.7) for _ in range(4000)]
    right = [draw.random() < math.exp(scale * score) for score in scores]
    assert fit_scale(scores, right) == pytest.approx(scale, rel=0.15)
