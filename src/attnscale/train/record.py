"""Record of one training step: score statistics of every layer and head, and one line of a log."""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from attnscale.diagnose.finding import SEVERITIES, Finding
from attnscale.measure.statistics import STATISTICS, logged
from attnscale.plain import plain
from attnscale.results import PlottedResult

VERSION = 2  # version of the line format; readers ignore unknown fields
OPTIONAL = ("rank", "run")  # fields of a line that are omitted if None
LEARNING = ("loss", "lr")  # also omitted if None; null if NaN or infinite
MOST = 2**53  # largest whole number: every JSON reader is exact up to here
LARGEST = 1e300  # largest number: sums over heads stay finite
LATEST = 2.5e11  # latest time, seconds since the epoch: datetime supports no later years
NAMES = {int: "a whole number", float: "a number", str: "a text", dict: "an object", list: "a list"}


class LineError(ValueError):
    """Error for a line of a log that cannot be read."""


def new_name() -> str:
    """Return a random name for a run, without using torch's random numbers.

    >>> len(new_name())
    8
    """
    return secrets.token_hex(4)


@dataclass(frozen=True)
class LayerRecord:
    """Statistics of one layer at one step: lists with one number per head, NaN if unknown."""

    rows: int  # measured rows, summed over heads
    numbers: Mapping[str, list[float]]  # by name in the catalogue of statistics
    broken: int = 0  # number of heads with NaN or infinite scores
    softcap: float | None = None
    clipped: Sequence[float] | None = None  # factor of QK-Clip on each head's scores since the previous record
    keys: float | None = None  # mean number of visible keys of a row
    uncompiled: bool = False  # True if only this module ran uncompiled under the tracer

    @property
    def lowered(self) -> float:
        """Smallest factor of QK-Clip on any head since the previous record; 1 if it did not act."""
        return min((factor for factor in self.clipped or () if factor > 0), default=1.0)

    @cached_property
    def effective_max(self) -> tuple[float, int]:
        """Largest effective score and its head; NaN if no head has a score.

        Softmax depends on the difference between a score and the mean of its row. The effective score is this
        difference, or the score itself if that is smaller.
        """
        largest = self.numbers.get("max", ())
        above_mean = self.numbers.get("max_above_mean", largest)
        effective = list(map(min, largest, above_mean))  # NaN if the score is NaN
        highest = max((value for value in effective if value == value), default=math.nan)
        return highest, effective.index(highest) if highest == highest else 0

    def whole(self, name: str) -> float:
        """Return a statistic of the whole layer: the largest of its heads or their mean, as the catalogue says."""
        return STATISTICS[name].over_heads(self.numbers[name]) if name in self.numbers else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with numbers rounded to five digits."""
        found: dict[str, Any] = {"rows": self.rows}
        found |= {"broken": self.broken} if self.broken else {}
        found |= {"softcap": self.softcap} if self.softcap is not None else {}
        found |= {"keys": _rounded(self.keys)} if self.keys is not None else {}
        found |= {"uncompiled": 1} if self.uncompiled else {}
        lists = self.numbers if self.clipped is None else {**self.numbers, "clipped": self.clipped}
        return found | {name: list(map(_rounded, values)) for name, values in lists.items()}

    @classmethod
    def from_dict(cls, entries: Any) -> "LayerRecord":
        """Create it from the result of to_dict(); null becomes NaN."""
        entries = _checked(entries, dict, "a layer")
        names = [name for name in (*logged(), "clipped") if entries.get(name) is not None]
        numbers = {name: _numbers(entries[name], name) for name in names}
        if len({len(values) for values in numbers.values()}) > 1:
            raise LineError("expected one number for each head in every list of a layer, but some lists are shorter")
        clipped = numbers.pop("clipped", None)
        return cls(
            _entry(entries, "rows", int),
            numbers,
            _entry(entries, "broken", int, 0),
            _entry(entries, "softcap", float, None),
            clipped,
            _entry(entries, "keys", float, None),
            bool(_entry(entries, "uncompiled", int, 0)),
        )


@dataclass(frozen=True, repr=False)
class Record(PlottedResult):
    """Record of one sampled step; `step` counts the training steps before it, so 0 is the initial model."""

    step: int
    time: float  # seconds since the epoch
    layers: Mapping[str, LayerRecord]
    alarms: list[Finding] = field(default_factory=list)  # raised at this step
    ranks: int = 1  # number of ranks merged into it
    rank: int | None = None  # rank of the record, if ranks could not be merged
    run: str | None = None  # name of its run; a log may have several
    loss: float | None = None  # mean loss of the step over ranks; None if not passed
    lr: float | None = None  # learning rate of the step

    def whole(self, name: str) -> float:
        """Return the mean of a statistic over all layers in which it is finite; NaN if there are none."""
        known = [value for layer in self.layers.values() if math.isfinite(value := layer.whole(name))]
        return math.fsum(known) / len(known) if known else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with numbers rounded to five digits and None for NaN and infinity."""
        found: dict[str, Any] = {"version": VERSION, "step": self.step, "time": round(self.time, 3)}
        found |= {"ranks": self.ranks}
        found |= {name: value for name in OPTIONAL if (value := getattr(self, name)) is not None}
        found |= {name: _rounded(value) for name in LEARNING if (value := getattr(self, name)) is not None}
        found["layers"] = {name: layer.to_dict() for name, layer in self.layers.items()}
        found["alarms"] = [plain(asdict(alarm)) for alarm in self.alarms]
        return found

    def to_line(self) -> bytes:
        """Return to_dict() as one line of JSON."""
        line = json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return f"{line}\n".encode("utf-8", "surrogatepass")

    @classmethod
    def from_dict(cls, entries: Any) -> "Record":
        """Create it from the result of to_dict(); raise LineError for an invalid field."""
        line = _checked(entries, dict, "a record")
        _entry(line, "version", int, VERSION)
        learning = (
            math.nan if name in line and line[name] is None else _entry(line, name, float, None) for name in LEARNING
        )
        return cls(
            _entry(line, "step", int),
            _checked(_entry(line, "time", float), float, "'time'", LATEST),
            {name: LayerRecord.from_dict(layer) for name, layer in _entry(line, "layers", dict).items()},
            [_read_alarm(alarm) for alarm in _entry(line, "alarms", list, [])],
            _entry(line, "ranks", int, 1),
            _entry(line, "rank", int, None),
            _entry(line, "run", str, None),
            *learning,
        )

    @classmethod
    def from_line(cls, line: bytes) -> "Record":
        """Read a line of a log; raise LineError if it is invalid."""
        try:
            return cls.from_dict(json.loads(line.decode("utf-8", "surrogatepass"), parse_constant=_refuse))
        except LineError:
            raise
        except json.JSONDecodeError as error:
            raise LineError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
        except UnicodeDecodeError:
            raise LineError("not UTF-8 text") from None
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits; lists in lists in lists
            raise LineError(f"not readable JSON: {str(error).partition(';')[0]}") from None


