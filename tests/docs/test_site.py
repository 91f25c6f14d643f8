"""The documentation as it is built: strict, whole, and readable from files without a network."""

import html
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

import attnscale
from attnscale.claims import INDEX, SOURCES
from attnscale.claims.ledger import recorded
from attnscale.cli import app
from attnscale.diagnose import CODES
from attnscale.measure.statistics import STATISTICS
from attnscale.rules.listing import catalogue
from docs.tools.blocks import ROOT
from docs.tools.generated import with_findings, with_rules
from tests.browser import PHONE, sideways

MKDOCS = [sys.executable, "-m", "mkdocs"]
WITH_KNOWN_CLAIMS = """
import json, sys
import attnscale.claims
from mkdocs.__main__ import cli
with open(sys.argv.pop(1), encoding="utf-8") as file:
    claims = [attnscale.claims.Claim(**fields) for fields in json.load(file)]
attnscale.claims.ledger = lambda: claims
cli(prog_name="mkdocs")
"""


def build(root, folder, mkdocs=MKDOCS):
    return subprocess.run(
        [*mkdocs, "build", "--strict", "--site-dir", str(folder)],
        cwd=root, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def site(made_once, claims_file):
    def make(folder):
        built = build(ROOT, folder / "site", [sys.executable, "-c", WITH_KNOWN_CLAIMS, str(claims_file)])
        assert built.returncode == 0, built.stderr
        assert "WARNING" not in built.stderr

    return made_once("documentation", make) / "site"


def page(site, name):
    return (site / name).read_text(encoding="utf-8")


class Loads(HTMLParser):
    """What a page loads by itself; what a reader may follow is left out."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.append(given.get("src") or "")
        if tag == "link" and given.get("rel") not in ("canonical", "prev", "next"):
            self.addresses.append(given.get("href") or "")


def test_no_page_loads_anything_from_a_network(site):
    for path in site.rglob("*.html"):
        found = Loads()
        found.feed(path.read_text(encoding="utf-8"))
        assert found.addresses
        assert [address for address in found.addresses if re.match(r"(https?:)?//", address)] == [], path.name
    for path in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text(encoding="utf-8")), path.name


def test_a_broken_link_or_anchor_fails_the_build_and_nothing_else_does(tmp_path):
    for name in ("tools", "assets"):
        shutil.copytree(ROOT / "docs" / name, tmp_path / "docs" / name, ignore=shutil.ignore_patterns("__pycache__"))
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text(settings.split("\nnav:\n")[0], encoding="utf-8")
    (tmp_path / "docs/rules.md").write_text("# Rules\n", encoding="utf-8")
    links = "[a](nowhere.md) [b](rules.md#no_such_rule) [c](rules.md) [d](rules.md#inverse_sqrt)"
    (tmp_path / "docs/index.md").write_text(f"# Start\n\n{links}\n", encoding="utf-8")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    complaints = [line for line in built.stderr.splitlines() if line.startswith("WARNING")]
    assert len(complaints) == 2
    assert any("nowhere.md" in line for line in complaints)
    assert any("no_such_rule" in line for line in complaints)


def test_every_public_name_is_in_the_api_with_its_docstring(site):
    api = page(site, "api.html")
    missing = [name for name in attnscale.__all__ if f'id="attnscale.{name}"' not in api]
    assert not missing
    text = html.unescape(re.sub(r"<[^>]+>", "", api))
    undocumented = [name for name in attnscale.__all__ if _first_words(getattr(attnscale, name)) not in text]
    assert not undocumented


def _first_words(thing):
    return re.split(r"[`\n:(]", thing.__doc__.strip())[0].strip()


def test_every_rule_has_its_facts_and_a_paragraph_of_its_own(site):
    rules, written = page(site, "rules.html"), (ROOT / "docs/rules.md").read_text(encoding="utf-8")
    for entry in catalogue():
        section = html.unescape(re.sub(r"<[^>]+>", "", _section(rules, entry.name.lower())))
        assert all(fact in section for fact in (entry.call, entry.formula, entry.source)), entry.name
        assert len(written.split(f"\n## {entry.name}\n")[1].split("\n## ")[0].split()) >= 15, entry.name


def test_every_finding_code_has_its_cause_its_fix_and_an_example_that_produces_it(site):
    findings, written = page(site, "findings.html"), (ROOT / "docs/findings.md").read_text(encoding="utf-8")
    for code, meaning in CODES.items():
        assert meaning[1:] in html.unescape(re.sub(r"<[^>]+>", "", _section(findings, code))), code
        section = written.split(f"\n## {code}\n")[1].split("\n## ")[0]
        assert "**Cause.**" in section, code
        assert "**Fix.**" in section, code
        output = section.split("```text")[1]
        assert re.search(rf"^(note|warning|error) {code}: ", output, flags=re.MULTILINE), code


def test_a_new_rule_or_code_gets_a_section_without_a_word_being_written():
    assert "## `inverse_sqrt`" in with_rules("# Rules\n")
    assert with_findings("# Findings\n").count("\n## ") == len(CODES)


def test_every_statistic_is_in_the_guide_with_what_it_means(site):
    guide = html.unescape(re.sub(r"<[^>]+>", "", page(site, "guides/statistics.html")))
    for entry in STATISTICS.values():
        assert entry.name in guide
        assert entry.meaning in guide, entry.name
    assert "<!-- statistics" not in page(site, "guides/statistics.html")


def test_every_command_and_option_is_on_the_page_of_the_command_line(site):
    text = html.unescape(re.sub(r"<[^>]+>", "", page(site, "command-line.html")))
    for command in app.registered_commands:
        name = command.name or command.callback.__name__.replace("_", "-")
        assert f"attnscale {name}" in text
    assert all(option in text for option in ("--what-if", "--packed", "--thin", "--json"))


def test_every_claim_and_every_command_of_the_index_is_on_the_page_of_the_ledger(site):
    page = html.unescape((site / "claims.html").read_text(encoding="utf-8"))
    assert all(f"<code>{name}</code>" in page for name in recorded())
    assert all(f"<code>{worked.command}</code>" in page for worked in INDEX)
    assert all(source.title.split("[")[0] in page for source in SOURCES)


@pytest.mark.parametrize("page", ["docs/claims.md", "docs/theory.md"])
def test_the_gradient_is_said_to_be_larger_without_the_scale_and_shared_less_evenly(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "**shared far less evenly**" in text
    assert "most queries pass little" not in text


def test_every_link_to_the_code_leads_to_the_line_that_defines_its_name(site):
    links = re.findall(r'<a href="(source/[^"#]+)#(L\d+)"><code>([\w.]+)</code></a>', page(site, "architecture.html"))
    assert len(links) > 14
    for target, anchor, name in links:
        line = page(site, target).split(f'<span id="{anchor}"')[1].split('class="line"')[1]
        text = html.unescape(re.sub(r"<[^>]+>", "", line))
        assert re.search(rf"\b{name.split('.')[-1]}\b", text), f"{name} in {target}"


def test_the_page_of_a_source_file_is_named_for_it_and_stands_in_no_menu(site):
    path = "src/attnscale/watching/watcher.py"
    shown = page(site, f"source/{path}.html")
    assert f"<title>{path} - attnscale</title>" in shown
    assert html.unescape(re.sub(r"<[^>]+>", "", shown)).count("class Watcher(DispatchMode):") == 1
    menu = re.findall(r'<a href="([^"]+)" class="md-nav__link', page(site, "index.html"))
    assert "architecture.html" in menu
    assert not any(target.startswith("source/") for target in menu)
    index = page(site, "search/search_index.json")
    assert '"location":"architecture.html' in index
    assert '"location":"source/' not in index


def test_formulas_are_mathml(site):
    theory = page(site, "theory.html")
    assert theory.count("<math") > 40
    assert "arithmatex" not in theory
    assert "\\operatorname" not in theory


def test_search_finds_a_rule_in_a_page_opened_from_a_file(site, open_page):
    opened = open_page(site / "index.html")
    opened.locator(".md-search__input").first.click()
    opened.keyboard.type("gaussian")
    opened.wait_for_selector(".md-search-result__item")
    assert "Theory" in opened.locator(".md-search-result__list").inner_text()


@pytest.mark.parametrize(
    "name",
    [
        "index.html", "theory.html", "claims.html", "findings.html", "api.html", "guides/does-not-learn.html",
        "architecture.html", "source/src/attnscale/watching/watcher.py.html",
    ],
)  # fmt: skip
def test_pages_fit_a_phone(site, open_page, name):
    assert sideways(open_page(site / name, viewport=PHONE)) <= 0


def _section(text, anchor):
    return re.split(r"<h2 ", text.split(f'<h2 id="{anchor}">')[1])[0]
