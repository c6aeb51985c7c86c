"""Block drafters: equal to all rows written out, trees best first, the text the target's own, recorded and priced."""

import heapq
import json
import math
from dataclasses import replace

import pytest
import torch
from fakes.pairs import random_network, random_target
from fakes.reference import assert_drafted
from fakes.refusals import refusal
from fakes.slow_layer import slow_block, slow_dflash

import specdec
from specdec.core.decode import decode_many
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.costs.profiles import profile
from specdec.errors import SpecdecError
from specdec.evaluation.lossless import audit
from specdec.models.block import BlockDrafter, load_block
from specdec.models.dflash import DFlashConfig, DFlashDrafter
from specdec.models.eagle.checkpoints import save_drafter, save_tensors
from specdec.models.eagle.network import EagleConfig
from specdec.models.load import load_drafter
from specdec.models.target import Target
from specdec.replays import record as recording
from specdec.replays.replay import replay

VOCAB, WIDTH, LAYERS, BLOCK = 24, 32, 8, 4
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
OWN = EagleConfig(WIDTH, 64, 4, 2, VOCAB, 10, WIDTH, taps=(2, 4, 5), block=BLOCK)
FIELDS = dict(query_key_norm=True, mask_token=5, num_layers=2)
DFLASH = DFlashConfig(WIDTH, 64, 4, 2, VOCAB, VOCAB, WIDTH, taps=(2, 4, 5), block=BLOCK, **FIELDS)
KINDS = {"root": OWN, "mask": replace(OWN, mask_token=0), "normed": replace(OWN, mask_token=7, fc_norm="each")}
ALL = KINDS | {"dflash": DFLASH, "reduced": replace(DFLASH, draft_vocab_size=10, own_head=True, from_anchor=True)}


@pytest.fixture(scope="module")
def target():
    return Target(random_target(VOCAB, hidden=WIDTH, seed=3))


def network(name: str):
    return random_network(ALL[name], 5)


def pair_of(name: str, target: Target) -> Pair:
    drafter = (BlockDrafter if name in KINDS else DFlashDrafter)(network(name), target)
    target.taps = drafter.taps
    return Pair(target, drafter, name="block")


@pytest.mark.parametrize("name", ALL)
@torch.inference_mode()
def test_drafted_trees_equal_the_slow_way(name, target):
    pair, written_out = pair_of(name, target), slow_block if name in KINDS else slow_dflash

    def slow(ids):
        states = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = torch.cat([states[tap][0, :-1] for tap in pair.drafter.taps], -1)
        levels = written_out(pair.drafter, torch.tensor(ids), features)
        return lambda path: levels[len(path)]

    seen = assert_drafted(pair, PROMPT, Static(58, 6, 3), slow, range(14, 20))  # deeper than the block, two cycles
    assert set(seen) == {(BLOCK - 1, BLOCK)}


@torch.inference_mode()
def test_trees_are_the_best_nodes_of_the_product(target):
    """Best first over the product of the positions' distributions, with a heap, as DDTree does."""
    pair, top_k, nodes = pair_of("mask", target), 10, 12  # all tokens that are drafted
    tokens = torch.tensor(PROMPT)
    with pair.inference():
        features = target.forward(tokens, target.new_cache(len(PROMPT))).features
        tree = recording.SequentialDrafter(pair.drafter, tokens, features, BLOCK - 1)
        grown = tree.grow(torch.tensor([len(PROMPT) - 1]), top_k, BLOCK - 1, top_k)
    found = grown.scores[0].sort(descending=True).values[:nodes]
    levels = slow_block(pair.drafter, tokens, features[:-1]).sort(descending=True).values.tolist()
    waiting, best = [(-levels[0][0], (0,))], []
    while len(best) < nodes:
        score, path = heapq.heappop(waiting)
        best.append(-score)
        level, rank = len(path) - 1, path[-1]
        heapq.heappush(waiting, (score + levels[level][rank] - levels[level][rank + 1], (*path[:-1], rank + 1)))
        if level + 1 < BLOCK:
            heapq.heappush(waiting, (score - levels[level + 1][0], (*path, 0)))
    torch.testing.assert_close(found, torch.tensor(best), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["root", "mask", "dflash"])
