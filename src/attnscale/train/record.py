"""Record: what was seen of every layer and head at one training step; one line of a log."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from attnscale.diagnose.finding import Finding
from attnscale.measure.statistics import STATISTICS, logged
from attnscale.plain import rounded

DIGITS = 5  # of a number in a log


@dataclass(frozen=True)
class LayerRecord:
    """One layer at one step: lists with one number a head, NaN where there is none."""

    rows: int  # looked at, over all heads
    numbers: Mapping[str, list[float]]
    broken: int = 0  # heads whose scores are NaN or infinite
    softcap: float | None = None  # which no score passes

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

    @property
    def last_step(self) -> int:
        """The last step that it stands for."""
        return self.step if self.until is None else self.until

    def whole(self, name: str) -> float:
        """The mean over all layers of which the number is known and finite; NaN where there is none."""
        known = [value for layer in self.layers.values() if math.isfinite(value := layer.whole(name))]
        return math.fsum(known) / len(known) if known else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON takes it: numbers of five digits, null for one that is NaN or infinite."""
        plain: dict[str, Any] = {"step": self.step, "time": round(self.time, 3), "ranks": self.ranks}
        plain |= {} if self.rank is None else {"rank": self.rank}
        plain |= {} if self.until is None else {"until": self.until}
        plain["layers"] = {
            name: {
                "rows": layer.rows,
                **({"broken": layer.broken} if layer.broken else {}),
                **({"softcap": layer.softcap} if layer.softcap is not None else {}),
                **{key: list(map(_short, values)) for key, values in layer.numbers.items()},
            }
            for name, layer in self.layers.items()
        }
        plain["alarms"] = [asdict(alarm) for alarm in self.alarms]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Record":
        """The record that to_dict() gave; numbers that were null are NaN."""
        layers = {str(name): _layer(layer) for name, layer in plain["layers"].items()}
        alarms = [Finding(**alarm) for alarm in plain.get("alarms", [])]
        rank, until = plain.get("rank"), plain.get("until")
        return cls(int(plain["step"]), float(plain["time"]), layers, alarms, int(plain.get("ranks", 1)), rank, until)


def _layer(plain: Mapping[str, Any]) -> LayerRecord:
    numbers = {
        key: [math.nan if value is None else float(value) for value in plain[key]] for key in logged() if key in plain
    }
    softcap = plain.get("softcap")
    return LayerRecord(
        int(plain["rows"]), numbers, int(plain.get("broken", 0)), None if softcap is None else float(softcap)
    )


def _short(value: float) -> float | None:
    """To DIGITS digits, and whole where that is shorter."""
    short = rounded(value, DIGITS)
    return int(short) if short is not None and short.is_integer() and abs(short) < 1e15 else short
