"""Run every fault of every family, or of those named, and print what was tried and what survived.

A family is a file here with a FAULTS: what is done, in words, and a function that takes an empty folder and returns how
often it was tried and how often all was as it should be. A new family is one line in FAMILIES.
"""

import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

FAMILIES = (
    "threads",
    "layouts",
    "models",
    "inputs",
    "logs",
    "coverage",
)


def main(wanted):
    failed = 0
    for family in wanted or FAMILIES:
        tried_in_all = survived_in_all = 0
        for name, fault in import_module(f"tests.faults.{family}").FAULTS.items():
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                tried, survived = fault(Path(folder))
            tried_in_all, survived_in_all = tried_in_all + tried, survived_in_all + survived
            print(f"  {name}: {tried} tried, {survived} survived, {time.monotonic() - start:.0f} s", flush=True)
        print(f"{family}: {tried_in_all} tried, {survived_in_all} survived", flush=True)
        failed += tried_in_all - survived_in_all
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
