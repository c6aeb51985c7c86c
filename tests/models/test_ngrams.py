"""Drafters without a model: beside slow references, lossless under every policy, refusals."""

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
from specdec.core.tree import EAGLE1_TREE, StaticShape
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.errors import SpecdecError
from specdec.evaluation.lossless import audit, distribution_test
from specdec.models import ngrams
from specdec.models.ngrams import CopyOdds, Evidence, fit_scale

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
        found, _ = theirs.get_candidates(torch.tensor([tokens]))
        trie = ngrams.trie_of(text_of(tokens), ngrams.PROMPT_LOOKUP, ODDS)
        assert list(trie.tokens) == found[0, len(tokens) :].tolist(), tokens
        assert list(trie.parents) == list(range(len(trie)))
        copied += len(trie)
    assert copied > 400


def slow_nodes(tokens: list[int], config: ngrams.NgramConfig) -> dict[tuple[int, ...], float]:
    """Every node that any place offers, and its score, by going over the whole text."""
    last, found = len(tokens) - 1, []
    for end in range(last):
        match = next((n for n in range(end + 1) if tokens[end - n] != tokens[last - n]), end + 1)
        if min(match, config.longest) >= config.shortest:
            found.append((min(match, config.longest), end))
    newest = [place for place in found if place[0] > 1][-config.places :]
    singles = [place for place in found[-config.places :] if place not in newest]
    newest = sorted((singles if len(newest) < config.places else []) + newest, reverse=True)[
        : config.places
    ]
    nodes, paths = {}, [((), 0.0, newest)]
    for path, score, places in paths:
        following = {}
        for match, end in places:
            if end + len(path) + 1 <= last:
                following.setdefault(tokens[end + len(path) + 1], []).append((match, end))
        ranked = sorted(following, key=lambda t: (-following[t][0][0], -len(following[t])))
        for rank, token in enumerate(ranked[: config.children]):
            own = following[token]
            seen = Evidence.of(own[0][0] + len(path), len(own), rank, len(ranked))
            nodes[(*path, token)] = score + ODDS.log_prob(seen)
            if len(path) + 1 < config.levels:
                paths.append(((*path, token), nodes[(*path, token)], own))
    return nodes


FEW = ngrams.NgramConfig(longest=4, shortest=2, levels=4, nodes=6, places=3, children=2)


@pytest.mark.parametrize("config", [ngrams.NgramConfig(), FEW])
def test_a_suffix_trie_holds_the_best_of_all_copies(config):
    draw, sizes = random.Random(1), []
    for _ in range(60):
        tokens = [draw.randrange(4) for _ in range(draw.randint(1, 40))]
        every, trie = (
            slow_nodes(tokens, config),
            paths_of(ngrams.trie_of(text_of(tokens), config, ODDS)),
        )
        assert all(trie[path] == pytest.approx(every[path]) for path in trie)
        assert len(trie) == min(config.nodes, len(every))
        left = [score for path, score in every.items() if path not in trie]
        assert not left or min(trie.values()) >= max(left) - 1e-9
        sizes.append(len(trie))
    assert max(sizes) == config.nodes and min(sizes) == 0


class SlowLookahead:
    """The window row by row: each of its rows is a text of its own for the target."""

    def __init__(self, pair, ids: list[int], config: ngrams.LookaheadConfig):
        self.pair, self.ids, self.config, self.pool, self.known = (
            pair,
            ids,
            config,
            ngrams.NgramPool(config),
            0,
        )
        self.levels = [[ids[(7 * c + 3) % len(ids)] for c in range(config.columns)]]

    def says(self, ids: list[int]) -> int:
        with torch.inference_mode():
            return int(self.pair.target.model(torch.tensor([ids])).logits[0, -1].argmax())

    def cycle(self, verify_nodes: int) -> int:
        config = self.config
        for end in (
            range(max(self.known, config.ngram - 1), len(self.ids)) if config.from_prompt else ()
        ):
            self.pool.add(self.ids[end - config.ngram + 1 : end + 1])
        self.known = len(self.ids)
        ranked = sorted(paths_of(self.pool.trie(self.ids[-1])).items(), key=lambda item: -item[1])
        paths = {path for path, _ in ranked[:verify_nodes]}
        new = [
            self.says(
                [*self.ids, *self.levels[0][: c + 1], *(level[c] for level in self.levels[1:])]
            )
            for c in range(config.columns)
        ]
        self.levels.append(new)
        if len(self.levels) == config.ngram:
            for ngram in zip(*self.levels, strict=True):
                self.pool.add(list(ngram))
            self.levels.pop(0)
        accepted = []
        while (*accepted, token := self.says([*self.ids, *accepted])) in paths:
            accepted.append(token)
        self.ids += [*accepted, token]
        return len(accepted)


