"""Record: the score statistics of every layer and head at one training step; one line of a log."""

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from attnscale.diagnose.finding import SEVERITIES, Finding
from attnscale.measure.statistics import STATISTICS, logged
from attnscale.module_paths import without_wrappers
from attnscale.plain import plain
from attnscale.results import PlottedResult
from attnscale.train.schema import LARGEST, Fields, LineError

VERSION = 2  # of the format of a line; readers ignore fields that they do not know
RENAMED = {"apart": "uncompiled", "scale": "scale_applied"}  # fields of a layer in earlier lines
OPTIONAL = ("rank", "until", "run", "part")  # fields of a line that are left out where they are None
LEARNING = ("loss", "lr")  # likewise; null where they are NaN or infinite
LATEST = 2.5e11  # seconds since the epoch: the last years that calendars can show
LONGEST_NAME = 128  # characters of the name of a run


def new_name() -> str:
    """Return a random name for a run, or for a part of one, without drawing from torch's random numbers.

    >>> len(new_name())
    8
    """
    return secrets.token_hex(4)


@dataclass(frozen=True)
class LayerRecord:
    """One layer at one step: lists with one number a head, NaN where there is none."""

    rows: int  # measured, over all heads
    numbers: Mapping[str, list[float]]  # by the names of the catalogue of statistics
    broken: int = 0  # heads whose scores are NaN or infinite
    softcap: float | None = None
    clipped: Sequence[float] | None = None  # factor of QK-Clip on each head's scores since the record before
    keys: float | None = None  # visible to a row, on average
    uncompiled: bool = False  # its module ran uncompiled under the tracer, others by probes

    @property
    def lowered(self) -> float:
        """Smallest factor of QK-Clip on any head since the record before; 1 where it did nothing."""
        return min((factor for factor in self.clipped or () if factor > 0), default=1.0)

    @property
    def effective_max(self) -> tuple[float, int]:
        """Largest score as far as softmax sees it, and its head; NaN where no head has a score.

        Softmax sees how far a score is above the mean of its row; it is counted as that, or as the score if smaller.
        """
        largest = self.numbers.get("max", ())
        above_mean = self.numbers.get("max_above_mean", largest)
        effective = list(map(min, largest, above_mean))  # NaN where the score is
        highest = max((value for value in effective if value == value), default=math.nan)
        return highest, effective.index(highest) if highest == highest else 0

    def whole(self, name: str) -> float:
        """Return a statistic of the whole layer: the largest of its heads or their mean, as the catalogue says."""
        return STATISTICS[name].over_heads(self.numbers[name]) if name in self.numbers else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, numbers of five digits."""
        found: dict[str, Any] = {"rows": self.rows}
        found |= {"broken": self.broken} if self.broken else {}
        found |= {"softcap": self.softcap} if self.softcap is not None else {}
        found |= {"keys": _rounded(self.keys)} if self.keys is not None else {}
        found |= {"uncompiled": 1} if self.uncompiled else {}
        lists = self.numbers if self.clipped is None else {**self.numbers, "clipped": self.clipped}
        return found | {name: list(map(_rounded, values)) for name, values in lists.items()}

    @classmethod
    def from_dict(cls, entries: Any) -> "LayerRecord":
        """Read what to_dict() returned; numbers that are null are NaN."""
        if isinstance(entries, dict):
            entries = {RENAMED.get(name, name): value for name, value in entries.items()}
        layer = Fields(entries, "a layer")
        numbers = {name: layer.numbers(name) for name in logged() if name in layer}
        clipped = layer.optional("clipped", layer.numbers)
        if len({len(values) for values in (*numbers.values(), clipped) if values is not None}) > 1:
            raise LineError("expected one number a head in every list of a layer, and some are shorter")
        return cls(
            layer.whole("rows"),
            numbers,
            layer.optional("broken", layer.whole) or 0,
            layer.optional("softcap", layer.number),
            clipped,
            layer.optional("keys", layer.number, least=0.0),
            bool(layer.optional("uncompiled", layer.whole, most=1)),
        )


@dataclass(frozen=True, repr=False)
class Record(PlottedResult):
    """One sampled step. `step` counts the training steps before it, so 0 is the model as it was initialised."""

    step: int
    time: float  # seconds since the epoch
    layers: Mapping[str, LayerRecord]
    alarms: list[Finding] = field(default_factory=list)  # raised at this step
    ranks: int = 1  # whose rows are in it
    rank: int | None = None  # whose record it is, where ranks were not merged
    until: int | None = None  # the last step, where a record stands for several
    run: str | None = None  # which run it belongs to; a log may hold several
    part: str | None = None  # of that run: after a resume the run goes on under its name as another part
    loss: float | None = None  # of the step, the mean of its ranks; NaN where it was none, None where it was not given
    lr: float | None = None  # the learning rate of the step

    @property
    def last_step(self) -> int:
        """Last step that the record stands for."""
        return self.step if self.until is None else self.until

    def whole(self, name: str) -> float:
        """Return the mean of a statistic over all layers in which it is finite; NaN where there is none."""
        known = [value for layer in self.layers.values() if math.isfinite(value := layer.whole(name))]
        return math.fsum(known) / len(known) if known else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: numbers of five digits, None for NaN and infinity."""
        found: dict[str, Any] = {"version": VERSION, "step": self.step, "time": round(self.time, 3)}
        found |= {"ranks": self.ranks}
        found |= {name: value for name in OPTIONAL if (value := getattr(self, name)) is not None}
        found |= {name: _rounded(value) for name in LEARNING if (value := getattr(self, name)) is not None}
        found["layers"] = {name: layer.to_dict() for name, layer in self.layers.items()}
        found["alarms"] = [plain(asdict(alarm)) for alarm in self.alarms]
        return found

    def to_json(self) -> str:
        """Return what to_dict() returns as one line of JSON."""
        return json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    def to_line(self) -> bytes:
        """Return the line of a log."""
        return f"{self.to_json()}\n".encode("utf-8", "surrogatepass")

    @classmethod
    def from_dict(cls, entries: Any) -> "Record":
        """Read what to_dict() returned, checking every field.

        Lines of version 1 name layers with what wrappers add, as `module.`; they get the names of the model itself.
        """
        line = Fields(entries, "a record")
        step, version = line.whole("step"), line.optional("version", line.whole, least=1) or 1
        layers = {name: LayerRecord.from_dict(layer) for name, layer in line.entries("layers").items()}
        names = {name: (without_wrappers(name) or name) if version == 1 else name for name in layers}
        if len(set(names.values())) < len(names):  # two would become one
            names = {}
        return cls(
            step,
            line.number("time", -LATEST, LATEST),
            {names.get(name, name): layer for name, layer in layers.items()},
            [_read_alarm(Fields(alarm, "an alarm"), names) for alarm in line.items("alarms")],
            line.whole("ranks", least=1) if "ranks" in line else 1,
            line.optional("rank", line.whole),
            line.optional("until", line.whole, least=step),
            line.optional("run", line.text, longest=LONGEST_NAME),
            line.optional("part", line.text, longest=LONGEST_NAME),
            *(line.number_or_nan(name) if name in line else None for name in LEARNING),
        )

    @classmethod
    def from_line(cls, line: bytes) -> "Record":
        """Read a line of a log; a LineError says what is wrong with it."""
        try:
            return cls.from_dict(json.loads(line.decode("utf-8", "surrogatepass"), parse_constant=_refuse))
        except LineError:
            raise
        except json.JSONDecodeError as error:
            raise LineError(f"no JSON: {error.msg} at character {error.pos + 1}") from None
        except UnicodeDecodeError:
            raise LineError("no text in UTF-8") from None
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits; lists in lists in lists
            raise LineError(f"no JSON that can be read: {str(error).partition(';')[0]}") from None


def _read_alarm(alarm: Fields, names: Mapping[str, str]) -> Finding:
    layer = alarm.text("layer")
    return Finding(
        names.get(layer, layer),
        alarm.optional("head", alarm.whole),
        alarm.text("code"),
        alarm.one_of("severity", SEVERITIES),
        alarm.text("message"),
        alarm.optional("measured", alarm.number),
        alarm.optional("expected", alarm.number),
        alarm.text("advice"),
    )


def _refuse(constant: str) -> NoReturn:
    raise LineError(f"no JSON: {constant} is no number")


def _rounded(value: float) -> float | None:
    """Round to five digits; None for NaN, infinity and what readers refuse.

    >>> _rounded(0.123456), _rounded(math.inf)
    (0.12346, None)
    """
    return float(f"{value:.5g}") if abs(value) <= LARGEST else None
