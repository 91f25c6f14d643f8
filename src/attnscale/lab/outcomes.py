"""Outcomes of an experiment's cells: means over seeds with their intervals, comparisons, and sentences about them."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnscale.lab.experiment import Check, Curve, Outcome, Setting, Settings, Table
from attnscale.plain import finite
from attnscale.theory.significance import student_quantile

LEVEL = 0.95
# Chance that a check of several curves fails although the theory is right. With 5% for each of ten experiments, one
# in three complete runs would report a false failure.
CHANCE = 0.01
NEGLIGIBLE = 0.1  # nats
SMALLEST_SHARE = 1e-6  # a smaller one is shown as `less than`
WORSE, BETTER, ALIKE, UNDECIDED = "worse", "better", "no difference", "undecided"


@dataclass(frozen=True)
class Band:
    """Mean over independent seeds with its 95% interval, mean ± margin; the margin of one seed is infinite."""

    mean: float
    margin: float
    seeds: int

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.margin

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.margin

    @property
    def columns(self) -> tuple[float | None, float | None]:
        """Mean and margin for a table, None if not finite."""
        return finite(self.mean), finite(self.margin)

    def contains(self, value: float) -> bool:
        """Return True if the value lies in the interval."""
        return self.low <= value <= self.high

    def is_below(self, limit: float) -> bool | None:
        """Return True or False if the whole interval is below or above the limit, otherwise None."""
        return True if self.high < limit else False if self.low > limit else None

    def __format__(self, form: str) -> str:
        """Format the mean by `form`, followed by the margin."""
        form = form or ".3g"
        if math.isinf(self.margin):
            return f"{self.mean:{form}} (one seed)"
        return f"{self.mean:{form}} ± {self.margin:{'.1%' if form.endswith('%') else '.2g'}}"


def band(values: Iterable[float], points: int = 1) -> Band:
    """Return the mean and its interval; with `points`, 95% is the chance that all of so many intervals are right.

    >>> f"{band([1.0, 2.0, 3.0]):.1f}"
    '2.0 ± 2.5'
    """
    sample = np.fromiter(values, dtype=np.float64)
    seeds = len(sample)
    if seeds == 0 or not np.isfinite(sample).all():
        return Band(math.nan, math.nan, seeds)
    if seeds == 1:
        return Band(float(sample[0]), math.inf, 1)
    error = float(sample.std(ddof=1)) / math.sqrt(seeds)
    return Band(float(sample.mean()), student_quantile(seeds - 1, 1 - (1 - LEVEL) / points) * error, seeds)


@dataclass(frozen=True)
class Outcomes:
    """Pairs of settings and outcome, in the order of the grid."""

    cells: Sequence[tuple[Settings, Outcome]]

    def __iter__(self) -> Iterator[tuple[Settings, Outcome]]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def where(self, **settings: Setting) -> "Outcomes":
        """Return the cells with these settings."""
        wanted = settings.items()
        return Outcomes([cell for cell in self.cells if all(cell[0][name] == value for name, value in wanted)])

    def derived(self, measure: Callable[[Outcome], Outcome]) -> "Outcomes":
        """Return the cells with further measures, computed from their own."""
        return Outcomes([(own, {**found, **measure(found)}) for own, found in self])

    def values(self, setting: str) -> list[Any]:
        """Return each value of a setting once, in the order of the grid."""
        return list(dict.fromkeys(own[setting] for own, _ in self.cells))

    def groups(self, *settings: str) -> "dict[tuple[Setting, ...], Outcomes]":
        """Return the cells by their values of these settings, in the order of the grid."""
        combinations = dict.fromkeys(tuple(own[name] for name in settings) for own, _ in self)
        return {values: self.where(**dict(zip(settings, values, strict=True))) for values in combinations}

    def at_best_rates(self, *settings: str) -> "Outcomes":
        """Return the runs at the best rate, by mean loss, of each combination of these settings."""
        cells: list[tuple[Settings, Outcome]] = []
        for own in self.groups(*settings).values():
            losses = {rate: own.band("final", rate=rate).mean for rate in own.values("rate")}
            cells += own.where(rate=min(losses, key=lambda rate: losses[rate])).cells
        return Outcomes(cells)

    def samples(self, measure: str, **settings: Setting) -> list[float]:
        """Return a measured number of every cell with these settings."""
        return [float(found[measure]) for _, found in self.where(**settings)]

    def count(self, measure: str) -> int:
        """Return the number of cells in which a measure is true."""
        return sum(bool(found[measure]) for _, found in self)

    def band(self, measure: str, *, points: int = 1, **settings: Setting) -> Band:
        """Return the mean of a number over seeds, with its interval."""
        return band(self.samples(measure, **settings), points)

    def difference(self, measure: str, one: Settings, other: Settings, *, points: int = 1, **settings: Setting) -> Band:
        """Return the number under `one` minus the number under `other`, paired by seed."""
        first, second = (
            {own["seed"]: float(found[measure]) for own, found in self.where(**settings, **side)}
            for side in (one, other)
        )
        return band((first[seed] - second[seed] for seed in first if seed in second), points)

    def exponent(self, measure: str, along: str) -> Band:
        """Return the exponent in `number ∝ setting^exponent`, fitted for each seed; NaN if a number is not finite."""
        powers = []
        for own in self.groups("seed").values():
            x, y = np.log(own.values(along)), np.log(own.samples(measure))
            powers.append(float(np.polyfit(x, y, 1)[0]) if np.isfinite(y).all() else math.nan)
        return band(powers)

    def curve(self, name: str, x: str, y: str, **settings: Setting) -> Curve:
        """Return a number against a setting, with intervals over seeds."""
        own = self.where(**settings)
        along: list[Any] = own.values(x)
        return banded(name, along, [own.band(y, **{x: value}) for value in along])

    def curves(
        self, x: str, y: str, by: str, *, names: Mapping[Any, str] | None = None,
        theory: Callable[[Any, Any], float] | None = None,
    ) -> tuple[Curve, ...]:  # fmt: skip
        """Return a curve for each value of the setting `by`, followed by theory(value, x) if there is one."""
        found = []
        for value in self.values(by):
            own, name = self.where(**{by: value}), names[value] if names else str(value)
            found.append(own.curve(name, x, y))
            if theory is not None:
                found.append(expected_curve(name, own.values(x), [theory(value, at) for at in own.values(x)]))
        return tuple(found)

    def table(self, title: str, settings: Mapping[str, str], measures: Mapping[str, str]) -> Table:
        """Return the means of measures, a row for each combination of settings; both map names to headings.

        After a heading that ends in ±, a second column has the margin. Booleans are counted.
        """
        rows = []
        for combination, own in self.groups(*settings).items():
            row: list[Setting] = [*combination]
            for name, heading in measures.items():
                found = own.band(name)
                mean = own.count(name) if isinstance(own.cells[0][1][name], bool) else finite(found.mean)
                row += [mean, found.columns[1]] if heading.endswith("±") else [mean]
            rows.append(tuple(row))
        headings = [part for heading in measures.values() for part in heading.rsplit(" ", heading.endswith("±"))]
        return Table(title, (*settings.values(), *headings), tuple(rows))

    def series(self, name: str, x: Sequence[float], measure: str, **settings: Setting) -> Curve:
        """Return a list of numbers that every cell has, against x, with intervals over seeds."""
        lists = [found[measure] for _, found in self.where(**settings)]
        return banded(name, x, [band(values) for values in zip(*lists, strict=True)])

    def check(
        self, statement: str, measure: str, theory: Callable[[Any], float], along: str, curves: int = 1,
        **settings: Setting,
    ) -> Check:  # fmt: skip
        """Check that a curve along a setting agrees with theory(setting), as one of `curves` checked together."""
        own = self.where(**settings)
        expected = {value: theory(value) for value in own.values(along)}
        points = round(len(expected) * curves * (1 - LEVEL) / CHANCE)
        bands = {value: own.band(measure, points=points, **{along: value}) for value in expected}
        seeds = min(found.seeds for found in bands.values())
        if seeds < 2:
            return Check(statement, None, "one seed has no interval; run two or more")
        outside = [value for value, found in bands.items() if not found.contains(expected[value])]
        is_share = all(expected.values())  # a difference from zero has no relative size
        units = {value: abs(own) if is_share else 1.0 for value, own in expected.items()}
        form = ".2%" if is_share else ".2g"
        off = max(abs(found.mean - expected[value]) / units[value] for value, found in bands.items())
        widest = max(found.margin / units[value] for value, found in bands.items())
        evidence = (
            f"{len(bands) - len(outside)} of {len(bands)} points within their intervals over {seeds} seeds; largest "
            f"difference {off:{form}}, widest interval ±{widest:{form}}"
        )
        where = f"; outside at {along} = {_listed(outside)}" if outside else ""
        return Check(statement, not outside, evidence + where)


def column(values: Iterable[float]) -> tuple[float | None, ...]:
    """Return numbers for a curve or a table, with None for NaN and infinity, which JSON cannot write."""
    return tuple(finite(float(value)) for value in values)


def expected_curve(name: str, x: Sequence[float], y: Sequence[float]) -> Curve:
    """Return the prediction that belongs to the measured curve of this name."""
    return Curve(f"{name}, expected", tuple(map(float, x)), column(y), is_theory=True)


def banded(name: str, x: Sequence[float], bands: Sequence[Band]) -> Curve:
    """Return means against x, with their intervals."""
    mean, low, high = (column([getattr(found, part) for found in bands]) for part in ("mean", "low", "high"))
    return Curve(name, tuple(map(float, x)), mean, low, high)


def verdict(difference: Band) -> str:
    """Return a verdict on a loss from its difference to another: worse, better, no difference or undecided.

    >>> [verdict(Band(mean, 0.03, 8)) for mean in (0.2, -0.2, 0.02, 0.09)]
    ['worse', 'better', 'no difference', 'worse']
    >>> verdict(Band(0.2, 0.3, 8))
    'undecided'
    """
    if difference.low > 0:
        return WORSE
    if difference.high < 0:
        return BETTER
    return ALIKE if difference.low >= -NEGLIGIBLE and difference.high <= NEGLIGIBLE else UNDECIDED


def verdicts(differences: Mapping[Any, Band]) -> str:
    """Group names by verdict.

    >>> verdicts({"8": Band(0.01, 0.02, 8), "32": Band(0.0, 0.01, 8), "128": Band(0.2, 0.03, 8)})
    'no difference at 8, 32 (at most 0.03), worse at 128 (+0.2 ± 0.03)'
    """
    groups: dict[str, dict[Any, Band]] = {}
    for name, difference in differences.items():
        groups.setdefault(verdict(difference), {})[name] = difference
    parts = []
    for word, group in groups.items():
        if word == ALIKE:
            most = max(max(abs(each.low), abs(each.high)) for each in group.values())
            parts.append(f"{word} at {_listed(group)} (at most {most:.2g})")
        else:
            parts.append(f"{word} at " + ", ".join(f"{name} ({each:+.2g})" for name, each in group.items()))
    return ", ".join(parts)


def tally(checks: Sequence[Check]) -> str:
    """Count the checks that pass, and name the others.

    >>> tally([Check("a", True, ""), Check("b", False, ""), Check("c", None, "")])
    '1 of 3 checks pass. Failed: b. Undecided: c.'
    """
    passed = sum(check.holds is True for check in checks)
    others = ""
    for word, holds in (("Failed", False), ("Undecided", None)):
        named = [check.statement for check in checks if check.holds is holds]
        others += f" {word}: {'; '.join(named)}." if named else ""
    return f"{'All' if not others else f'{passed} of'} {len(checks)} checks pass.{others}"


def ranging(values: Iterable[float], digits: int = 3) -> str:
    """Return the range of numbers as text.

    >>> ranging([1.001, 1.002]), ranging([2.0, 0.5])
    ('1', '0.5 to 2')
    """
    sample = list(values)
    low, high = (f"{end(sample):.{digits}g}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def percent(share: float) -> str:
    """Return a percentage with one decimal, or with one digit if one decimal would show zero.

    >>> percent(0.614), percent(0.0002374), percent(2e-7)
    ('61.4%', '0.02%', 'less than 0.0001%')
    """
    if 0 < share < SMALLEST_SHARE:
        return "less than 0.0001%"
    return f"{share:.1%}" if share == 0 or share >= 0.0005 else f"{100 * share:.1g}%"


def diverged_sentence(outcomes: Outcomes) -> str:
    """Return a sentence with the number of diverged runs."""
    return f"{outcomes.count('diverged') or 'None'} of {len(outcomes)} runs diverged."


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
