"""Executed notebooks as pages."""

import base64
import io
import json

import pytest
from fakes.notebooks import notebook
from PIL import Image

from specdec.errors import SpecdecError

from workbook import book, executed, notebooks


def executed_copy() -> dict:
    read = json.loads(notebook("First", "1 + 1", "print('two')"))
    picture = io.BytesIO()
    Image.new("RGB", (4, 4)).save(picture, "png")
    png = base64.b64encode(picture.getvalue()).decode()
    read["cells"][2]["outputs"] = [
        {"output_type": "display_data", "data": {"image/png": png}, "metadata": {}},
        {"output_type": "stream", "name": "stderr", "text": "a warning"},
        {
            "output_type": "display_data",
            "data": {"text/markdown": "see [it](10_b.ipynb)"},
            "metadata": {},
        },
    ]
    read["cells"][3]["metadata"]["tags"] = ["found"]
    read["cells"][3]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "two\n"}]
    read["metadata"]["executed"] = {"commit": "0" * 40, "cpu": "a cpu"}
    return read


def test_a_page_shows_code_folded_and_outputs_without_warnings():
    text, pictures = executed.page_of(executed_copy(), "00_a", {"10_b"})
    assert text.startswith("# First\n\n> Promises First.") and list(pictures) == ["00_a-1.png"]
    assert "![Figure](00_a-1.png)" in text and "see [it](10_b.md)" in text
    assert "```python\n1 + 1\n```" in text and "a warning" not in text
    assert "<!-- found -->\n\n```\ntwo\n```\n\n<!-- end of found -->" in text
    assert "commit 000000000000" in text and executed.source_hash(executed_copy()) in text


def test_contents_mark_pages_of_an_earlier_version(home, monkeypatch):
    folder = home / "notebooks"
    folder.mkdir()
    (folder / "book.yml").write_text("- {name: 00_a}\n")
    (folder / "00_a.ipynb").write_text(json.dumps(executed_copy()))
    opened = book.Book(folder=folder)
    pages = home / "pages"
    pages.mkdir()
    with pytest.raises(SpecdecError, match="00_a"):
        executed.write_pages(opened, ["00_a"], pages)
    opened.copy(opened.entries[0]).parent.mkdir(parents=True)
    opened.copy(opened.entries[0]).write_text(json.dumps(executed_copy()))
    executed.write_pages(opened, ["00_a"], pages)
    text = (pages / "README.md").read_text()
    assert "two" in text and executed.OLDER not in text
    (folder / "00_a.ipynb").write_text(notebook("First", "another"))
    assert executed.OLDER in executed.contents(opened, pages)


def test_an_executed_notebook_becomes_one_page_of_html():
    read = executed_copy()
    for cell in read["cells"]:
        cell["source"] = "".join(cell["source"]).splitlines(keepends=True)
    html = notebooks.as_html(read)
    assert "First" in html and "data:image/png;base64" in html and "1 + 1" not in html
