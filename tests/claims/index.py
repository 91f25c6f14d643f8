"""The table of exercises, listings and worked examples on the page of claims."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Worked(NamedTuple):
    article: str
    kind: str
    what: str
    command: str


def rows():
    page = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    for row in re.findall(r"^\| (.+) \|$", page.split("## Exercises, listings")[1], flags=re.MULTILINE)[2:]:
        article, kind, what, command = re.split(r" \| ", row)
        yield Worked(article, kind, re.sub(r"\\(.)", r"\1", what), command.strip("`"))


INDEX = list(rows())
