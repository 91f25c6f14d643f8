"""Run every fault of every family, or of those named, and print what was tried and what survived.

A family is a file here with a FAULTS: what is done, in words, and a function that takes an empty folder and returns how
often it was tried and how often all was as it should be. A new family is one line in FAMILIES.
"""

import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

FAMILIES = ("logs", "inputs")


def main(wanted):
    failed = 0
    for family in wanted or FAMILIES:
        for name, fault in import_module(f"tests.faults.{family}").FAULTS.items():
            start = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                tried, survived = fault(Path(folder))
            failed += tried - survived
            print(f"{family}: {name}: {tried} tried, {survived} survived, {time.monotonic() - start:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
