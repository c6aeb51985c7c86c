"""How the `toy/...` suites were written: held-out prompts of the generated corpus, a JSONL file per suite."""

from __future__ import annotations

import json
from pathlib import Path

from specdec import runs
from specdec.data.suites import SUITE_PROMPTS, SUITES, TOY
from specdec.toy import corpus

EMBEDDED_SEED = 2026


def write_suites(folder: Path) -> None:
    """Write every toy suite to folder/toy/<name>.jsonl, the same bytes each time."""
    for suite in TOY:
        lines = [json.dumps(row, ensure_ascii=False) for row in suite_rows(suite)]
        runs.write_text(Path(folder) / f"{suite}.jsonl", "\n".join(lines) + "\n")


def suite_rows(suite: str) -> list[dict]:
    """The first SUITE_PROMPTS different held-out examples of the suite's family, as rows of its file."""
    rows, openings = [], set()
    for example in corpus.generate(SUITES[suite].family, EMBEDDED_SEED, 100 * SUITE_PROMPTS):
        if corpus.held_out(example) and example.turns[0] not in openings:
            openings.add(example.turns[0])
            id, reference = f"{suite}/{len(rows)}", example.answers[0]
            rows.append({"id": id, "turns": list(example.turns), "reference": reference, "check": example.check})
        if len(rows) == SUITE_PROMPTS:
            break
    return rows
