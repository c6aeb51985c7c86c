"""The view alone in a real browser: explorer.js gets what Python would send it, and tells what people do."""

import base64
import io
import os
from pathlib import Path

import pytest
from PIL import Image

import specdec
from specdec.replays import snapshots
from specdec.report import explorer_panels as panels
from specdec.report.explorer import FOLDER, explore

# A model as anywidget hands it to a view: the page to draw, and a list of what the view sent back.
HARNESS = """async ({source, page, wide}) => {
  document.body.innerHTML = `<div id="here" style="width: ${wide}px"></div>`;
  window.escaped = [];
  document.body.onkeydown = (event) => window.escaped.push(event.key);
  const heard = {};
  window.model = {
    data: {page, width: 1080}, sent: [],
    get(name) { return this.data[name]; },
    set(name, value) { this.data[name] = value; },
    save_changes() {},
    on(event, then) { (heard[event] ||= []).push(then); },
    send(what) { this.sent.push(what); },
  };
  window.fire = (event) => (heard[event] || []).forEach((then) => then());
  const view = await import("data:text/javascript;base64," + source);
  view.default.render({model: window.model, el: document.getElementById("here")});
}"""
# Pairs of texts that cover each other, as the browser laid them out.
OVERLAPS = """() => {
  const found = [];
  for (const picture of document.querySelectorAll("svg")) {
    const texts = [...picture.querySelectorAll("text")].map(one => [one.textContent, one.getBBox()]);
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


def show(page, explorer, wide=1080):
    source = base64.b64encode((FOLDER / "explorer.js").read_bytes()).decode()
    page.evaluate(HARNESS, {"source": source, "page": explorer.view.page, "wide": wide})
    page.add_style_tag(content=(FOLDER / "explorer.css").read_text())


def redraw(page, explorer) -> float:
    """Send the page what is to be seen now; the milliseconds of processor time that its drawing took."""
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
    assert tree.locator("[data-kind=verified]").count() == sum(cycle.verified) - 1 - cycle.accepted_tok
    assert tree.locator("[data-kind=accepted]").evaluate_all(FILL) == [rgb(panels.ACCEPTED)] * cycle.accepted_tok
    assert tree.locator("[data-kind=bonus]").evaluate_all(FILL) == [rgb(panels.BONUS)]
    assert f"{sum(cycle.verified) - 1} verified, {cycle.accepted_tok} accepted" in page.inner_text(".counts")
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
    assert small["height"] < height and small["height"] <= box["height"] and small["width"] <= box["width"]
    page.click("button:text('1:1')")
    assert page.locator(".tree svg").evaluate("one => one.viewBox.baseVal.height == one.height.baseVal.value")
    explorer.own.click()
    redraw(page, explorer)
    assert page.inner_text(".message") == ""


def test_lanes_come_and_go_and_a_lost_kernel_is_said(page, explorer):
    show(page, explorer)
    explorer.policy.value, explorer.other.value, explorer.bound.value = "LTD", "RADAR", True
    redraw(page, explorer)
    assert page.locator(".lane").count() == 3 and "clairvoyant" in page.inner_text(".time")
    assert page.evaluate(OVERLAPS) == []
    explorer.other.value, explorer.bound.value = "nobody", False
    redraw(page, explorer)
    assert page.locator(".lane").count() == 1
    page.evaluate("fire('comm:close')")
    assert page.inner_text(".message").startswith("The kernel behind this view has gone")


@pytest.mark.parametrize("wide, lanes, high", [(934, 1, 560), (934, 3, 560), (479, 1, None)])
def test_all_of_a_cycle_is_in_view_on_a_laptop(page, explorer, wide, lanes, high):
    """1366 x 768 less what browser and JupyterLab take; 479 pixels are left of it at 150 %."""
    page.set_viewport_size({"width": 1366 if high else 911, "height": 650 if high else 433})
    explorer.view.width, explorer.policy.value = wide, "ours"
    explorer.other.value, explorer.bound.value = ("LTD", True) if lanes == 3 else ("nobody", False)
    show(page, explorer, wide)
    root = page.locator(".specdec-explorer").bounding_box()
    assert high is None or root["height"] <= high
    parts = page.locator(".bar, .text svg, .time svg, .tree, .answers svg").evaluate_all(
        "all => all.map(one => one.getBoundingClientRect()).map(box => [box.left, box.right])"
    )
    assert len(parts) == 3 + 2 * lanes and all(root["x"] <= left and right <= root["x"] + wide for left, right in parts)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator(".text svg").count() == 1 and page.evaluate(OVERLAPS) == []
    if lanes == 1 and high:
        assert page.locator(".bar").bounding_box()["height"] < 30  # one row
        assert page.locator(".answers").evaluate("one => one.scrollHeight <= one.clientHeight")


def test_names_keys_and_the_theme(page, explorer):
    explorer.other.value, explorer.bound.value = "nobody", False
    show(page, explorer)
    page.add_style_tag(content=":root { --jp-layout-color0: #111; --jp-content-font-color1: #fff; }")
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
    explorer._told(None, sent[1])
    assert explorer.depth.value == sent[1]["value"] and "What if" in explorer.message
    assert (
        page.locator(".specdec-explorer").evaluate("one => getComputedStyle(one).backgroundColor") == "rgb(17, 17, 17)"
    )
    assert page.locator(".tree [data-kind=root]").evaluate_all(FILL) == ["rgb(255, 255, 255)"]
    explorer.own.click()


# README's width in pixels, drawn twice as fine; the question that its pictures are about, and a word of a sensible answer.
WIDE, FINE = 830, 2
QUESTION, SENSIBLE = "What is the capital of France, and what is it known for?", "Paris"
POLICIES = {"Re-SpS": "resps", "LTD": "ltd", "RADAR": "radar", "ours": "ours"}


@pytest.fixture
def asked(explorer):
    """(pair, explorer over a recording of its answer to QUESTION), with the prices and policies of the recording that ships."""
    pair = specdec.load_pair("smollm2", dtype="float32")
    known, kept = explorer.recordings["smollm2"], ("depth", "top_ks", "trees", "max_new_tokens")
    settings = {name: known.trace.header[name] for name in kept}
    trace = specdec.record(pair, {"asked": [QUESTION]}, **settings, progress=False)
    own = explore(snapshots.recording_of(trace, pair, known.costs), policies=explorer.policies)
    own.view.width = WIDE
    return pair, own


@pytest.fixture
def camera(browser):
    """(page, take): take(viewer, name) draws what is shown now, looks for overlaps, and saves <name>.png in SPECDEC_SHOTS."""
    folder = Path(os.environ["SPECDEC_SHOTS"])
    folder.mkdir(parents=True, exist_ok=True)
    page = browser.new_page(viewport={"width": WIDE + 20, "height": 740}, device_scale_factor=FINE)

    def take(viewer, name: str = ""):
        show(page, viewer, WIDE)
        page.wait_for_timeout(200)
        assert page.evaluate(OVERLAPS) == [], name
        picture = Image.open(io.BytesIO(page.locator(".specdec-explorer").screenshot())).convert("RGB")
        picture = picture.quantize(64, dither=Image.Dither.NONE)
        if name:
            picture.save(folder / f"{name}.png", optimize=True)
        return picture

    yield folder, take
    page.close()


@pytest.mark.skipif("SPECDEC_SHOTS" not in os.environ, reason="writes pictures: run `make test-browser`")
def test_pictures_for_the_readme(asked, camera):
    """Stills of the explorer on a real answer, one of `watch`, and the comparison of three lanes, step by step, as a GIF."""
    (pair, explorer), (folder, take) = asked, camera
    explorer.policy.value = "fixed 60,7,10"
    cycles = explorer.shown[0][0].cycles[:-1]
    for name, choose in (("easy", max), ("hard", min)):
        number = choose(range(len(cycles)), key=lambda one: cycles[one].accepted_tok)
        explorer.cycle.value = number + 1
        take(explorer, name)
    own, tree = cycles[number], best_tree(explorer)
    explorer.total_tokens.value, explorer.depth.value, explorer.top_k.value = tree
    faster = explorer.drawn()[0][0].cycles[number]
    assert faster.kept_tok / faster.total_ms > 2 * own.kept_tok / own.total_ms, "the change does not matter"
    take(explorer, "what_if")
    for policy, name in POLICIES.items():
        explorer.policy.value, explorer.cycle.value = policy, 2
        take(explorer, name)
    explorer.policy.value, explorer.other.value, explorer.bound.value = "fixed 60,7,10", "ours", True
    frames = []
    for number in range(1, 9):
        explorer.cycle.value = number
        frames.append(take(explorer, "comparison" if number == 3 else ""))
    animated(frames, folder / "comparison.gif")
    live = specdec.watch(pair, QUESTION, {"tuned": specdec.Static(6, 2, 3)}, max_new_tokens=48)
    live.view.width = WIDE
    assert SENSIBLE in live.start().wait().text
    live.cycle.value = 3
    take(live, "live")


def best_tree(explorer) -> tuple[int, int, int]:
    """The fixed tree that is fastest on the recording."""
    fastest = next(policy for name, policy in explorer.policies.items() if name.endswith("(fastest)"))
    return fastest.plan.total_tokens, fastest.plan.depth, fastest.plan.top_k


def animated(frames: list, path: Path) -> None:
    """Frames as a GIF of one size and one set of colours, below 2 MB, that pauses at its end."""
    size = max(frame.width for frame in frames), max(frame.height for frame in frames)
    pages = [Image.new("RGB", size, "white") for _ in frames]
    for page, frame in zip(pages, frames, strict=True):
        page.paste(frame.convert("RGB"))
    first = pages[0].quantize(64, dither=Image.Dither.NONE)
    rest = [page.quantize(palette=first, dither=Image.Dither.NONE) for page in pages[1:]]
    times = [1500] * len(rest) + [3500]
    first.save(path, save_all=True, append_images=rest, duration=times, loop=0, optimize=True)
    with Image.open(path) as shown:
        assert shown.n_frames == len(frames) and path.stat().st_size < 2e6
