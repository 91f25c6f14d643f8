"""The ledger: every number and testable statement of four articles, recomputed.

A statement of several articles is entered once, under the article that puts it most strongly.
"""

import json
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from attnscale.claims import discussion, post, textbook, tutorial
from attnscale.claims.judging import Claim, judge
from attnscale.errors import SettingError
from attnscale.files import write_whole

RECORDED = "recorded.json"

SOURCES = (post.SOURCE, tutorial.SOURCE, textbook.SOURCE, discussion.SOURCE)


def ledger(ids: Sequence[str] = ()) -> list[Claim]:
    """Judge every claim, source by source, or only those with these ids."""
    known = {entry.id for source in SOURCES for entry in source.entries}
    if unknown := [name for name in ids if name not in known]:
        close = get_close_matches(unknown[0], known, n=3)
        meant = f" Did you mean {' or '.join(close)}?" if close else ""
        raise SettingError(f"Unknown claim {unknown[0]!r}.{meant} Run 'attnscale claims --json' to see all ids.")
    return [
        judge(entry, source.name)
        for source in SOURCES for entry in source.entries if not ids or entry.id in ids
    ]  # fmt: skip


def recorded() -> dict[str, str]:
    """Return the verdicts as last recorded, by id."""
    verdicts: dict[str, str] = json.loads((files("attnscale.claims") / RECORDED).read_text(encoding="utf-8"))
    return verdicts


def changed(claims: Iterable[Claim], whole: bool = True) -> list[str]:
    """Describe each claim whose verdict is not the recorded one, or that is new or, from a whole ledger, gone."""
    before, now = recorded(), {claim.id: claim.verdict for claim in claims}
    before = before if whole else {name: verdict for name, verdict in before.items() if name in now}
    sentences = []
    for name in sorted(before.keys() | now.keys()):
        if name not in before:
            sentences.append(f"'{name}' is new: {now[name]}, with no recorded verdict.")
        elif name not in now:
            sentences.append(f"'{name}' is gone: it was recorded as {before[name]}.")
        elif before[name] != now[name]:
            sentences.append(f"'{name}' changed: it was recorded as {before[name]} and is now {now[name]}.")
    return sentences


def record(claims: Iterable[Claim], path: Path | str | None = None) -> None:
    """Write the verdicts to a file, by default the one that changed() reads."""
    verdicts = {claim.id: claim.verdict for claim in claims}
    text = json.dumps(verdicts, indent=1, sort_keys=True, ensure_ascii=False)
    write_whole(Path(str(files("attnscale.claims") / RECORDED)) if path is None else Path(path), text + "\n")
