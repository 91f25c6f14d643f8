"""Links, paths, names and the list of rooms in README, CONTRIBUTING and docs agree with the repository."""

import re

from tests.docs.blocks import FENCE, PAGES, ROOT
from tests.test_rooms import ROOMS, SRC

ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
TREE = ARCHITECTURE.split("src/attnscale/\n")[1].split("```")[0]
PATH = re.compile(r"(?:src|tests|docs|examples|benchmarks|scripts)/[\w./-]*|[\w-]+/[\w./-]*\.(?:py|md)")
HOMES = (ROOT, SRC, ROOT / "docs")  # folders that a named path may be relative to


def prose(page):
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links(page):
    for words, target in re.findall(r"\[([^\]\n]+)\]\(((?!https?:)[^)#\s]+)[^)]*\)", prose(page)):
        yield words, (page.parent / target).resolve()


def is_defined(name, file):
    own = re.escape(name.split(".")[-1])
    pattern = rf"^\s*(?:(?:async )?def |class ){own}\b|^[^(\n]*\b{own}\b[^\n]*=|^\s*{own}: "
    return re.search(pattern, file.read_text(encoding="utf-8"), flags=re.MULTILINE) is not None


def test_the_tree_lists_the_rooms_in_their_order_with_their_folders():
    entries = re.findall(r"^  (\S+) +\S.*$", TREE, flags=re.MULTILINE)
    assert [name.removesuffix("/").removesuffix(".py") for name in entries] == list(ROOMS)
    assert all((SRC / name).is_dir() if name.endswith("/") else (SRC / name).is_file() for name in entries)

    listed, room = set(), ""
    for line in TREE.splitlines():
        name = line.split(maxsplit=1)[0]
        if line.startswith("    "):
            listed.add(f"{room}{name}")
        else:
            room = name
    assert listed == {f"{path.parent.relative_to(SRC)}/" for path in SRC.glob("*/*/__init__.py")}


def test_every_path_that_is_named_exists():
    named = {(page.name, name) for page in PAGES for name in re.findall(r"`([^`\s]+)`", prose(page))}
    paths = {(page, name) for page, name in named if PATH.fullmatch(name)}
    assert len(paths) > 10
    assert {(page, name) for page, name in paths if not any((home / name).exists() for home in HOMES)} == set()


def test_every_link_leads_to_a_file_and_a_name_to_the_file_that_defines_it():
    missing, undefined, checked = [], [], 0
    for page in PAGES:
        for words, file in links(page):
            name = re.fullmatch(r"`([\w.]+)`", words)
            if not file.exists():
                missing.append((page.name, str(file)))
            elif file.suffix == ".py" and name:
                checked += 1
                if not is_defined(name[1], file):
                    undefined.append((page.name, name[1], str(file)))
    assert (missing, undefined) == ([], [])
    assert checked > 10


def test_each_kind_of_change_names_its_files_and_a_test():
    section = ARCHITECTURE.split("\n## Five changes\n")[1].split("\n## ")[0]
    changes = re.split(r"^### ", section, flags=re.MULTILINE)[1:]
    titles = [change.partition("\n")[0] for change in changes]
    assert titles == ["A kernel of another library", "A finding", "A config field", "A softmax", "A statistic"]
    for change in changes:
        files = re.findall(r"\]\(\.\./(src|tests)/", change)
        assert {"src", "tests"} <= set(files), change
