"""Outcomes: the cells of an experiment, to be asked for bands and curves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnscale.lab.bands import LEVEL, Band, Factors, band
from attnscale.lab.cell import Outcome, Setting, Settings
from attnscale.lab.result import Check, Curve, column

# That any of the curves compared together is outside its band though the theory is right. Ten experiments with 5%
# each would raise a false alarm in every third round.
CHANCE = 0.01


@dataclass(frozen=True)
class Outcomes:
    """Pairs of settings and what came of them, in the order of the grid."""

    cells: Sequence[tuple[Settings, Outcome]]

    def __iter__(self) -> Iterator[tuple[Settings, Outcome]]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def where(self, **settings: Setting) -> "Outcomes":
        """The cells with these settings."""
        wanted = settings.items()
        return Outcomes([cell for cell in self.cells if all(cell[0][name] == value for name, value in wanted)])

    def values(self, setting: str) -> list[Any]:
        """What a setting was set to, each value once, in the order of the grid."""
        return list(dict.fromkeys(own[setting] for own, _ in self.cells))

    def samples(self, measure: str, **settings: Setting) -> list[float]:
        """A measured number, once a seed."""
        return [float(found[measure]) for _, found in self.where(**settings)]

    def band(self, measure: str, *, points: int = 1, **settings: Setting) -> Band:
        """The mean of a number over seeds, with its band."""
        return band(self.samples(measure, **settings), points)

    def difference(self, measure: str, one: Settings, other: Settings, *, points: int = 1, **settings: Setting) -> Band:
        """How much larger a number is under some settings than under others, seed by seed."""
        return band((first - second for first, second in self._pairs(measure, one, other, settings)), points)

    def ratio(self, measure: str, one: Settings, other: Settings, *, points: int = 1, **settings: Setting) -> Band:
        """How many times as large a number is under some settings as under others, seed by seed."""
        return band((first / second for first, second in self._pairs(measure, one, other, settings)), points)

    def _pairs(self, measure: str, one: Settings, other: Settings, settings: Settings) -> list[tuple[float, float]]:
        first, second = (
            {own["seed"]: float(found[measure]) for own, found in self.where(**settings, **side)}
            for side in (one, other)
        )
        return [(first[seed], second[seed]) for seed in first if seed in second]

    def curve(self, name: str, x: str, y: str, **settings: Setting) -> Curve:
        """A number against a setting, with bands over seeds."""
        own = self.where(**settings)
        along: list[Any] = own.values(x)
        return banded(name, along, [own.band(y, **{x: value}) for value in along])

    def series(self, name: str, x: Sequence[float], measure: str, **settings: Setting) -> Curve:
        """A list of numbers that every cell has, against x, with bands over seeds."""
        lists = [found[measure] for _, found in self.where(**settings)]
        return banded(name, x, [band(values) for values in zip(*lists, strict=True)])

    def agrees(
        self, measure: str, expected: Mapping[Any, float], along: str, curves: int = 1, **settings: Setting
    ) -> list[Setting]:
        """The values of the setting `along` at which a band does not hold what was expected: none, if all agree.

        The bands hold together, at all points of this curve and of as many others as are compared beside it.
        """
        bands = self._bands(measure, expected, along, curves, settings)
        return [value for value, found in bands.items() if not found.holds(expected[value])]

    def check(
        self,
        statement: str,
        measure: str,
        expected: Mapping[Any, float],
        along: str,
        curves: int = 1,
        **settings: Setting,
    ) -> Check:
        """Whether a curve agrees with what was expected; one seed has no band, and shows nothing."""
        bands = self._bands(measure, expected, along, curves, settings)
        seeds = min(found.seeds for found in bands.values())
        if seeds < 2:
            return Check(statement, False, "cannot be told from one seed, which has no band; run two or more")
        amiss = [value for value, found in bands.items() if not found.holds(expected[value])]
        has_zero = not all(expected.values())  # of which nothing is a share
        units = {value: 1.0 if has_zero else abs(own) for value, own in expected.items()}
        off = max(abs(found.mean - expected[value]) / units[value] for value, found in bands.items())
        wide = max(found.half / units[value] for value, found in bands.items())
        sizes = (f"{off:.2g}", f"{wide:.2g}") if has_zero else (f"{off:.2%}", f"{wide:.2%}")
        inside = f"{len(bands) - len(amiss)} of {len(bands)} points inside their bands over {seeds} seeds"
        outside = f"; outside at {along} = {', '.join(map(str, amiss))}" if amiss else ""
        evidence = f"{inside}; off by at most {sizes[0]}, bands ±{sizes[1]} or less{outside}"
        return Check(statement, not amiss, evidence)

    def _bands(
        self, measure: str, expected: Mapping[Any, float], along: str, curves: int, settings: Settings
    ) -> dict[Any, Band]:
        own, points = self.where(**settings), round(len(expected) * curves * (1 - LEVEL) / CHANCE)
        return {value: own.band(measure, points=points, **{along: value}) for value in expected}


def banded(name: str, x: Sequence[float], bands: Sequence[Band | Factors]) -> Curve:
    """Means against x, with their bands."""
    mean, low, high = (column([getattr(found, part) for found in bands]) for part in ("mean", "low", "high"))
    return Curve(name, tuple(map(float, x)), mean, low, high)
