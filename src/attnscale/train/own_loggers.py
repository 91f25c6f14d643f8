"""What the loggers of a trainer are given besides our sinks: which numbers, and which loggers have them already."""

from collections.abc import Iterable, Sequence

from attnscale.errors import SettingError
from attnscale.measure.statistics import Place, in_place, logged
from attnscale.train.sinks import Sink

Wanted = bool | Sequence[str]
CLIPPED_HEADS = "attnscale/clipped_heads"  # how many heads QK-Clip lowered since the log before


def numbers_of(wanted: Wanted) -> tuple[str, ...]:
    """The statistics that go to a trainer's loggers: those of the live table, those that are named, or none.

    >>> numbers_of(["spread", "max"]), numbers_of(False)
    (('spread', 'max'), ())
    """
    if isinstance(wanted, bool):
        return tuple(entry.name for entry in in_place(Place.LIVE)) if wanted else ()
    known = logged()
    if isinstance(wanted, str) or not all(name in known for name in wanted):
        raise SettingError(f"Expected log as True, False or a list of {', '.join(known)}; got {wanted!r}.")
    return tuple(wanted)


def has_them_already(logger: object, sinks: Iterable[Sink]) -> bool:
    """Whether a sink writes the same curves to the tool that a logger writes to."""
    names = [kind.__name__.lower() for kind in type(logger).__mro__]
    tools = [tool for sink in sinks if (tool := getattr(sink, "tool", None)) is not None]
    return any(name.startswith(tool) for name in names for tool in tools)
