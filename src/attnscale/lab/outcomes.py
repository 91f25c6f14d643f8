"""Outcomes: the cells of an experiment, to be asked for bands and curves."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnscale.lab.bands import Band, band
from attnscale.lab.cell import Outcome, Setting, Settings
from attnscale.lab.result import Check, Curve, column


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

    def difference(self, measure: str, one: Settings, other: Settings, **settings: Setting) -> Band:
        """How much larger a number is under some settings than under others, seed by seed."""
        minuend, subtrahend = (
            {own["seed"]: float(found[measure]) for own, found in self.where(**settings, **side)}
            for side in (one, other)
        )
        return band(minuend[seed] - subtrahend[seed] for seed in minuend if seed in subtrahend)

    def curve(self, name: str, x: str, y: str, **settings: Setting) -> Curve:
        """A number against a setting, with bands over seeds."""
        own = self.where(**settings)
        along: list[Any] = own.values(x)
        bands = [own.band(y, **{x: value}) for value in along]
        low, high = (column([getattr(found, end) for found in bands]) for end in ("low", "high"))
        return Curve(name, tuple(map(float, along)), column([found.mean for found in bands]), low, high)

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
        off, wide = (
            max(size / (abs(expected[value]) or 1.0) for value, size in sizes.items())
            for sizes in (
                {value: abs(found.mean - expected[value]) for value, found in bands.items()},
                {value: found.half for value, found in bands.items()},
            )
        )
        inside = f"{len(bands) - len(amiss)} of {len(bands)} points inside their bands over {seeds} seeds"
        outside = f"; outside at {along} = {', '.join(map(str, amiss))}" if amiss else ""
        return Check(statement, not amiss, f"{inside}; off by at most {off:.2%}, bands ±{wide:.2%} or less{outside}")

    def _bands(
        self, measure: str, expected: Mapping[Any, float], along: str, curves: int, settings: Settings
    ) -> dict[Any, Band]:
        own, points = self.where(**settings), len(expected) * curves
        return {value: own.band(measure, points=points, **{along: value}) for value in expected}
