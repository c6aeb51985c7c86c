"""Every family: a tree gives each node what the plain model gives its path, and nothing is left behind; others are refused."""

import copy

import pandas as pd
import pytest
import torch
import transformers as hf
from fakes import families
from fakes.families import tokens as random_tokens
from fakes.refusals import refusal

from specdec.core.decode import autoregress, decode, stream
from specdec.core.pair import Pair
from specdec.core.policy import Policy, RandomPolicy, Static
from specdec.core.tree_config import TreeConfig
from specdec.core.verification import Picker
from specdec.errors import SpecdecError
from specdec.models.families import decoder_layers, position_limit
from specdec.models.target import Rows, Target, TreeMask

F32, BF16 = torch.float32, torch.bfloat16
# Error of a node: root mean square over the vocabulary, in units of the logits' standard deviation. Measured over all
# families: float32 at most 4e-6 at any node; bfloat16 at most 0.02 on average over the nodes (up to 0.05 at one). On
# average rather than at most, since rounding may send one node of a mixture to another expert. Every planted fault costs
# 0.28 or more on average.
MOST_F32, MOST_MEAN_BF16, LEAST_FAULT = 5e-5, 0.06, 0.2
ROUTED = {"phimoe-window"}  # a mixture whose experts sit at near-ties

WINDOWED = {
    "gemma2",
    "gemma3",
    "gpt-oss",
    "cohere2",
    *(name for name in families.FAMILIES if "window" in name),
}
LAYERS = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
STREAMED = {"gemma3n-window"}  # its layers carry several hidden states per token


def rounds(target: Target, fault: str | None = None, count: int = 3):
    """Prefill four tokens (fewer than the window), then trees whose longest path is kept: (context, tree, rows) of each.

    The context crosses the sliding window inside the first tree and leaves it far behind.
    """
    context, seen = random_tokens(4, seed=1), []
    with target.inference():
        cache = target.new_cache(64)
        target.forward(context, cache, last_only=True)
        for number in range(count):
            tree, start = families.random_tree(number), len(cache)
            depth = torch.arange(len(tree)) if fault == "consecutive positions" else tree.depth
            ancestors = (
                torch.ones_like(tree.ancestors).tril() if fault == "causal mask" else tree.ancestors
            )
            seen.append((context, tree, target.forward(tree.token, cache, depth, ancestors)))
            if fault == "rows not gathered":
                cache.truncate(start + len(families.LONGEST_PATH))
            else:
                cache.keep(start, [start + node for node in families.LONGEST_PATH])
            context = torch.cat((context, tree.token[families.LONGEST_PATH]))
            assert len(cache) == len(context)
    return seen


def node_errors(model, seen) -> torch.Tensor:
    """[rounds, nodes]: distance of each node's logits from the plain model's on its path."""
    errors = []
    for context, tree, rows in seen:
        expected, _ = families.alone(model, context, tree)
        errors.append((rows.logits.float() - expected).square().mean(1).sqrt() / expected.std())
    return torch.stack(errors)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_a_tree_gives_every_node_what_its_own_path_gives_and_planted_faults_do_not(
    name, monkeypatch
):
    model = families.model_of(name)
    layers = model.config.num_hidden_layers
    target = Target(model, taps=() if name in STREAMED else (1, layers - 1, layers))
    seen = rounds(target)
    assert node_errors(model, seen).max() < MOST_F32
    for context, tree, rows in seen:
        expected, features = families.alone(model, context, tree, target.taps)
        assert torch.equal(rows.logits.argmax(-1), expected.argmax(-1))
        if target.taps:
            assert torch.allclose(
                rows.features, features, atol=1e-4 * float(features.std()), rtol=0
            )
    model = families.model_of(name, BF16)
    target, truth = Target(model), copy.deepcopy(model).float()
    seen = rounds(target)
    # Against the same weights in float32 we stray no further than the model by itself; the median, because an expert that is
    # chosen otherwise at a near-tie moves a few nodes by much.
    plain = [
        (context, tree, Rows(families.alone(model, context, tree)[0], None))
        for context, tree, _ in seen
    ]
    assert node_errors(truth, seen).median() <= 1.3 * node_errors(truth, plain).median()
    if name not in ROUTED:
        assert node_errors(model, seen).mean() < MOST_MEAN_BF16
    for fault in ("causal mask", "consecutive positions"):
        assert node_errors(model, rounds(target, fault, count=1)).mean() > LEAST_FAULT, fault
    after_gathering = node_errors(model, rounds(target, "rows not gathered", count=2))[1]
    assert after_gathering.mean() > LEAST_FAULT
    if name in WINDOWED:
        everything = TreeMask.visible
        monkeypatch.setattr(TreeMask, "visible", lambda state, window: everything(state, None))
        monkeypatch.setattr(TreeMask, "is_plain", lambda state, window: False)
        assert node_errors(model, rounds(target)).mean() > LEAST_FAULT


