"""Run every fault of every family, or of those named, and print what was tried and what survived.

A family is a file here with a FAULTS: what is done, in words, and a function that takes an empty folder and returns how
often it was tried and how often all was as it should be. A new family is one line in FAMILIES. Ends with status 1 if
something did not survive, and leaves nothing behind where it is interrupted.
"""

import multiprocessing
import signal
import sys
import tempfile
import time
import traceback
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
                tried, survived = _tried(fault, Path(folder))
            tried_in_all, survived_in_all = tried_in_all + tried, survived_in_all + survived
            print(f"  {name}: {tried} tried, {survived} survived, {time.monotonic() - start:.0f} s", flush=True)
        print(f"{family}: {tried_in_all} tried, {survived_in_all} survived", flush=True)
        failed += tried_in_all - survived_in_all
    return 1 if failed else 0


def _tried(fault, folder):
    """What a fault says of itself; one that raises did not survive. Nothing that it began goes on after it."""
    try:
        return fault(folder)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        return 1, 0
    finally:
        for process in multiprocessing.active_children():
            process.kill()
            process.join()


def _stop(number, frame):
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("Interrupted; the families above are those that were run.")
