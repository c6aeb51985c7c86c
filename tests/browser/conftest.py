"""A real browser, where one is found; every test here is skipped with a reason where not."""

import os
import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def browser():
    """Chromium, driven by Playwright. SPECDEC_BROWSER names another executable."""
    driver = pytest.importorskip(
        "playwright.sync_api", reason="needs Playwright: pip install playwright"
    )
    executable = os.environ.get("SPECDEC_BROWSER")
    for name in NAMES:
        executable = executable or shutil.which(name)
    if executable is None:
        pytest.skip("needs Chromium: apt-get install chromium, or SPECDEC_BROWSER=its path")
    with driver.sync_playwright() as playwright:
        options = ["--no-sandbox", "--no-proxy-server", "--disable-gpu"]
        opened = playwright.chromium.launch(executable_path=executable, args=options)
        yield opened
        opened.close()


@pytest.fixture
def page(browser):
    """A page that notes every error; the test fails if there was one."""
    opened = browser.new_page(viewport={"width": 1480, "height": 1750})
    opened.set_default_timeout(180_000)
    errors = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    yield opened
    opened.close()
    assert errors == []
