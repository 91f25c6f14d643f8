"""What may befall a log: writers and thinnings that are killed, lines that nobody wrote, many megabytes."""

import os
import random
import subprocess
import sys
import time

from attnscale.train import read_log
from tests.processes import finished, started
from tests.train.corrupt import CORRUPT, line
from tests.train.large import large_log
from tests.train.test_streams import kill_thinnings

KILLS = int(os.environ.get("KILLS", "100"))
LARGE = 300 * 10**6  # bytes
MOST_MEMORY = 300  # MB, of which torch takes more than two thirds

WRITER = """
import sys
from attnscale.train import JsonLines
from tests.train.test_jsonlines import record
sink = JsonLines(sys.argv[1], limit=10**6)
for step in range(int(sys.argv[2]), 10**9):
    sink(record(step))
    print(step, flush=True)
"""
PEAK = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
"""


def killed_writers(folder):
    """Killed while it writes, again and again; nothing that it said was written is missing."""
    path, moments, step, survived = folder / "scores.jsonl", random.Random(0), 0, 0
    for _ in range(KILLS):
        with started(
            [sys.executable, "-c", WRITER, str(path), str(step)], stdout=subprocess.PIPE, text=True
        ) as process:
            process.stdout.readline()
            time.sleep(moments.uniform(0.0, 0.1))
            process.kill()
            said = [int(number) for number in process.stdout.read().split()[:-1]]
        step = max([step, *said]) + 1
        records = read_log(path).records
        covered = {one for found in records for one in range(found.step, found.last_step + 1)}
        survived += covered.issuperset(range(step))
        step = max(covered) + 1
    return KILLS, survived


def killed_thinnings(folder):
    kill_thinnings(folder, KILLS, 4 * 2**20)  # which asserts after each
    return KILLS, KILLS


def corrupt_lines(folder):
    survived = 0
    for kind in CORRUPT.values():
        path = folder / "scores.jsonl"
        path.write_bytes("\n".join([line(0), kind, line(60), ""]).encode("utf-8", "surrogatepass"))
        done = finished([sys.executable, "-m", "attnscale", "watch-log", str(path)])
        survived += done.returncode == 0 and "1 damaged line left out" in done.stdout and not done.stderr
    return len(CORRUPT), survived


def large(folder):
    """Shown, drawn and thinned, each within MOST_MEMORY."""
    path, survived = large_log(folder / "scores.jsonl", LARGE), 0
    for options in (["--json"], ["--html", str(folder / "report.html")], ["--thin", "--json"]):
        start = time.monotonic()
        command = [sys.executable, "-c", PEAK, sys.executable, "-m", "attnscale", "watch-log", str(path), *options]
        status, memory = finished(command).stdout.split()
        print(f"  watch-log {options[0]}: {float(memory):.0f} MB, {time.monotonic() - start:.0f} s")
        survived += status == "0" and float(memory) < MOST_MEMORY
    return 3, survived


FAULTS = {
    "a writer is killed": killed_writers,
    "a thinning is killed": killed_thinnings,
    "a corrupt line is shown": corrupt_lines,
    "a log of 300 MB stays under 300 MB of memory": large,
}
