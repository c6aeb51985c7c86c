"""Block drafters: equal to all rows written out, trees best first, recorded, priced and read."""

import json
from dataclasses import replace

import pytest
import torch
from fakes.pairs import random_network, random_target
from fakes.reference import assert_drafted
from fakes.refusals import refusal
from fakes.slow_layer import slow_block

import specdec
from specdec.core.decode import decode_many
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.costs.profiles import profile
from specdec.errors import SpecdecError
from specdec.evaluation.lossless import audit
from specdec.models.eagle_drafter import BlockDrafter, EagleDrafter
from specdec.models.eagle_files import save_drafter
from specdec.models.eagle_network import EagleConfig
from specdec.models.load import load_drafter
from specdec.models.target import Target
from specdec.replays.record import record
from specdec.replays.replay import replay
from specdec.training.drafter.eagle3 import TEMPERED, begun
from specdec.training.drafter.objective import TokenBatch
from specdec.training.drafter.presets import Settings
from specdec.training.drafter.ttt import unroll

from workbook import one_pass

VOCAB, WIDTH, BLOCK, PROMPT = 24, 32, 4, [3, 1, 4, 1, 5, 9, 2, 6]
OWN = EagleConfig(WIDTH, 64, 4, 2, VOCAB, 10, WIDTH, taps=(2, 4, 5), head_dim=8, block=BLOCK)
KINDS = {"block": OWN, "normed": replace(OWN, mask_token=7, fc_norm="each")}


@pytest.fixture(scope="module")
def target():
    return Target(random_target(VOCAB, hidden=WIDTH, seed=3))


def pair_of(name: str, target: Target) -> Pair:
    drafter = BlockDrafter(random_network(KINDS[name], 5), target)
    target.taps = drafter.taps
    return Pair(target, drafter, name="block")


def levels_of(pair: Pair, ids: list[int]):
    """The slow way: log-probabilities [B, Vd] of the positions after the root ids[-1]."""
    states = pair.target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    features = torch.cat([states[tap][0, :-1] for tap in pair.drafter.taps], -1)
    return slow_block(pair.drafter, torch.tensor(ids), features)


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_drafted_trees_equal_the_slow_way(name, target):
    pair = pair_of(name, target)

    def slow(ids):
        levels = levels_of(pair, ids)
        return lambda path: levels[len(path)]

    # deeper than the block, two cycles
    seen = assert_drafted(pair, PROMPT, Static(58, 6, 3), slow, range(14, 20))
    assert set(seen) == {(BLOCK - 1, BLOCK)}


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_training_unrolls_what_decoding_drafts(name, target, tmp_path):
    pair, batch = pair_of(name, target), TokenBatch(torch.tensor([PROMPT]))
    with pair.inference():
        features = target.forward(batch.ids[0], target.new_cache(len(PROMPT))).features[None]

    def unrolled(network):
        return unroll(network, target.model.get_input_embeddings().weight, features, batch, BLOCK)

    network = pair.drafter.network
    for states, level in zip(unrolled(network), levels_of(pair, PROMPT), strict=True):
        torch.testing.assert_close(network.head(states[0, -2]).log_softmax(-1), level)
    eagle = random_network(replace(KINDS[name], block=0)).bfloat16().float()
    start = begun(save_drafter(eagle, tmp_path), target.model, Settings(), None, 0, "block")
    attention = eagle.midlayer.self_attn
    tempered = [eagle.fc, eagle.midlayer.mlp.down_proj]
    for layer in (*tempered, attention.q_proj, attention.k_proj, attention.o_proj):
        layer.weight.data /= TEMPERED
    assert torch.equal(next(unrolled(start)), next(unrolled(eagle)))


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_recorded_trees_are_the_best_nodes_of_the_product(name, target):
    """Of all paths, as DDTree draws them best first: probabilities are products of positions'."""
    pair, nodes, tokens = pair_of(name, target), 12, torch.tensor(PROMPT)
    with pair.inference():
        features = target.forward(tokens, target.new_cache(len(PROMPT))).features
        grown = pair.drafter.batched(tokens, features, BLOCK - 1).grow(
            torch.tensor([4, 7]), 10, BLOCK - 1, 10
        )
    for scores, ids in zip(grown.scores, (PROMPT[:5], PROMPT), strict=True):
        paths = [torch.zeros(1)]
        for level in levels_of(pair, ids):
            paths.append((paths[-1][:, None] + level).flatten())
        torch.testing.assert_close(
            scores.topk(nodes).values, torch.cat(paths[1:]).topk(nodes).values
        )


def test_the_text_is_the_targets_own_and_replays(target, home):
    pair, prompts, tree = pair_of("normed", target), [PROMPT, PROMPT[:3]], Static(8, 2, 3)
    assert audit(
        pair, prompts, {"tree": Static(10, 3, 3)}, max_new_tokens=16, progress=False
    ).passed
    live = [specdec.decode(pair, prompt, tree, max_new_tokens=12) for prompt in prompts]
    with_others = decode_many(pair, prompts, tree, max_new_tokens=12)
    assert [out.tokens for out in with_others] == [out.tokens for out in live]
    settings = dict(max_new_tokens=12, top_ks=(3,), trees=(3,), progress=False)
    pytest.raises(SpecdecError, record, pair, {"own": prompts}, depth=4, **settings).match(
        "no deeper than depth 3"
    )
    costs = one_pass.block_costs(profile("roofline-t4-llama-8b-eager"), BLOCK, level_ms=0.25)
    replayed = replay(record(pair, {"own": prompts}, depth=3, **settings), tree, costs)
    assert replayed.table["cycles"].tolist() == [len(out.rows) for out in live]
    assert (costs.draft_ms(3, [1, 7], 50) - costs.root_ms(3, 50)).tolist() == pytest.approx(
        [0.25, 1.75]
    )


@pytest.mark.parametrize("name", KINDS)
def test_files_are_read_again(name, target, tmp_path):
    saved = random_network(KINDS[name])
    read = load_drafter(save_drafter(saved, tmp_path), target).network
    assert type(read) is type(saved)
    assert read.config == KINDS[name]
    ours = read.state_dict()
    for part, value in saved.state_dict().items():
        assert torch.equal(value, ours[part])


def test_bad_files_are_refused(target, tmp_path):
    raw = json.loads((save_drafter(random_network(OWN), tmp_path) / "config.json").read_text())
    for words, change in {"ptd_token_id": {"ptd_token_id": None}}.items():
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        assert words in refusal(load_drafter, str(tmp_path), target)
    save_drafter(random_network(replace(OWN, block=0)), tmp_path)
    assert type(load_drafter(f"block:{tmp_path}", target)) is EagleDrafter