def _read_alarm(entries: Any) -> Finding:
    alarm = _checked(entries, dict, "an alarm")
    severity = _entry(alarm, "severity", str)
    if severity not in SEVERITIES:
        raise LineError(f"expected 'severity' as one of {', '.join(SEVERITIES)}")
    layer, code, message, advice = (_entry(alarm, name, str) for name in ("layer", "code", "message", "advice"))
    measured, expected = (_entry(alarm, name, float, None) for name in ("measured", "expected"))
    return Finding(layer, _entry(alarm, "head", int, None), code, severity, message, measured, expected, advice)


def _entry(entries: Mapping[str, Any], name: str, kind: type, *default: Any) -> Any:
    """Return an entry of this type; if it is missing or null, return the default, or raise LineError without one."""
    value = entries.get(name)
    return default[0] if default and value is None else _checked(value, kind, f"'{name}'")


def _checked(value: Any, kind: type, what: str, most: float = LARGEST) -> Any:
    """Return a value of this type and range, or raise LineError; a float may be written as an integer."""
    is_right = type(value) is kind or (kind is float and type(value) is int)  # excludes booleans
    if not is_right or (kind is float and not abs(value) <= most) or (kind is int and not 0 <= value <= MOST):
        text = repr(value) if type(value) is not int or abs(value) <= MOST else "a larger one"
        raise LineError(f"expected {what} as {NAMES[kind]}, got {text if len(text) <= 40 else f'{text[:40]}…'}")
    return float(value) if kind is float else value


def _numbers(values: Any, name: str) -> list[float]:
    """Read a list of at least one number; null is NaN."""
    what = f"a number of '{name}'"
    if not _checked(values, list, f"'{name}'"):
        raise LineError(f"expected {what}, got none")
    return [math.nan if value is None else _checked(value, float, what) for value in values]


def _refuse(constant: str) -> NoReturn:
    raise LineError(f"not JSON: {constant} is not a number")


def _rounded(value: float) -> float | None:
    """Round to five digits; None for NaN, infinity and numbers above LARGEST.

    >>> _rounded(0.123456), _rounded(math.inf)
    (0.12346, None)
    """
    return float(f"{value:.5g}") if abs(value) <= LARGEST else None
