"""A language model as drafter: its trees equal the model's own forwards, its text the target's."""

import pytest
import torch
from fakes.pairs import random_target
from fakes.reference import assert_drafted
from transformers import MistralConfig, MistralForCausalLM

import specdec
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.errors import SpecdecError
from specdec.evaluation.lossless import audit
from specdec.models.small_lm import SmallLM, load_small_lm
from specdec.models.target import Target

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def windowed(vocabulary: int = 24):
    """A model that sees the five newest tokens only."""
    torch.manual_seed(4)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    ids = dict(vocab_size=vocabulary, bos_token_id=7, eos_token_id=None, pad_token_id=None)
    config = MistralConfig(**sizes, **ids, num_key_value_heads=2, sliding_window=5, initializer_range=0.5)
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("model", [random_target(24, hidden=16, layers=2, seed=8), windowed()], ids=["llama", "window"])
@torch.inference_mode()
def test_drafted_trees_equal_the_models_own_forwards(model):
    target = Target(random_target(24, seed=3))
    drafter = SmallLM(model, target)

    def slow(ids):  # the begin token stands where the text's first would
        return lambda path: model(torch.tensor([[*drafter.begin, *ids[1:], *path]])).logits[0, -1].log_softmax(-1)

    assert_drafted(Pair(target, drafter), PROMPT, Static(31, 3, 3), slow, range(20, 26))


def test_chains_and_beams_are_lossless_and_bad_models_get_one_sentence(tmp_path):
    target, model = Target(random_target(24, seed=3)), windowed()
    model.save_pretrained(tmp_path)
    pair = Pair(target, load_small_lm(tmp_path, target), name="lm")
    found = audit(pair, [PROMPT, PROMPT[:1]], {"chain": Static(5, 3, 1), "beam": Static(10, 2, 3)}, 14, progress=False)
    assert found.passed
    assert specdec.load_drafter(f"lm:{tmp_path}", target).model.vocab_size == 24
    target = Target(random_target(24, seed=3))
    pytest.raises(SpecdecError, SmallLM, windowed(30), target).match("knows 30 tokens, the target 24")
    (tmp_path / "config.json").write_text("{}")
    pytest.raises(SpecdecError, load_small_lm, tmp_path, target).match("cannot be loaded as a transformers causal LM")
    short = random_target(24, hidden=16, layers=2, limit=10)
    with pytest.raises(SpecdecError, match="context ends at 10"):
        specdec.decode(Pair(target, SmallLM(short, target)), PROMPT, Static(4, 2, 1), max_new_tokens=8)
