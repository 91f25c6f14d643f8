"""What measuring costs: plain attention, attention with statistics, and what people do today, timed in turns."""

from attnscale.bench.cases import Case, cases
from attnscale.bench.costs import Cost, machine, measure_case, to_dict

__all__ = ["Case", "Cost", "cases", "machine", "measure_case", "to_dict"]