def test_layers_are_those_of_the_text_decoder():
    text = dict(families.FAMILIES["llama"][1], model_type="llama")
    vision = dict(model_type="clip_vision_model", intermediate_size=48, image_size=8, patch_size=4)
    config = hf.LlavaConfig(text_config=text, vision_config=LAYERS | vision, image_token_index=2)
    model = hf.LlavaForConditionalGeneration(config).eval()
    first_of_length = next(
        m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 4
    )
    assert decoder_layers(model, 4) is model.get_decoder().layers is not first_of_length
    target = Target(model, taps=(1, 4))
    with target.inference():
        assert target.forward(random_tokens(5, 0), target.new_cache(8)).features.shape == (5, 64)
    with target.inference(taps=False):
        assert target.forward(random_tokens(5, 0), target.new_cache(8)).features is None


def test_taps_outside_the_model_and_of_several_streams_of_states_are_refused():
    for name, tap, words in [
        *(("llama", tap, f"layer input {tap} cannot be tapped") for tap in (-1, 5)),
        *((name, 2, "no features can be tapped") for name in STREAMED),
    ]:
        target = Target(families.model_of(name), taps=(1, tap))
        before = families.state_of(target.model)
        with pytest.raises(SpecdecError, match=words), target.inference():
            target.forward(random_tokens(3, seed=0), target.new_cache(4))
        assert families.state_of(target.model) == before


def oracle_pair(model, prompt, count: int, picker: Picker, seed: int = 0) -> tuple[Pair, list[int]]:
    """A pair whose drafter mostly knows the text, and that text (`count` tokens and a few more)."""
    truth = families.plain_text(model, prompt, count + 8, picker)
    return Pair(
        Target(model), families.OracleDrafter(prompt.tolist() + truth, seed=seed), name="oracle"
    ), truth[:count]


LIMITS = TreeConfig(total_tokens=24, depth=4, top_k=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", families.FAMILIES)
def test_text_is_identical_to_the_plain_models(name, temperature):
    model, prompt, count = families.model_of(name), random_tokens(4, seed=5), 24
    pair, truth = oracle_pair(model, prompt, count, Picker.from_settings(temperature, seed=7))
    settings = dict(max_new_tokens=count, temperature=temperature, seed=7, stop_tokens=())
    anything = decode(pair, prompt, RandomPolicy(LIMITS, seed=1), **settings)
    always = decode(pair, prompt, Static(24, 4, 4), **settings)
    assert anything.tokens == always.tokens == truth == autoregress(pair, prompt, **settings).tokens
    accepted = pd.concat((anything.cycles, always.cycles)).accepted_tok
    assert accepted.max() >= 2 and accepted.min() == 0  # paths of several tokens, and none
    assert len(set(truth)) > 2  # more than a word repeated
    if temperature == 0:
        ids = model.generate(
            prompt[None],
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=[],
        )
        assert ids[0, len(prompt) :].tolist() == truth


DYNAMIC = dict(
    rope_type="dynamic", factor=4.0, rope_theta=1e4
)  # its boundary is max_position_embeddings
LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4)
LONG |= dict(original_max_position_embeddings=24)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", dict(rope_parameters=DYNAMIC, max_position_embeddings=24)),
        ("phi3", dict(rope_parameters=LONG, original_max_position_embeddings=24)),
        ("gpt2", dict(n_positions=24)),
        ("qwen3", dict(max_position_embeddings=24)),
    ],
)
def test_text_is_right_up_to_the_last_position_and_refused_beyond(name, changes):
    family, settings = families.FAMILIES[name]
    model, prompt = families.build(family, {**settings, **changes}), random_tokens(5, seed=6)
    assert position_limit(model.config) == 24
    count, picker = 24 - len(prompt), Picker()
    truth = families.plain_text(model, prompt, count, picker)
    pair = Pair(
        Target(model), families.OracleDrafter(prompt.tolist() + truth + [2] * 9), name="oracle"
    )
    for seed in range(3):
        out = decode(
            pair, prompt, RandomPolicy(LIMITS, seed=seed), max_new_tokens=count, stop_tokens=()
        )
        assert out.tokens == truth
    assert autoregress(pair, prompt, max_new_tokens=count, stop_tokens=()).tokens == truth
    for run in (decode, autoregress):
        with pytest.raises(SpecdecError, match=f"context ends at 24.*at most {count} tokens"):
            run(pair, prompt, max_new_tokens=count + 1)
    if "rope_parameters" in changes:  # a look across the boundary would change what is committed
        beyond = random_tokens(30, seed=6)[None]
        with torch.no_grad():
            logits = model(beyond[:, :24]).logits[0, -1]
            assert (model(beyond).logits[0, 23] - logits).abs().max() > 0.01 * logits.std()


