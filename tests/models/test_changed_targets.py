"""What somebody does to a target after its first use is seen, or refused if it is packed."""

import copy

import pytest
import torch
from torch import nn

import specdec
from specdec.errors import SpecdecError

PROMPT = list(range(5, 25))


class Adapter(nn.Module):  # low-rank change beside a layer, as adapters are injected
    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(3)
        self.layer = layer
        self.down = nn.Parameter(torch.randn(layer.out_features, layer.in_features) * 0.2)

    def forward(self, x):
        return self.layer(x) + x @ self.down.T


def adapters(model, *names):
    for layer in model.model.layers:
        for name in names:
            owner = layer.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], Adapter(layer.get_submodule(name)))


def noise(like):
    return 0.3 * torch.randn(like.shape, generator=torch.Generator().manual_seed(2)) * like.std()


def loaded(model):
    model.load_state_dict(
        {name: value + noise(value.float()) for name, value in model.state_dict().items()}
    )


def merged(model):
    """As adapters are merged: PyTorch counts no change of what is reached through `.data`."""
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data += noise(layer.self_attn.q_proj.weight)
        layer.mlp.down_proj.weight.data += noise(layer.mlp.down_proj.weight)


def norms(model):
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 30.0


def layers(model):
    model.model.layers = nn.ModuleList(
        [copy.deepcopy(model.model.layers[0]), *model.model.layers[1:]]
    )
    loaded(model.model.layers[0])


def hooked(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda module, args, output: output * 1.5)


def replaced(model):
    for mlp in (layer.mlp for layer in model.model.layers):
        mlp.forward = lambda x, mlp=mlp: mlp.down_proj(3 * mlp.act_fn(mlp.gate_proj(x)))


def scaled(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 2


def embedded(model):
    words = copy.deepcopy(model.get_input_embeddings())
    words.weight.add_(4 * noise(words.weight))
    model.set_input_embeddings(words)


CHANGES = {
    "an adapter of an MLP": lambda model: adapters(model, "mlp.down_proj"),
    "adapters of attention": lambda model: adapters(model, "self_attn.q_proj", "self_attn.v_proj"),
    "an adapter of the head": lambda model: setattr(model, "lm_head", Adapter(model.lm_head)),
    "bfloat16": lambda model: model.bfloat16(),
    **{
        change.__name__: change
        for change in (loaded, merged, norms, layers, hooked, replaced, scaled, embedded)
    },
}


def plain_text(pair):
    ids = torch.tensor([PROMPT])
    settings = dict(max_new_tokens=16, do_sample=False, eos_token_id=None)
    return pair.target.model.generate(ids, **settings)[0, 20:].tolist()


# what a packed model refuses, in one sentence
REFUSED = ("bfloat16", "loaded", "layers")


def test_the_copies_of_weights_that_packing_makes_cannot_be_changed_quietly():
    for change in REFUSED:
        model = specdec.load_pair("tiny", drafter="suffix", dtype="float32").target.model
        with torch.no_grad(), pytest.raises(SpecdecError, match="pack=False"):
            CHANGES[change](model)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_the_text_is_that_of_the_model_as_it_is(change, packed):
    if packed and change in REFUSED:
        return
    pair = specdec.load_pair("tiny", drafter="suffix", dtype="float32", pack=packed)
    settings = dict(max_new_tokens=16, stop_tokens=())
    before = specdec.decode(pair, PROMPT, **settings).tokens
    assert before == plain_text(pair)
    with torch.no_grad():
        CHANGES[change](pair.target.model)
    many = specdec.decode_many(pair, [PROMPT, PROMPT[:7]], specdec.Static(6, 2, 2), **settings)
    now = specdec.autoregress(pair, PROMPT, **settings).tokens
    assert many[0].tokens == now
    assert specdec.decode(pair, PROMPT, specdec.Static(12, 3, 4), **settings).tokens == now
    if change == "bfloat16":
        assert pair.target.dtype == torch.bfloat16
    else:
        assert now == plain_text(pair) != before
