"""Pictures of the explorer and of `watch` as a browser draws them: stills and an animation for README, in figures/explorer.

`make test-browser` takes them, and looks at what the page says meanwhile. The view stands alone in the page: it is sent what Python
would send it in a notebook. Knows nothing about JupyterLab.
"""

from __future__ import annotations

import base64
import dataclasses
import io
from pathlib import Path

import specdec
from specdec.replays import snapshots
from specdec.report.explorer import FOLDER, explore

from workbook.pictures import few_colours

WIDE_PX, FINE = 830, 2  # README's width on GitHub, drawn twice as fine
QUESTION = "What is the capital of France, and what is it known for?"
MOST_BYTES = 2_000_000
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


def show(page, viewer, wide: int = 1080) -> None:
    """Put a view into a page of Playwright, `wide` pixels wide, as it is now."""
    source = base64.b64encode((FOLDER / "explorer.js").read_bytes()).decode()
    page.evaluate(HARNESS, {"source": source, "page": viewer.view.page, "wide": wide})
    page.add_style_tag(content=(FOLDER / "explorer.css").read_text())


class Camera:
    """Takes pictures of views into a folder; `seen` is called with the page before each."""

    def __init__(self, browser, folder: Path, seen=lambda page: None):
        self.browser, self.folder, self.seen = browser, Path(folder), seen
        self.folder.mkdir(parents=True, exist_ok=True)

    def take(self, viewer, name: str = "", high_px: int = 560, fit: bool = False):
        """What the view shows now, in few colours, for a window of this height; saved as <name>.png. fit: whole trees."""
        from PIL import Image

        page = self.browser.new_page(viewport={"width": WIDE_PX + 20, "height": high_px}, device_scale_factor=FINE)
        try:
            show(page, viewer, WIDE_PX)
            if fit:
                page.click("button:text('fit')")
            page.wait_for_timeout(200)
            self.seen(page)
            content = page.locator(".specdec-explorer").screenshot()
        finally:
            page.close()
        picture = few_colours(Image.open(io.BytesIO(content)))
        if name:
            picture.save(self.folder / f"{name}.png", optimize=True)
        return picture


def asked(pair, known, question: str = QUESTION):
    """The explorer over a recording of the pair's answer, with the prices and settings of the recording `known`."""
    settings = {name: known.trace.header[name] for name in ("depth", "top_ks", "trees", "max_new_tokens")}
    trace = specdec.record(pair, {"asked": [question]}, **settings, progress=False)
    recording = dataclasses.replace(snapshots.recording_of(trace, pair, known.costs), prompts=(question,))
    explorer = explore(recording)
    explorer.view.width = WIDE_PX
    return explorer


def stills(explorer, camera: Camera) -> tuple[float, float]:
    """An easy and a hard place, one tree of EAGLE-3's changed, and each controller at work. Returns the tokens/s of the changed
    cycle, before and after.
    """
    for policy, name in {"Re-SpS": "resps", "LTD": "ltd", "RADAR": "radar", "ours": "ours"}.items():
        explorer.policy.value, explorer.cycle.value = policy, 1
        camera.take(explorer, name)
    cycles = explorer.shown[0][0].cycles[1:-1]
    for name, choose in (("easy", max), ("hard", min)):
        explorer.cycle.value = 2 + choose(range(len(cycles)), key=lambda number: cycles[number].accepted_tok)
        camera.take(explorer, name)
    explorer.policy.value = "fixed 60,7,10"
    cycles = explorer.shown[0][0].cycles[:-1]
    small = next(policy.plan for name, policy in explorer.policies.items() if name.endswith("(fastest)"))
    number = best_change(explorer, cycles, small)
    explorer.cycle.value = 1 + number
    explorer.total_tokens.value, explorer.depth.value, explorer.top_k.value = (
        small.total_tokens,
        small.depth,
        small.top_k,
    )
    changed = explorer.drawn()[0][0].cycles[number]
    camera.take(explorer, "what_if")
    before, after = (1e3 * cycle.kept_tok / cycle.total_ms for cycle in (cycles[number], changed))
    return before, after


def best_change(explorer, cycles: list, tree) -> int:
    """The cycle in which `tree` has most accepted of those in which it loses nothing."""
    others = [snapshots.what_if(explorer.recording, 0, cycle.position, tree) for cycle in cycles]
    kept = [number for number, cycle in enumerate(cycles) if others[number].accepted_tok == cycle.accepted_tok]
    return max(kept, key=lambda number: cycles[number].accepted_tok, default=0)


def comparison(explorer, camera: Camera, cycles: int = 8) -> Path:
    """comparison.png and comparison.gif: EAGLE-3's tree, ours and the bound on one text, cycle by cycle."""
    explorer.policy.value, explorer.other.value, explorer.bound.value = "fixed 60,7,10", "ours", True
    frames = []
    for number in range(1, cycles + 1):
        explorer.cycle.value = number
        frames.append(camera.take(explorer, "comparison" if number == 3 else "", high_px=740, fit=True))
    return animated(frames, camera.folder / "comparison.gif")


def animated(frames: list, path: Path) -> Path:
    """Frames as a GIF of one size and one set of colours, which stays on its last."""
    from PIL import Image

    wide, high = max(frame.width for frame in frames), max(frame.height for frame in frames)
    together = Image.new("RGB", (wide, high * len(frames)), "white")
    for number, frame in enumerate(frames):
        together.paste(frame.convert("RGB"), (0, high * number))
    together = few_colours(together)
    first, *rest = (together.crop((0, high * number, wide, high * (number + 1))) for number in range(len(frames)))
    times_ms = [1500] * len(rest) + [3500]
    first.save(path, save_all=True, append_images=rest, duration=times_ms, loop=0, optimize=True)
    return path


def live(pair, camera: Camera) -> str:
    """live.png: what `watch` shows when it has ended. Returns the answer."""
    view = specdec.watch(pair, QUESTION, {"tuned": specdec.Static(6, 2, 3)}, max_new_tokens=48)
    view.view.width = WIDE_PX
    result = view.start().wait()
    view.cycle.value = 3
    camera.take(view, "live")
    return result.text
