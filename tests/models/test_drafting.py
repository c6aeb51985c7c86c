"""Drafters against their equations written out, without cache, tree or packing; files of heads."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fakes.families import SIZES, WINDOW, build
from fakes.pairs import random_network, random_target
from fakes.reference import assert_drafted
from fakes.slow_layer import slow_children
from safetensors.torch import load_file
from transformers import LlamaConfig, MistralConfig

import specdec
from specdec.core.decode import decode_many
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.tree import StaticShape
from specdec.costs.profiles import profile
from specdec.errors import SpecdecError
from specdec.evaluation.lossless import audit
from specdec.models.eagle_drafter import EagleDrafter
from specdec.models.eagle_network import EagleConfig
from specdec.models.heads import HeadsConfig, HeadsDrafter, load_heads, read_heads, save_heads
from specdec.models.small_lm import SmallLM, load_small_lm
from specdec.models.target import Target
from specdec.replays.record import record
from specdec.replays.replay import replay

VOCAB, WIDTH, LAYERS = 24, 32, 8
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
EAGLE = EagleConfig(WIDTH, 48, 4, 2, VOCAB, VOCAB, WIDTH)
FIRST = replace(EAGLE, generation=1, num_taps=1, fc_bias=True)
EAGLES = {
    "official": EAGLE,
    "narrow, own embedding": replace(EAGLE, hidden_size=16, own_embedding=True),
    "reduced vocabulary": replace(EAGLE, draft_vocab_size=10),
    "a norm per tap": replace(EAGLE, fc_norm="each"),
    "biases": replace(EAGLE, attention_bias=True, fc_bias=True),
    "another rope base": replace(EAGLE, rope_theta=300.0),
    "wide heads": replace(EAGLE, head_dim=16),
    "other taps": replace(EAGLE, taps=(1, 3, 7)),
    "eagle-1": FIRST,
    "eagle-1, reduced vocabulary": replace(FIRST, draft_vocab_size=10),
    "griffin": replace(FIRST, griffin=True),
}
MEDUSA = HeadsConfig(WIDTH, VOCAB, VOCAB, num_heads=3, taps=(LAYERS,), shared=False)
OURS = replace(MEDUSA, shared=True, draft_vocab_size=10)
HEADS = {
    "medusa": MEDUSA,
    "medusa, ours": OURS,
    "hydra": replace(MEDUSA, hydra=True),
    "hydra, ours": replace(OURS, hydra=True),
}


@pytest.fixture(scope="module")
def target():
    return Target(random_target(VOCAB, hidden=WIDTH, seed=3))


def drafter_of(config, target: Target):
    kind = EagleDrafter if isinstance(config, EagleConfig) else HeadsDrafter
    drafter = kind(random_network(config, 5), target)
    target.taps = drafter.taps
    if drafter.target_id is not None:
        assert drafter.target_id.tolist() == list(range(3, 23, 2))
    return drafter


def children_of_heads(drafter, ids, states, path):
    """Log-probabilities after `path`. states [T - 1, H]: the target's last, before the root."""
    network, target, head = drafter.network, drafter.target, len(path)
    config = network.config
    # 1. the head's block
    x = states[-1]
    block = network.first[head]
    residual = x
    if config.hydra:
        x = torch.cat([x, *target.embedding.weight[[int(ids[-1]), *path]]])
        residual = block.res_connection.weight @ x + block.res_connection.bias
    x = residual + F.silu(block.linear.weight @ x + block.linear.bias)
    # 2. its projection
    projection = network.lm_head if config.shared else network.lm_heads[head]
    bias = 0 if projection.bias is None else projection.bias
    return (projection.weight @ x + bias).log_softmax(-1)


def children_of_lm(drafter, ids, features, path):
    # the begin token stands where the text's first would
    ids = torch.tensor([[*drafter.begin, *ids[1:].tolist(), *path]])
    return drafter.network(ids).logits[0, -1].log_softmax(-1)


def windowed(vocabulary: int = 24):
    """A model that sees the six newest tokens only."""
    return build(MistralConfig, SIZES | WINDOW | {"vocab_size": vocabulary, "bos_token_id": 7})


# name: how it is made of a target, the slow way, a tree, how many nodes are looked at. That is two
# cycles at least, since the second reads what the first left in the cache.
CASES = {}
for name, config in EAGLES.items():
    make = functools.partial(drafter_of, config)
    CASES[name] = make, slow_children, Static(36, 2, 4), range(18, 30)
for name, config in HEADS.items():  # the tree is deeper than there are heads
    make = functools.partial(drafter_of, config)
    CASES[name] = make, children_of_heads, Static(30, 5, 3), range(14, 20)
LMS = {"lm": random_target(24, hidden=16, layers=2, seed=8), "lm with a window": windowed()}
for name, model in LMS.items():
    make = functools.partial(SmallLM, model)
    CASES[name] = make, children_of_lm, Static(31, 3, 3), range(20, 26)


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_drafted_trees_equal_the_slow_way(name, target):
    make, children, tree, nodes = CASES[name]
    drafter = make(target)

    def slow(ids):
        hidden = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = torch.cat([hidden[tap][0, :-1] for tap in drafter.taps or (LAYERS,)], -1)
        return lambda path: children(drafter, torch.tensor(ids), features, path)

    depths = assert_drafted(Pair(target, drafter), PROMPT, tree, slow, nodes)
    assert name not in HEADS or set(depths) == {(2, 3)}


