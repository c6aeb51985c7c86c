"""Every kind of drafter learns one answer by heart: then a chain is accepted as far as its depth or its training allows."""

from dataclasses import replace

import pytest

from specdec.core.decode import autoregress, decode
from specdec.core.policy import Static
from specdec.core.protocols import Drafter
from specdec.models.load import load_drafter, load_pair
from specdec.training.drafter.eagle3 import train_drafter
from specdec.training.drafter.presets import OBJECTIVES, Settings
from specdec.training.drafter.ttt import LossRules, TrainingTimeTest

CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]
LEVELS = 8  # of the chain


@pytest.fixture(scope="module")
def tiny():
    return load_pair("tiny", dtype="float32", device="cpu")


def learned_by_heart(tiny, name: str, out_dir, steps: int, **settings) -> tuple[Drafter, float, int]:
    """(the drafter after so many steps on one answer, tokens per cycle of a chain there, levels of the chain)."""
    answer = autoregress(tiny, CHAT, max_new_tokens=48)
    chat = [*CHAT, {"role": "assistant", "content": answer.text}]
    objective = TrainingTimeTest(LossRules(LEVELS)) if name == "eagle3" else OBJECTIVES[name]
    settings = Settings(**{"steps": steps, "batch": 1, "length": 64, "warmup_steps": 10, **settings})
    model = tiny.target.model, tiny.tokenizer
    folder = train_drafter(model, [chat], out_dir=out_dir, objective=objective, settings=settings)
    drafter = load_drafter(folder, tiny.target)
    levels = LEVELS if drafter.deepest is None else drafter.deepest + 1
    out = decode(replace(tiny, drafter=drafter), CHAT, Static(levels + 1, levels - 1, 1), max_new_tokens=48)
    assert out.tokens == answer.tokens
    return drafter, out.tau, levels
