"""Sentences that numbers write: each says something else where the numbers do."""

from collections.abc import Iterable, Sequence

from attnscale.lab.bands import Band
from attnscale.lab.result import Check


def tally(checks: Sequence[Check]) -> str:
    """How many checks hold, and which do not.

    >>> tally([Check("a", True, ""), Check("b", False, "")])
    'Of 2 checks 1 holds; not confirmed: b.'
    """
    failed = [check.statement for check in checks if not check.holds]
    if not failed:
        return f"All {len(checks)} checks hold."
    held = len(checks) - len(failed)
    return f"Of {len(checks)} checks {held} {'holds' if held == 1 else 'hold'}; not confirmed: {'; '.join(failed)}."


def ranging(values: Iterable[float], digits: int = 3) -> str:
    """Where numbers lie: one number, or from the least to the largest.

    >>> ranging([1.001, 1.002]), ranging([2.0, 0.5])
    ('1', '0.5 to 2')
    """
    sample = list(values)
    low, high = (f"{end(sample):.{digits}g}" for end in (min, max))
    return low if low == high else f"{low} to {high}"


def times(ratio: Band) -> str:
    """How many times as large, or that no difference can be told: for a band of ratios, where one means alike.

    >>> times(Band(2.0, 0.1, 8)), times(Band(1.1, 0.2, 8))
    ('2 ± 0.1 times', 'no difference (1.1 ± 0.2 times)')
    """
    size = f"{ratio:.3g} times"
    return f"no difference ({size})" if ratio.holds(1.0) else size


def percent(share: float) -> str:
    """A share of a whole, to one decimal or, where that shows none, one digit.

    >>> percent(0.614), percent(0.0002374)
    ('61.4%', '0.02%')
    """
    return f"{share:.1%}" if share == 0 or share >= 0.0005 else f"{100 * share:.1g}%"
