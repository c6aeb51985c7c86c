"""The model card of a small pair: card.json has every fact, README.md one table of them.

Knows nothing about how a pair is trained or measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from specdec import machine
from specdec.core.records import tau
from specdec.report import tables
from specdec.report.card import licence, limits, page, records, rounded, run_facts, weight_facts
from specdec.data import corpus

PARTS = ("target", "drafter")


def families() -> list[str]:
    """The names of the corpus's task families, sorted."""
    return sorted({example.family for example in corpus.streams()[corpus.PROMPTS]})


def card_of(folder: Path, logs: Sequence[Path], measured: pd.DataFrame | None = None, name: str = "") -> dict:
    """The card of the pair in `folder`.

    logs: the training folders of target and drafter (plan.json, loss.parquet). measured: what `pair.measure_pair` returns.
    """
    return {
        "name": name or Path(folder).resolve().name,
        "weights": {part: weight_facts(Path(folder) / part) for part in PARTS},
        "training": {part: run_facts(Path(log)) for part, log in zip(PARTS, logs, strict=True)},
        "families": families(),
        "measured": [] if measured is None else records(summary(measured)),
        "measured_on": None if measured is None else {**machine.hardware(), **machine.commit()},
        "measured_how": {} if measured is None else dict(measured.attrs),
        "licence": licence(),
    }


def summary(measured: pd.DataFrame) -> pd.DataFrame:
    """One row per suite and one for 'all': answers, tau (pooled over cycles), checked, correct, loops, distinct pairs.

    measured: one row per answer (`pair.measure_pair`). accuracy_frac is NaN where nothing can be checked. loop_frac is the
    share of the words' 4-grams that stood earlier in the same answer; distinct_2 that of distinct word pairs.
    """
    rows = []
    for name, part in [*measured.groupby("suite", sort=False), ("all", measured)]:
        checked, pairs = part["correct"].dropna(), [pair for text in part["text"] for pair in _grams(text, 2)]
        fours = [_grams(text, 4) for text in part["text"]]
        rows.append(
            {
                "suite": name,
                "answers": len(part),
                "new_tok": int(part["new_tok"].sum()),
                "tau": float(tau(part["cycle_tok"].sum(), max(1, part["cycles"].sum()))),
                "checked": len(checked),
                "correct": int(checked.sum()),
                "accuracy_frac": float(checked.mean()) if len(checked) else float("nan"),
                "loop_frac": sum(len(grams) - len(set(grams)) for grams in fours) / max(1, sum(map(len, fours))),
                "distinct_2": len(set(pairs)) / len(pairs) if pairs else 1.0,
            }
        )
    return pd.DataFrame(rows)


def _grams(text: str, n: int) -> list[tuple[str, ...]]:
    words = text.split()
    return list(zip(*(words[start:] for start in range(n)), strict=False))


def curve_of(card: dict, part: str) -> pd.DataFrame:
    """The stored curve of 'target' or 'drafter': one row per stretch of steps."""
    return pd.DataFrame(card["training"][part]["curve"])


def unrolled_accuracy(card: dict) -> pd.DataFrame:
    """The drafter's accuracy by unrolled step over training, long: columns step, draft_step (1, 2, ...), accuracy."""
    curve = curve_of(card, "drafter")
    names = [name for name in curve if name.startswith("accuracy_")]
    long = curve.melt("step", names, "draft_step", "accuracy").dropna()  # runs may unroll fewer steps early on
    return long.assign(draft_step=long["draft_step"].str.removeprefix("accuracy_").astype(int) + 1)


def card_text(card: dict) -> str:
    """README.md of a card: what was trained, how it ended (means of the last steps), and what was measured."""
    facts = {}
    for part in PARTS:
        weights, training = card["weights"][part], card["training"][part]
        numbers = {name: training[name] for name in ("steps", "seen_tok", "minutes", "own_chats", "seed")}
        shown = rounded({"parameters": weights["parameters"], **numbers, **training["last"]})
        facts[part] = {"sha256": weights["sha256"][:16], **shown, "notes": training["notes"] or "-"}
    measured = pd.DataFrame(card["measured"])
    how = ", ".join(f"{name} {value}" for name, value in card["measured_how"].items())
    return page(
        f"# {card['name']}: a target and its EAGLE-3 drafter",
        "**Toy scale.** It knows the generated tasks of the workbook and nothing about the world. All facts: card.json.",
        tables.markdown(pd.DataFrame(facts).fillna("-").rename_axis("fact")),
        f"Measured greedily on held-out prompts ({how}):" if len(measured) else "Not measured.",
        tables.markdown(measured, digits=3) if len(measured) else "",
        " ".join(limits(card["weights"]["drafter"]["config"])),
        f"Licence: {card['licence']}. The weights were trained on generated text and library source only.",
    )
