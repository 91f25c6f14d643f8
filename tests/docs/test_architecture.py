"""The architecture page names what there is: links lead to definitions, and each change names its files."""

import re

import pytest

from docs.tools.blocks import ROOT
from docs.tools.source import definitions, linked, source_page, with_source_links

PAGE = "architecture.md"
TEXT = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))


def test_each_of_the_five_changes_names_its_files_and_a_test():
    changes = re.split(r"^### ", SECTIONS["Five changes"], flags=re.MULTILINE)[1:]
    titles = [change.partition("\n")[0] for change in changes]
    assert titles == ["A kernel of another library", "A finding", "A config field", "A softmax", "A statistic"]
    for change in changes:
        files = {path for _, path in linked(change, PAGE)}
        assert any(path.startswith("src/") for path in files)
        assert any(path.startswith("tests/") for path in files)


def test_a_name_leads_to_the_line_that_defines_it_and_a_path_to_the_file():
    file = "../../src/attnscale/watching/watcher.py"
    line = definitions(ROOT / "src/attnscale/watching/watcher.py")["Watcher._read"]
    told = with_source_links(f"[`Watcher._read`]({file}) [a file]({file})", "guides/statistics.md")
    page = "source/src/attnscale/watching/watcher.py.md"
    assert told == f"[`Watcher._read`](../{page}#L{line}) [a file](../{page})"


@pytest.mark.parametrize("target", ["../src/attnscale/nowhere.py", "rules.md"])
def test_a_link_to_anything_else_is_left_to_mkdocs(target):
    assert with_source_links(f"[a]({target})", PAGE) == f"[a]({target})"
    assert list(linked(f"[a]({target})", PAGE)) == []


def test_the_page_of_a_file_has_an_anchor_a_line_and_nothing_that_markdown_reads():
    path = "src/attnscale/errors.py"
    page = source_page(path)
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    assert re.findall(r'id="L(\d+)"', page) == [str(number) for number in range(1, len(lines) + 1)]
    assert "`" not in page.split("<pre>")[1]


@pytest.mark.parametrize(
    ("code", "defined"),
    [
        ("class A:\n    b: int = 1\n    def c(self):\n        d = 2", {"A": 1, "A.b": 2, "A.c": 3}),
        ("a, b = 1, 2\nC: int = 3\nasync def f(): pass", {"a": 1, "b": 1, "C": 2, "f": 3}),
        ("from x import y\nif y:\n    pass", {}),
    ],
)
def test_definitions_are_those_of_the_module_and_of_its_classes(code, defined, tmp_path):
    (tmp_path / "module.py").write_text(code, encoding="utf-8")
    assert definitions(tmp_path / "module.py") == defined
