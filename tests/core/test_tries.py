"""Copies beside the tree: tries, trees merged with them, and the cycle that looks at both."""

import dataclasses
import random

import pytest
import torch
from fakes.copies import ScriptedDrafter, paths_of, random_trie
from fakes.pairs import shared_bigrams
from fakes.reference import ReferenceTree

from specdec.core.cycle import run_cycle
from specdec.core.decode import autoregress, decode
from specdec.core.engine import LiveEngine
from specdec.core.policy import RandomPolicy, Static
from specdec.core.records import EXTEND, SIZE
from specdec.core.tree import DraftTree, Merged, Trie
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.core.verification import Picker

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def test_a_pool_and_a_trie_merged_by_hand():
    scores = [0.0, -0.5, -1.0, -1.5, -3.0]
    copied = (-0.25, -0.75, -3.0, -0.5, -2.5)
    merged = Merged(
        [9, 5, 6, 5, 7],
        [-1, 0, 0, 2, 2],
        scores,
        Trie(tokens=(5, 8, 4, 6, 5), parents=(0, 1, 0, 0, 4), scores=copied),
    )
    assert (merged.size, len(merged)) == (5, 7)
    assert merged.tokens == [9, 5, 6, 5, 7, 8, 4] and merged.parents == [-1, 0, 0, 2, 2, 1, 0]
    # of each edge the better probability
    assert merged.scores == [0.0, -0.25, -0.5, -1.0, -3.0, -0.75, -3.0]
    # of equal ones the earlier first
    assert merged.ranked() == [1, 2, 5, 3, 4, 6]
    assert (merged.child(2, 5), merged.child(1, 8), merged.child(1, 5)) == (3, 5, None)
    tree = merged.best(4)
    assert (tree.token.tolist(), tree.parent.tolist()) == ([9, 5, 6, 5, 8], [-1, 0, 0, 2, 1])
    assert tree.depth.tolist() == [0, 1, 1, 2, 2] and tree.levels == 2
    assert tree.score.tolist() == [0.0, -0.25, -0.5, -1.0, -0.75]
    twins = Merged([9, 5, 5], [-1, 0, 0], [0.0, -0.5, -0.5], Trie((5,), (0,), (-0.25,)))
    assert twins.scores == [0.0, -0.25, -0.5], "of children with one token the first counts"


