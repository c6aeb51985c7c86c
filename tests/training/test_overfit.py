"""Every kind of drafter learns one answer by heart: then a chain is accepted as far as its depth or its training allows."""

from dataclasses import replace

import pytest

from specdec.core.decode import autoregress, decode
from specdec.core.policy import Static
from specdec.models.load import load_drafter
from specdec.training.drafter.eagle3 import train_drafter
from specdec.training.drafter.presets import OBJECTIVES, Settings
from specdec.training.drafter.ttt import LossRules, TrainingTimeTest

CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]


def tokens_per_cycle(tiny, name: str, out_dir, steps: int, levels: int, **settings) -> tuple[float, int]:
    """(tokens per cycle of a chain after so many steps on one answer, the most that its levels allow)."""
    answer = autoregress(tiny, CHAT, max_new_tokens=28)
    chat = [*CHAT, {"role": "assistant", "content": answer.text}]
    objective = TrainingTimeTest(LossRules(levels)) if name == "eagle3" else OBJECTIVES[name]
    settings = Settings(**{"steps": steps, "batch": 1, "length": 48, "warmup_steps": 10, **settings})
    model = tiny.target.model, tiny.tokenizer
    folder = train_drafter(model, [chat], out_dir=out_dir, objective=objective, settings=settings)
    drafter = load_drafter(folder, tiny.target)
    levels = levels if drafter.deepest is None else drafter.deepest + 1
    chain = Static(levels + 1, levels - 1, 1)
    out = decode(replace(tiny, drafter=drafter), CHAT, chain, max_new_tokens=1 + 3 * (levels + 1))
    assert out.tokens == answer.tokens[: out.new_tok]
    return out.tau, levels + 1


def kind(name: str, steps: int, *marks, levels: int = 8, reached: float = 0.9, **settings):
    """levels: of the chain, where the drafter has no end of its own. reached: of the tokens per cycle that they allow."""
    return pytest.param(name, steps, levels, reached, settings, id=f"{name}-{levels}", marks=marks)


@pytest.mark.parametrize(
    ("name", "steps", "levels", "reached", "settings"),
    [
        kind("eagle3", 60, levels=4),
        kind("block", 60),
        kind("medusa", 40),
        kind("hydra", 40),
        kind("eagle3", 100, pytest.mark.nightly),
        kind("eagle1", 800, pytest.mark.nightly, learning_rate=0.01),
        kind("griffin", 300, pytest.mark.nightly, learning_rate=0.01),
        kind(
            "hass", 200, pytest.mark.nightly, reached=4 / 9
        ),  # it is taught three drafts, and the target's own follows
        kind("hydra++", 60, pytest.mark.nightly),
        kind("lm", 600, pytest.mark.nightly, learning_rate=0.01),
    ],
)
def test_one_answer_is_learned_by_heart(tiny, tmp_path, name, steps, levels, reached, settings):
    tau, most = tokens_per_cycle(tiny, name, tmp_path, steps, levels, **settings)
    assert reached * most <= tau <= most
