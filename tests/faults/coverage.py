"""Intervals of 95%: each statistic of each named case covers 93 to 97 in 100, or says that it cannot tell."""

import os
import runpy
from pathlib import Path

from attnscale.measure.uncertainty import NORMAL

BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "coverage.py"))
SAMPLES = int(os.environ.get("SAMPLES", "250"))
CONSERVATIVE = {"saturated"}  # a share of which nothing is seen is covered by all


def intervals(folder):
    tried = survived = 0
    slack = NORMAL * (0.95 * 0.05 / SAMPLES) ** 0.5  # of so many draws, the heads of one being much alike
    for name, cases in BENCHMARK["NAMED"].items():
        for case in cases:
            shares, told = BENCHMARK["coverage"](case, SAMPLES)
            for statistic, share in shares.items():
                tried += 1
                high = 1.0 if statistic in CONSERVATIVE else 0.97 + slack
                held = told == 0 or 0.93 - slack <= share <= high
                survived += held
                if not held:
                    print(f"  {name}: {case}: {statistic} {100 * share:.1f}%, told {100 * told:.0f}%")
    return tried, survived


FAULTS = {"intervals cover, or say that they cannot": intervals}
