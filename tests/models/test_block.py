"""Block drafters: equal to all rows written out, trees best first, the text the target's own, recorded, priced and read."""

import json
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
from specdec.models.eagle_files import save_drafter, save_tensors
from specdec.models.eagle_network import EagleConfig
from specdec.models.load import load_drafter
from specdec.models.target import Target
from specdec.replays.record import record
from specdec.replays.replay import replay
from specdec.training.drafter.networks import TEMPERED, begun
from specdec.training.drafter.objective import TokenBatch
from specdec.training.drafter.presets import Settings
from specdec.training.drafter.ttt import unroll

from workbook import one_pass

VOCAB, WIDTH, BLOCK, PROMPT = 24, 32, 4, [3, 1, 4, 1, 5, 9, 2, 6]
OWN = EagleConfig(WIDTH, 64, 4, 2, VOCAB, 10, WIDTH, taps=(2, 4, 5), head_dim=8, block=BLOCK)
KINDS = {
    "block": OWN,
    "deep": replace(OWN, mask_token=7, fc_norm="each", query_key_norm=True, num_layers=3),
}
SHAPE = replace(OWN, draft_vocab_size=VOCAB, query_key_norm=True, mask_token=5, num_layers=2)
DFLASH = DFlashConfig(**SHAPE.to_dict())
ALL = KINDS | {
    "dflash": DFLASH,
    "reduced": replace(DFLASH, draft_vocab_size=10, own_head=True, from_anchor=True),
}


@pytest.fixture(scope="module")
def target():
    return Target(random_target(VOCAB, hidden=WIDTH, seed=3))


def pair_of(name: str, target: Target) -> Pair:
    drafter = (BlockDrafter if name in KINDS else DFlashDrafter)(
        random_network(ALL[name], 5), target
    )
    target.taps = drafter.taps
    return Pair(target, drafter, name="block")


def levels_of(pair: Pair, ids: list[int]):
    """The slow way: log-probabilities [B, Vd] of the positions after the root ids[-1]."""
    states = pair.target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    features = torch.cat([states[tap][0, :-1] for tap in pair.drafter.taps], -1)
    return (slow_block if type(pair.drafter) is BlockDrafter else slow_dflash)(
        pair.drafter, torch.tensor(ids), features
    )


@pytest.mark.parametrize("name", ALL)
@torch.inference_mode()
def test_drafted_trees_equal_the_slow_way(name, target):
    pair = pair_of(name, target)

    def slow(ids):
        levels = levels_of(pair, ids)
        return lambda path: levels[len(path)]

    seen = assert_drafted(
        pair, PROMPT, Static(58, 6, 3), slow, range(14, 20)
    )  # deeper than the block, two cycles
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
    eagle = random_network(replace(KINDS[name], block=0, num_layers=1)).bfloat16().float()
    start = begun(save_drafter(eagle, tmp_path), target.model, Settings(layers=3), None, 0, "block")
    for weight in (
        eagle.fc.weight,
        eagle.midlayer.mlp.down_proj.weight,
        *(getattr(eagle.midlayer.self_attn, f"{name}_proj").weight for name in "qko"),
    ):
        weight.data /= TEMPERED
    assert "only a block drafter" in refusal(
        begun, tmp_path, target.model, Settings(layers=3), None, 0, "eagle3"
    )
    assert len(start.layers) == 2 and torch.equal(next(unrolled(start)), next(unrolled(eagle)))


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_recorded_trees_are_the_best_nodes_of_the_product(name, target):
    """Of all paths, whose probability is the product of the positions' own, as DDTree draws them best first."""
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


@pytest.mark.parametrize("name", ["deep", "dflash"])
def test_the_text_is_the_targets_own_and_replays(name, target, home):
    pair, prompts, tree = pair_of(name, target), [PROMPT, PROMPT[:3]], Static(8, 2, 3)
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


LAYER = {
    name: value
    for name, value in DFLASH.to_dict().items()
    if name.startswith(("hidden", "inter", "num_", "head"))
}
LAYER |= dict(vocab_size=VOCAB, num_hidden_layers=2, rms_norm_eps=1e-5, rope_theta=10000.0)
AUTHORS = LAYER | {
    "block_size": BLOCK + 1,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3, 4]},
}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "transformer_layer_config": LAYER,
    "draft_vocab_size": 10,
}
SPECULATORS |= {"block_size": BLOCK, "mask_token_id": 5, "aux_hidden_state_layer_ids": [2, 4, 5]}
LAYOUTS = {
    "block": None,
    "deep": None,
    "dflash": AUTHORS,
    "reduced": SPECULATORS | {"sample_from_anchor": True},
}


def written(folder, raw: dict, saved) -> str:
    save_tensors(
        dict(saved.state_dict()) | {"verifier_norm.weight": torch.ones(WIDTH)},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read(name, target, tmp_path):
    saved = random_network(ALL[name])
    folder = (
        written(tmp_path, LAYOUTS[name], saved) if LAYOUTS[name] else save_drafter(saved, tmp_path)
    )
    read = load_drafter(str(folder), target).network
    assert type(read) is type(saved) and read.config == ALL[name]
    assert all(
        torch.equal(value, read.state_dict()[part]) for part, value in saved.state_dict().items()
    )


def test_relatives_and_bad_files_are_refused(target, tmp_path):
    for words, change in {
        "DSpark's bias from the token before": {"markov_rank": 4},
        "'domino' is not supported": {"projector_type": "domino"},
        "over a window": {"layer_types": ["sliding_attention", "full_attention"]},
        "must name the tapped layers": {"dflash_config": {"mask_token_id": 5}},
        "lacks layers.2.": {"num_hidden_layers": 3},
        "states a part of the vocabulary": {"draft_vocab_size": 10},
    }.items():
        assert words in refusal(
            load_drafter, written(tmp_path, AUTHORS | change, random_network(DFLASH)), target
        )
    raw = json.loads((save_drafter(random_network(OWN), tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 10**9}))
    assert "lacks layers.1" in refusal(load_drafter, str(tmp_path), target)
    save_drafter(random_network(replace(OWN, block=0)), tmp_path)
    assert "load it as eagle3" in refusal(load_block, tmp_path, target)
