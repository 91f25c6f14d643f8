"""Write the parts of README and docs that follow from the code: `python docs/tools/generate.py`.

A part stands between `<!-- generated: name -->` and `<!-- end -->`; tests/docs fails when one is stale.
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import typer
from typer.cli import get_docs_for_click

from attnscale import claims
from attnscale.claims.judging import ARITHMETIC, STATEMENT
from attnscale.cli import app
from attnscale.diagnose import CODES
from attnscale.lab.experiments import EXPERIMENTS
from attnscale.measure.statistics import STATISTICS, Statistic, of_scores
from attnscale.rules.listing import catalogue
from attnscale.show.listings import counted, shown_value
from attnscale.show.text import shown

DOCS = Path(__file__).parents[1]
PART = re.compile(r"(?<=<!-- generated: )(?P<name>[\w ]+) -->.*?(?=<!-- end -->)", re.DOTALL)


def text_of(value: object) -> str:
    """Return text that neither HTML nor Markdown reads as markup."""
    return re.sub(r"([\\|*_`\[\]$])", r"\\\1", " ".join(escape(str(value), quote=False).split()))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ["---"] * len(headings), *rows))


def _rules() -> str:
    return table(
        ["rule", "scores", "use it for", "source"],
        (
            [f"[`{rule.call}`](#{rule.name.lower()})", text_of(rule.formula), text_of(rule.use), text_of(rule.source)]
            for rule in catalogue()
        ),
    )


def _findings() -> str:
    return table(["code", "meaning"], ([f"[`{code}`](#{code})", text_of(CODES[code])] for code in CODES))


def _statistics(entries: Iterable[Statistic]) -> str:
    return table(["name", "what it is", "values", "read it as"], map(_statistic, entries))


def _statistic(entry: Statistic) -> list[str]:
    is_same = entry.attribute in (entry.name, None)
    name = f"`{entry.name}`" if is_same else f"`{entry.attribute}` (in logs and tables *{entry.name}*)"
    low, high = entry.range
    values = "any" if math.isinf(low) else f"≥ {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"
    return [name, entry.meaning, f"{values} {entry.unit}".strip(), entry.reading]


def _commands() -> str:
    group = typer.main.get_command(app)
    help_pages = get_docs_for_click(obj=group, ctx=typer.Context(group, info_name="attnscale"), name="attnscale")
    return help_pages[help_pages.index("## `") :].replace("```console", "```text").rstrip()


def _ledger() -> str:
    judged = claims.ledger()
    parts = [f"**{' '.join(counted(judged))}**"]
    for source in claims.SOURCES:
        parts += [f"## The {source.kind}", f"*{text_of(source.title)}*"]
        for kind in (STATEMENT, ARITHMETIC):
            rows = [
                [claim.verdict, f"`{claim.id}`<br>{text_of(claim.claim)} *{text_of(shown_value(claim.claimed))}*",
                 text_of(shown_value(claim.computed)), text_of(claim.note), text_of(claim.section)]
                for claim in judged if (claim.source, claim.kind) == (source.name, kind)
            ]  # fmt: skip
            parts += ["Plain arithmetic:"] if kind == ARITHMETIC and rows else []
            parts += [table(["", "claimed", "computed", "note", "section"], rows)] if rows else []
    return "\n\n".join(parts)


def _index() -> str:
    kinds = {source.name: source.kind for source in claims.SOURCES}
    rows = ([kinds[one.source], one.kind, text_of(one.what), f"`{one.command}`"] for one in claims.INDEX)
    return table(["text", "", "what", "command"], rows)


def _results() -> str:
    results = [json.loads((DOCS / f"results/{name}.json").read_text(encoding="utf-8")) for name in EXPERIMENTS]
    rows = (
        [
            f"[{name}](#{name})",
            text_of(each["question"]),
            text_of(re.split(r"(?<=\.) (?=[A-Z])", each["conclusion"])[0]),
        ]
        for name, each in zip(EXPERIMENTS, results, strict=True)
    )
    return "\n\n".join([table(["", "question", "answer, in short"], rows), *map(_result, results)])


def _result(result: dict[str, Any]) -> str:
    name, checks = result["experiment"], result["checks"]
    parts = [f"## {text_of(name)}", f"*{text_of(result['question'])}*", text_of(result["conclusion"])]
    rows = (
        [text_of(c["statement"]), {True: "yes", False: "**no**", None: "undecided"}[c["holds"]], text_of(c["evidence"])]
        for c in checks
    )
    holding = sum(check["holds"] is True for check in checks)
    parts.append(_folded(f"{holding} of {len(checks)} checks hold", table(["statement", "holds", "measured"], rows)))
    for number, plot in enumerate(result["plots"], 1):
        title = text_of(plot["title"])
        parts += [f"### {title}", text_of(plot["notice"]), f"![{title}](plots/{name}-{number}.svg)"]
    for each in result["tables"]:
        rows = ([text_of(shown(value)) for value in row] for row in each["rows"])
        parts.append(_folded(text_of(each["title"]), table(list(map(text_of, each["columns"])), rows)))
    settings = (f"{text_of(key)}: {text_of(shown(value))}" for key, value in result["settings"].items())
    return "\n\n".join([*parts, _folded("How it was run", "; ".join(settings))])


def _folded(summary: str, body: str) -> str:
    return f"<details markdown><summary>{summary}</summary>\n\n{body}\n\n</details>"


PARTS = {
    "rules": _rules,
    "findings": _findings,
    "statistics": lambda: _statistics(of_scores().values()),
    "statistics of a log": lambda: _statistics(one for one in STATISTICS.values() if one.attribute is None),
    "commands": _commands,
    "ledger": _ledger,
    "index": _index,
    "results": _results,
}


def generated(markdown: str) -> str:
    """Return a page with its generated parts written anew."""
    return PART.sub(lambda part: f"{part['name']} -->\n\n{PARTS[part['name']]()}\n\n", markdown)


if __name__ == "__main__":
    for page in [Path(argument) for argument in sys.argv[1:]] or sorted(DOCS.rglob("*.md")):
        page.write_text(generated(page.read_text(encoding="utf-8")), encoding="utf-8")
