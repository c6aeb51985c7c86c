"""The view alone in a real browser: what explorer.js draws, and what people do to it."""

import pytest
from browser.harness import show, traits

from specdec.report import explorer_panels as panels
from specdec.report.explorer import explore

FILL = "nodes => nodes.map(node => getComputedStyle(node).fill)"


@pytest.fixture(scope="module")
def explorer():
    return explore()


def redraw(page, explorer) -> None:
    """Send the page what is to be seen now."""
    page.evaluate("data => { model.data = data; fire('change:page'); }", traits(explorer))


def rgb(colour: str) -> str:
    return "rgb({}, {}, {})".format(*(int(colour[place : place + 2], 16) for place in (1, 3, 5)))


def test_what_the_page_shows_and_what_keys_and_clicks_do(page, explorer):
    show(page, explorer)
    cycle = explorer.lane.cycles[explorer.cycle - 1]
    refused = sum(cycle.verified) - 1 - cycle.accepted_tok
    tree = page.locator(".tree")
    assert tree.locator("[data-kind=verified]").count() == refused
    fills = tree.locator("rect[data-kind=accepted]").evaluate_all(FILL)
    assert fills == [rgb(panels.ACCEPTED)] * cycle.accepted_tok
    assert tree.locator("[data-kind=bonus]").evaluate_all(FILL) == [rgb(panels.BONUS)]
    assert f"{cycle.accepted_tok} accepted" in page.inner_text(".counts")
    assert page.locator(".text text[data-kind=accepted]").count() == cycle.accepted_tok
    assert explorer.prompt[:40] in page.inner_text(".prompt")
    # 1. keys and clicks change the cycle
    page.focus(".specdec-explorer")
    for key, place in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2)):
        page.keyboard.press(key)
        assert page.evaluate("model.data.cycle") == place
    page.locator(".time [data-kind=cycle]").nth(3).click()
    assert page.evaluate("model.data.cycle") == 4
    # 2. exact numbers of a node
    tree.locator("rect[data-kind=accepted]").first.hover()
    assert "accepted; probability" in page.inner_text(".tip")


def test_controls_set_traits(page, explorer):
    show(page, explorer)
    page.locator(".control.policy select").select_option(label="LTD")
    assert page.evaluate("model.data.policy") == "LTD"
    page.locator(".control.turn select").select_option(index=2)
    assert page.evaluate("model.data.turn") == 2
    before = explorer.depth
    page.get_by_role("slider", name="depth").press("ArrowLeft")
    assert page.evaluate("model.data.depth") == before - 1
    page.locator(".control.top_k input").fill("0")
    assert page.evaluate("model.data.top_k") == explorer.recording.top_ks[0]


def test_240_nodes_can_be_zoomed(page, explorer):
    show(page, explorer)
    explorer.depth, explorer.top_k, explorer.total_tokens = 8, 10, 241
    redraw(page, explorer)
    nodes = page.locator(".tree rect[data-kind=verified], .tree rect[data-kind=accepted]")
    assert nodes.count() == 240
    assert "What if 241 / 8 / 10" in page.inner_text(".message")
    height = page.locator(".tree svg").bounding_box()["height"]
    page.click("button:text('fit')")
    small = page.locator(".tree svg").bounding_box()
    box = page.locator(".tree").bounding_box()
    assert small["height"] < height
    assert small["height"] <= box["height"]
    assert small["width"] <= box["width"]
    explorer.move()
    redraw(page, explorer)
    assert page.inner_text(".message") == ""


def test_a_lost_kernel_is_said(page, explorer):
    show(page, explorer)
    page.evaluate("fire('comm:close')")
    assert page.inner_text(".message").startswith("The kernel behind this view has gone")


@pytest.mark.parametrize("wide, high", [(934, 560), (479, None)])
def test_all_of_a_cycle_is_in_view_on_a_laptop(page, explorer, wide, high):
    """1366 x 768 less what browser and JupyterLab take; 479 pixels are left of it at 150 %."""
    page.set_viewport_size({"width": 1366 if high else 911, "height": 650 if high else 433})
    explorer.policy = "ours"
    show(page, explorer, wide)
    root = page.locator(".specdec-explorer").bounding_box()
    assert high is None or root["height"] <= high
    parts = page.locator(".bar, .text svg, .time svg, .tree, .answers svg")
    assert parts.count() == 5
    for part in parts.all():
        box = part.bounding_box()
        assert root["x"] <= box["x"]
        assert box["x"] + box["width"] <= root["x"] + wide
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_shortcuts_of_the_notebook_do_not_see_what_is_typed_here(page, explorer):
    show(page, explorer)
    page.focus(".specdec-explorer")
    for key in ("ArrowDown", "d", "Enter", "ArrowRight", "Control+s"):
        page.keyboard.press(key)
    assert page.evaluate("escaped") == ["Control", "s"]
