"""The ledger of claims as a page: source by source what is claimed, what was computed, and the verdict; the index."""

from collections import Counter

from attnscale.claims import INDEX, SOURCES, VERDICTS, Claim, ledger
from attnscale.show.ledger import shown_value
from docs.tools.results import plain_text

MARKS = {"confirmed": "holds", "qualified": "qualified", "refuted": "fails"}


def with_claims(markdown: str) -> str:
    """The page, and under it every claim, recomputed, then the index."""
    claims = ledger()
    counts = Counter(claim.verdict for claim in claims)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    parts = [markdown, f"**{len(claims)} claims: {told}.**"]
    for source in SOURCES:
        own = [claim for claim in claims if claim.source == source.name]
        parts += [f"## The {source.kind}", f"*{plain_text(source.title)}*", _table(own)]
    return "\n\n".join([*parts, *_index()])


def _table(claims: list[Claim]) -> str:
    rows = [
        f'| <span class="{MARKS[claim.verdict]}">{claim.verdict}</span> | `{claim.id}`<br>{plain_text(claim.claim)} '
        f"*{plain_text(shown_value(claim.claimed))}* | {plain_text(shown_value(claim.computed))} "
        f"| {plain_text(claim.note)} |"
        for claim in claims
    ]
    return "\n".join(["| | claimed | computed | note |", "|---|---|---|---|", *rows])


def _index() -> list[str]:
    kinds = {source.name: source.kind for source in SOURCES}
    rows = [
        f"| {kinds[worked.source]} | {worked.kind} | {plain_text(worked.what)} | `{worked.command}` |"
        for worked in INDEX
    ]
    return [
        "## Exercises, listings and worked examples",
        "Each with the command that does it; `attnscale claims --index` prints this table.",
        "\n".join(["| text | | what | command |", "|---|---|---|---|", *rows]),
    ]
