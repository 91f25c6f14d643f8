"""A real browser for the tests of pages: what a page asks of a network, or complains of, fails the test."""

import os
import shutil
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
OWN = ("file:", "data:", "blob:")  # all that a self-contained page may load
PATIENCE = 30_000  # milliseconds for anything to appear
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
A4 = {"width": 718, "height": 1047}  # pixels, at 1 cm margins


def executable():
    """The installed browser; without one the test is skipped, but fails where CI must run it."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        missing = f"No browser is installed (looked for {', '.join(BROWSERS)}), so pages were not opened."
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    return found


@pytest.fixture(scope="module")
def browser():
    """One browser a module: it ends with the module, since Playwright holds the thread's event loop meanwhile."""
    path = executable()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def open_page(browser):
    """`open_page(path, fragment="", **context)` opens a file in a fresh profile, and holds it to its silence."""
    contexts, complaints = [], []

    def listen(page):
        page.on("console", lambda said: said.type in ("error", "warning") and complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda sent: sent.url.startswith(OWN) or complaints.append(f"a request: {sent.url}"))

    def open_file(path, fragment="", **context):
        contexts.append(browser.new_context(**{"viewport": DESKTOP, **context}))
        contexts[-1].set_default_timeout(PATIENCE)
        page = contexts[-1].new_page()
        listen(page)
        page.goto(Path(path).resolve().as_uri() + fragment)
        return page

    open_file.complaints = complaints
    yield open_file
    for context in contexts:
        context.close()
    assert complaints == []


def sideways(page):
    """How many pixels the page is wider than its window: none, where nobody need scroll sideways."""
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
