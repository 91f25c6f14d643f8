"""The ledger: every number and every testable statement of four public texts, recomputed and judged.

A statement that several sources make is entered once, under the source that puts it most strongly.
"""

import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from attnscale.claims import discussion, post, textbook, tutorial
from attnscale.claims.judging import Claim, judge

RECORDED = "recorded.json"

ENTRIES = (
    (post.SOURCE, post.CLAIMS),
    (tutorial.SOURCE, tutorial.CLAIMS),
    (textbook.SOURCE, textbook.CLAIMS),
    (discussion.SOURCE, discussion.CLAIMS),
)
SOURCES = tuple(source for source, _ in ENTRIES)


def ledger() -> list[Claim]:
    """Judge every claim, source by source."""
    return [judge(entry, source) for source, entries in ENTRIES for entry in entries]


def recorded() -> dict[str, str]:
    """The verdicts as last recorded, by id."""
    verdicts: dict[str, str] = json.loads((files("attnscale.claims") / RECORDED).read_text(encoding="utf-8"))
    return verdicts


def changed(claims: Iterable[Claim]) -> list[str]:
    """One sentence for each claim whose verdict is not the recorded one, or that is new or gone."""
    before, now = recorded(), {claim.id: claim.verdict for claim in claims}
    sentences = []
    for name in sorted(before.keys() | now.keys()):
        if name not in before:
            sentences.append(f"'{name}' is new: {now[name]}, with no recorded verdict.")
        elif name not in now:
            sentences.append(f"'{name}' is gone: it was recorded as {before[name]}.")
        elif before[name] != now[name]:
            sentences.append(f"'{name}' changed: it was recorded as {before[name]} and is now {now[name]}.")
    return sentences


def record(claims: Iterable[Claim], path: Path | str) -> None:
    """Write the verdicts to a file, sorted by id."""
    verdicts = {claim.id: claim.verdict for claim in claims}
    text = json.dumps(verdicts, indent=1, sort_keys=True, ensure_ascii=False)
    Path(path).write_text(text + "\n", encoding="utf-8")
