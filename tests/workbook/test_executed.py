"""Pages of executed notebooks: what stands on them, what is left out, and whether they belong to their sources."""

import base64
import io

import pytest
from PIL import Image

from specdec import machine, runs
from specdec.errors import SpecdecError

from workbook import book, executed, notebooks


def cell(kind: str, source: str, outputs=(), tags=()) -> dict:
    return {"cell_type": kind, "source": source, "metadata": {"tags": list(tags)}, "outputs": list(outputs)}


def shown(**data) -> dict:
    return {
        "output_type": "display_data",
        "metadata": {},
        "data": {name.replace("_", "/"): text for name, text in data.items()},
    }


def picture(width: int) -> str:
    written = io.BytesIO()
    Image.linear_gradient("L").resize((width, 40)).convert("RGB").save(written, "png")
    return base64.b64encode(written.getvalue()).decode()


HEAD = cell(
    "markdown",
    "# A title\n\n> A promise.\n\n[next →](11_draft_trees.ipynb) and [a guide](teaching.md), "
    "[out](https://x.org), [later](12_decisions.ipynb)",
)
SOURCE = {"cells": [HEAD, cell("code", "limit: int = 3  # prompts", tags=["parameters"]), cell("code", "show()")]}
STREAMS = [{"output_type": "stream", "name": name, "text": [f"on {name}\n"]} for name in ("stdout", "stderr")]
WIDGET = {
    "output_type": "display_data",
    "data": {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "View()"},
}
TEXTS = [shown(text_plain=text) for text in ("<Axes>", "42")]
OUTPUTS = [
    *STREAMS,
    WIDGET,
    shown(text_markdown="| a |\n|---|", text_plain="x"),
    shown(image_png=picture(3000)),
    *TEXTS,
]
DONE = {
    "cells": [
        HEAD,
        SOURCE["cells"][1],
        cell("code", "limit = 5", tags=["injected-parameters"]),
        cell("code", "show()", OUTPUTS),
    ],
    "metadata": {"papermill": {"parameters": {"limit": 5}, "end_time": "2026-01-02T03:04:05"}},
}


def test_a_page_holds_what_a_reader_needs_and_nothing_else():
    text, pictures = executed.page_of(DONE, SOURCE, "10_title", "on 2026-01-02", {"11_draft_trees"})
    assert [line for line in text.splitlines() if line][:2] == ["# A title", "> A promise."]
    assert "[next →](11_draft_trees.md) and [a guide](../../notebooks/teaching.md), [out](https://x.org)" in text
    assert "[later](../../notebooks/12_decisions.ipynb)" in text
    assert "<details><summary>parameters</summary>\n\n```python\nlimit: int = 3" in text and "limit = 5\n" not in text
    assert "```\non stdout\n```" in text and "stderr" not in text and "View" not in text and "Axes" not in text
    assert "| a |\n|---|" in text and "```\n42\n```" in text and "![Figure](10_title-1.png)" in text
    assert text.rstrip().endswith(
        f"but limit=5. Source: [10_title.ipynb](../../notebooks/10_title.ipynb), {executed.source_hash(SOURCE)}.</sub>"
    )
    (content,) = pictures.values()
    small = Image.open(io.BytesIO(content))
    assert small.size == (executed.WIDEST_PX, 13) and len(small.getcolors()) <= executed.COLOURS


def test_pages_are_written_from_copies_and_say_when_their_source_has_changed(home, tmp_path):
    opened, to = book.Book("laptop"), tmp_path / "book"
    entry = next(entry for entry in opened.entries if entry.stem == "70_claims")
    pytest.raises(SpecdecError, executed.write_pages, opened, ["70_claims"], to).match(
        "no executed copy of 70_claims; run"
    )
    runs.write_json(opened.copy(entry), DONE)
    page, contents = executed.write_pages(opened, to=to)
    assert page.name == "70_claims.md" and "at commit" in page.read_text() and (to / "70_claims-1.png").is_file()
    line = next(line for line in contents.read_text().splitlines() if "70_claims" in line)
    assert "changed since" not in line and '<img src="70_claims-1.png"' in line
    runs.write_text(
        page, page.read_text().replace(executed.source_hash(notebooks.read_notebook(opened.source(entry))), "0" * 12)
    )
    assert "(its source has changed since)" in executed.contents(opened, to)
    failed = {**DONE, "cells": [cell("code", "1 / 0", [{"output_type": "error"}])]}
    runs.write_json(opened.copy(entry), failed)
    pytest.raises(SpecdecError, executed.write_pages, opened, (), to).match("ends in an error")


def test_the_pages_here_belong_to_their_sources_or_say_that_they_are_older():
    """`python -m specdec.book pages` writes them; together they are small."""
    where = machine.checkout() / "figures" / "book"
    assert (where / executed.CONTENTS).read_text(encoding="utf-8") == executed.contents(book.Book("laptop"))
    assert sum(path.stat().st_size for path in where.iterdir()) < 6 << 20
    for page in where.glob("[0-9]*.md"):
        text = page.read_text(encoding="utf-8")
        assert "Traceback" not in text and "it/s]" not in text and "PosixPath(" not in text, page