def test_a_drafter_follows_a_new_map_and_a_target_that_grew():
    target = Target(random_target(VOCAB, hidden=WIDTH, seed=3))
    drafter = drafter_of(replace(EAGLE, draft_vocab_size=10, own_embedding=True), target)
    pair = Pair(target, drafter)
    target.model.resize_token_embeddings(VOCAB + 6, mean_resizing=False)
    prompt = [*PROMPT, VOCAB + 3]
    drafted = specdec.decode(pair, prompt, max_new_tokens=12)
    assert drafted.tokens == specdec.autoregress(pair, prompt, max_new_tokens=12).tokens
    drafter.network.d2t.zero_()
    drafter.refresh()
    assert drafter.target_id.tolist() == list(range(10))


@torch.inference_mode()
def test_a_head_that_was_replaced_is_the_drafters_too():
    target = Target(random_target(VOCAB, hidden=WIDTH, layers=2))
    drafter = EagleDrafter(random_network(FIRST), target)
    target.model.lm_head = torch.nn.Linear(WIDTH, VOCAB)
    target.refresh()
    drafter.refresh()
    states = torch.randn(3, WIDTH)
    assert torch.equal(drafter.network.head(states), target.model.lm_head(states))


@pytest.mark.parametrize("name", ["medusa, ours", "hydra"])
def test_the_text_of_heads_is_the_targets_own_and_replays(name, target, home):
    pair = Pair(target, drafter_of(HEADS[name], target), name="heads")
    shape = StaticShape([(0,), (1,), (0, 0), (1, 0), (2,)])
    policies = {"tree": Static(10, 4, 3), "static": specdec.Static(shape=shape)}
    prompts = [PROMPT, PROMPT[:3]]
    assert audit(pair, prompts, policies, max_new_tokens=16, progress=False).passed
    settings = {"max_new_tokens": 12, "top_ks": (3,), "trees": (3,), "progress": False}
    pytest.raises(SpecdecError, record, pair, {"own": prompts}, depth=3, **settings).match(
        "no deeper than depth 2"
    )
    tree = Static(8, 2, 3)
    replayed = replay(
        record(pair, {"own": prompts}, depth=2, **settings),
        tree,
        profile("roofline-a100-llama-8b-eager"),
    )
    live = [len(specdec.decode(pair, prompt, tree, max_new_tokens=12).rows) for prompt in prompts]
    assert replayed.table["cycles"].tolist() == live


OFFICIAL_NAMES = {
    "medusa": {"2.0.linear.weight", "2.0.linear.bias", "2.1.weight"},
    "medusa, ours": {"2.0.linear.weight", "lm_head.weight", "d2t", "t2d"},
    "hydra": {"hydra_mlp.2.0.res_connection.bias", "hydra_lm_head.2.bias"},
    "hydra, ours": {"hydra_mlp.2.0.linear.bias", "lm_head.weight"},
}


@pytest.mark.parametrize("name", HEADS)
def test_files_of_heads_are_read_again_and_hold_the_official_names(name, target, tmp_path):
    network = random_network(HEADS[name])
    folder = save_heads(network, tmp_path)
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    assert set(tensors) >= OFFICIAL_NAMES[name]
    assert not [part for part in tensors if part.startswith(("first", "lm_heads"))]
    assert_same(read_heads(folder, target), network)
    # as their authors published them
    file.unlink()
    unread = {"input_embed_fn.weight": torch.ones(2)}
    torch.save({**tensors, **unread}, file.with_suffix(".pt"))
    assert_same(load_heads(folder, target).network, network)


def assert_same(left, right):
    assert left.config == right.config
    for name, value in right.state_dict().items():
        assert torch.equal(value, left.state_dict()[name])


def test_small_models_are_lossless_and_bad_ones_get_one_sentence(tmp_path):
    target = Target(random_target(24, seed=3))
    windowed().save_pretrained(tmp_path)
    pair = Pair(target, load_small_lm(tmp_path, target), name="lm")
    policies = {"chain": Static(5, 3, 1), "beam": Static(10, 2, 3)}
    assert audit(pair, [PROMPT, PROMPT[:1]], policies, 14, progress=False).passed
    pytest.raises(SpecdecError, SmallLM, windowed(30), target).match("knows 30 tokens")


@pytest.mark.parametrize("begin", [None, 7])
def test_beyond_a_drafters_context_the_text_goes_on_plainly(begin, target):
    sizes = SIZES | {"vocab_size": VOCAB, "bos_token_id": begin, "max_position_embeddings": 20}
    pair = Pair(target, SmallLM(build(LlamaConfig, sizes), target), name="lm")
    long = PROMPT * 3
    settings = {"max_new_tokens": 16, "stop_tokens": ()}
    outs = decode_many(pair, [PROMPT, long], Static(9, 3, 3), **settings)
    for prompt, out in zip((PROMPT, long), outs, strict=True):
        assert out.tokens == specdec.autoregress(pair, prompt, **settings).tokens
    rows = outs[0].cycles
    within = rows["context_tok"] + 2 <= 20
    assert within.any() and (rows["draft_calls"] > 0).tolist() == within.tolist()
    assert not outs[1].cycles["draft_calls"].any()
    # recordings would draft beyond it
    session = pair.drafter.session(40, 9)
    pytest.raises(SpecdecError, session.root, torch.tensor(long), None, 3).match("ends at 20")