class Breaks(Policy):  # at its question number `at`
    asks, plan, limits = frozenset({"extend", "size"}), TreeConfig(8, 2, 3), TreeConfig(8, 2, 3)

    def __init__(self, at: int):
        self.left = at

    def answer(self, question):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("broken")
        return True if question.kind == "extend" else question.largest


SMALL = LAYERS | dict(bos_token_id=0, eos_token_id=1)
LAYERS_4 = dict(hidden_size=32, num_layers=4, num_heads=4)
MAMBA = dict(mamba_d_state=4, mamba_dt_rank=4)
MOE = dict(num_experts=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
LINEAR = dict(
    linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8
)
LLAMA_4 = dict(head_dim=8, intermediate_size_mlp=48, num_local_experts=2)
LIKE_LLAMA = families.FAMILIES["llama"][1]
# name: (config class, settings, words of the refusal, model class where it is no causal LM)
REFUSED = {
    "bloom": (hf.BloomConfig, dict(hidden_size=32, n_layer=4, n_head=4), "ALiBi"),
    "mpt": (hf.MptConfig, dict(d_model=32, n_layers=4, n_heads=4, max_seq_len=64), "ALiBi"),
    "falcon-alibi": (hf.FalconConfig, SMALL | dict(alibi=True), "ALiBi"),
    "mamba": (
        hf.MambaConfig,
        dict(hidden_size=32, num_hidden_layers=4, state_size=4),
        "recurrent state",
    ),
    "rwkv": (
        hf.RwkvConfig,
        dict(hidden_size=32, num_hidden_layers=4, context_length=64),
        "recurrent state",
    ),
    "jamba": (
        hf.JambaConfig,
        LIKE_LLAMA | dict(num_experts=2, use_mamba_kernels=False) | MAMBA,
        "recurrent state",
    ),
    "qwen3-next": (
        hf.Qwen3NextConfig,
        LIKE_LLAMA | LINEAR | MOE | dict(head_dim=8),
        "recurrent state",
    ),
    "lfm2": (
        hf.Lfm2Config,
        LIKE_LLAMA | dict(layer_types=["conv", "full_attention"] * 2),
        "recurrent state",
    ),
    "llama4": (
        hf.Llama4TextConfig,
        LIKE_LLAMA | LLAMA_4,
        "chunked_attention",
        hf.Llama4ForCausalLM,
    ),
    "no head": (hf.LlamaConfig, LIKE_LLAMA, "no language-model head", hf.LlamaModel),
    "t5": (
        hf.T5Config,
        dict(d_model=32, d_ff=48, d_kv=8),
        "encoder-decoder",
        hf.T5ForConditionalGeneration,
    ),
    "bert": (
        hf.BertConfig,
        SMALL | dict(intermediate_size=48),
        "does not obey a tree mask",
        hf.BertLMHeadModel,
    ),
    "gpt-neo": (
        hf.GPTNeoConfig,
        LAYERS_4 | dict(attention_types=[[["global"], 4]]),
        "window of its own kind",
    ),
    "openai-gpt": (
        hf.OpenAIGPTConfig,
        dict(n_embd=32, n_layer=4, n_head=4),
        "keys and values in the cache",
    ),
    "doge": (hf.DogeConfig, LIKE_LLAMA, "window of its own kind"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_cannot_carry_a_tree_are_refused_with_a_sentence(name):
    kind, settings, reason, *model_class = REFUSED[name]
    config = kind(**{"vocab_size": families.VOCAB, **settings})
    model = (
        model_class[0](config) if model_class else hf.AutoModelForCausalLM.from_config(config)
    ).eval()
    families.spread(model, seed=0)
    before = families.state_of(model)
    sentence = refusal(lambda: Target(model).inference().__enter__())
    assert reason in sentence and type(model).__name__ in sentence and sentence.endswith(".")
    assert families.state_of(model) == before


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_probe_notices_masks_and_positions_that_are_ignored(dtype, monkeypatch):
    model = families.model_of("llama", dtype)
    forward = model.forward
    for ignored in ("attention_mask", "position_ids"):
        with monkeypatch.context() as patch:
            patch.setattr(
                model, "forward", lambda ignored=ignored, **rest: forward(**rest | {ignored: None})
            )
            with (
                pytest.raises(SpecdecError, match="does not obey a tree mask"),
                Target(model).inference(),
            ):
                pass
    with Target(model).inference():
        pass


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_the_model_comes_back_as_it_was(name):
    model, prompt = families.build(*families.FAMILIES[name]), random_tokens(6, seed=8)
    plain = dict(do_sample=False, max_new_tokens=12)
    text, weights = model.generate(prompt[None], **plain), [p.clone() for p in model.parameters()]
    pair, _ = oracle_pair(model, prompt, 20, Picker())
    pair.target.taps = (1, 2)
    before = families.state_of(model)

    def untouched():
        return families.state_of(model) == before and torch.equal(
            model.generate(prompt[None], **plain), text
        )

    decode(pair, prompt, RandomPolicy(LIMITS), max_new_tokens=20)
    assert untouched()
    for at in (0, 1, 5):
        with pytest.raises(SpecdecError, match="policy Breaks failed.*broken"):
            decode(pair, prompt, Breaks(at), max_new_tokens=20)
        assert untouched()
    running = stream(pair, prompt, RandomPolicy(LIMITS), max_new_tokens=20)
    first = next(running)
    assert untouched()  # between two cycles as well
    second = next(running)
    del running
    assert first and second and untouched()
    pair.drafter.truth = [99] * 99  # the drafter fails in the first cycle
    pytest.raises(
        families.CommittedSomethingElse,
        decode,
        pair,
        prompt,
        RandomPolicy(LIMITS),
        max_new_tokens=20,
    )
    assert untouched()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True))
    assert not any(p.grad is not None or p.is_inference() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "changes"), [("llama", {}), ("phi3", dict(rope_parameters=LONG)), ("mixtral", {})]
)
def test_a_model_can_be_trained_after_decoding(name, changes):
    family, settings = families.FAMILIES[name]
    fresh, used = (families.build(family, {**settings, **changes}) for _ in range(2))
    prompt = random_tokens(6, seed=8)
    pair, _ = oracle_pair(used, prompt, 10, Picker())
    decode(pair, prompt, Static(12, 2, 4), max_new_tokens=10)
    for model in (fresh, used):  # what was remembered under inference mode must not reach autograd
        ids = random_tokens(40, seed=9)[None]
        model(ids, labels=ids).loss.backward()
    for a, b in zip(fresh.parameters(), used.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-6)


