"""What measuring costs: plain attention, attention with statistics, and what people do today, timed in turns."""

from attnscale.bench.cases import Case
from attnscale.bench.costs import Cost, machine, measure_case, to_dict
from attnscale.bench.kinds import KINDS, cases

__all__ = ["KINDS", "Case", "Cost", "cases", "machine", "measure_case", "to_dict"]
