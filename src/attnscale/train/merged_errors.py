"""Errors of the numbers that alarms are raised by, told by every rank that sampled rows, and merged.

All that standard errors are told from is some 500 numbers a head. Two statistics raise alarms, and are ratios of four
sums; of these the cumulants travel, which add over ranks, and only where an alarm is near.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from types import MappingProxyType

import torch
from torch import Tensor

from attnscale.errors import SettingError
from attnscale.measure.pooled import SUMS
from attnscale.measure.statistics import STATISTICS
from attnscale.measure.stats import DENOMINATOR, ScoreStats
from attnscale.measure.uncertainty import Uncertainty, packed_size

KNOWN = ("entropy_ratio", "jacobian_trace")  # by which alarms are raised
TOLD = (*KNOWN, *(DENOMINATOR[name] for name in KNOWN))  # sums over rows; a merge moves none of them
ERRORS = packed_size(len(TOLD))
# An alarm is near below so many times its floor: hardly any rank is above that where the mean of all is under it.
NEAR = 3
Floors = Mapping[str, float | None]
NO_FLOORS: Floors = MappingProxyType({})


def is_near(stats: ScoreStats, floors: Floors) -> bool:
    """Whether a number of a layer is low enough for an alarm to depend on its error, which takes its time to form."""
    limits = {name: floor for name in KNOWN if (floor := floors.get(name)) is not None}
    return any(STATISTICS[name].whole(stats) < NEAR * floor for name, floor in limits.items())


def errors_of(stats: ScoreStats) -> Tensor:
    """What one rank knows of the errors of its sums, (heads, ERRORS) on the host; zeros where it looked at all rows."""
    pooled = stats.pooled
    known = Uncertainty.none(pooled.sums) if pooled.uncertainty is None else pooled.uncertainty
    told = torch.tensor([SUMS.index(name) for name in TOLD], device=known.covariance.device)
    covariance = known.covariance[:, told][:, :, told]
    return replace(known, covariance=covariance).packed().double().cpu()


def summed(errors: Sequence[Tensor | None]) -> Tensor | None:
    """Those of all ranks; None where one does not know its own."""
    known = [each for each in errors if each is not None]
    return reduce(torch.add, known) if known and len(known) == len(errors) else None


@dataclass(frozen=True)
class MergedStats(ScoreStats):
    """Statistics whose rows were looked at elsewhere."""

    errors: Tensor | None = field(default=None, kw_only=True, repr=False)

    def stderr(self, name: str) -> Tensor:
        """That of a number that raises alarms; NaN where some rank did not tell it. Others do not travel."""
        if name not in KNOWN:
            told = " and ".join(KNOWN)
            raise SettingError(f"Of several ranks the standard errors of {told} are merged, that of {name} is not.")
        below = self._sum(DENOMINATOR[name])
        if self.errors is None:
            return torch.full_like(below, torch.nan)
        gradient = below.new_zeros(self.heads, len(TOLD))
        gradient[:, TOLD.index(name)] = 1 / below
        gradient[:, TOLD.index(DENOMINATOR[name])] = -getattr(self, name) / below
        return Uncertainty.unpacked(self.errors, len(TOLD)).stderr(gradient)