def paths_in(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Score by path below the root."""
    scores = {}
    for row in tree.lineage()[1:]:
        path = row[row >= 0]
        scores[tuple(tree.token[path[1:]].tolist())] = float(tree.score[path[-1]])
    return scores


def slow_merge(slow: ReferenceTree, trie: Trie) -> tuple[dict[tuple[int, ...], float], int]:
    """(score by path of what either proposes, paths whose score the trie raised)."""
    drafted = {}
    for node in range(1, len(slow.nodes)):
        drafted[tuple(slow.path_tokens(node)[1:])] = slow.nodes[node]["score"]
    scores, copied, raised = dict(drafted), {(): 0.0, **paths_of(trie)}, 0
    for path in sorted(set(copied) - {()}, key=len):
        step = copied[path] - copied[path[:-1]]
        if path in drafted:
            step = max(step, drafted[path] - drafted.get(path[:-1], 0.0))
        scores[path] = scores.get(path[:-1], 0.0) + step
        raised += path in drafted and scores[path] > drafted[path] + 1e-6
    return scores, raised


def likeliest(top_k: int):
    """A path's children as the bigrams' drafter gives them."""

    def children(path: list[int]) -> list[tuple[int, float]]:
        best = shared_bigrams().drafter.table[path[-1]].topk(top_k)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    return children


def copying(propose, drafter=None, **facts):
    """The bigrams' pair with these copies."""
    pair = shared_bigrams()
    return dataclasses.replace(
        pair, drafter=ScriptedDrafter(pair.target, propose, drafter, **facts)
    )


def with_random_tries(seed: int, nodes: int):
    """(a pair with random copies beside its drafter, what was proposed at each length)."""
    draw, tries = random.Random(seed), {}

    def propose(ids: list[int]) -> Trie:
        trie = random_trie(draw, nodes, range(24))
        scores = [4 * score for score in trie.scores]
        return tries.setdefault(len(ids), dataclasses.replace(trie, scores=scores))

    return copying(propose, shared_bigrams().drafter), tries


def plain_text(new_tok: int, prompt=PROMPT) -> list[int]:
    return [*prompt, *autoregress(shared_bigrams(), prompt, max_new_tokens=new_tok).tokens]


def next_three(text: list[int]):
    """Copies of the next three tokens of the text, and at each place another one, less likely."""

    def propose(ids: list[int]) -> Trie:
        assert ids == text[: len(ids)]
        right = text[len(ids) : len(ids) + 3]
        rows = [(token, level, -0.1 * (level + 1)) for level, token in enumerate(right)]
        rows += [((token + 1) % 24, level, -5.0) for level, token in enumerate(right)]
        return Trie(*zip(*rows, strict=True))

    return propose


def test_copies_that_come_true_are_accepted():
    text = plain_text(32)
    pair = copying(next_three(text))
    out = decode(pair, PROMPT, Static.of(CopiedTree(9)), max_new_tokens=21)
    assert out.tokens == text[len(PROMPT) : len(PROMPT) + 21]
    # and one more each; the first token is the prompt's
    assert [row.accepted_tok for row in out.rows] == [3] * 5
    assert {(row.candidates, row.verify_nodes, row.draft_calls) for row in out.rows} == {(6, 6, 0)}
    assert pair.drafter.asked == [9, 13, 17, 21, 25], "once a cycle, with the root"
    fewer = decode(pair, PROMPT, Static.of(CopiedTree(3)), max_new_tokens=10)
    assert [row.accepted_tok for row in fewer.rows] == [2] * 3, "the two best of six"


def test_copies_end_at_the_targets_last_position():
    text = plain_text(9, (PROMPT * 64)[:503])
    # four levels of copies fit before position 512 up to context 507
    for length, expected in ((503, [(503, 6), (507, 6)]), (504, [(504, 6), (508, 0), (509, 0)])):
        pair = copying(next_three(text))
        out = decode(pair, text[:length], Static.of(CopiedTree(9)), 9 if length == 503 else 7)
        assert out.tokens == text[length : length + len(out.tokens)]
        assert [(row.context_tok, row.candidates) for row in out.rows] == expected


@pytest.mark.parametrize("tree", [TreeConfig(10, 2, 3), TreeConfig(5, 1, 2), TreeConfig(4, 0, 4)])
def test_the_best_of_both_are_verified(tree):
    pair, tries = with_random_tries(8, 20)
    engine = LiveEngine(pair, torch.tensor(PROMPT), 24, tree, Picker())
    text, raised = plain_text(24), 0
    with pair.inference():
        engine.prefill()
        while not engine.finished:
            place = len(PROMPT) + len(engine.tokens)
            row = run_cycle(engine, Static.of(tree))
            slow = ReferenceTree(text[place - 1], likeliest(tree.top_k), tree.depth, tree.top_k)
            expected, more = slow_merge(slow, tries[place])
            raised += more
            found = paths_in(engine.tree)
            assert row.candidates == len(expected)
            assert row.verify_nodes == len(found) == tree.verify_nodes
            assert all(found[path] == pytest.approx(expected[path], abs=1e-5) for path in found)
            rest = [score for path, score in expected.items() if path not in found]
            assert min(found.values()) >= max(rest, default=-1e9) - 1e-5
    assert engine.tokens == text[len(PROMPT) : len(PROMPT) + 24] and raised > 1


def test_questions_count_what_is_drafted_and_copied():
    pair, tries = with_random_tries(3, 6)
    text, counts = plain_text(40), set()

    class Looker(RandomPolicy):
        def answer(self, question):
            slow = ReferenceTree(text[question.context_tok], likeliest(3), question.expansions, 3)
            trie = tries[question.context_tok + 1]
            assert question.copied_scores == tuple(trie.scores)
            if question.kind == SIZE:
                expected, _ = slow_merge(slow, trie)
                assert question.largest == min(len(expected), self.limits.verify_nodes)
                counts.add(question.largest)
            return super().answer(question)

    policy = Looker(TreeConfig(39, 4, 3), seed=2, asks=(EXTEND, SIZE))
    assert decode(pair, PROMPT, policy, max_new_tokens=40).tokens == text[len(PROMPT) :]
    assert len(counts) > 3 and min(counts) < 15


def test_trees_are_no_deeper_than_the_drafter_can():
    pair = copying(lambda ids: Trie(), shared_bigrams().drafter)
    pair.drafter.deepest = 1
    out = decode(pair, PROMPT, Static(30, 4, 3), max_new_tokens=12)
    assert out.tokens == plain_text(12)[len(PROMPT) :]
    assert {(row.expansions, row.candidates) for row in out.rows} == {(1, 12)}


@pytest.mark.parametrize("chain", [(7,), (7, 11, 2)])
def test_a_window_rides_along_and_changes_nothing(chain):
    text = plain_text(12)
    pair = copying(next_three(text), window=chain)
    out = decode(pair, PROMPT, Static.of(CopiedTree(9)), max_new_tokens=12)
    assert out.tokens == text[len(PROMPT) :]
    assert {row.verified_tok - row.verify_nodes for row in out.rows} == {1 + len(chain)}
    for place, logits in zip((9, 13, 17), pair.drafter.learned, strict=True):
        with torch.inference_mode():
            slow = pair.target.model(torch.tensor([[*text[:place], *chain]])).logits[0]
        torch.testing.assert_close(logits, slow[-len(chain) :], atol=1e-4, rtol=1e-4)
