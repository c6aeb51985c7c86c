"""The `laptop/...` suites: all prompts differ, from the benchmarks too; references are right."""

import json
import os
import re
from pathlib import Path

import pytest

from specdec.data import suites

SHARED = Path(os.environ.get("SPECDEC_SHARED", Path(suites.__file__).parents[3] / "shared"))
CHECKED = {"humaneval", "gsm8k", "nq", "mbpp"}


def of(name: str) -> list[suites.Prompt]:
    return suites.load_suite(f"laptop/{name}")


def grams(texts, size: int) -> set[tuple]:
    """All runs of `size` words in any of the texts."""
    runs = set()
    for text in texts:
        words = re.findall(r"\w+", text.lower())
        runs.update(tuple(words[i : i + size]) for i in range(len(words) - size + 1))
    return runs


@pytest.mark.parametrize("name", suites.NAMES)
def test_every_suite_has_enough_prompts_in_every_part(name):
    prompts = of(name)
    train, tune, test = map(len, suites.split(prompts).values())
    assert train >= 12 and tune >= 5 and test >= 12
    for number, prompt in enumerate(prompts):
        assert prompt.id == f"laptop/{name}/{number}"
        assert len(prompt.turns) == (2 if name == "mt_bench" else 1)
        assert (prompt.check is not None) == (name in CHECKED)
        assert prompt.reference or name == "mt_bench"


def test_nothing_is_shared_with_the_real_benchmarks():
    rows = []
    for file in sorted((SHARED / "data" / "benchmarks").glob("*.jsonl")):
        rows += [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    if not rows:
        pytest.skip(f"no benchmarks in {SHARED} (SPECDEC_SHARED names another place)")
    texts = []
    for row in rows:
        texts += row["turns"]
        texts += [text for text in row.get("reference") or [] if isinstance(text, str)]
    real = grams(texts, 8)
    assert len(real) > 20_000
    for name in (*suites.NAMES, suites.SUBJECTS):
        for prompt in of(name):
            assert not grams([*prompt.turns, prompt.reference or ""], 8) & real, prompt.id
