"""Every causal LM that transformers registers, and what people wrap around one: its own text, or one sentence.

`pytest -m nightly tests/models/test_families.py` runs all of the registry.
"""

import random

import pytest
import torch
from fakes import registry
from fakes.families import FAMILIES, build, spread
from fakes.families import tokens as random_tokens
from fakes.refusals import refusal
from torch import nn

import specdec
from specdec.core.decode import autoregress, decode, decode_many

SMALL, SETTINGS = specdec.Static(6, 2, 2), dict(max_new_tokens=12, stop_tokens=())
# Partial rotary embeddings, values changed behind the cache, attention by `view`, norms without weights, all logits given
# whatever is asked for, attention in code of its own, positions that do not start at 0.
KNOWN = ["glm", "glm4", "diffllama", "afmoe", "nanochat", "whisper", "falcon", "roberta"]
SAMPLE = random.Random(36).sample([name for name in registry.NAMES if name not in KNOWN], 5)


def judged(name: str) -> str:
    result, why = registry.verdict(name)
    assert result in ("right", "refused", "not made"), why
    if result == "refused":
        assert (
            why.endswith(".") and "\n" not in why and ("ForCausalLM" in why or "LMHead" in why)
        ), why
    return result


@pytest.mark.parametrize("name", KNOWN + SAMPLE)
def test_a_registered_family_tells_its_own_text_or_is_refused_in_one_sentence(name):
    assert judged(name) == "right" or name in SAMPLE


@pytest.mark.nightly
def test_all_registered_families_do():
    results = [judged(name) for name in registry.NAMES]
    assert results.count("right") >= 120 and results.count("not made") <= 10


class Wrapper(nn.Module):  # somebody's module around a model. change: of its logits
    def __init__(self, inside, change=lambda logits: logits):
        super().__init__()
        self.inside, self.change = inside, change

    def forward(self, *args, **kwargs):
        output = self.inside(*args, **kwargs)
        output.logits = self.change(output.logits)
        return output


def compiled(module):
    return torch.compile(module, backend="eager")


def compiled_layers(model):
    model.model.layers = nn.ModuleList(map(compiled, model.model.layers))
    return model


def compiled_in_place(model):
    model.compile(backend="eager")
    model.model.layers[1].forward = compiled(model.model.layers[1].forward)
    return model


def hooked(model):
    hooks = pytest.importorskip("accelerate.hooks")
    for module in list(model.modules()):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(io_same_device=True))
    return model


def dispatched(model):
    return pytest.importorskip("accelerate").dispatch_model(model, {"": "cpu"}, force_hooks=True)


def offloaded(model):
    return pytest.importorskip("accelerate").cpu_offload(model, execution_device="cpu")


def adapted(model, kind="LoraConfig", **settings):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        model, getattr(peft, kind)(task_type="CAUSAL_LM", **settings)
    ).eval()
    if kind == "LoraConfig":
        spread(adapted.base_model, seed=4)
    return adapted


WRAPPED = (
    nn.DataParallel,
    Wrapper,
    compiled,
    compiled_layers,
    compiled_in_place,
    hooked,
    dispatched,
    adapted,
)
REFUSED = {
    "offloaded": (offloaded, "not on a device"),
    "another text": (
        lambda model: Wrapper(model, lambda x: 0.5 * x + x.roll(1, -1)),
        "does not give the logits",
    ),
    "no logits": (lambda model: nn.Sequential(model), "does not give the logits"),
    "prompts": (
        lambda model: adapted(model, "PromptTuningConfig", num_virtual_tokens=3),
        "does not give the logits",
    ),
    "no model": (lambda model: model.model.layers[0], "no transformers causal LM"),
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_what_is_wrapped_tells_the_text_of_the_model_inside(wrap):
    model, prompt = build(*FAMILIES["llama"]), random_tokens(9, seed=1)
    given = wrap(model)
    with torch.compiler.set_stance("force_eager"):  # `generate` would compile for minutes
        ids = model.generate(prompt[None], do_sample=False, max_new_tokens=12, eos_token_id=None)[
            0, 9:
        ].tolist()
    pair = specdec.load_pair(target=given, drafter="suffix")
    assert pair.target.model is model
    assert (
        decode(pair, prompt, SMALL, **SETTINGS).tokens
        == autoregress(pair, prompt, **SETTINGS).tokens
        == ids
    )
    assert decode_many(pair, [prompt, prompt[:4]], SMALL, **SETTINGS)[0].tokens == ids


@pytest.mark.parametrize("name", REFUSED)
def test_what_says_something_else_than_the_model_inside_is_refused(name):
    wrap, reason = REFUSED[name]
    given = wrap(build(*FAMILIES["llama"]))
    sentence = refusal(
        lambda: decode(
            specdec.load_pair(target=given, drafter="suffix"), [4, 1, 5], SMALL, **SETTINGS
        )
    )
    assert reason in sentence and sentence.endswith(".")


def test_what_was_compiled_is_compiled_again_after_decoding():
    seen = []
    double = torch.compile(
        lambda x: 2 * x, backend=lambda graph, inputs: seen.append(graph) or graph.forward
    )
    pair = specdec.load_pair(target=build(*FAMILIES["llama"]), drafter="suffix")
    with pair.target.inference(), pair.target.inference():
        double(torch.ones(2))
    assert not seen
    double(torch.ones(2))
    assert len(seen) == 1
