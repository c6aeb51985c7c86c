"""The pages that code writes for GitHub: README.md's findings, figures/README.md, figures/claims.md, and the first figure.

All follow from the rows that came with the checkout, and from one ledger. Knows nothing about how they were made.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from specdec import runs
from specdec.report import tables

from workbook import claims, findings, items

MARKED = ("findings", "verdicts")  # what code writes into README.md, between marks of these names


def filled(readme: str, ledger: pd.DataFrame) -> str:
    """The text of README.md with what code writes between its marks (MARKED). ledger: by what came with the checkout alone."""
    found = findings.read()
    texts = found.markdown() if found else "", tables.markdown(claims.summary(ledger))
    for name, text in zip(MARKED, texts, strict=True):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = readme.partition(begin)
        readme = f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    return readme


def claims_page(ledger: pd.DataFrame) -> str:
    """figures/claims.md: every claim with its verdict by what came with the checkout, paper by paper."""
    parts = [
        "# Claims and their verdicts",
        "Written by `make figures` from the runs in `measured/`. [claims.yml](claims.yml) holds the test of each claim, and "
        "[verdicts.py](../notebooks/workbook/verdicts.py) the rule that decides all of them.",
        tables.markdown(claims.summary(ledger)),
    ]
    for paper, rows in ledger.groupby("paper", sort=False):
        parts.append(f"## {items.SPEAKERS[paper]}")
        shown = [(f"**{row.verdict}**", _claim(row), row.evidence) for row in rows.itertuples()]
        parts.append(tables.markdown(pd.DataFrame(shown, columns=["verdict", "claim", "evidence"])))
    return "\n\n".join(parts) + "\n"


def _claim(row) -> str:
    """What a claim says, and below it where, whether it is about the method or about printed numbers, and its item."""
    facts = [row.where, row.about] if row.about != row.paper else [row.where]
    if row.item:
        item = items.find_item(row.item)
        facts.append(f"[our {item.label}](README.md#{item.anchor})")
    return f'<a id="{row.id}"></a>{row.says}<br><sub>{" · ".join(facts)}</sub>'


def write_verdicts(readme: Path, folder: Path) -> None:
    """Write README.md and, into the folder of published items, its contents and `claims_page`, all by the same ledger."""
    ledger = claims.ledger(shipped=True)
    runs.write_text(folder / "README.md", items.contents(ledger))
    runs.write_text(folder / "claims.md", claims_page(ledger))
    runs.write_text(readme, filled(readme.read_text(encoding="utf-8"), ledger))
