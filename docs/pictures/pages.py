"""Make the pictures of pages, from the pages themselves in a browser: part of `make pictures`."""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from attnscale.show.explore import explore_page

HERE = Path(__file__).parent
WINDOW = {"width": 1200, "height": 1130}


def explore(browser: Browser, folder: Path) -> None:
    """What `attnscale explore` opens, at unscaled scores of 24 dimensions."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "explore.html"
        path.write_text(explore_page(), encoding="utf-8")
        page = browser.new_page(viewport=WINDOW)
        page.goto(path.as_uri() + "#rule=unscaled&d=24&n=64")
        page.screenshot(path=folder / "explore.png")


def main(folder: Path = HERE) -> None:
    """Take every picture."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("Expected chromium to be installed: pages are pictured in it.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        explore(browser, folder)
        browser.close()


if __name__ == "__main__":
    main()
