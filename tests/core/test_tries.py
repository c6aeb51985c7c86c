"""Copies beside the tree: tries, what is merged with what was drafted, and the cycle that looks at
both.
"""

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
from specdec.core.tree import DraftTree, Merged, Pool, Trie
from specdec.core.tree_config import CopiedTree, TreeConfig
from specdec.core.verification import Picker

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def paths_in(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Score by path below the root."""
    found = {}
    for path in (row[row >= 0] for row in tree.paths()):
        for node in range(1, len(path)):
            found[tuple(tree.token[path[1 : node + 1]].tolist())] = float(tree.score[path[node]])
    return found


def slow_merge(slow: ReferenceTree, trie: Trie) -> tuple[dict[tuple[int, ...], float], int, int]:
    """(score by path of what either proposes, paths that both propose, how many of them the trie
    raised).
    """
    drafted = {
        tuple(slow.path_tokens(node)[1:]): slow.nodes[node]["score"]
        for node in range(1, len(slow.nodes))
    }
    expected, copied, raised = dict(drafted), {(): 0.0, **paths_of(trie)}, 0
    for path in sorted(set(copied) - {()}, key=len):
        step = copied[path] - copied[path[:-1]]
        if path in drafted:
            step = max(step, drafted[path] - drafted.get(path[:-1], 0.0))
        expected[path] = expected.get(path[:-1], 0.0) + step
        raised += path in drafted and expected[path] > drafted[path] + 1e-6
    return expected, len(set(copied) & set(drafted)), raised


def test_a_pool_and_a_trie_by_hand():
    draw = random.Random(5)
    for nodes in (0, 1, 2, 9, 9, 9):
        trie = random_trie(draw, nodes, range(4))
        paths = paths_of(trie)
        for levels in range(nodes + 2):
            kept = trie.within(levels)
            assert paths_of(kept) == {
                path: score for path, score in paths.items() if len(path) <= levels
            }
            assert all(parent <= node for node, parent in enumerate(kept.parents))
    assert len(Trie()) == 0 and len(Trie((5, 6), (0, 1), (-1.0, -2.0)).within(0)) == 0
    pool = Pool(
        tokens=(9, 5, 6, 5, 7), scores=(0.0, -0.5, -1.0, -1.5, -3.0), expanded=(0, 2), top_k=2
    )
    trie = Trie(
        tokens=(5, 8, 4, 6, 5), parents=(0, 1, 0, 0, 4), scores=(-0.25, -0.75, -3.0, -0.5, -2.5)
    )
    merged = Merged(pool, trie)
    assert (merged.size, len(merged)) == (5, 7)
    assert merged.tokens == [9, 5, 6, 5, 7, 8, 4] and merged.parents == [-1, 0, 0, 2, 2, 1, 0]
    assert merged.scores == [
        0.0,
        -0.25,
        -0.5,
        -1.0,
        -3.0,
        -0.75,
        -3.0,
    ]  # of each edge the better probability
    assert merged.ranked() == [1, 2, 5, 3, 4, 6]  # of equal ones the earlier first
    children = {(0, 5): 1, (0, 6): 2, (2, 5): 3, (2, 7): 4, (1, 8): 5, (0, 4): 6}
    places = [(node, token) for node in range(7) for token in range(12)]
    assert {place: merged.child(*place) for place in places} == {
        place: children.get(place) for place in places
    }
    tree = merged.best(4)
    assert (tree.token.tolist(), tree.parent.tolist()) == ([9, 5, 6, 5, 8], [-1, 0, 0, 2, 1])
    assert tree.depth.tolist() == [0, 1, 1, 2, 2] and tree.levels == 2
    assert tree.score.tolist() == [0.0, -0.25, -0.5, -1.0, -0.75]
    assert merged.best(0).token.tolist() == [9] and merged.best(0).levels == 0
    assert len(merged.best(99)) == 7
    assert pool.tokens[0] == 9 and pool.scores[1] == -0.5  # as it was


def likeliest(pair, top_k: int):
    """A path's children as the pair's drafter gives them."""

    def children(path: list[int]) -> list[tuple[int, float]]:
        best = pair.drafter.table[path[-1]].topk(top_k)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    return children


def with_random_tries(pair, seed: int, nodes: int):
    """(the pair with random copies beside its drafter, what was proposed at each length)."""
    draw, tries = random.Random(seed), {}

    def propose(ids: list[int]) -> Trie:
        trie = random_trie(draw, nodes, range(24))
        return tries.setdefault(
            len(ids), dataclasses.replace(trie, scores=[4 * score for score in trie.scores])
        )

    return dataclasses.replace(
        pair, drafter=ScriptedDrafter(pair.target, propose, pair.drafter)
    ), tries


def plain_text(new_tok: int) -> list[int]:
    return [*PROMPT, *autoregress(shared_bigrams(), PROMPT, max_new_tokens=new_tok).tokens]


def next_three(text: list[int]):
    """Copies of the three tokens that plain decoding picks next, and at each place another one,
    less likely.
    """

    def propose(ids: list[int]) -> Trie:
        assert ids == text[: len(ids)]
        right = text[len(ids) : len(ids) + 3]
        wrong = [(token + 1) % 24 for token in right]
        rows = [(token, level, -0.1 * (level + 1)) for level, token in enumerate(right)]
        rows += [(token, level, -5.0) for level, token in enumerate(wrong)]
        return Trie(*zip(*rows, strict=True))

    return propose


def test_copies_that_come_true_are_accepted_up_to_the_targets_last_position():
    text = plain_text(32)
    drafter = ScriptedDrafter(shared_bigrams().target, next_three(text))
    pair = dataclasses.replace(shared_bigrams(), drafter=drafter)
    out = decode(pair, PROMPT, Static.of(CopiedTree(9)), max_new_tokens=21)
    assert out.tokens == text[len(PROMPT) : len(PROMPT) + 21]
    assert [row.accepted_tok for row in out.rows] == [
        3
    ] * 5  # and one more each; the first token is the prompt's
    assert {(row.candidates, row.verify_nodes, row.draft_calls) for row in out.rows} == {(6, 6, 0)}
    assert drafter.asked == [9, 13, 17, 21, 25]  # once a cycle, with the root
    drafter.asked.clear()
    fewer = decode(pair, PROMPT, Static.of(CopiedTree(3)), max_new_tokens=10)
    assert [row.accepted_tok for row in fewer.rows] == [2] * 3  # the two best of six
    assert {(row.candidates, row.verify_nodes) for row in fewer.rows} == {(6, 2)}
    drafter.asked.clear()
    nothing = decode(pair, PROMPT, Static(1, 0, 1), max_new_tokens=4)
    assert nothing.tokens == text[len(PROMPT) : len(PROMPT) + 4] and not drafter.asked
    pair, long = shared_bigrams(), (PROMPT * 64)[:506]
    text = [*long, *autoregress(pair, long, max_new_tokens=6).tokens]
    drafter = ScriptedDrafter(pair.target, next_three(text))
    out = decode(
        dataclasses.replace(pair, drafter=drafter), long, Static.of(CopiedTree(9)), max_new_tokens=6
    )
    assert out.tokens == text[len(long) :]
    assert [(row.context_tok, row.candidates) for row in out.rows] == [(506, 6), (510, 2)]


@pytest.mark.parametrize("tree", [TreeConfig(10, 2, 3), TreeConfig(5, 1, 2), TreeConfig(4, 0, 4)])
def test_the_best_of_both_are_verified(tree):
    own, tries = with_random_tries(shared_bigrams(), 8, 20)
    children = likeliest(shared_bigrams(), tree.top_k)
    engine = LiveEngine(own, torch.tensor(PROMPT), 24, tree, Picker.from_settings(0.0, 0))
    policy, text, shared, raised = Static.of(tree), plain_text(24), 0, 0
    with own.inference():
        engine.prefill()
        while not engine.finished:
            place = len(PROMPT) + len(engine.tokens)
            row = run_cycle(engine, policy)
            slow = ReferenceTree(text[place - 1], children, tree.depth, tree.top_k)
            expected, both, more = slow_merge(slow, tries[place])
            shared, raised = shared + both, raised + more
            found = paths_in(engine.tree)
            assert engine.candidates == len(expected) or engine.finished
            assert row.candidates == len(expected)
            assert row.verify_nodes == len(found) == tree.verify_nodes
            assert all(found[path] == pytest.approx(expected[path], abs=1e-5) for path in found)
            others = [score for path, score in expected.items() if path not in found]
            assert min(found.values()) >= max(others, default=-1e9) - 1e-5
    assert engine.tokens == text[len(PROMPT) : len(PROMPT) + 24] and shared > raised > 1


def test_questions_see_what_is_drafted_and_copied_and_trees_are_no_deeper_than_the_drafter_can():
    own, tries = with_random_tries(shared_bigrams(), 3, 6)
    text, counts, children = plain_text(40), [], likeliest(shared_bigrams(), 3)

    class Looker(RandomPolicy):
        def answer(self, question):
            slow = ReferenceTree(text[question.context_tok], children, question.expansions, 3)
            expected, _, _ = slow_merge(slow, tries[question.context_tok + 1])
            if question.kind == SIZE:
                counts.append(question.largest)
                assert question.largest == min(len(expected), self.limits.verify_nodes)
            return super().answer(question)

    policy = Looker(TreeConfig(39, 4, 3), seed=2, asks=(EXTEND, SIZE))
    assert decode(own, PROMPT, policy, max_new_tokens=40).tokens == text[len(PROMPT) :]
    assert len(set(counts)) > 3 and min(counts) < 15
    pair = shared_bigrams()
    shallow = ScriptedDrafter(pair.target, lambda ids: Trie(), pair.drafter)
    shallow.deepest = 1
    out = decode(
        dataclasses.replace(pair, drafter=shallow), PROMPT, Static(30, 4, 3), max_new_tokens=12
    )
    assert out.tokens == plain_text(12)[len(PROMPT) :]
    assert {row.expansions for row in out.rows} == {1}
    assert {row.candidates for row in out.rows} == {12}
    drafter = ScriptedDrafter(
        shared_bigrams().target, lambda ids: Trie((5, 6), (0, 1), (-0.25, -0.5))
    )
    pair = dataclasses.replace(shared_bigrams(), drafter=drafter)
    engine = LiveEngine(
        pair, torch.tensor(PROMPT), 8, TreeConfig(4, 0, 3), Picker.from_settings(0.0, 0)
    )
    with pair.inference():
        engine.prefill()
        assert engine.copied_scores == (-0.25, -0.5)
        run_cycle(engine, Static.of(CopiedTree(3)))
        assert engine.scores.tolist() == [-0.25, -0.5]


@pytest.mark.parametrize("chain", [(7,), (7, 11, 2)])
def test_a_window_rides_along_and_changes_nothing(chain):
    text = plain_text(12)
    drafter = ScriptedDrafter(shared_bigrams().target, next_three(text), window=chain)
    pair = dataclasses.replace(shared_bigrams(), drafter=drafter)
    out = decode(pair, PROMPT, Static.of(CopiedTree(9)), max_new_tokens=12)
    assert out.tokens == text[len(PROMPT) :]
    assert len(drafter.learned) == len(out.rows) == 3
    for place, logits in zip((9, 13, 17), drafter.learned, strict=True):
        with torch.inference_mode():
            slow = pair.target.model(torch.tensor([[*text[:place], *chain]])).logits[
                0, -len(chain) :
            ]
        torch.testing.assert_close(logits, slow, atol=1e-4, rtol=1e-4)
