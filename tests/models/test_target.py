"""Every family: a tree gives each node what the plain model gives its path; others are refused."""

import pytest
import torch
import transformers as hf
from fakes import families
from fakes.families import tokens as random_tokens
from fakes.refusals import refusal
from torch import nn

import specdec
from specdec.core.decode import autoregress, decode, stream
from specdec.core.pair import Pair
from specdec.core.policy import RandomPolicy, Static
from specdec.core.tree_config import TreeConfig
from specdec.core.verification import Picker, text_seed
from specdec.errors import SpecdecError
from specdec.models.target import Target, decoder_layers, position_limit

F32, BF16 = torch.float32, torch.bfloat16
# Error of a node: root mean square over the vocabulary, in standard deviations of the logits.
# Measured: float32 at most 4e-6 at any node; bfloat16 at most 0.02 on average over the nodes, since
# rounding may send one node of a mixture to another expert. A causal mask, consecutive positions or
# rows that are not gathered cost 0.28 or more.
MOST_F32, MOST_MEAN_BF16 = 5e-5, 0.06
ROUTED = {"phimoe-window"}  # a mixture whose experts sit at near-ties
STREAMED = {"gemma3n-window"}  # its layers carry several hidden states per token
LIMITS = TreeConfig(total_tokens=24, depth=4, top_k=4)


def rounds(target: Target):
    """Prefill four tokens (fewer than the window), then trees whose longest path is kept.

    Returns (context, tree, rows) of each. The context leaves the sliding window far behind.
    """
    context = random_tokens(4, seed=1)
    results = []
    with target.inference():
        cache = target.new_cache(64)
        target.forward(context, cache, last_only=True)
        for number in range(3):
            tree = families.random_tree(number)
            start = len(cache)
            rows = target.forward(tree.token, cache, tree.depth, tree.ancestors)
            results.append((context, tree, rows))
            cache.keep(start, [start + node for node in families.LONGEST_PATH])
            context = torch.cat((context, tree.token[families.LONGEST_PATH]))
    return results


def node_errors(model, results) -> torch.Tensor:
    """[rounds, nodes]: distance of each node's logits from the plain model's on its path."""
    errors = []
    for context, tree, rows in results:
        expected, _ = families.alone(model, context, tree)
        errors.append((rows.logits.float() - expected).square().mean(1).sqrt() / expected.std())
    return torch.stack(errors)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_tree_gives_every_node_what_its_own_path_gives(name):
    model = families.model_of(name)
    layers = model.config.num_hidden_layers
    target = Target(model, taps=() if name in STREAMED else (1, layers - 1, layers))
    results = rounds(target)
    assert node_errors(model, results).max() < MOST_F32
    for context, tree, rows in results:
        expected, features = families.alone(model, context, tree, target.taps)
        assert torch.equal(rows.logits.argmax(-1), expected.argmax(-1))
        if target.taps:
            torch.testing.assert_close(
                rows.features, features, atol=1e-4 * float(features.std()), rtol=0
            )
    if name not in ROUTED:
        model = families.model_of(name, BF16)
        assert node_errors(model, rounds(Target(model))).mean() < MOST_MEAN_BF16


def test_layers_are_those_of_the_text_decoder():
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {**families.FAMILIES["llama"][1], "model_type": "llama"}
    vision = {"model_type": "clip_vision_model", "intermediate_size": 48, "image_size": 8}
    vision = {**sizes, **vision, "patch_size": 4}
    config = hf.LlavaConfig(text_config=text, vision_config=vision, image_token_index=2)
    model = hf.LlavaForConditionalGeneration(config).eval()
    assert decoder_layers(model, 4) is model.get_decoder().layers
    target = Target(model, taps=(1, 4))
    with target.inference():
        assert target.forward(random_tokens(5, 0), target.new_cache(8)).features.shape == (5, 64)
    with target.inference(taps=False):
        assert target.forward(random_tokens(5, 0), target.new_cache(8)).features is None


def oracle_pair(model, prompt, count: int, picker: Picker) -> tuple[Pair, list[int]]:
    """A pair whose drafter mostly knows the text, and that text (`count` tokens and a few more)."""
    truth = families.plain_text(model, prompt, count + 8, picker)
    drafter = families.OracleDrafter(prompt.tolist() + truth)
    return Pair(Target(model), drafter, name="oracle"), truth[:count]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_text_is_identical_to_the_plain_models(name, temperature):
    model, prompt, count = families.model_of(name), random_tokens(4, seed=5), 24
    picker = Picker.from_settings(temperature, seed=text_seed(7, prompt.tolist()))
    pair, truth = oracle_pair(model, prompt, count, picker)
    settings = {"max_new_tokens": count, "temperature": temperature, "seed": 7, "stop_tokens": ()}
    anything = decode(pair, prompt, RandomPolicy(LIMITS, seed=1), **settings)
    always = decode(pair, prompt, Static(24, 4, 4), **settings)
    assert anything.tokens == always.tokens == truth == autoregress(pair, prompt, **settings).tokens
    # paths of several tokens, and none
    accepted = [*anything.cycles.accepted_tok, *always.cycles.accepted_tok]
    assert max(accepted) >= 2 and min(accepted) == 0
    assert len(set(truth)) > 2


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24}
LONG |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
ENDS = [
    ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 24}),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 24}),
    ("gpt2", {"n_positions": 24}),
]


