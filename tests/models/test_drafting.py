"""Drafters against their equations written out, without cache, tree or packing; files of heads."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from fakes.pairs import random_network, random_target
from fakes.reference import assert_drafted
from fakes.slow_layer import attention, rms, slow_children
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, MistralForCausalLM

import specdec
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.costs.profiles import profile
from specdec.errors import SpecdecError
from specdec.evaluation.lossless import audit
from specdec.models.eagle_drafter import EagleDrafter
from specdec.models.eagle_network import EagleConfig
from specdec.models.heads import (
    HeadsConfig,
    HydraDrafter,
    MedusaDrafter,
    load_heads,
    read_heads,
    save_heads,
)
from specdec.models.small_lm import SmallLM, load_small_lm
from specdec.models.target import Target
from specdec.replays.record import record
from specdec.replays.replay import replay

from workbook.medusa_tree import tree_from_table

VOCAB, WIDTH, LAYERS = 24, 32, 8
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
EAGLE = EagleConfig(WIDTH, 48, 4, 2, VOCAB, VOCAB, WIDTH)
FIRST = dict(generation=1, num_taps=1, fc_bias=True)
READINGS = {
    "official": {},
    "narrow, own embedding": dict(hidden_size=16, own_embedding=True),
    "reduced vocabulary": dict(draft_vocab_size=10),
    "speculators' residual": dict(norm_before_residual=True),
    "normed output fed back": dict(norm_output=True),
    "a norm per tap": dict(fc_norm="each"),
    "one norm over all taps": dict(fc_norm="joint"),
    "biases": dict(attention_bias=True, fc_bias=True),
    "query and key norms": dict(query_key_norm=True),
    "another rope base": dict(rope_theta=300.0),
    "wide heads": dict(head_dim=16),
    "other taps": dict(taps=(1, 3, 7)),
    "eagle-1": FIRST,
    "eagle-1, reduced vocabulary": dict(FIRST, draft_vocab_size=10),
    "griffin": dict(FIRST, griffin=True),
}
LAYER = EagleConfig(
    WIDTH,
    64,
    4,
    2,
    VOCAB,
    VOCAB,
    WIDTH,
    rms_norm_eps=1e-6,
    generation=1,
    num_taps=1,
    taps=(LAYERS,),
)
MEDUSA = HeadsConfig(WIDTH, VOCAB, VOCAB, num_heads=3, taps=(LAYERS,), projections="each")
KINDS = {
    "medusa, first files": MEDUSA,
    "medusa, version 2": replace(MEDUSA, projections="target", num_layers=2),
    "medusa, shared": replace(MEDUSA, projections="shared", draft_vocab_size=10),
    "hydra": replace(MEDUSA, path="state", head_bias=True),
    "hydra, shared": replace(MEDUSA, path="state", projections="shared", draft_vocab_size=10),
    "hydra++": replace(MEDUSA, path="layer", layer=LAYER, num_layers=3, head_bias=True),
}


@pytest.fixture(scope="module")
def target():
    return Target(random_target(VOCAB, hidden=WIDTH, seed=3))


def drafter_of(config, target: Target):
    kind = (
        EagleDrafter
        if isinstance(config, EagleConfig)
        else HydraDrafter
        if config.path
        else MedusaDrafter
    )
    drafter = kind(random_network(config, 5), target)
    target.taps = drafter.taps
    if drafter.target_id is not None:
        assert drafter.target_id.tolist() == list(range(3, 23, 2))
    return drafter


def children_of_heads(drafter, ids, states, path):
    """Log-probabilities after `path`. states [T - 1, H]: the target's last, before the root."""
    network, target, head = drafter.network, drafter.target, len(path)
    config = network.config
    if config.path == "layer":
        layer = network.prefix.midlayer
        attended = attention(network.prefix, rms(states, layer.input_layernorm.weight))
        x = states + attended @ layer.self_attn.o_proj.weight.T
        inner, mlp = rms(x, layer.post_attention_layernorm.weight), layer.mlp
        inner = F.silu(inner @ mlp.gate_proj.weight.T) * (inner @ mlp.up_proj.weight.T)
        states = rms(x + inner @ mlp.down_proj.weight.T, network.prefix.norm.weight)
    x = states[-1]
    if config.path:
        x = torch.cat([x, *target.embedding.weight[[int(ids[-1]), *path]]])
    for number in range(config.num_layers):
        block = network.further[head] if number and config.path else network.first[head]
        again = (
            x
            if block.res_connection is None
            else block.res_connection.weight @ x + block.res_connection.bias
        )
        x = again + F.silu(block.linear.weight @ x + block.linear.bias)
    if config.projections == "target":
        return target.model.lm_head(x).log_softmax(-1)
    own = network.lm_heads[head] if config.projections == "each" else network.lm_head
    return (own.weight @ x + (own.bias if config.head_bias else 0)).log_softmax(-1)


