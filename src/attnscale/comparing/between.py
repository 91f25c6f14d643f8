"""compare: what became of every head between two checkpoints, two runs, or two saved checks."""

from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from attnscale.comparing.comparison import TOLERANCE, Comparison, compare_portraits, require_tolerance
from attnscale.comparing.measuring import portray
from attnscale.comparing.portrait import Portrait
from attnscale.comparing.sides import Asked
from attnscale.diagnose import audited
from attnscale.errors import SettingError

Side: TypeAlias = str | Path | nn.Module | Portrait


def compare(
    a: Side, b: Side, *args: Any, tolerance: float = TOLERANCE, rows: int | None = None, **kwargs: Any
) -> Comparison:
    """What changed from `a` to `b`, head by head, with error bars.

    Each is a model, run as model(*args, **kwargs) with every sequence of the batch a sample; or the name of one, as
    `attnscale check` takes it; or a file: a check that was saved, or a log of a run, LOG.jsonl or LOG.jsonl#RUN.
    """
    require_tolerance(tolerance)
    names = ("the first model", "the second model")
    sides = [portrait_of(side, name, args, kwargs, rows) for side, name in zip((a, b), names, strict=True)]
    return compare_portraits(sides[0], sides[1], tolerance)


def portrait_of(side: Side, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None) -> Portrait:
    """Run it, load and run it, or read it."""
    if isinstance(side, Portrait):
        return side
    if isinstance(side, nn.Module):
        if not args and not kwargs:
            raise SettingError("Expected what to run the models on, as compare(a, b, batch), got nothing.")
        audit = audited(side, args, kwargs, rows=rows)
        return portray(side, args, kwargs, audit, title=name, fed="the batch given", rows=rows)
    if not isinstance(side, str | Path):
        raise SettingError(f"Expected a model, its name, or a file to compare, got {type(side).__name__}.")
    from attnscale.loading import Request

    return Asked(str(side), Request(), rows).portrait()
