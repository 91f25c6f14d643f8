"""Record: what was seen of every layer and head at one training step; one line of a log."""

import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from attnscale.diagnose.finding import SEVERITIES, Finding
from attnscale.measure.statistics import STATISTICS, logged
from attnscale.plain import plain
from attnscale.train.schema import LARGEST, LATEST, LONGEST_NAME, Fields, LineError

VERSION = 1  # of the format of a line; lines from before there were versions have none
FORMAT = "%.5g"  # of a number in a log
LARGEST_BEGINS = "e+30"  # how exponents from LARGEST on begin
OPTIONAL = ("rank", "until", "run", "part")  # fields of a record that a line has where they are known
LEARNING = ("loss", "lr")  # likewise, and null where they are NaN or infinite


def new_name() -> str:
    """A name for a run, or for a part of one, that no other has; torch's random numbers are left alone.

    >>> len(new_name())
    8
    """
    return secrets.token_hex(4)


@dataclass(frozen=True)
class LayerRecord:
    """One layer at one step: lists with one number a head, NaN where there is none."""

    rows: int  # looked at, over all heads
    numbers: Mapping[str, list[float]]
    broken: int = 0  # heads whose scores are NaN or infinite
    softcap: float | None = None  # which no score passes
    clipped: Sequence[float] | None = None  # what QK-Clip multiplied each head's scores by since the record before
    keys: float | None = None  # that a row sees on average
    apart: bool = False  # its module alone ran uncompiled: it cannot be measured inside the model's run, others were

    @property
    def lowered(self) -> float:
        """What clipping did to the head that it lowered most since the record before; 1 where it did nothing."""
        return min((factor for factor in self.clipped or () if factor > 0), default=1.0)

    @property
    def felt(self) -> tuple[float, int]:
        """What softmax sees of the largest score, as far as that is known, and the head that has it.

        That is what it is above the mean of its row, and never more than it is. NaN where no head has a score.
        """
        largest = self.numbers.get("max", ())
        above = self.numbers.get("max_above_mean", largest)
        felt = list(map(min, largest, above))  # NaN where the score is
        highest = max((value for value in felt if value == value), default=math.nan)
        return highest, felt.index(highest) if highest == highest else 0

    def whole(self, name: str) -> float:
        """The number of the layer, by the rule of the catalogue: the largest of its heads, or their mean."""
        return STATISTICS[name].over_heads(self.numbers[name]) if name in self.numbers else math.nan


@dataclass(frozen=True)
class Record:
    """One sampled step. `step` counts the training steps before it, so 0 is the model as it was initialised."""

    step: int
    time: float  # seconds since the epoch
    layers: Mapping[str, LayerRecord]
    alarms: list[Finding] = field(default_factory=list)  # raised at this step
    ranks: int = 1  # whose rows are in it
    rank: int | None = None  # whose record it is, where ranks were not merged
    until: int | None = None  # the last step, where a thinned log keeps the extremes of several as one
    run: str | None = None  # which run it belongs to; a log may hold several
    part: str | None = None  # of that run: a resumed one goes on under the same name as another part
    loss: float | None = None  # of the step, the mean of its ranks; NaN where it was none, None where it was not given
    lr: float | None = None  # the learning rate of the step

    @property
    def last_step(self) -> int:
        """The last step that it stands for."""
        return self.step if self.until is None else self.until

    def whole(self, name: str) -> float:
        """The mean over all layers of which the number is known and finite; NaN where there is none."""
        known = [value for layer in self.layers.values() if math.isfinite(value := layer.whole(name))]
        return math.fsum(known) / len(known) if known else math.nan

    def to_json(self) -> str:
        """The record as one line of JSON: numbers of five digits, null for one that is NaN or infinite."""
        head: dict[str, Any] = {"version": VERSION, "step": self.step, "time": round(self.time, 3), "ranks": self.ranks}
        head |= {name: own for name in OPTIONAL if (own := getattr(self, name)) is not None}
        head |= {name: _finite(own) for name in LEARNING if (own := getattr(self, name)) is not None}
        layers = ",".join(f"{_json(name)}:{_layer_json(layer)}" for name, layer in self.layers.items())
        alarms = _json([plain(asdict(alarm)) for alarm in self.alarms])
        return f'{_json(head)[:-1]},"layers":{{{layers}}},"alarms":{alarms}}}'

    def to_dict(self) -> dict[str, Any]:
        """What to_json() gives, as JSON takes it."""
        found: dict[str, Any] = json.loads(self.to_json())
        return found

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Record":
        """The record that to_dict() gave, every field checked; numbers that were null are NaN.

        Of a record whose version is newer than this program's, what is not known is left out.
        """
        line = Fields(given, "a record")
        step, is_newer = line.whole("step"), "version" in line and line.whole("version", least=1) > VERSION
        return cls(
            step,
            line.number("time", -LATEST, LATEST),
            _layers(line.entries("layers"), is_newer),
            _alarms(line.items("alarms"), is_newer),
            line.whole("ranks", least=1) if "ranks" in line else 1,
            line.optional("rank", line.whole),
            line.optional("until", line.whole, least=step),
            line.optional("run", line.text, longest=LONGEST_NAME),
            line.optional("part", line.text, longest=LONGEST_NAME),
            *(line.number_or_nan(name) if name in line else None for name in LEARNING),
        )