def windowed(vocabulary: int = 24):
    """A model that sees the five newest tokens only."""
    torch.manual_seed(4)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    ids = dict(vocab_size=vocabulary, bos_token_id=7, eos_token_id=None, pad_token_id=None)
    config = MistralConfig(
        **sizes, **ids, num_key_value_heads=2, sliding_window=5, initializer_range=0.5
    )
    return MistralForCausalLM(config).eval()


def children_of_lm(
    drafter, ids, features, path
):  # the begin token stands where the text's first would
    ids = torch.tensor([[*drafter.begin, *ids[1:].tolist(), *path]])
    return drafter.network(ids).logits[0, -1].log_softmax(-1)


# name: how it is made of a target, the slow way, a tree, how many nodes are looked at. That is two
# cycles at least, since the second reads what the first left in the cache.
CASES = {}
for name, reading in READINGS.items():
    made = functools.partial(drafter_of, replace(EAGLE, **reading))
    CASES[name] = made, slow_children, Static(36, 2, 4), range(18, 30)
for name, config in KINDS.items():  # the tree is deeper than there are heads
    CASES[name] = (
        functools.partial(drafter_of, config),
        children_of_heads,
        Static(30, 5, 3),
        range(14, 20),
    )
for name, model in {
    "llama": random_target(24, hidden=16, layers=2, seed=8),
    "window": windowed(),
}.items():
    CASES[f"lm, {name}"] = (
        functools.partial(SmallLM, model),
        children_of_lm,
        Static(31, 3, 3),
        range(20, 26),
    )


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_drafted_trees_equal_the_slow_way(name, target):
    make, children, tree, nodes = CASES[name]
    drafter = make(target)

    def slow(ids):
        hidden = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        features = torch.cat([hidden[tap][0, :-1] for tap in drafter.taps or (LAYERS,)], -1)
        return lambda path: children(drafter, torch.tensor(ids), features, path)

    seen = assert_drafted(Pair(target, drafter), PROMPT, tree, slow, nodes)
    assert name not in KINDS or set(seen) == {(2, 3)}


@torch.inference_mode()
def test_a_head_that_was_replaced_is_the_drafters_too():
    target = Target(random_target(VOCAB, hidden=WIDTH, layers=2))
    drafter = EagleDrafter(random_network(replace(EAGLE, generation=1, num_taps=1)), target)
    target.model.lm_head = torch.nn.Linear(WIDTH, VOCAB)
    target.refresh()
    drafter.refresh()
    states = torch.randn(3, WIDTH)
    assert torch.equal(drafter.head(states), target.model.lm_head(states))


