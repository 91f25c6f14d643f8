"""Comparing losses: worse, better, no difference, or not enough seeds to tell."""

from collections.abc import Mapping

from attnscale.lab.bands import Band

NEGLIGIBLE = 0.1  # nats: about what a factor of three in the learning rate costs near the best one (growth)
WORSE, BETTER, ALIKE, UNDECIDED = "worse", "better", "no difference", "undecided"


def verdict(difference: Band) -> str:
    """What a difference of losses, with its band, says.

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


def effect(difference: Band) -> str:
    """Its size: "+0.2 ± 0.03"."""
    return f"{difference:+.2g}"


def verdicts(differences: Mapping[str, Band]) -> str:
    """Which are worse, better or alike, each verdict once.

    >>> verdicts({"8": Band(0.01, 0.02, 8), "32": Band(0.0, 0.01, 8), "128": Band(0.2, 0.03, 8)})
    'no difference at 8, 32 (beyond 0.03), worse at 128 (+0.2 ± 0.03)'
    """
    groups: dict[str, dict[str, Band]] = {}
    for name, difference in differences.items():
        groups.setdefault(verdict(difference), {})[name] = difference
    return ", ".join(f"{said} at {_listed(said, group)}" for said, group in groups.items())


def _listed(said: str, group: Mapping[str, Band]) -> str:
    if said == ALIKE:
        most = max(max(abs(each.low), abs(each.high)) for each in group.values())
        return f"{', '.join(group)} (beyond {most:.2g})"
    return ", ".join(f"{name} ({effect(each)})" for name, each in group.items())