@pytest.mark.parametrize(("name", "changes"), ENDS)
def test_text_is_right_up_to_the_last_position_and_refused_beyond(name, changes):
    family, settings = families.FAMILIES[name]
    model, prompt = families.build(family, {**settings, **changes}), random_tokens(5, seed=6)
    assert position_limit(model.config) == 24
    count = 24 - len(prompt)
    truth = families.plain_text(model, prompt, count, Picker())
    drafter = families.OracleDrafter(prompt.tolist() + truth + [2] * 9)
    pair = Pair(Target(model), drafter, name="oracle")
    ends = {"max_new_tokens": count, "stop_tokens": ()}
    assert decode(pair, prompt, RandomPolicy(LIMITS, seed=2), **ends).tokens == truth
    assert autoregress(pair, prompt, **ends).tokens == truth
    for run in (decode, autoregress):
        with pytest.raises(SpecdecError, match="context ends at 24"):
            run(pair, prompt, max_new_tokens=count + 1)


LIKE_LLAMA = families.FAMILIES["llama"][1]
SMALL = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "bos_token_id": 0}
MOE = {"num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "head_dim": 8}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
NEO = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "attention_types": [[["global"], 4]]}
LLAMA_4 = {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2}
# name: (config class, settings, words of the refusal, model class where it is no causal LM)
REFUSED = {
    "bloom": (hf.BloomConfig, {"hidden_size": 32, "n_layer": 4, "n_head": 4}, "tree"),
    "mamba": (hf.MambaConfig, {"hidden_size": 32, "num_hidden_layers": 4}, "linear_attention"),
    "qwen3-next": (hf.Qwen3NextConfig, LIKE_LLAMA | LINEAR | MOE, "linear_attention"),
    "llama4": (hf.Llama4TextConfig, LIKE_LLAMA | LLAMA_4, "chunked", hf.Llama4ForCausalLM),
    "no head": (hf.LlamaConfig, LIKE_LLAMA, "language-model head", hf.LlamaModel),
    "t5": (hf.T5Config, {"d_model": 32, "d_ff": 48}, "decoder", hf.T5ForConditionalGeneration),
    "bert": (hf.BertConfig, SMALL, "does not obey a tree mask", hf.BertLMHeadModel),
    "gpt-neo": (hf.GPTNeoConfig, NEO, "window of its own kind"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_cannot_carry_a_tree_are_refused(name):
    kind, settings, reason, *model_class = REFUSED[name]
    config = kind(**{"vocab_size": families.VOCAB, **settings})
    build = model_class[0] if model_class else hf.AutoModelForCausalLM.from_config
    model = build(config).eval()
    families.spread(model, seed=0)
    before = families.state_of(model)
    sentence = refusal(lambda: Target(model).inference().__enter__())
    assert reason in sentence and type(model).__name__ in sentence
    assert families.state_of(model) == before


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_probe_notices_what_is_ignored_and_what_is_not_finite(dtype, monkeypatch):
    model = families.build(*families.FAMILIES["llama"]).to(dtype)
    forward = model.forward
    for ignored in ({"attention_mask": None}, {"position_ids": None}):
        monkeypatch.setattr(model, "forward", lambda ignored=ignored, **i: forward(**i | ignored))
        assert "does not obey" in refusal(lambda: Target(model).inference().__enter__())
    monkeypatch.undo()
    model.model.norm.weight.data[0] = torch.nan
    assert "not finite" in refusal(lambda: Target(model).inference().__enter__())


class Breaks(RandomPolicy):
    def answer(self, question):
        raise RuntimeError("broken")


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_the_model_comes_back_as_it_was(name):
    model, prompt = families.build(*families.FAMILIES[name]), random_tokens(6, seed=8)
    model.train()
    model.get_decoder().layers[1].eval()  # frozen by its owner
    before = families.state_of(model)
    weights = [weight.clone() for weight in model.parameters()]
    pair, _ = oracle_pair(model.eval(), prompt, 20, Picker())
    model.train()
    model.get_decoder().layers[1].eval()
    pair.target.taps = (1, 2)
    decode(pair, prompt, RandomPolicy(LIMITS), max_new_tokens=20)
    assert families.state_of(model) == before
    pytest.raises(RuntimeError, decode, pair, prompt, Breaks(LIMITS)).match("broken")
    assert families.state_of(model) == before
    running = stream(pair, prompt, RandomPolicy(LIMITS), max_new_tokens=20)
    next(running)
    assert families.state_of(model) == before, "between two cycles as well"
    del running
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    # what was computed under inference mode must not reach autograd
    ids = random_tokens(40, seed=9)[None]
    model(ids, labels=ids).loss.backward()


def compiled(model):
    return torch.compile(model, backend="eager")


def adapted(model):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM")).eval()
    families.spread(wrapped.base_model, seed=4)
    return wrapped


@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled, adapted])
def test_what_is_wrapped_tells_the_text_of_the_model_inside(wrap):
    model, prompt = families.build(*families.FAMILIES["llama"]), random_tokens(9, seed=1)
    wrapped = wrap(model)
    expected = families.plain_text(model, prompt, 12, Picker())
    pair = specdec.load_pair(target=wrapped, drafter="suffix")
    assert pair.target.model is model
    ends = {"max_new_tokens": 12, "stop_tokens": ()}
    assert decode(pair, prompt, Static(6, 2, 2), **ends).tokens == expected
    layer = model.model.layers[0]
    assert "no transformers causal LM" in refusal(specdec.load_pair, target=layer)
