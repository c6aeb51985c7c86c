"""The view alone in a real browser: explorer.js gets what Python would send it, and tells what
people do.
"""

import pytest
from browser.harness import show

from specdec.report import explorer_panels as panels
from specdec.report.explorer import explore

# Pairs of texts that cover each other, as the browser laid them out.
OVERLAPS = """() => {
  const found = [];
  for (const picture of document.querySelectorAll("svg")) {
    const nodes = [...picture.querySelectorAll("text")];
    const texts = nodes.map(one => [one.textContent, one.getBBox()]);
    texts.forEach(([words, a], i) => texts.slice(i + 1).forEach(([others, b]) => {
      const [x, y] = [Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x),
                      Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y)];
      if (x > 2 && y > 4) found.push([words, others]);
    }));
  }
  return found;
}"""
FILL = "nodes => nodes.map(node => getComputedStyle(node).fill)"


@pytest.fixture(scope="module")
def explorer():
    return explore()


def redraw(page, explorer) -> float:
    """Send the page what is to be seen now; the milliseconds of processor time that its drawing
    took.
    """
    page.evaluate("page => { window.next = page; }", explorer.view.page)
    counting = page.context.new_cdp_session(page)
    counting.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = busy_ms(counting)
    page.evaluate("() => { model.data.page = window.next; fire('change:page'); }")
    return busy_ms(counting) - before


def busy_ms(counting) -> float:
    """Of the page's main thread since it began, drawing included."""
    metrics = counting.send("Performance.getMetrics")["metrics"]
    return 1e3 * next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration")


def rgb(colour: str) -> str:
    return "rgb({}, {}, {})".format(*(int(colour[i : i + 2], 16) for i in (1, 3, 5)))


def test_what_the_page_shows_and_what_it_tells(page, explorer):
    show(page, explorer)
    lane, number = explorer.shown[0]
    cycle = lane.cycles[number]
    tree = page.locator(".tree")
    assert (
        tree.locator("[data-kind=verified]").count() == sum(cycle.verified) - 1 - cycle.accepted_tok
    )
    assert (
        tree.locator("[data-kind=accepted]").evaluate_all(FILL)
        == [rgb(panels.ACCEPTED)] * cycle.accepted_tok
    )
    assert tree.locator("[data-kind=bonus]").evaluate_all(FILL) == [rgb(panels.BONUS)]
    assert f"{sum(cycle.verified) - 1} verified, {cycle.accepted_tok} accepted" in page.inner_text(
        ".counts"
    )
    assert page.locator(".text text[data-kind=accepted]").count() == cycle.accepted_tok
    assert explorer.prompt[:40] in page.inner_text(".prompt")
    page.focus(".specdec-explorer")
    for key in ("ArrowRight", "ArrowLeft", "Home", "f", " "):
        page.keyboard.press(key)
    tree.locator("[data-kind=verified]").first.dblclick()
    page.locator(".time [data-kind=cycle]").nth(3).click()
    sent = page.evaluate("model.sent")
    assert [one["do"] for one in sent] == ["step", "step", "go", "fold", "play", "fold", "go"]
    assert sent[-1]["cycle"] == 3 and cycle.verified[sent[-2]["node"]]
    tree.locator("[data-kind=accepted]").first.hover()
    assert "accepted; probability" in page.inner_text(".tip")


def test_240_nodes_are_drawn_within_100_ms_and_can_be_zoomed(page, explorer):
    show(page, explorer)
    explorer.depth.value, explorer.top_k.value, explorer.total_tokens.value = 8, 10, 241
    spent_ms = min(redraw(page, explorer) for _ in range(3))
    print(f"240 nodes: {spent_ms:.0f} ms of the page's processor time")
    assert page.locator(".tree [data-kind=verified], .tree [data-kind=accepted]").count() == 240
    assert spent_ms < 100, f"drawn in {spent_ms} ms"
    assert "What if 241 / 8 / 10" in page.inner_text(".message")
    height = page.locator(".tree svg").bounding_box()["height"]
    page.click("button:text('fit')")
    small = page.locator(".tree svg").bounding_box()
    box = page.locator(".tree").bounding_box()
    assert (
        small["height"] < height
        and small["height"] <= box["height"]
        and small["width"] <= box["width"]
    )
    page.click("button:text('1:1')")
    assert page.locator(".tree svg").evaluate(
        "one => one.viewBox.baseVal.height == one.height.baseVal.value"
    )
    explorer.own.click()
    redraw(page, explorer)
    assert page.inner_text(".message") == ""


