"""Notebook 11 in a JupyterLab that was really started: run all, step, slide, switch, decode, stop,
restart.

Takes minutes: `make test-browser` runs it, `make test` does not.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from specdec import machine

pytestmark = pytest.mark.skipif(
    "SPECDEC_SHOTS" not in os.environ, reason="takes minutes: run `make test-browser`"
)
NOTEBOOK = "11_draft_trees.ipynb"
SMALL = {"pair": '"tiny"', "dtype": '"float32"', "max_new_tokens": "64"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab over a copy of the notebook, small."""
    root = tmp_path_factory.mktemp("lab")
    notebook = json.loads((machine.checkout() / "notebooks" / NOTEBOOK).read_text())
    for cell in notebook["cells"]:
        if "parameters" in cell["metadata"].get("tags", []):
            source = "".join(cell["source"])
            for name, value in SMALL.items():
                pattern = rf"^({name}: \w+ = ).*?(  #)"
                source = re.sub(pattern, rf"\g<1>{value}\2", source, flags=re.M)
                assert value in source
            cell["source"] = source
    (root / NOTEBOOK).write_text(json.dumps(notebook))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = dict(ip="127.0.0.1", port=port, root_dir=root, open_browser=False, allow_root=True)
    options = [f"--ServerApp.{name}={value}" for name, value in settings.items()]
    options += ["--IdentityProvider.token=", "--LabApp.news_url="]
    command = [sys.executable, "-m", "jupyterlab", *options]
    with open(root / "log.txt", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=root)
    address = f"http://127.0.0.1:{port}/lab"
    try:
        answered(address, server, root / "log.txt")
        yield address
    finally:
        server.kill()
        server.wait(20)


def answered(address: str, server, log: Path) -> None:
    for _ in range(240):
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            time.sleep(0.5)
    raise AssertionError(f"JupyterLab did not answer: {log.read_text()}")


def settled(view, words: str) -> None:
    """Wait until the view shows `words` in its strip of times."""
    view.locator(".time", has_text=words).wait_for()


def pick(view, name: str, choice: str) -> None:
    view.locator(f".control.{name} select").select_option(label=choice)


def views(page):
    """Each view with its controls."""
    return page.locator(".jp-OutputArea-output:has(.specdec-explorer)")


def choose(page, menu: str, entry: str) -> None:
    """An entry of a menu of the bar."""
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{menu}$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{entry}$")).click()


def run_all(page, lab: str) -> None:
    # a server that has just come up may ask, even twice
    asked = page.locator(".jp-Dialog", has_text="Select Kernel")
    page.add_locator_handler(asked, lambda dialog: dialog.locator(".jp-mod-accept").click())
    page.goto(f"{lab}/tree/{NOTEBOOK}")
    page.locator(".jp-Notebook .jp-Cell").first.wait_for()
    page.evaluate("document.querySelectorAll('.jp-toast-button').forEach(one => one.click())")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").first.wait_for(
        state="attached"
    )
    running = page.locator(".jp-InputArea-prompt", has_text=re.compile(r"\[(\*|\d+)\]"))
    # a kernel that has just come up may not hear the first time
    for _ in range(5):
        choose(page, "Run", "Run All Cells")
        page.wait_for_timeout(15_000)
        if running.count():
            break
    views(page).first.locator(".tree svg").wait_for()


def test_the_whole_way(page, lab):
    run_all(page, lab)
    page.locator(".jp-OutputArea-output", has_text="240 nodes cut").wait_for()
    views(page).nth(2).locator(".tree svg").wait_for()  # the last view of the notebook
    errors = page.locator("[data-mime-type='application/vnd.jupyter.stderr']", has_text="Error")
    assert errors.count() == 0
    explored(page, views(page).first)
    live(page, views(page).nth(1))


def explored(page, view) -> None:
    """The view and its kernel: a policy, a cycle, another tree, a hard text, the bound."""
    pick(view, "policy", "fixed 60,7,10")
    for _ in range(20):
        view.locator(".specdec-explorer").press("ArrowLeft")
    settled(view, "cycle 1/")
    counts = view.locator(".counts").inner_text()
    numbers = re.findall(r"(\d+) (?:drafted|verified|accepted)", counts)
    drafted, verified, accepted = map(int, numbers)
    assert (drafted, verified) == (710, 59)
    assert view.locator(".tree [data-kind=accepted]").count() == accepted > 0
    view.get_by_role("slider", name="total_tokens").press("ArrowLeft")
    view.locator(".message", has_text="What if 59 / 7 / 10").wait_for()
    view.locator(".specdec-explorer").press("ArrowRight")
    settled(view, "cycle 2/")
    pick(view, "turn", view.locator(".turn option").nth(2).text_content())
    view.locator(".prompt", has_text="night bus").wait_for()
    pick(view, "policy", "clairvoyant")
    settled(view, "clairvoyant")


def live(page, view) -> None:
    """Decode again, stop, and a kernel that goes away midway."""
    view.locator("button", has_text="start").click()
    view.locator(".message", has_text=re.compile("Decoding|Finished|Stopped")).wait_for()
    view.locator("button", has_text="stop").click()
    ended = re.compile(r"(Stopped|Finished): \d+ tokens in \d+ cycles")
    view.locator(".message", has_text=ended).wait_for()
    assert view.locator(".tree [data-kind=root]").count() == 1
    choose(page, "Kernel", "Restart Kernel…")
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    view.locator(".message", has_text="The kernel behind this view has gone").wait_for()