@pytest.mark.parametrize("name", ["medusa, shared", "hydra++"])
def test_the_text_is_the_targets_own_and_replays(name, target, home):
    pair = Pair(target, drafter_of(KINDS[name], target), name="heads")
    table = [[0.5, 0.3, 0.1], [0.4, 0.2], [0.3]]
    policies = {"tree": Static(10, 4, 3), "static": specdec.Static(shape=tree_from_table(table, 5))}
    found = audit(pair, [PROMPT, PROMPT[:3]], policies, max_new_tokens=16, progress=False)
    assert found.passed
    settings = dict(max_new_tokens=12, top_ks=(3,), trees=(3,), progress=False)
    pytest.raises(SpecdecError, record, pair, {"own": [PROMPT]}, depth=3, **settings).match(
        "no deeper than depth 2"
    )
    trace = record(pair, {"own": [PROMPT, PROMPT[:3]]}, depth=2, **settings)
    tree = Static(8, 2, 3)
    live = [
        specdec.decode(pair, prompt, tree, max_new_tokens=12) for prompt in (PROMPT, PROMPT[:3])
    ]
    replayed = replay(trace, tree, profile("roofline-a100-llama-8b-eager"))
    assert replayed.table["cycles"].tolist() == [len(out.rows) for out in live]


def test_files_are_read_again_and_hold_the_official_names(target, tmp_path):
    for name, config in KINDS.items():
        network = random_network(config)
        folder = save_heads(network, tmp_path / name)
        read = read_heads(folder, target)
        assert read.config == config
        assert_same(read, network)
        assert type(load_heads(folder, target)) is (HydraDrafter if config.path else MedusaDrafter)
    network = random_network(replace(MEDUSA, num_layers=2))
    names = set(load_file(save_heads(network, tmp_path / "a") / "medusa_lm_head.safetensors"))
    own = {
        f"{head}.{layer}.linear.{part}"
        for head in range(3)
        for layer in range(2)
        for part in ("weight", "bias")
    }
    assert names == own | {f"{head}.2.weight" for head in range(3)}
    second = replace(MEDUSA, projections="target", num_layers=2)
    assert (
        set(
            load_file(
                save_heads(random_network(second), tmp_path / "b") / "medusa_lm_head.safetensors"
            )
        )
        == own
    )

    weights = load_file(tmp_path / "a" / "medusa_lm_head.safetensors")
    whole = {f"medusa_head.{name}": value for name, value in weights.items()} | {
        "model.norm.weight": torch.ones(3)
    }
    for before, name, tensors in (
        ("medusa_lm_head.safetensors", "medusa_lm_head.pt", weights),
        ("medusa_lm_head.pt", "pytorch_model.bin", whole),
    ):
        (tmp_path / "a" / before).unlink()
        torch.save(tensors, tmp_path / "a" / name)
        assert_same(read_heads(tmp_path / "a", target), network)

    network = random_network(KINDS["hydra++"])
    folder = save_heads(network, tmp_path / "c")
    weights = load_file(folder / "hydra_lm_head.safetensors")
    blocks = [
        f"{block}.{part}" for block in ("linear", "res_connection") for part in ("weight", "bias")
    ]
    own = {f"hydra_mlp.{head}.1.{name}" for head in range(3) for name in blocks}
    own |= {
        f"hydra_mlp.{head}.{at}.linear.{part}"
        for head in range(3)
        for at in (3, 5)
        for part in ("weight", "bias")
    }
    own |= {f"hydra_lm_head.{head}.1.{part}" for head in range(3) for part in ("weight", "bias")}
    assert own == {name for name in weights if not name.startswith("prefix")}
    assert weights["hydra_mlp.2.1.linear.weight"].shape == (WIDTH, 4 * WIDTH)
    assert {
        f"prefix_embeding_layer.{name}.weight" for name in ("layers.0.self_attn.q_proj", "norm")
    } <= set(weights)
    (folder / "hydra_lm_head.safetensors").unlink()
    unread = {
        "prefix_embeding_layer.embed_tokens.weight": torch.ones(2),
        "input_embed_fn.weight": torch.ones(2),
    }
    torch.save(weights | unread, folder / "hydra_lm_head.pt")
    assert_same(read_heads(folder, target), network)