def test_lanes_come_and_go_and_a_lost_kernel_is_said(page, explorer):
    show(page, explorer)
    explorer.policy.value, explorer.other.value, explorer.bound.value = "LTD", "RADAR", True
    redraw(page, explorer)
    assert page.locator(".lane").count() == 3 and "clairvoyant" in page.inner_text(".time")
    assert page.evaluate(OVERLAPS) == []
    explorer.other.value, explorer.bound.value = "no policy", False
    redraw(page, explorer)
    assert page.locator(".lane").count() == 1
    page.evaluate("fire('comm:close')")
    assert page.inner_text(".message").startswith("The kernel behind this view has gone")


@pytest.mark.parametrize("wide, lanes, high", [(934, 1, 560), (934, 3, 560), (479, 1, None)])
def test_all_of_a_cycle_is_in_view_on_a_laptop(page, explorer, wide, lanes, high):
    """1366 x 768 less what browser and JupyterLab take; 479 pixels are left of it at 150 %."""
    page.set_viewport_size({"width": 1366 if high else 911, "height": 650 if high else 433})
    explorer.view.width, explorer.policy.value = wide, "ours"
    explorer.other.value, explorer.bound.value = (
        ("LTD", True) if lanes == 3 else ("no policy", False)
    )
    show(page, explorer, wide)
    root = page.locator(".specdec-explorer").bounding_box()
    assert high is None or root["height"] <= high
    parts = page.locator(".bar, .text svg, .time svg, .tree, .answers svg").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect()).map(box => [box.left, box.right])"
    )
    assert len(parts) == 3 + 2 * lanes and all(
        root["x"] <= left and right <= root["x"] + wide for left, right in parts
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator(".text svg").count() == 1 and page.evaluate(OVERLAPS) == []
    if lanes == 1 and high:
        assert page.locator(".bar").bounding_box()["height"] < 30  # one row
        assert page.locator(".answers").evaluate("one => one.scrollHeight <= one.clientHeight")


def test_names_keys_and_the_theme(page, explorer):
    explorer.other.value, explorer.bound.value = "no policy", False
    show(page, explorer)
    page.add_style_tag(
        content=":root { --jp-layout-color0: #111; --jp-content-font-color1: #fff; }"
    )
    named = page.locator(".specdec-explorer").locator("button, input, select, svg, [tabindex]")
    names = named.evaluate_all("all => all.map(one => one.getAttribute('aria-label') || '')")
    assert len(names) > 18 and all(names) and "next cycle (→)" in names
    assert page.get_by_role("slider").count() == 4 and page.get_by_role("img").count() == 4
    page.focus(".specdec-explorer")
    for key in ("ArrowDown", "d", "b", "Enter", "Escape", "ArrowRight", "Control+s"):
        page.keyboard.press(key)
    assert page.evaluate("escaped") == ["Control", "s"]
    page.get_by_role("slider", name="depth").press("ArrowRight")
    sent = page.evaluate("model.sent")
    assert [one["do"] for one in sent] == ["step", "set"] and sent[1]["name"] == "depth"
    explorer._received(None, sent[1])
    assert explorer.depth.value == sent[1]["value"] and "What if" in explorer.message
    ground = page.locator(".specdec-explorer").evaluate(
        "one => getComputedStyle(one).backgroundColor"
    )
    assert ground == "rgb(17, 17, 17)"
    assert page.locator(".tree [data-kind=root]").evaluate_all(FILL) == ["rgb(255, 255, 255)"]
    explorer.own.click()
