"""Reports in a real browser: no request, names shown as text, every switch works, also by keyboard."""

import re

import pytest

from attnscale.checking import Checked
from attnscale.diagnose import diagnose
from attnscale.show.explore import explore_page
from attnscale.show.report import comparison_page, lab_page, report_page, run_page, twins_page
from tests.browser import A4, PHONE, sideways
from tests.busy import held_up

from .reports import EVIL, checked, compared, layers_of, records, result, twins

KINDS = {
    "check": lambda: report_page(checked((EVIL, "<b>bold</b>&lt;"), title=EVIL, rows=64, length=97)),
    "log": lambda: run_page(EVIL, records((EVIL, "<b>bold</b>&lt;"))),
    "compare": lambda: comparison_page(compared((EVIL, "<b>bold</b>&lt;"), title=EVIL)),
    "lab": lambda: lab_page(result(EVIL)),
    "twins": lambda: twins_page(twins((EVIL, "b"), names_of_runs=(EVIL, "<b>other</b>"), title=EVIL)),
}
# The least ratio of luminance between text and its background.
CONTRAST = """() => {
  const channel = v => (v /= 255, v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = each => {
    const colour = getComputedStyle(each).backgroundColor;
    return colour.endsWith(", 0)") ? ground(each.parentElement) : colour;
  };
  const text = "h1, h2, h3, p, dt, output, label, legend, button:not([aria-disabled=true]), td, th, code";
  return Math.min(...[...document.querySelectorAll(text)].map(each => {
    const [more, less] = [light(getComputedStyle(each).color), light(ground(each))].sort((a, b) => b - a);
    return (more + 0.05) / (less + 0.05);
  }));
}"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that writes a report of a kind once, and returns its path."""
    folder, made = tmp_path_factory.mktemp("reports"), {}

    def write(kind, make=None):
        if kind not in made:
            made[kind] = folder / f"{kind}.html"
            made[kind].write_text((make or KINDS[kind])(), encoding="utf-8")
        return made[kind]

    return write


@pytest.fixture
def report(open_page, written):
    """Open a report and wait for its figures."""

    def open_report(kind, make=None, **context):
        page = open_page(written(kind, make), **context)
        page.wait_for_selector("html[data-drawn]")
        return page

    return open_report


def colours(page, name):
    return page.evaluate(
        "name => document.getElementById(name).querySelector('.heat image').getAttribute('href')", name
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_name_is_text_in_every_kind_of_report(report, kind):
    page = report(kind)  # no dialog, no request, no complaint: the fixture holds that
    assert page.locator("main img, main b, header b, .plot b").count() == 0
    assert EVIL in page.title()
    assert EVIL in page.locator("h1").inner_text() or EVIL in page.locator("main").inner_text()
    drawn = page.locator(".plot text, .plot .legend li").all_text_contents()
    assert any("onerror=alert(1)>" in label for label in drawn)
    assert page.locator("svg a, svg image[href^='http']").count() == 0


def test_pointing_at_a_head_shows_its_value_and_error(report):
    page = report("check")
    page.locator("#head-map .field").hover(position={"x": 5, "y": 5})
    page.wait_for_selector("#head-map .hovertext")
    label = page.locator("#head-map .hovertext").text_content()
    assert label.startswith(EVIL)
    assert re.search(r"head 0\s*spread [\d.]+ ± [\d.]+", label)
    assert re.match(re.escape(EVIL) + r", head 0: spread [\d.]+ ± ", page.locator("#head-map-readout").inner_text())


def test_every_switch_changes_the_map_and_its_sentence(report):
    page = report("check")
    seen = set()
    for metric in ("spread", "entropy (% of max)", "top-1 weight", "1−Σp²", "largest score"):
        page.locator("#heads .switch").get_by_text(metric, exact=True).click()
        seen.add((colours(page, "head-map"), page.locator("#head-map-notice").inner_text()))
        assert metric in page.locator("#head-map-notice").inner_text()
    assert len(seen) == 5


@pytest.mark.slow
def test_everything_works_by_keyboard(report):
    page = report("check")
    reached, seen = [], set()
    for _ in range(60):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            "() => { const on = document.activeElement; const shown = on.matches('.switch input') ?"
            " on.nextElementSibling : on; return [on.id || on.name || on.className || on.textContent,"
            " getComputedStyle(shown).outlineStyle, on.tagName] }"
        )
        if focused[2] == "BODY":
            break
        reached.append(focused[0])
        seen.add(focused[1])
    assert seen == {"solid"}  # the focus is always visible
    assert reached[0] == "skip"
    assert {"head-map", "wide"} <= set(reached)
    page.locator("input[name=head-map]").first.focus()
    before = colours(page, "head-map")
    page.keyboard.press("ArrowRight")
    assert colours(page, "head-map") != before
    assert page.locator("input[name=head-map]").nth(1).is_checked()
    page.locator("#head-map").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert "head 1: entropy (% of max)" in page.locator("#head-map-readout").inner_text()
    assert page.locator("#head-map-readout").inner_text().startswith("<b>bold</b>&lt;")
    assert page.locator("#head-map .frame rect").count() == 2