def assert_same(left, right):
    assert all(
        torch.equal(value, right.state_dict()[name]) for name, value in left.state_dict().items()
    )


def test_bad_files_get_one_sentence(target, tmp_path):
    def folder(change, config=MEDUSA):
        place = save_heads(random_network(config), tmp_path / str(len(list(tmp_path.iterdir()))))
        tensors = load_file(place / "medusa_lm_head.safetensors")
        change(tensors)
        save_file(tensors, place / "medusa_lm_head.safetensors")
        return place

    shared, two, first = KINDS["medusa, shared"], replace(MEDUSA, num_layers=2), "0.0.linear.weight"
    for words, *change in (
        ("lacks first.1.linear.bias|lacks 1", lambda tensors: tensors.pop("1.0.linear.bias")),
        ("holds strange", lambda tensors: tensors.update(strange=torch.ones(1))),
        (r"shape \(5, 5\)", lambda tensors: tensors.update({first: torch.ones(5, 5)})),
        ("not finite", lambda tensors: tensors[first].fill_(float("nan"))),
        (
            "no heads are numbered",
            lambda tensors: [tensors.pop(name) for name in (first, "0.0.linear.bias")],
        ),
        ("vocabulary map d2t is wrong", lambda tensors: tensors["d2t"].add_(30), shared),
        (
            "one block is applied several times",
            lambda tensors: tensors["0.1.linear.weight"].add_(1),
            two,
        ),
    ):
        pytest.raises(SpecdecError, read_heads, folder(*change), target).match(words)
    fewer = folder(
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("2.")]
    )
    with pytest.warns(UserWarning, match="counts 3 heads, the weights 2"):
        assert read_heads(fewer, target).config.num_heads == 2
    pytest.raises(SpecdecError, random_network(MEDUSA).state, torch.zeros(1, WIDTH), 3).match(
        "drafts no deeper"
    )


def test_a_static_tree_holds_the_likeliest_nodes():
    table = [[0.6, 0.2, 0.05], [0.5, 0.3], [0.4, 0.1]]
    chances = {}
    for length in (1, 2, 3):
        for path in itertools.product(*(range(len(row)) for row in table[:length])):
            chances[path] = float(
                torch.tensor([table[level][rank] for level, rank in enumerate(path)])
                .double()
                .prod()
            )
    for nodes in (1, 4, 9, len(chances), 100):
        best = sorted(chances, key=lambda path: -chances[path])[:nodes]
        assert set(tree_from_table(table, nodes).choices) == set(best)
    pytest.raises(SpecdecError, tree_from_table, table, 0).match("at least one node")


def test_chains_and_beams_are_lossless_and_bad_models_get_one_sentence(tmp_path):
    target, model = Target(random_target(24, seed=3)), windowed()
    model.save_pretrained(tmp_path)
    pair = Pair(target, load_small_lm(tmp_path, target), name="lm")
    found = audit(
        pair,
        [PROMPT, PROMPT[:1]],
        {"chain": Static(5, 3, 1), "beam": Static(10, 2, 3)},
        14,
        progress=False,
    )
    assert found.passed
    assert specdec.load_drafter(f"lm:{tmp_path}", target).model.vocab_size == 24
    target = Target(random_target(24, seed=3))
    pytest.raises(SpecdecError, SmallLM, windowed(30), target).match(
        "knows 30 tokens, the target 24"
    )
    (tmp_path / "config.json").write_text("{}")
    pytest.raises(SpecdecError, load_small_lm, tmp_path, target).match(
        "cannot be loaded as a transformers causal LM"
    )
    short = random_target(24, hidden=16, layers=2, limit=10)
    with pytest.raises(SpecdecError, match="context ends at 10"):
        specdec.decode(
            Pair(target, SmallLM(short, target)), PROMPT, Static(4, 2, 1), max_new_tokens=8
        )
