"""report.html: one page of all results, which needs no network and no other file; every picture is inside.

First the answer, then the claims, then the papers' items, folded. report.html.j2 and report.css beside this file are its form; it
has no script, so that it can be read where scripts are not allowed. Knows nothing about how anything was measured.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable
from pathlib import Path

import mistune
import pandas as pd

from specdec import runs
from specdec.report import tables

from workbook import claims, findings, items, verdicts
from workbook.pictures import small_picture

COLOURS = {verdicts.HOLDS: "holds", verdicts.FAILS: "fails"}  # class of a verdict in report.css; "open" of all others
NUMBER = re.compile(r"[-+−±]?\d[\d,.]*(e-?\d+)?( ?[%×])?( (\[.*\]|±.*|to [\d.]+))*( \(\w\))*|-|")
THUMBNAIL_PX = (128, 80)
SOURCE = ["run", "pair", "dtype", "machine", "prompts", "seeds", "commit"]  # what an item says of each run


def write(scale: str = "laptop", headlines: Iterable = (), contents: str = "") -> Path:
    """Write runs/<scale>/report.html and return its path.

    headlines: markdown files of what was just measured. contents: the notebooks in markdown, with links from that folder.
    """
    import jinja2

    here = Path(__file__)
    form = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    form.filters |= {"colour": lambda verdict: COLOURS.get(verdict, "open"), "number": list(verdicts.VERDICTS).index}
    ledger, found, first = claims.ledger(scale), findings.read(), runs.workbook() / "figures" / "speed.svg"
    page = form.from_string(here.with_suffix(".html.j2").read_text(encoding="utf-8")).render(
        style=here.with_suffix(".css").read_text(encoding="utf-8"),
        findings=[_html(text, escape=False) for text in _answer(found)] if found else [],
        speed=_picture(first) if first.is_file() else "",
        headlines=[_html(Path(path).read_text(encoding="utf-8")) for path in headlines],
        papers=_papers(scale, ledger),
        verdicts=[verdict for verdict in verdicts.VERDICTS if (ledger["verdict"] == verdict).any()],
        notebooks=_html(contents),
    )
    return runs.write_text(runs.runs_dir(scale) / "report.html", page)


def _answer(found: findings.Findings) -> list[str]:
    """What README says first, in markdown: two paragraphs, a table and its caption."""
    return [found.sentences(), findings.not_run(), tables.markdown(found.table()), f"<sub>{found.caption()}</sub>"]


def _papers(scale: str, ledger: pd.DataFrame) -> list[dict]:
    """Each paper with its claims and its items, this workbook last."""
    there, status = {**items.drawn(published=True), **items.drawn(scale)}, items.status(scale)
    papers = []
    for key, name in items.SPEAKERS.items():
        rows = list(ledger[ledger["paper"] == key].itertuples())
        shown = [
            _item(row, there.get(row.item), ledger) for row in status.itertuples() if row.item.startswith(f"{key}/")
        ]
        papers.append({"key": key, "name": name, "claims": rows, "items": shown})
    return papers


def _item(row, one: items.Drawn | None, ledger: pd.DataFrame) -> dict:
    """What the page shows of an item: its line of `items.status`, picture or table, caption, runs, and claims."""
    item = items.find_item(row.item)
    found = {"of": item, "state": ": ".join(filter(None, (row.state, row.missing)))}
    found["claims"] = list(ledger[ledger["item"] == item.id].itertuples())
    if one is None or one.incomplete:
        return found
    picture = one.stem.with_name(f"{one.stem.name}.svg")
    if picture.is_file():
        found |= {"picture": _picture(picture), "thumbnail": _thumbnail(picture.with_suffix(".png"))}
    else:
        found["table"] = _html(one.stem.with_name(f"{one.stem.name}.md").read_text(encoding="utf-8"))
    measured = [{**row, "run": f"{row['run']}-{(row['key'] or '')[:12]}"} for row in one.facts.get("measured", ())]
    cells = [[_said(row.get(name)) for name in SOURCE] for row in measured]
    return found | {"caption": one.facts.get("caption", ""), "sources": table(SOURCE, cells) if cells else ""}


def _said(value) -> str:
    listed = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return "-" if value is None else html.escape(listed[:12] if re.fullmatch(r"[0-9a-f]{40}", listed) else listed)


def _picture(path: Path) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _thumbnail(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(small_picture(path.read_bytes(), THUMBNAIL_PX)).decode()}"


def _html(text: str, escape: bool = True) -> str:
    return mistune.create_markdown(renderer=_Tables(escape), plugins=["table"])(text)


class _Tables(mistune.HTMLRenderer):
    """Markdown as HTML, with tables as `table` writes them."""

    def render_token(self, token, state):
        if token["type"] != "table":
            return super().render_token(token, state)
        head, body = token["children"]
        rows = [head, *body["children"]]
        head, *rows = [[self.render_tokens(cell["children"], state) for cell in row["children"]] for row in rows]
        return table(head, rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in HTML in a box that scrolls, columns of numbers to the right. Cells are HTML.

    Where the first columns are `model` and `row`, each model is a line of its own above its rows, so that names stay in sight.
    """
    grouped, lines, above = head[:2] == ["model", "row"], [], None
    if grouped:
        order = {model: place for place, model in enumerate(dict.fromkeys(row[0] for row in rows))}
        rows = sorted(rows, key=lambda row: order[row[0]])
    numeric = [all(NUMBER.fullmatch(row[place]) for row in rows) for place in range(len(head))]

    def cells(row: list[str], kind: str) -> str:
        ends = [' class="number"' if is_number else "" for is_number in numeric]
        pairs = list(zip(row, ends, strict=True))[grouped:]
        return "".join(f"<{kind}{end}>{cell}</{kind}>" for cell, end in pairs)

    for row in rows:
        if grouped and row[0] != above:
            above = row[0]
            lines.append(f'<tr class="model"><th colspan="{len(head) - 1}"><span>{above}</span></th></tr>')
        lines.append(f"<tr>{cells(row, 'td')}</tr>")
    body = f"<thead><tr>{cells(head, 'th')}</tr></thead><tbody>{''.join(lines)}</tbody>"
    hint = '<p class="hint">Wide table: scroll it sideways.</p>' if len(head) > 4 else ""
    return f'{hint}<div class="scroll" tabindex="0"><table>{body}</table></div>\n'
