"""Pages completed from the code they describe, so that they cannot drift: rules, findings, statistics, commands."""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import typer

from attnscale.cli import app
from attnscale.diagnose import CODES
from attnscale.measure.statistics import STATISTICS, Statistic, of_scores
from attnscale.rules.listing import catalogue


def with_rules(markdown: str) -> str:
    """Under each rule's heading its call, formula, source and use; a section for every rule that has none."""
    facts = {
        entry.name: f'<div class="rule-facts" markdown>\n**`{entry.call}`** · scores: **{entry.formula}**'
        f"{' · learned' if entry.learned else ''}\n\n{_sentence(entry.use)}\n\nSource: {entry.source}.\n</div>"
        for entry in catalogue()
    }
    return _under_headings(markdown, facts)


def with_findings(markdown: str) -> str:
    """Under each code's heading what it says; a section for every code that has none."""
    return _under_headings(markdown, {code: f"**{_sentence(meaning)}**" for code, meaning in CODES.items()})


def with_statistics(markdown: str) -> str:
    """In place of the comment that names it, each table: what ScoreStats has, and what a log keeps besides."""
    of_layers = [entry for entry in STATISTICS.values() if entry.attribute is None]
    tables = {"statistics": of_scores().values(), "statistics of a log": of_layers}
    for name, entries in tables.items():
        markdown = markdown.replace(f"<!-- {name} -->", _statistics(entries))
    return markdown


def with_commands(markdown: str) -> str:
    """Every command as its own help describes it."""
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="attnscale")
    commands = (group.get_command(context, name) for name in group.list_commands(context))
    return "\n\n".join([markdown, *(_command(command, context) for command in commands)])


def _under_headings(markdown: str, facts: dict[str, str]) -> str:
    """Each fact under the heading `## name`, or under a new one at the end."""
    for name, fact in facts.items():
        heading = re.compile(rf"^## `?{re.escape(name)}`?$", re.MULTILINE)
        markdown = markdown if heading.search(markdown) else f"{markdown}\n\n## `{name}`"
        markdown = heading.sub(_inserted(fact), markdown, count=1)
    return markdown


def _inserted(fact: str) -> Callable[[re.Match[str]], str]:
    return lambda match: f"{match[0]}\n\n{fact}\n"


def _statistics(entries: Iterable[Statistic]) -> str:
    rows = [f"| {_names(each)} | {each.meaning} | {_values(each)} | {each.reading} |" for each in entries]
    return "\n".join(["| name | what it is | values | read it as |", "|---|---|---|---|", *rows])


def _names(entry: Statistic) -> str:
    same = entry.attribute in (entry.name, None)
    return f"`{entry.name}`" if same else f"`{entry.attribute}` (in logs and tables *{entry.name}*)"


def _values(entry: Statistic) -> str:
    low, high = entry.range
    if math.isinf(low):
        told = "any"
    elif math.isinf(high):
        told = f"≥ {low:g}"
    else:
        told = f"{low:g} to {high:g}"
    return f"{told} {entry.unit}".strip()


def _command(command: Any, group: typer.Context) -> str:
    context = typer.Context(command, info_name=command.name, parent=group)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    records = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    options = [f"| `{_cell(name)}` | {_cell(text)} |" for name, text in records]
    table = "\n".join(["| | |", "|---|---|", *options])
    return f"## attnscale {command.name}\n\n`{usage}`\n\n{_plain(command.help or '')}\n\n{table}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _plain(text: str) -> str:
    """Help as it was written, without what Markdown would make of it."""
    return re.sub(r"([*_<])", r"\\\1", text)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
