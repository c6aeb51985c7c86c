"""A view of the explorer alone in a page, with what Python would send it in a notebook."""

import base64

from specdec.report.explorer import FOLDER

# A model as anywidget hands it to a view: its traits, and a list of what the view sent back.
HARNESS = """async ({source, data, wide}) => {
  document.body.innerHTML = `<div id="here" style="width: ${wide}px"></div>`;
  window.escaped = [];
  document.body.onkeydown = (event) => window.escaped.push(event.key);
  const heard = {};
  window.model = {
    data, sent: [],
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


def traits(viewer) -> dict:
    """The traits that Python and the page share."""
    names = [name for name in viewer.keys if not name.startswith("_")]
    return {name: getattr(viewer, name) for name in names if name not in ("layout", "tooltip")}


def show(page, viewer, wide: int = 1080) -> None:
    """Put a view into a page of Playwright, `wide` pixels wide, as it is now."""
    source = base64.b64encode((FOLDER / "explorer.js").read_bytes()).decode()
    page.evaluate(HARNESS, {"source": source, "data": traits(viewer), "wide": wide})
    page.add_style_tag(content=(FOLDER / "explorer.css").read_text())
