"""The ledger of claims in the terminal."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from attnscale.claims import INDEX, SOURCES, VERDICTS, Claim
from attnscale.claims.judging import ARITHMETIC, STATEMENT, Source

STYLES = {"confirmed": "green", "qualified": "yellow", "refuted": "red"}
LARGE = 1e9  # larger floats are written with an exponent


def show_ledger(claims: Sequence[Claim]) -> None:
    """Print the claims of each source with their sections, then the counts; plain arithmetic is listed separately."""
    console = Console()
    for source in SOURCES:
        own = [claim for claim in claims if claim.source == source.name]
        if own:
            _print_title(source, console)
            for kind, heading in ((STATEMENT, ""), (ARITHMETIC, "Plain arithmetic:")):
                if group := [claim for claim in own if claim.kind == kind]:
                    console.print(*([heading] if heading else []), *map(_entry, group), sep="\n")
    console.print(Text("\n" + "\n".join(counted(claims)), style="bold"))


def _print_title(source: Source, console: Console) -> None:
    console.print(Text.assemble((source.title, "bold"), f", {source.kind} ({source.name})"))


def _entry(claim: Claim) -> Text:
    note = f"{claim.note} " if claim.note else ""
    sentence = f"{claim.claim} Claimed: {shown_value(claim.claimed)}. Computed: {shown_value(claim.computed)}. "
    section = (f"{note}[{claim.section}]", "dim")
    return Text.assemble((f"{claim.verdict} ", STYLES[claim.verdict]), (f"{claim.id}: ", "cyan"), sentence, section)


def counted(claims: Sequence[Claim]) -> list[str]:
    """Return sentences that count the verdicts, with plain arithmetic counted separately."""
    sentences = []
    for kind, noun, rest in ((STATEMENT, "statement", ""), (ARITHMETIC, "number", " by plain arithmetic")):
        counts = Counter(claim.verdict for claim in claims if claim.kind == kind)
        found = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
        nouns = noun if counts.total() == 1 else f"{noun}s"
        sentences += [f"{counts.total()} {nouns}{rest}: {found}."] if counts else []
    return sentences


def show_index() -> None:
    """Print every exercise, listing and worked example of each source with its command."""
    console = Console()
    for source in SOURCES:
        _print_title(source, console)
        for worked in INDEX:
            if worked.source == source.name:
                console.print(
                    Text.assemble((f"{worked.kind} ", "dim"), f"{worked.what}: ", (worked.command, "cyan")),
                    soft_wrap=True,
                )


def shown_value(value: object) -> str:
    """Return a claimed or computed value as text."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown_value, value))}]"
    if isinstance(value, float) and abs(value) >= LARGE:
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int | float) else str(value)
