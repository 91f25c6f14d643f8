"""A check held against one that was saved: for a build that must not get worse."""

from pathlib import Path
from typing import TYPE_CHECKING

from attnscale.comparing.comparison import Comparison, compare_portraits, require_tolerance
from attnscale.comparing.saved import read, save
from attnscale.comparing.sides import checked_portrait

if TYPE_CHECKING:
    from attnscale.checking import Checked
    from attnscale.loading import Request


def check_against(
    request: "Request",
    rows: int | None,
    what_if: str | None,
    kept: Path | None,
    baseline: Path | None,
    tolerance: float,
) -> "tuple[Checked, Comparison | None]":
    """Check a model; keep what was measured in one file, and compare it with what another holds."""
    require_tolerance(tolerance)
    before = None if baseline is None else read(baseline)
    checked, portrait = checked_portrait(request, rows, what_if)
    if kept is not None:
        save(portrait, kept)
    return checked, None if before is None else compare_portraits(before, portrait, tolerance)