def test_the_text_is_the_targets_own_and_replays(name, target, home):
    pair, prompts = pair_of(name, target), [PROMPT, PROMPT[:3]]
    found = audit(
        pair, prompts, {"tree": Static(10, 3, 3), "wide": Static(30, 2, 6)}, max_new_tokens=16, progress=False
    )
    assert found.passed
    tree = Static(8, 2, 3)
    live = [specdec.decode(pair, prompt, tree, max_new_tokens=12) for prompt in prompts]
    with_others = decode_many(pair, prompts, tree, max_new_tokens=12)
    assert [out.tokens for out in with_others] == [out.tokens for out in live]
    settings = dict(max_new_tokens=12, top_ks=(3,), trees=(3,), progress=False)
    pytest.raises(SpecdecError, recording.record, pair, {"own": prompts}, depth=4, **settings).match("than depth 3")
    trace = recording.record(pair, {"own": prompts}, depth=3, **settings)
    replayed = replay(trace, tree, profile("roofline-a100-llama-8b-eager").one_pass(BLOCK))
    assert replayed.table["cycles"].tolist() == [len(out.rows) for out in live]


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_batched_recording_equals_one_position_after_the_other(name, target):
    pair, tokens, contexts = pair_of(name, target), torch.tensor(PROMPT * 2), torch.tensor([4, 9, 12])
    with pair.inference():
        features = target.forward(tokens, target.new_cache(len(tokens))).features
        grown = [
            kind(tokens, features, 3).grow(contexts, 3, 3, 5)
            for kind in (pair.drafter.batched, lambda *given: recording.SequentialDrafter(pair.drafter, *given))
        ]
    for part in ("tokens", "beams", "root_tokens"):
        assert torch.equal(*(getattr(one, part) for one in grown)), part
    torch.testing.assert_close(*(one.scores for one in grown), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_saved_and_read_again(name, target, tmp_path):
    saved = network(name)
    read = load_block(save_drafter(saved, tmp_path), target).network
    assert read.config == replace(KINDS[name], head_dim=8)
    assert all(torch.equal(value, read.state_dict()[part]) for part, value in saved.state_dict().items())
    plain = save_drafter(random_network(replace(OWN, block=0)), tmp_path / "plain")
    pytest.raises(SpecdecError, load_block, plain, target).match("load it as eagle3")


SHAPE = dict(hidden_size=WIDTH, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
SHAPE |= dict(vocab_size=VOCAB, num_hidden_layers=2, rms_norm_eps=1e-5, rope_theta=10000.0)
AUTHORS = SHAPE | {"block_size": BLOCK + 1, "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3, 4]}}
SPECULATORS = {"speculators_model_type": "dflash", "transformer_layer_config": SHAPE, "draft_vocab_size": 10}
SPECULATORS |= {
    "block_size": BLOCK,
    "mask_token_id": 5,
    "aux_hidden_state_layer_ids": [2, 4, 5],
    "sample_from_anchor": True,
}


def written(folder, raw: dict, saved) -> str:
    save_tensors(dict(saved.state_dict()) | {"verifier_norm.weight": torch.ones(WIDTH)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


@pytest.mark.parametrize(("name", "raw"), [("dflash", AUTHORS), ("reduced", SPECULATORS)])
def test_dflash_is_read_in_both_layouts(name, raw, target, tmp_path):
    drafter = load_drafter(written(tmp_path, raw, network(name)), target)
    assert type(drafter) is DFlashDrafter and drafter.config == replace(ALL[name], head_dim=8)
    assert all(
        torch.equal(value, drafter.network.state_dict()[part]) for part, value in network(name).state_dict().items()
    )


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("DSpark's bias from the token before", {"markov_rank": 4}),
        ("'domino' is not supported", {"projector_type": "domino"}),
        ("over a window", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("must name the tapped layers", {"dflash_config": {"mask_token_id": 5}}),
        ("states 9999 layers", {"num_hidden_layers": 9999}),
        ("lacks layers.2.", {"num_hidden_layers": 3}),
        ("states a part of the vocabulary", {"draft_vocab_size": 10}),
    ],
)
def test_its_relatives_and_bad_files_are_refused(words, change, target, tmp_path):
    folder = written(tmp_path, AUTHORS | change, network("dflash"))
    assert words in refusal(load_drafter, folder, target)


def test_the_root_pass_drafts_everything_and_an_expansion_costs_the_host_alone():
    costs = profile("roofline-t4-llama-8b-eager")
    one = costs.one_pass(8, level_ms=0.25)
    root_ms, wider_ms = (
        float(part) for part in (costs.root_ms(10, 100), costs.expand_ms(8, 100) - costs.expand_ms(1, 100))
    )
    for depth in (0, 1, 7):
        assert math.isclose(float(one.draft_ms(10, depth, 100)), root_ms + wider_ms + depth * 0.25)
    assert float(one.verify_ms(20, 100)) == float(costs.verify_ms(20, 100)) and "computed" in one.provenance
