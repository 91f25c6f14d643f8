"""Make the pictures of pages, from the pages themselves in a browser: part of `make pictures`."""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from attnscale.checking import check_model
from attnscale.loading import Request
from attnscale.show.explore import explore_page
from attnscale.show.report import report_page

MARGIN = 12  # pixels
HERE = Path(__file__).parent
WINDOW = {"width": 1280, "height": 900}
REPORT = {"width": 900, "height": 900}


def explore(browser: Browser, folder: Path) -> None:
    """Take the upper part of what `attnscale explore` opens."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "explore.html"
        path.write_text(explore_page(), encoding="utf-8")
        page = browser.new_page(viewport=WINDOW)
        page.goto(path.as_uri() + "#third=1")
        last = page.locator("#phenomenon").bounding_box()
        assert last is not None
        height = last["y"] + last["height"] + MARGIN
        page.screenshot(
            path=folder / "explore.png", full_page=True, clip={"x": 0, "y": 0, "width": 1280, "height": height}
        )


def report(browser: Browser, folder: Path) -> None:
    """Take the upper part of the report of the bundled model, as `attnscale check --html` writes it."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "report.html"
        path.write_text(report_page(check_model(Request())), encoding="utf-8")
        page = browser.new_page(viewport=REPORT)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-drawn]")
        last = page.locator("#heads").bounding_box()
        assert last is not None
        clip = {"x": 0, "y": 0, "width": REPORT["width"], "height": last["y"] + last["height"] + MARGIN}
        page.screenshot(path=folder / "report.png", full_page=True, clip=clip)


def main(folder: Path = HERE) -> None:
    """Take every picture."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("Expected chromium to be installed: pages are pictured in it.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        explore(browser, folder)
        report(browser, folder)
        browser.close()


if __name__ == "__main__":
    main()
