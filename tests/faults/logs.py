"""What may happen to a log: writers that are killed, lines that nobody wrote, many megabytes."""

import os
import sys
import time

from tests.processes import finished
from tests.train.corrupt import CORRUPT, line
from tests.train.logs import killed_writers, large_log

KILLS = int(os.environ.get("KILLS", "50"))
LARGE = 300 * 10**6  # bytes
MOST_MEMORY = 300  # MB, of which torch takes more than two thirds

PEAK = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


def killed(folder):
    """Kill a writer again and again; nothing that it said was written is missing."""
    return KILLS, killed_writers(folder / "scores.jsonl", KILLS)


def corrupt_lines(folder):
    survived = 0
    for kind in CORRUPT.values():
        path = folder / "scores.jsonl"
        path.write_bytes("\n".join([line(0), kind, line(60), ""]).encode("utf-8", "surrogatepass"))
        done = finished([sys.executable, "-m", "attnscale", "watch-log", str(path)])
        survived += done.returncode == 0 and "1 damaged line left out" in done.stdout and not done.stderr
    return len(CORRUPT), survived


def large(folder):
    """Show and draw a large log, each within MOST_MEMORY."""
    path, survived = large_log(folder / "scores.jsonl", LARGE), 0
    for options in (["--json"], ["--html", str(folder / "report.html")]):
        start = time.monotonic()
        command = [sys.executable, "-c", PEAK, sys.executable, "-m", "attnscale", "watch-log", str(path), *options]
        status, memory = finished(command).stdout.split()
        print(f"  watch-log {options[0]}: {float(memory):.0f} MB, {time.monotonic() - start:.0f} s")
        survived += status == "0" and float(memory) < MOST_MEMORY
    return 2, survived


FAULTS = {
    "a writer is killed": killed,
    "a corrupt line is shown": corrupt_lines,
    "a log of 300 MB stays under 300 MB of memory": large,
}
