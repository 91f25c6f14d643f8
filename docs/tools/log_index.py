"""The index of LOG.md, made from its entries: `python docs/tools/log_index.py` writes it."""

import re
from pathlib import Path

LOG = Path(__file__).parents[2] / "LOG.md"
BEGINS = "**Index.** What is marked as superseded is kept for how it was found."
ENTRY = re.compile(
    r"^## (?P<day>\S+) · (?P<title>.*)\n(?:\*Superseded in its \w+ by \"(?P<by>.*)\"\.\*\n)?", re.MULTILINE
)


def with_index(log: str) -> str:
    """The log, with every entry in its index, and what superseded it where an entry says so."""
    lines, day = [], ""
    for entry in ENTRY.finditer(log):
        if entry["day"] != day:
            day = entry["day"]
            lines.append(f"\n**{day}**\n")
        mark = "" if entry["by"] is None else f" (superseded: {entry['by']})"
        lines.append(f"- [{entry['title']}](#{_anchor(entry[0].splitlines()[0])}){mark}")
    before, after = log.split(BEGINS)[0], log[log.index("\n## ") :]
    return f"{before}{BEGINS}\n" + "\n".join(lines) + f"\n{after}"


def _anchor(heading: str) -> str:
    """
    >>> _anchor("## 2026-11-15 · Two cores, read")
    '2026-11-15--two-cores-read'
    """
    return re.sub(r"[^\w\- ]", "", heading.removeprefix("## ").lower()).replace(" ", "-")


if __name__ == "__main__":
    LOG.write_text(with_index(LOG.read_text(encoding="utf-8")), encoding="utf-8")
