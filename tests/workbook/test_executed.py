"""Pages of executed notebooks: what stands on them, what is left out, and whether they belong to their sources."""

import base64
import io
import re

import pytest
from fakes.notebooks import cell
from PIL import Image

from specdec import machine, runs
from specdec.errors import SpecdecError

from workbook import book, executed, notebooks
from workbook.pictures import PAGE_COLOURS, WIDEST_PX


def shown(**data) -> dict:
    kinds = {name.replace("_", "/"): text for name, text in data.items()}
    return {"output_type": "display_data", "metadata": {}, "data": kinds}


def picture(width: int) -> str:
    written = io.BytesIO()
    Image.linear_gradient("L").resize((width, 40)).convert("RGB").save(written, "png")
    return base64.b64encode(written.getvalue()).decode()


GUIDES = "[a guide](teaching.md#exercises), [out](https://x.org), [all](../figures/book/README.md)"
HEAD = cell("markdown", "# A title\n\n> A promise.\n\n[executed page](x.md) · [next →](11_draft_trees.ipynb)", 0)
GIVEN = cell("code", "limit: int = 3  # prompts", 1, ["parameters"])
TEXT = cell("markdown", f"{GUIDES}, [later](12_decisions.ipynb)", 2)
SOURCE = {"cells": [HEAD, GIVEN, TEXT, cell("code", "show()", 3, ["found"])]}
STREAMS = [{"output_type": "stream", "name": name, "text": [f"on {name}\n"]} for name in ("stdout", "stderr")]
WIDGET = shown(**{notebooks.WIDGET: {}}, text_plain="View()")
TEXTS = [shown(text_plain=text) for text in ("<Axes>", "TreeConfig(depth=1)", "42")]
TABLE = shown(text_markdown="| a |\n|---|", text_plain="x")
FOUND = SOURCE["cells"][3] | {"outputs": [*STREAMS, WIDGET, TABLE, shown(image_png=picture(3000)), *TEXTS]}
INJECTED = cell("code", "limit = 5", 4, ["injected-parameters"])
PAPERMILL = {"parameters": {"limit": 5}, "end_time": "2026-01-02T03:04:05", "duration": 90.0}
FACTS = {"papermill": PAPERMILL, notebooks.EXECUTED: {"commit": "0123456789abcdef", "dirty": True, "cpu": "Z80"}}
DONE = {"cells": [HEAD, GIVEN, INJECTED, TEXT, FOUND], "metadata": FACTS}


def test_a_page_holds_what_a_reader_needs_and_nothing_else():
    text, pictures = executed.page_of(DONE, "10_title", {"11_draft_trees"})
    title, promise, links, about = [line for line in text.splitlines() if line][:4]
    assert [title, promise] == ["# A title", "> A promise."]
    assert links == "[notebook](../../notebooks/10_title.ipynb) · [contents](README.md) · [next →](11_draft_trees.md)"
    assert "commit 0123456789ab with local changes on 2026-01-02 in 1.5 min on Z80, with the parameters" in about
    assert "below but `limit = 5`." in about
    assert "[a guide](../../notebooks/teaching.md#exercises), [out](https://x.org), [all](README.md)" in text
    assert "[later](../../notebooks/12_decisions.ipynb)" in text
    assert "<details><summary>parameters</summary>\n\n```python\nlimit: int = 3" in text and "limit = 5\n" not in text
    assert "```\non stdout\n```" in text and not re.search("stderr|View|Axes|TreeConfig", text)
    assert "| a |\n|---|" in text and "```\n42\n```" in text and "![Figure](10_title-1.png)" in text
    source = f"[10_title.ipynb](../../notebooks/10_title.ipynb), {executed.source_hash(SOURCE)}"
    assert text.rstrip().endswith(f"Source: {source}.</sub>")
    (content,) = pictures.values()
    small = Image.open(io.BytesIO(content))
    assert small.size == (WIDEST_PX[0], 13) and len(small.getcolors()) <= PAGE_COLOURS


def test_pages_are_written_from_copies_and_say_when_their_source_has_changed(home, tmp_path):
    opened, to = book.Book("laptop"), tmp_path / "book"
    entry = next(entry for entry in opened.entries if entry.stem == "70_claims")
    absent = pytest.raises(SpecdecError, executed.write_pages, opened, ["70_claims"], to)
    absent.match("no executed copy of 70_claims; run")
    runs.write_json(opened.copy(entry), DONE)
    page, contents = executed.write_pages(opened, to=to)
    assert page.name == "70_claims.md" and (to / "70_claims-1.png").is_file()

    def line() -> str:
        return next(line for line in executed.contents(opened, to).splitlines() if "70_claims" in line)

    assert line() in contents.read_text() and '<img src="70_claims-1.png"' in line() and "<br>on stdout<br>" in line()
    assert "changed since" in line()  # it was executed from other cells than the notebook has
    of_source = executed.source_hash(notebooks.read_notebook(opened.source(entry)))
    runs.write_text(page, page.read_text().replace(executed.source_hash(SOURCE), of_source))
    assert "changed since" not in line()
    failed = FOUND | {"outputs": [{"output_type": "error"}]}
    runs.write_json(opened.copy(entry), DONE | {"cells": [HEAD, failed]})
    pytest.raises(SpecdecError, executed.write_pages, opened, (), to).match("ends in an error")


def test_the_pages_here_belong_to_their_sources_or_say_that_they_are_older():
    """`python -m specdec.book pages` writes them; together they are small."""
    where = machine.checkout() / "figures" / "book"
    assert (where / executed.CONTENTS).read_text(encoding="utf-8") == executed.contents(book.Book("laptop"))
    assert sum(path.stat().st_size for path in where.iterdir()) < 6 << 20
    for page in where.glob("[0-9]*.md"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"Traceback|it/s\]|PosixPath\(|^TreeConfig\(", text, re.M), page
