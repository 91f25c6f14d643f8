"""Time attention: plain, with statistics, and with common alternatives."""

from attnscale.bench.costs import KINDS, Cost, cases, measure_case, to_dict
from attnscale.bench.dense import Case

__all__ = ["KINDS", "Case", "Cost", "cases", "measure_case", "to_dict"]
