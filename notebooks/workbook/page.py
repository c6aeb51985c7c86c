"""The pages that code writes for GitHub: README.md's findings, figures/README.md and claims.md.

All follow from the rows that came with the checkout, and from one ledger.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from specdec import runs
from specdec.report import tables

from workbook import claims, findings, items

MARKED = ("findings", "verdicts")  # what code writes into README.md, between marks of these names
ABOUT = (
    "Written by `make figures` from the runs in `measured/`. [claims.yml](claims.yml) holds the "
    "test of each claim, and [verdicts.py](../notebooks/workbook/verdicts.py) the rule that "
    "decides all of them."
)


def filled(readme: str, ledger: pd.DataFrame) -> str:
    """The text of README.md with what code writes between its marks."""
    first_screen = findings.read()
    texts = [
        first_screen.markdown() if first_screen else "",
        tables.markdown(claims.summary(ledger)),
    ]
    for name, text in zip(MARKED, texts, strict=True):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = readme.partition(begin)
        readme = f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    return readme


def claims_page(ledger: pd.DataFrame) -> str:
    """figures/claims.md: every claim with its verdict, paper by paper."""
    parts = ["# Claims and their verdicts", ABOUT, tables.markdown(claims.summary(ledger))]
    for paper, rows in ledger.groupby("paper", sort=False):
        parts.append(f"## {items.SPEAKERS[paper]}")
        lines = []
        for row in rows.itertuples():
            facts = [row.where]
            if row.about != row.paper:
                facts.append(row.about)
            if row.item:
                item = items.find_item(row.item)
                facts.append(f"[our {item.label}](README.md#{item.anchor})")
            claim = f'<a id="{row.id}"></a>{row.says}<br><sub>{" · ".join(facts)}</sub>'
            lines.append((f"**{row.verdict}**", claim, row.evidence))
        parts.append(tables.markdown(pd.DataFrame(lines, columns=["verdict", "claim", "evidence"])))
    return "\n\n".join(parts) + "\n"


def write_verdicts(readme: Path, folder: Path) -> None:
    """Write README.md and, into the folder of published items, its contents and `claims_page`."""
    # one ledger, so that the three pages agree
    ledger = claims.ledger(shipped=True)
    runs.write_text(folder / "README.md", items.contents(ledger))
    runs.write_text(folder / "claims.md", claims_page(ledger))
    runs.write_text(readme, filled(readme.read_text(encoding="utf-8"), ledger))
