"""report.html in a real browser: short when folded, nothing cut on a phone, links that unfold, a filter that hides."""

import pytest

from specdec import machine

from workbook import items, report

WIDER = """() => [...document.querySelectorAll("body *")].filter(one => one.getBoundingClientRect().right > innerWidth + 1
  && !one.closest(".scroll")).map(one => one.outerHTML.slice(0, 90))"""
TEXT_PX = """() => Math.min(...[...document.querySelectorAll("body *")].filter(one => one.innerText)
  .map(one => parseFloat(getComputedStyle(one).fontSize)))"""


@pytest.fixture
def written(home, monkeypatch):
    monkeypatch.setattr(items, "figures_dir", lambda: machine.checkout() / "figures")
    return report.write().as_uri()


def test_the_report_is_short_fits_a_phone_and_unfolds(page, written):
    for width, tallest in ((1280, 8 * 900), (390, 30_000)):
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(written)
        assert page.evaluate("document.documentElement.scrollHeight") <= tallest and page.evaluate(WIDER) == []
        assert not page.locator("#ltd-table1").is_visible()
        page.goto(f"{written}#ltd-table1")
        assert page.locator("#ltd-table1 td").first.is_visible(), "a link unfolds the item"
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == width, "wide tables scroll in their boxes"
        assert page.evaluate(WIDER) == [] and page.evaluate(TEXT_PX) >= (15 if width < 400 else 13)
    page.locator("label", has=page.locator("#paper-ltd")).click()
    assert page.locator("#claims-ltd").is_visible() and not page.locator("#claims-radar").is_visible()
