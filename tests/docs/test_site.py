"""The documentation as it is built: strict, whole, and readable from files without a network."""

import html
import os
import re
import subprocess
import sys

import pytest

import attnscale
from tests.browser import PHONE, sideways
from tests.docs.blocks import ROOT


@pytest.fixture(scope="session")
def site(made_once):
    """Return the folder of the built site: a broken link or anchor fails the build."""

    def make(folder):
        built = subprocess.run(
            [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")],
            cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert built.returncode == 0, built.stderr
        assert "WARNING" not in built.stderr

    return made_once("documentation", make) / "site"


def page(site, name):
    return (site / name).read_text(encoding="utf-8")


def test_no_page_loads_anything_from_a_network(site):
    loaded = re.compile(r"""<(?:script|img|iframe|source|link rel="(?:stylesheet|icon)")[^>]*(?:src|href)="([^"]*)""")
    for path in site.rglob("*.html"):
        addresses = loaded.findall(path.read_text(encoding="utf-8"))
        assert addresses
        assert [address for address in addresses if re.match(r"(https?:)?//", address)] == [], path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text(encoding="utf-8")), path.name


def test_every_public_name_is_in_the_api_with_its_docstring(site):
    api = page(site, "api.html")
    missing = [name for name in attnscale.__all__ if f'id="attnscale.{name}"' not in api]
    assert not missing
    text = html.unescape(re.sub(r"<[^>]+>", "", api))
    undocumented = [name for name in attnscale.__all__ if _first_words(getattr(attnscale, name)) not in text]
    assert not undocumented


def _first_words(thing):
    return re.split(r"[`\n:(]", thing.__doc__.strip())[0].strip()


def test_links_to_source_code_lead_to_the_repository(site):
    targets = re.findall(r'<a href="([^"]+\.py)"', page(site, "architecture.html"))
    assert len(targets) > 30
    repository = "https://github.com/attnscale/attnscale/blob/HEAD/"
    assert [target for target in targets if not target.startswith(repository)] == []


def test_formulas_are_mathml(site):
    theory = page(site, "theory.html")
    assert theory.count("<math") > 40
    article = theory.split("<article")[1].split("</article")[0]
    assert "$" not in re.sub(r"<(pre|code)\b.*?</\1>|<[^>]+>", "", article, flags=re.DOTALL)
    assert "\\operatorname" not in theory


def test_search_finds_a_rule_in_a_page_opened_from_a_file(site, open_page):
    opened = open_page(site / "index.html")
    opened.locator(".md-search__input").first.click()
    opened.keyboard.type("gaussian")
    opened.wait_for_selector(".md-search-result__item")
    assert "Theory" in opened.locator(".md-search-result__list").inner_text()


def test_pages_fit_a_phone(site, open_page):
    for name in ("index", "claims", "theory", "findings", "api", "command-line", "results/index"):
        assert sideways(open_page(site / f"{name}.html", viewport=PHONE)) <= 0, name
