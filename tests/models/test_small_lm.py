"""A language model as drafter: its trees equal the model's own forwards, its text the target's."""

import pytest
import torch
from fakes.pairs import random_target
from fakes.reference import children_of
from transformers import MistralConfig, MistralForCausalLM

import specdec
from specdec.core.cycle import run_cycle
from specdec.core.engine import LiveEngine
from specdec.core.pair import Pair
from specdec.core.policy import Static
from specdec.core.verification import Picker
from specdec.errors import SpecdecError
from specdec.evaluation.lossless import audit
from specdec.models.small_lm import SmallLM, load_small_lm
from specdec.models.target import Target

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def windowed(vocabulary: int = 24):
    """A model that sees the five newest tokens only."""
    torch.manual_seed(4)
    config = MistralConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=5,
        initializer_range=0.5,
        bos_token_id=7,
        eos_token_id=None,
        pad_token_id=None,
    )
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("model", [random_target(24, hidden=16, layers=2, seed=8), windowed()], ids=["llama", "window"])
@torch.inference_mode()
def test_drafted_trees_equal_the_models_own_forwards(model):
    target = Target(random_target(24, seed=3))
    drafter, policy = SmallLM(model, target), Static(31, 3, 3)
    engine, checked = LiveEngine(Pair(target, drafter), torch.tensor(PROMPT), 12, policy.limits, Picker()), 0
    with target.inference(), drafter.inference():
        engine.prefill()
    while not engine.finished and checked < 26:
        ids = PROMPT + engine.tokens
        with target.inference(), drafter.inference():
            run_cycle(engine, policy)
        pool = engine.growing.whole()
        for node in set(pool.parent[1:].tolist()):
            path = pool.token[[n for n in pool.lineage()[node].tolist() if n > 0]].tolist()
            # the begin token stands where the text's first would
            read = torch.tensor([[*drafter.begin, *ids[1:], *path]])
            wanted = model(read).logits[0, -1].log_softmax(-1).topk(3)
            children = children_of(pool.parent.tolist(), node)
            assert pool.token[children].tolist() == wanted.indices.tolist()
            torch.testing.assert_close(pool.score[children] - pool.score[node], wanted.values, atol=1e-4, rtol=1e-4)
            checked += 1
    assert checked >= 20


def test_chains_and_beams_are_lossless(tmp_path):
    target, model = Target(random_target(24, seed=3)), windowed()
    model.save_pretrained(tmp_path)
    pair = Pair(target, load_small_lm(tmp_path, target), name="lm")
    found = audit(pair, [PROMPT, PROMPT[:1]], {"chain": Static(5, 3, 1), "beam": Static(10, 2, 3)}, 14, progress=False)
    assert found.passed
    assert specdec.load_drafter(f"lm:{tmp_path}", target).model.vocab_size == 24


def test_bad_models_get_one_sentence(tmp_path):
    target = Target(random_target(24, seed=3))
    with pytest.raises(SpecdecError, match="knows 30 tokens, the target 24"):
        SmallLM(windowed(30), target)
    (tmp_path / "config.json").write_text("{}")
    pytest.raises(SpecdecError, load_small_lm, tmp_path, target).match("cannot be loaded as a transformers causal LM")
    short = random_target(24, hidden=16, layers=2, limit=10)
    with pytest.raises(SpecdecError, match="context ends at 10"):
        specdec.decode(Pair(target, SmallLM(short, target)), PROMPT, Static(4, 2, 1), max_new_tokens=8)
