"""The ledger of claims in the terminal."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from attnscale.claims import INDEX, SOURCES, VERDICTS, Claim
from attnscale.claims.judging import ARITHMETIC, STATEMENT

STYLES = {"confirmed": "green", "qualified": "yellow", "refuted": "red"}
NARROW = 72  # columns of a terminal: with fewer, columns would break words, and claims are told as sentences
LARGE = 1e9  # a float from here on has an exponent


def show_ledger(claims: Sequence[Claim]) -> None:
    """Print the claims of each source with their sections, plain arithmetic apart, and how many hold."""
    console = Console()
    for source in SOURCES:
        own = [claim for claim in claims if claim.source == source.name]
        if own:
            console.print(Text.assemble((source.title, "bold"), f", {source.kind} ({source.name})"))
            show = _sentences if console.width < NARROW else _claims
            for kind, heading in ((STATEMENT, ""), (ARITHMETIC, "Plain arithmetic:")):
                if group := [claim for claim in own if claim.kind == kind]:
                    console.print(*([heading] if heading else []), show(group), sep="\n")
    console.print(Text("\n" + "\n".join(counted(claims)), style="bold"))


def counted(claims: Sequence[Claim]) -> list[str]:
    """Count the verdicts, plain arithmetic apart."""
    sentences = []
    for kind, what in ((STATEMENT, "statements"), (ARITHMETIC, "numbers by plain arithmetic")):
        counts = Counter(claim.verdict for claim in claims if claim.kind == kind)
        found = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        sentences += [f"{counts.total()} {what}: {found}."] if counts else []
    return sentences


def show_index() -> None:
    """Print every exercise, listing and worked example of each source with its command."""
    console = Console()
    for source in SOURCES:
        console.print(Text.assemble((source.title, "bold"), f", {source.kind} ({source.name})"))
        table = _grid()
        for worked in INDEX:
            if worked.source == source.name:
                table.add_row(Text(worked.kind, style="dim"), Text(worked.what), Text(worked.command, style="cyan"))
        console.print(table)


def _claims(claims: Sequence[Claim]) -> Table:
    table = _grid("", "claim", "claimed", "computed")
    table.expand = True
    for column, ratio in zip(table.columns[1:], (5, 3, 5), strict=True):
        column.ratio, column.overflow = ratio, "fold"
    for claim in claims:
        rest = f" {claim.note}" if claim.note else ""
        stated = Text.assemble((f"{claim.id}\n", "cyan"), claim.claim, (f"{rest} [{claim.section}]", "dim"))
        verdict = Text(claim.verdict, style=STYLES[claim.verdict])
        table.add_row(verdict, stated, shown_value(claim.claimed), shown_value(claim.computed))
    return table


def _sentences(claims: Sequence[Claim]) -> Table:
    table = _grid()
    for claim in claims:
        claimed, computed = shown_value(claim.claimed), shown_value(claim.computed)
        note = f"{claim.note} " if claim.note else ""
        sentence = f"{claim.id}: {claim.claim} Claimed {claimed}, computed {computed}. {note}[{claim.section}]"
        table.add_row(Text(claim.verdict, style=STYLES[claim.verdict]), Text(sentence))
    return table


def shown_value(value: object) -> str:
    """Return a claimed or computed value as text."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown_value, value))}]"
    if isinstance(value, float) and abs(value) >= LARGE:
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _grid(*headings: str) -> Table:
    return Table(*headings, box=None, show_header=bool(headings), pad_edge=False, padding=(0, 1, 0, 0))
