"""README, CONTRIBUTING and docs do what they say: every code block runs and prints what is shown."""

import re

import pytest

from tests.docs import blocks
from tests.docs.blocks import PAGES, ROOT, ROUGH, run_command, run_page, same


def tour_prints_the_gain_it_names(printed):
    assert all(printed)
    assert printed[0].startswith("0.398")


def the_remedy_helps(printed):
    broken, mended = map(int, re.findall(r"(\d+)% right", printed))
    assert broken < 85 < 97 < mended


def examples_show_what_they_say(printed):
    attention, trainer, lightning, ranks, _ = printed
    the_remedy_helps(attention)
    calm, wild = trainer.split("learning rate")[1:]
    assert "no alarm" in calm
    assert re.search(r"[1-9]\d* alarms", wild)
    assert float(re.search(r"loss (\S+)", wild)[1]) > float(re.search(r"loss (\S+)", calm)[1]) + 0.2
    assert all(float(after) > 10 * float(before) for before, after in re.findall(r"score (\S+) to (\S+);", lightning))
    assert "rank 0 wrote 3 records" in ranks


def fixes_hold_the_scores(printed):
    as_it_was, *fixed = map(float, re.findall(r"largest score +(\S+)", "".join(printed[2:3])))
    assert len(fixed) == 3
    assert max(fixed) < 50 < 500 < as_it_was
    times, largest = re.search(r"(\d+) times .* is (\S+)", printed[3]).groups()
    assert int(times) > 0
    assert float(largest) < as_it_was / 5


# What must hold of the numbers that may differ from machine to machine.
CLAIMS = {
    "docs/tour.md": tour_prints_the_gain_it_names,
    "docs/examples.md": examples_show_what_they_say,
    "docs/guides/scores-explode.md": fixes_hold_the_scores,
}


EXAMPLES = "docs/examples.md"  # five processes, which train models
NAMES = [str(page.relative_to(ROOT)) for page in PAGES if page.parent.name != "lesson"]  # which tests/lab runs
RUN_HERE = [name for name in NAMES if name != EXAMPLES]


@pytest.mark.parametrize("page", [*RUN_HERE, pytest.param(EXAMPLES, marks=pytest.mark.slow)])
def test_every_block_runs_and_prints_what_the_page_shows(page, tmp_path, known_claims):
    runs = run_page(ROOT / page, tmp_path)
    for ran in runs:
        assert ran.agrees, f"{ran.source} shows\n{ran.shown}\nand prints\n{ran.printed}\n`make outputs` refreshes it."
    if page in CLAIMS:
        CLAIMS[page]([ran.printed for ran in runs])


def test_the_first_example_shows_its_bug_and_its_remedy(tmp_path):
    status, printed = run_command("python examples/hand_written_attention.py", tmp_path)
    assert status == 0
    the_remedy_helps(printed)


def test_every_page_that_lets_numbers_differ_says_what_must_hold_of_them():
    loose = {page for page in NAMES if ROUGH in (ROOT / page).read_text(encoding="utf-8")}
    assert loose <= set(CLAIMS)


def test_every_example_is_run_by_its_command_on_the_page_of_examples():
    page = (ROOT / EXAMPLES).read_text(encoding="utf-8")
    examples = [path.name for path in (ROOT / "examples").glob("*.py")]
    assert len(examples) >= 5
    assert all(f" examples/{name}\n" in page for name in examples)


def test_a_stale_output_is_noticed_and_refreshed_unless_its_title_lets_numbers_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    for title, agrees in ((f' title="{ROUGH}"', True), ("", False)):
        page.write_text(f"```python\nprint('max', 7.0)\n```\n\n```text{title}\nmax 5.0\n```\n", encoding="utf-8")
        assert [ran.agrees for ran in run_page(page, tmp_path)] == [agrees]
    assert blocks.refresh(page)
    assert [ran.agrees for ran in run_page(page, tmp_path)] == [True]
    assert "max 7.0" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("shown", "printed", "agree"),
    [
        ("a 1.00 b", "a  1.01 b\n", True),
        ("a 1.00 b", "a 1.04 b", False),
        ("a b", "a b c", False),
        ("a\n…\nd", "a\nb\nc\nd", True),
        ("a\n…\nd", "a\nb\nc", False),
    ],
)
def test_words_agree_and_numbers_are_close(shown, printed, agree):
    assert same(shown, printed) is agree