def test_a_report_is_small_and_pointing_at_a_curve_shows_its_value(report, written):
    assert written("check").stat().st_size < 1.5e6
    page = report("log")
    page.locator("#run-curves .mark").first.hover(force=True)
    page.wait_for_selector("#run-curves .hovertext")
    assert re.search(r"[\d,.]+: [\d,.]+", page.locator("#run-curves .hovertext").text_content())


@pytest.mark.slow
def test_a_report_has_landmarks_and_labels(report):
    page = report("check")
    for role in ("banner", "main", "navigation", "contentinfo"):
        assert page.get_by_role(role).count() == 1, role
    assert page.locator("h1").count() == 1
    assert page.evaluate(
        "[...document.querySelectorAll('.plot, .wide')].every((part) => part.getAttribute('aria-label'))"
    )
    assert page.evaluate("[...document.querySelectorAll('input, select')].every((control) => control.labels.length)")
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((part) => part.id)")
    assert len(ids) == len(set(ids))
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "results"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_report_fits_a_phone_with_its_figures_and_verdicts(report, kind):
    page = report(kind, viewport=PHONE)
    assert sideways(page) == 0
    for cell in page.locator("td:not(.number):is(.fine, .warning, .error)").all():
        box = cell.bounding_box()
        assert box["x"] + box["width"] <= PHONE["width"]
    widths = page.evaluate("[...document.querySelectorAll('.plot svg')].map((svg) => svg.clientWidth)")
    assert widths
    assert max(widths) <= PHONE["width"] - 16
    assert page.evaluate("[...document.querySelectorAll('.plot')].every((plot) => plot.querySelector('svg'))")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(open_page, written, scheme):
    for kind, make in (("check", None), ("explore", explore_page)):
        assert open_page(written(kind, make), color_scheme=scheme).evaluate(CONTRAST) > 4.5, kind  # WCAG AA


@pytest.mark.slow
def test_dark_mode_follows_the_system_and_printed_pages_are_white(report):
    page = report("check", color_scheme="dark")
    colours = (
        "[getComputedStyle(document.querySelector('.tick')).fill, getComputedStyle(document.body).backgroundColor]"
    )
    assert page.evaluate(colours) == ["rgb(162, 169, 184)", "rgb(20, 22, 27)"]
    page.emulate_media(media="print")
    page.set_viewport_size(A4)
    page.wait_for_timeout(200)
    assert page.evaluate(colours) == ["rgb(93, 99, 112)", "rgb(255, 255, 255)"]
    assert page.locator(".skip").is_hidden()
    assert page.locator("nav").is_hidden()
    widths = page.evaluate("[...document.querySelectorAll('.plot svg')].map((svg) => svg.clientWidth)")
    assert max(widths) <= A4["width"]
    page.emulate_media(media="screen", color_scheme="light")
    assert page.evaluate(colours) == ["rgb(93, 99, 112)", "rgb(251, 251, 250)"]


def large():
    """A report of a model of 100 layers and 128 heads."""
    layers = layers_of(
        [f"model.decoder.layers.{index}.self_attn" for index in range(100)], heads=128, length=32, head_dim=16
    )
    return report_page(Checked("a large model", "random tokens", "cpu", None, (), diagnose(layers, trained=False)))


@pytest.mark.slow
def test_a_hundred_layers_of_128_heads_open_in_two_seconds_and_take_less_than_7_mb(report, written):
    assert written("large", large).stat().st_size < 7e6
    busy = held_up()
    page = report("large")
    taken = float(page.evaluate("document.documentElement.dataset.drawn")) / max(busy, held_up())
    assert page.evaluate("FIGURES['head-map'][0].values.map((row) => row.length)") == [128] * 100
    assert page.locator("#head-map .heat image").count() == 1
    assert taken < 2000  # milliseconds