def _layers(given: Mapping[str, Any], is_newer: bool) -> dict[str, LayerRecord]:
    found, names = dict[str, LayerRecord](), logged()
    for name, plain_layer in given.items():
        try:
            found[name] = _layer(Fields(plain_layer, "a layer"), names)
        except LineError:
            if not is_newer:
                raise
    if given and not found:
        raise LineError("expected layers that can be read, and of this newer version none can")
    return found


def _layer(layer: Fields, names: Iterable[str]) -> LayerRecord:
    numbers = _of_one_meaning({name: layer.numbers(name) for name in names if name in layer})
    clipped = layer.optional("clipped", layer.numbers)
    if len({len(values) for values in (*numbers.values(), clipped) if values is not None}) > 1:
        raise LineError("expected as many numbers in every list of a layer as it has heads, and some have fewer")
    broken = layer.whole("broken") if "broken" in layer else 0
    return LayerRecord(
        layer.whole("rows"),
        numbers,
        broken,
        layer.optional("softcap", layer.number),
        clipped,
        layer.optional("keys", layer.number, least=0.0),
        bool(layer.optional("apart", layer.whole, most=1)),
    )


def _of_one_meaning(numbers: dict[str, list[float]]) -> dict[str, list[float]]:
    """Logs that do not know the total spread yet have it under the name of the spread."""
    if "spread" in numbers and "total_spread" not in numbers:
        numbers["total_spread"] = numbers.pop("spread")
    return numbers


def _alarms(given: list[Any], is_newer: bool) -> list[Finding]:
    found = []
    for plain_alarm in given:
        try:
            found.append(_alarm(Fields(plain_alarm, "an alarm"), is_newer))
        except LineError:
            if not is_newer:
                raise
    return found


def _alarm(alarm: Fields, is_newer: bool) -> Finding:
    if not is_newer:
        alarm.only([field.name for field in fields(Finding)])
    return Finding(
        alarm.text("layer"),
        alarm.optional("head", alarm.whole),
        alarm.text("code"),
        alarm.one_of("severity", SEVERITIES),
        alarm.text("message"),
        alarm.optional("measured", alarm.number),
        alarm.optional("expected", alarm.number),
        alarm.text("advice"),
    )


_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def _layer_json(layer: LayerRecord) -> str:
    head: dict[str, Any] = {"rows": layer.rows}
    head |= {"broken": layer.broken} if layer.broken else {}
    head |= {"softcap": layer.softcap} if layer.softcap is not None else {}
    head |= {"keys": _finite(layer.keys)} if layer.keys is not None else {}
    head |= {"apart": 1} if layer.apart else {}
    lists = layer.numbers if layer.clipped is None else {**layer.numbers, "clipped": layer.clipped}
    numbers = (f",{_json(name)}:[{_short(values)}]" for name, values in lists.items())
    return f"{_json(head)[:-1]}{''.join(numbers)}}}"


def _finite(value: float) -> float | None:
    """To five digits; None for what no reader takes.

    >>> _finite(0.123456), _finite(math.inf)
    (0.12346, None)
    """
    return float(FORMAT % value) if abs(value) <= LARGEST else None


def _short(values: Sequence[float]) -> str:
    """To five digits, with commas between; null for what no reader takes.

    >>> _short([0.123456, 7, math.nan, -1e301])
    '0.12346,7,null,null'
    """
    text = ",".join([FORMAT] * len(values)) % tuple(values)
    if "n" not in text and LARGEST_BEGINS not in text:  # one after the other takes twice the time
        return text
    return ",".join(FORMAT % value if abs(value) <= LARGEST else "null" for value in values)
