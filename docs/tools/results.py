"""The results of the lab, as JSON in docs/results, as pages: conclusion, checks, tables and charts of each."""

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from attnscale.lab.experiments import EXPERIMENTS
from attnscale.lab.result import Value
from attnscale.show.numbers import shown
from docs.tools.chart import chart

FOLDER = Path(__file__).parents[1] / "results"
NONE_YET = "No result is recorded here yet."


def with_results(markdown: str, folder: Path = FOLDER) -> str:
    """The page, and under it every result in the folder, in the order of the catalogue."""
    order = list(EXPERIMENTS)
    paths = sorted(folder.glob("*.json"), key=lambda path: (order.index(path.stem) if path.stem in order else -1, path))
    results = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    recorded = [result for result in results if "experiment" in result and "conclusion" in result]
    told = [summary(recorded), *map(section, recorded)] if recorded else [NONE_YET]
    return "\n\n".join([markdown, *told])


def summary(results: list[dict[str, Any]]) -> str:
    """Every question with the first sentence of its answer, and the way to the rest."""
    rows = (
        f"| [{plain_text(each['experiment'])}](#{each['experiment']}) | {plain_text(each['question'])} | "
        f"{plain_text(first_sentence(each['conclusion']))} |"
        for each in results
    )
    return "\n".join(["| | question | answer, in short |", "|---|---|---|", *rows])


def first_sentence(text: str) -> str:
    """Up to the first full stop that a capital follows.

    >>> first_sentence("From 0.1 to 0.3 it grows. At 0.3 it stops.")
    'From 0.1 to 0.3 it grows.'
    """
    return re.split(r"(?<=\.) (?=[A-Z])", text, maxsplit=1)[0]


def section(result: dict[str, Any]) -> str:
    """One result: the question, what came out, what was checked, and the numbers."""
    parts = [
        f"## {plain_text(result['experiment'])}",
        f"*{plain_text(result['question'])}*",
        plain_text(result["conclusion"]),
    ]
    if result.get("checks"):
        parts.append(_checks(result["checks"]))
    for plot in result.get("plots", ()):
        parts += [f"### {plain_text(plot['title'])}", plain_text(plot["notice"]), chart(plot)]
    parts += [_folded(plain_text(each["title"]), table(each)) for each in result.get("tables", ())]
    if result.get("settings"):
        parts.append(_folded("How it was run", _settings(result["settings"])))
    return "\n\n".join(parts)


def table(given: dict[str, Any]) -> str:
    """A table in Markdown, numbers to four digits."""
    lines = [given["columns"], ["---"] * len(given["columns"]), *given["rows"]]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def cell(value: Value) -> str:
    """A value of a table, as the terminal shows it."""
    return plain_text(shown(value))


def _checks(checks: list[dict[str, Any]]) -> str:
    """Folded where all hold; what does not hold stands in the open."""
    words = {True: '<span class="holds">holds</span>', False: '<span class="fails">does not hold</span>'}
    rows = [
        f"| {plain_text(c['statement'])} | {words[bool(c['holds'])]} | {plain_text(c['evidence'])} |" for c in checks
    ]
    holding = sum(bool(check["holds"]) for check in checks)
    told = "\n".join(["| said | | measured |", "|---|---|---|", *rows])
    return _folded(f"{holding} of {len(checks)} checks hold", told, is_open=holding < len(checks))


def _settings(settings: dict[str, Any]) -> str:
    plain = ((plain_text(name), plain_text(json.dumps(value, ensure_ascii=False))) for name, value in settings.items())
    return "; ".join(f"{name}: {value}" for name, value in plain)


def _folded(summary: str, body: str, is_open: bool = False) -> str:
    return f"<details markdown{' open' * is_open}><summary>{summary}</summary>\n\n{body}\n\n</details>"


def plain_text(value: object) -> str:
    """Text that neither HTML nor Markdown takes for markup."""
    plain = " ".join(escape(str(value), quote=False).split())
    for mark in "\\|*_`[]$":
        plain = plain.replace(mark, f"\\{mark}")
    return plain
