"""What README, CONTRIBUTING and docs say of the repository is so; tests/docs runs their code."""

import re
import runpy
from pathlib import Path

import pytest

from docs.tools.blocks import FENCE, PAGES
from docs.tools.log_index import ENTRY, LOG, with_index
from docs.tools.source import definitions
from tests.test_rooms import ROOMS

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src/attnscale"
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
TREE = ARCHITECTURE.split("src/attnscale/\n")[1].split("```")[0]
PATH = re.compile(r"(?:src|tests|docs|examples|benchmarks|training)/[\w./-]*|[\w-]+/[\w./-]*\.(?:py|md)")
HOMES = (ROOT, SRC, ROOT / "docs")  # that a path may be told from
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def branches(indent):
    """The names of the tree that stand so far in, each with the line of words beside it."""
    return re.findall(rf"^ {{{indent}}}(\S+) +(\S.*)$", TREE, flags=re.MULTILINE)


def test_the_tree_is_the_rooms_in_their_order():
    names = [name for name, _ in branches(2)]
    assert [name.removesuffix("/").removesuffix(".py") for name in names] == list(ROOMS)
    assert all((SRC / name).is_dir() if name.endswith("/") else (SRC / name).is_file() for name in names)


def test_the_tree_has_every_room_within_a_room_under_it():
    told, room = [], ""
    for line in TREE.splitlines():
        name = line.split(maxsplit=1)[0]
        if line.startswith("    "):
            told.append(f"{room}{name}")
        else:
            room = name
    there = {f"{path.parent.relative_to(SRC)}/" for path in SRC.glob("*/*/__init__.py")}
    assert len(told) == len(set(told))
    assert set(told) == there


def test_every_line_of_the_tree_is_a_room_or_one_within():
    assert len(branches(2)) + len(branches(4)) == len(TREE.splitlines())


@every_page
def test_every_path_that_is_named_exists(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    named = [name for name in re.findall(r"`([^`\s]+)`", text) if PATH.fullmatch(name)]
    assert [name for name in named if not any((home / name).exists() for home in HOMES)] == []


@every_page
def test_every_link_to_a_file_leads_to_one_and_a_name_to_the_file_that_defines_it(page):
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for words, target in re.findall(r"\[([^\]\n]+)\]\(((?!https?:)[^)#\s]+)[^)]*\)", text):
        file = (page.parent / target).resolve()
        assert file.exists(), target
        if file.suffix == ".py" and (name := re.fullmatch(r"`([\w.]+)`", words)):
            assert name[1] in definitions(file), f"{name[1]} in {target}"


def test_the_paths_and_names_that_are_looked_for_are_found():
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "tests/test_rooms.py" in filter(PATH.fullmatch, re.findall(r"`([^`\s]+)`", contributing))
    assert "[`SINKS`](src/attnscale/train/sinks/__init__.py)" in contributing


def test_the_picture_shows_what_the_command_prints(tmp_path, capsys):
    runpy.run_path(str(ROOT / "docs/pictures/make.py"))["main"](tmp_path)
    capsys.readouterr()
    assert (tmp_path / "predict.svg").read_bytes() == (ROOT / "docs/pictures/predict.svg").read_bytes()


def test_the_costs_told_are_the_recorded_ones():
    assert runpy.run_path(str(ROOT / "benchmarks/table.py"))["table"]() in (ROOT / "docs/speed.md").read_text(
        encoding="utf-8"
    )


def test_the_index_of_the_log_lists_every_entry_and_marks_what_is_superseded():
    log = LOG.read_text(encoding="utf-8")
    assert with_index(log) == log, "make outputs refreshes it"
    titles = {entry["title"] for entry in ENTRY.finditer(log)}
    superseding = {entry["by"] for entry in ENTRY.finditer(log)} - {None}
    assert superseding
    assert superseding <= titles