def test_a_model_that_is_lent_is_shared_comes_back_as_it_was_and_takes_no_overfull_cache():
    model = families.build(*families.FAMILIES["llama"])
    model.train()
    model.model.layers[1].eval()  # frozen by its owner
    before = families.state_of(model)
    with Target(model).inference():
        assert not any(m.training for m in model.modules())
    assert families.state_of(model) == before and {m.training for m in model.modules()} == {
        True,
        False,
    }
    model, prompt = families.model_of("llama"), random_tokens(5, seed=9)
    one, other = Target(model, taps=(1,)), Target(model)
    with one.inference(), other.inference():
        inner = other.forward(prompt, other.new_cache(8)).logits
    with one.inference():
        assert torch.equal(one.forward(prompt, one.new_cache(8)).logits, inner)
    target, prompt = Target(families.model_of("llama")), random_tokens(6, seed=10)
    with target.inference():
        cache = target.new_cache(8)
        target.forward(prompt, cache)
        keys = [layer.keys.clone() for layer in cache.layers]
        pytest.raises(SpecdecError, target.forward, prompt[:3], cache).match(
            "room for 8 tokens but 9 are needed"
        )
        assert len(cache) == 6 and all(
            torch.equal(a, b.keys) for a, b in zip(keys, cache.layers, strict=True)
        )
        target.forward(prompt[:2], cache)
        assert len(cache) == 8
