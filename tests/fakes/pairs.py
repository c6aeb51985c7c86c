"""Small pairs with random weights for tests of decoding.

Two drafters: EAGLE's network with random weights (it hits now and then, the vocabulary being
small), and a table of bigrams read off a target whose layers say little (it hits often, so that
long paths are accepted). Nothing is trained.
"""

import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.core.pair import Pair
from specdec.core.protocols import Drafter, DraftSession
from specdec.models.eagle_drafter import EagleDrafter
from specdec.models.eagle_network import EagleConfig, network_of
from specdec.models.heads import HeadsConfig, HeadsNetwork
from specdec.models.target import Target


def spread(module: torch.nn.Module, seed: int, scale: float = 1.0) -> None:
    """Normal weights with the standard deviation that keeps activations at unit size, times `scale`
    for the heads.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim == 2:
                wide = 1.0 if "embed" in name else weight.shape[1] ** -0.5
                size = wide * (scale if "lm_head" in name else 1.0)
                weight.copy_(torch.randn(weight.shape, generator=generator) * size)


def random_network(config: EagleConfig | HeadsConfig, seed: int = 0):
    """Weights everywhere: norms and biases that do nothing would hide where they are applied.

    Of a reduced vocabulary every second token is drafted, from number 3 on.
    """
    network = HeadsNetwork(config) if isinstance(config, HeadsConfig) else network_of(config)
    spread(network, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim != 2:
                weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5 * ("norm" in name))
        if config.is_reduced:
            numbers = torch.arange(config.draft_vocab_size)
            network.d2t.copy_(numbers + 3)
            network.t2d.zero_()[2 * numbers + 3] = True
    return network.requires_grad_(False)


def random_target(
    vocab_size=24, hidden=32, layers=8, seed=0, limit=512, dtype=torch.float32, say=1.0
) -> LlamaForCausalLM:
    """A Llama whose next-token distributions are neither flat nor point masses. say: how much the
    context matters.
    """
    sizes = dict(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
    )
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=limit)
    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    model = LlamaForCausalLM(LlamaConfig(**sizes, **no_ids)).eval()
    spread(model, seed, scale=2.0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= say
            layer.mlp.down_proj.weight *= say
    return model.to(dtype)


def random_drafter(
    target: Target, draft_vocab_size=None, hidden=None, seed=1, **fields
) -> EagleDrafter:
    vocab_size, hidden = target.vocab_size, hidden or target.hidden_size
    shape = hidden, 2 * hidden, 4, 2, vocab_size, draft_vocab_size or vocab_size, target.hidden_size
    config = EagleConfig(*shape, own_embedding=hidden != target.hidden_size, **fields)
    network = network_of(config)
    spread(network, seed)
    drafter = EagleDrafter(network, target)
    target.taps = drafter.taps
    return drafter


def random_pair(
    vocab_size=24, seed=0, dtype=torch.float32, drafter_fields=None, **target_fields
) -> Pair:
    """A fresh pair: a random target and a random EAGLE-3 drafter over all of its vocabulary."""
    target = Target(random_target(vocab_size, seed=seed, dtype=dtype, **target_fields))
    return Pair(
        target, random_drafter(target, seed=seed + 1, **(drafter_fields or {})), name="random"
    )


class BigramDrafter(Drafter, DraftSession):
    """Drafts from the target's own answers to single tokens: the whole drafting protocol in a few
    lines.
    """

    def __init__(self, target: Target):
        self.target = target
        with torch.inference_mode():
            logits = target.model(torch.arange(target.vocab_size)[:, None]).logits[:, 0]
        self.table = logits.float().log_softmax(-1)

    def session(self, context_tok: int, tree_tok: int) -> "BigramDrafter":
        return self

    def root(self, tokens, features, top_k):
        return self.expand(tokens[-1:], None, top_k)

    def expand(self, tokens, rows, top_k):
        best = self.table[tokens].topk(top_k)
        return best.indices, best.values


def bigram_pair(vocab_size=24, seed=0, dtype=torch.float32, say=0.25, **target_fields) -> Pair:
    """A random target of which a table of bigrams knows a good part."""
    target = Target(random_target(vocab_size, seed=seed, dtype=dtype, say=say, **target_fields))
    return Pair(target, BigramDrafter(target), name="bigrams")


@functools.cache
def shared_pair() -> Pair:
    """One random EAGLE-3 pair for all tests that leave it as it is."""
    return random_pair()


@functools.cache
def shared_bigrams() -> Pair:
    """One bigram pair for all tests that leave it as it is."""
    return bigram_pair()


def layer_fields(config: EagleConfig) -> dict:
    """What a drafter's config.json says of its layer."""
    names = "hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size"
    names = [*names.split(), "rms_norm_eps"]
    return {name: getattr(config, name) for name in names}