@pytest.mark.parametrize("from_prompt", [True, False])
def test_lookahead_accepts_what_a_slow_one_accepts(from_prompt):
    config = ngrams.LookaheadConfig(columns=3, ngram=3, kept=3, from_prompt=from_prompt)
    target = random_pair(vocab_size=8, seed=5).target
    pair = specdec.Pair(target, ngrams.LookaheadDrafter(target, config))
    prompt = [1, 2, 3, 1, 2, 5, 1, 2]
    out = specdec.decode(pair, prompt, Static.of(CopiedTree(6)), max_new_tokens=30)
    slow = SlowLookahead(pair, [*prompt, out.tokens[0]], config)
    assert [row.accepted_tok for row in out.rows] == [slow.cycle(5) for _ in out.rows]
    assert sum(row.accepted_tok for row in out.rows) > 3
    rows = [row.verified_tok - row.verify_nodes - 1 for row in out.rows]
    assert rows[:3] == [3, 6, 6] and set(rows[2:]) == {6}


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
    "plain": Static(1, 0, 1),
    "EAGLE-1": Static(shape=StaticShape(EAGLE1_TREE)),
    "flat": Static.of(TreeConfig(9, 1, 4, flat_nodes=6)),
    "random": RandomPolicy(TreeConfig(16, 4, 4), seed=3, own_beams=True),
    "random size": RandomPolicy(TreeConfig(16, 4, 4), seed=4, asks=("extend", "size")),
}


@pytest.mark.parametrize("name", ["prompt_lookup", "suffix", "lookahead", "hybrid"])
def test_texts_are_plain_decodings_alone_at_once_and_sampled(name):
    pair, cycle, tree = pair_with(name), list(range(20)) * 24, Static(9, 2, 3)
    found = audit(pair, [[1, 2, 3, 4, 1, 2, 3], [5]], POLICIES, max_new_tokens=12, progress=False)
    assert found.passed and found.rows["accepted_tok"].sum() > 20
    ends = specdec.decode(pair, cycle, tree, max_new_tokens=32)  # up to the last position
    assert (
        ends.new_tok == 32
        and ends.tokens == specdec.autoregress(pair, cycle, max_new_tokens=32).tokens
    )
    prompts = [[1, 2, 1, 2, 1], [7, 8, 9, 7, 8, 9, 7], [3]]
    alone = [specdec.decode(pair, prompt, tree, max_new_tokens=12) for prompt in prompts]
    both = decode_many(pair, prompts, tree, max_new_tokens=12)
    assert [out.tokens for out in both] == [out.tokens for out in alone]
    assert [[row.accepted_tok for row in out.rows] for out in both] == [
        [r.accepted_tok for r in o.rows] for o in alone
    ]
    if name in ("suffix", "hybrid"):
        settings = dict(new_tok=2, draws=80, top_k=4, progress=False)
        assert distribution_test(
            pair, [3, 1, 4, 3, 1, 4, 3, 1], Static(10, 2, 3), **settings
        ).passed


def test_copies_alone_draft_nothing_and_bad_settings_are_one_sentence():
    pair = pair_with("hybrid")
    prompt = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]
    copied = specdec.decode(pair, prompt, Static.of(CopiedTree(7)), max_new_tokens=12).cycles
    assert not copied["draft_calls"].any() and not copied["top_k"].any()
    assert (copied["verify_nodes"] == copied["candidates"].clip(upper=6)).all()
    both = specdec.decode(pair, prompt, Static(30, 2, 4), max_new_tokens=12).cycles
    assert (both["draft_calls"] == 3).all() and both["candidates"].max() > Static(
        30, 2, 4
    ).plan.pool_size
    for bad, words in (
        (lambda: ngrams.NgramConfig(levels=0), "levels must be"),
        (lambda: ngrams.NgramConfig(longest=1, shortest=2), "shortest=2 exceeds"),
        (lambda: ngrams.LookaheadConfig(ngram=1), "ngram must be"),
        (lambda: specdec.load_pair("tiny", drafter="lookahead:x/y"), "has no weights"),
        (
            lambda: specdec.load_pair("tiny", drafter="suffix:/nowhere/at/all"),
            "neither a folder|no copies",
        ),
    ):
        pytest.raises(SpecdecError, bad).match(words)


def test_odds_are_counted_kept_and_checked_and_the_scale_of_scores_is_found(tmp_path):
    ids = torch.tensor([*range(9)] * 12 + [30, *range(9)])
    found = list(ngrams.outcomes(ids, 9, ngrams.NgramConfig()))
    begun = [
        9,
        10,
        *range(20, 98, 11),
        108,
        109,
        110,
    ]  # ten copies at most, and the target's own token
    assert found == list(ngrams.outcomes(ids, 9, ngrams.NgramConfig(), begun))
    odds = CopyOdds.from_outcomes(found, scale=0.8, learned_from="a round")
    sure, lone = Evidence.of(20, 2, 0, 1), Evidence.of(1, 1, 1, 2)
    assert odds.probability(sure) > 0.9 > ODDS.probability(lone)
    assert odds.log_prob(sure) == pytest.approx(math.log(odds.probability(sure)) / 0.8)
    assert sum(row["outcomes"] for row in odds.table) == len(found) and len(odds.table) == 28
    assert CopyOdds.load(odds.save(tmp_path).parent) == odds
    assert specdec.load_pair("tiny", drafter=f"suffix:{tmp_path}").drafter.odds == odds
    for text in ("{", odds.save(tmp_path).read_text().replace('"scale": 0.8', '"scale": 0.9')):
        (tmp_path / ngrams.FILE).write_text(text)
        pytest.raises(SpecdecError, CopyOdds.load, tmp_path).match("copies.json.*count it again")
    pytest.raises(SpecdecError, CopyOdds.load, tmp_path / "nowhere").match("no copies.json")
    draw = random.Random(0)
    scores = [-draw.expovariate(0.7) for _ in range(4000)]
    for scale in (0.5, 1.0, 1.6):
        right = [draw.random() < math.exp(scale * score) for score in scores]
        assert fit_scale(scores, right) == pytest.approx(scale, rel=0.15)
