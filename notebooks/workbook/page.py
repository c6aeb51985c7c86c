"""One HTML page of all results: it needs no network and no other file, every picture is inside.

Headline tables, verdicts, every item with where it comes from, and the notebooks. Knows nothing about how they were made.
"""

from __future__ import annotations

import base64
import html
from pathlib import Path

import pandas as pd

from specdec import runs
from specdec.report import figures, tables

from workbook import claims, findings, items, verdicts

PAPERS = {"resps": "Re-SpS", "ltd": "LTD (Learning to Draft)", "radar": "RADAR", "ppow": "PPOW"}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; } img { max-width: 100%; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-size: 13px; margin: .5rem 0; }
td, th { padding: .2rem .6rem; border-bottom: 1px solid #e4e4e4; text-align: left; vertical-align: top; }
figure { margin: 1rem 0; } .holds { color: #05691f; } .fails { color: #a3161b; } .label { color: #666; font-size: 13px; }
nav a { margin-right: 1rem; } pre { font-size: 12px; overflow-x: auto; }
"""
VERDICT_CLASS = {verdicts.HOLDS: "holds", verdicts.FAILS: "fails"}


def write(scale: str = "laptop", headlines=(), contents: str = "") -> Path:
    """Write runs/<scale>/report.html and return its path.

    headlines: markdown files to show first. contents: the notebooks in markdown, with links from that folder.
    """
    ledger, status = claims.ledger(scale), items.status(scale)
    parts = {
        "Headline": "".join(_markdown(Path(path).read_text(encoding="utf-8")) for path in headlines)
        or "<p>Nothing yet.</p>",
        "Verdicts": _verdicts(ledger),
        "Tables and figures": _items(scale, status),
        "Notebooks": _markdown(contents),
    }
    links = "".join(f'<a href="#{_anchor(name)}">{name}</a>' for name in parts)
    body = "".join(f'<h2 id="{_anchor(name)}">{name}</h2>\n{text}\n' for name, text in parts.items())
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>specdec: results</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>specdec: results</h1><nav>{links}</nav>\n{body}</body></html>\n"
    )
    return runs.write_text(runs.runs_dir(scale) / "report.html", page)


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-").replace("/", "-")


def _markdown(text: str) -> str:
    import mistune

    return mistune.create_markdown(plugins=["table"])(text)


def _verdicts(ledger) -> str:
    shown = [_markdown(tables.markdown(claims.summary(ledger)))]
    for about, rows in ledger.groupby("about", sort=False):
        lines = []
        for row in rows.itertuples():
            cells = (PAPERS.get(row.paper, row.paper), row.says, row.evidence, row.source, row.where)
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
            lines.append(f'<tr><td class="{VERDICT_CLASS.get(row.verdict, "")}">{row.verdict}</td>{cells}</tr>')
        head = (
            "<tr><th>verdict</th><th>whose</th><th>claim</th><th>evidence</th><th>measured on</th><th>where</th></tr>"
        )
        shown.append(f"<h3>Claims about {about}</h3><table>{head}{''.join(lines)}</table>")
    return "\n".join(shown)


def _items(scale: str, status) -> str:
    there = {**items.drawn(published=True), **items.drawn(scale)}
    counts = ", ".join(f"{count} {state}" for state, count in status["state"].value_counts().items())
    shown = [f"<p>{counts}, of {len(status)}.</p>"]
    for row in status.itertuples():
        item = items.find_item(row.item)
        if item.name == "table1":
            shown.append(f"<h3>{PAPERS[item.paper]}</h3>")
        note = f": {row.missing}" if row.missing else ""
        head = f'<h4 id="{_anchor(row.item)}">{item.id}. {html.escape(item.title)}</h4>'
        shown.append(f'{head}<p class="label">{html.escape(row.state + note)}; by {item.notebook}</p>')
        if row.item in there and not there[row.item].incomplete:
            shown.append(_item(there[row.item]))
    return "\n".join(shown)


def _item(one: items.Drawn) -> str:
    """The picture or the table of an item, its caption, and what its json file says, folded."""
    picture = one.stem.with_name(f"{one.stem.name}.svg")
    if picture.is_file():
        data = base64.b64encode(picture.read_bytes()).decode()
        shown = f'<figure><img alt="{html.escape(one.item.title)}" src="data:image/svg+xml;base64,{data}"></figure>'
    else:
        shown = _markdown(one.stem.with_name(f"{one.stem.name}.md").read_text(encoding="utf-8"))
    facts = html.escape(runs.canonical(one.facts.get("measured", [])))
    caption = html.escape(one.facts.get("caption", ""))
    return f'{shown}<p class="label">{caption}</p><details><summary>where from</summary><pre>{facts}</pre></details>'


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
        parts.append(f"## {PAPERS.get(paper, 'This workbook')}")
        shown = pd.DataFrame(
            {"claim": rows["says"], "where": rows["where"], "about": rows["about"], "verdict": rows["verdict"]}
        )
        items_of = [f"[{item}](README.md)" if item else "" for item in rows["item"]]
        parts.append(tables.markdown(shown.assign(evidence=rows["evidence"], item=items_of).reset_index(drop=True)))
    return "\n\n".join(parts) + "\n"


def write_verdicts(readme: Path, folder: Path) -> None:
    """Write README.md and, into the folder of published items, `claims_page`, both by the same ledger."""
    ledger = claims.ledger(shipped=True)
    runs.write_text(folder / "claims.md", claims_page(ledger))
    runs.write_text(readme, filled(readme.read_text(encoding="utf-8"), ledger))


ASIDE = ("autoregressive", "random", "per-suite tuned static")  # rows of the comparison that the first page leaves out


def write_speeds(folder: Path) -> list[Path]:
    """Draw speed.svg for README.md: the live speeds of the newest comparison that came with the checkout, of the first pair
    that has one (`claims.PAIRS`); [] without one.
    """
    test = {"run": "controllers", "table": "one_table"}
    compared = next(filter(None, (claims.runs_of(test, pair=pair, shipped=True) for pair in claims.PAIRS)), [])[:1]
    if not compared:
        return []
    rows = compared[0].read_table("one_table")
    rows = rows[(rows["how"] == "live") & ~rows["method"].isin(ASIDE)]
    named = {"speedup_low": "low", "speedup_high": "high"}
    rows = rows.assign(at=rows["temperature"].map("temperature {:g}".format)).rename(columns=named)
    label = "times as fast as plain decoding (dashed), live, with 95 % intervals over prompts"
    figure = figures.intervals(rows, "method", "speedup", panel="at", label=label)
    data = rows[["method", "temperature", "prompts", "speedup", "low", "high"]].reset_index(drop=True)
    return figures.save(figure, folder / "speed", sources=compared, data=data)
