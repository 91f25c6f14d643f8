"""Run PyTorch's own tests of attention with ours in place, and tell what fails that plain SDPA passes.

    python -m tests.upstream [ours | plain] [--jobs 16] [--every 13] [--seconds 450] [-k nested]

Ends with status 1 where something fails that reasons.py does not know. `ours` or `plain` runs that alone, and compares
with what the other left behind, if it did. `--jobs` processes share the tests; `--every` 13 takes each 13th of the
3,072 cases of mask_vs_math; what `--seconds` leave no time for is told as not run. `plain --failed` runs what failed
with ours before. Other arguments go to pytest. On a machine without a network, bring build/upstream along. Where $OUT
is a folder, outcomes and the summary are left there.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.upstream.fetching import WANTED, fetched
from tests.upstream.reasons import reason_for
from tests.upstream.sharing import lines_of, settings

ROOT = Path(__file__).parents[2]
WAYS = {"ours": "attnscale.attention", "plain": "plain SDPA"}
FOLDER = ROOT / "build" / "upstream"
ENDED = "the process ended in it"


def main(arguments):
    """Both runs, and the difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", nargs="?", choices=WAYS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--failed", action="store_true")
    told, others = parser.parse_known_args(arguments)
    told.only, tests = (), fetched(FOLDER)
    for way in [told.way] if told.way else WAYS:
        _run_shared(tests, way, told, others)
    found = {way: _outcomes(way) for way in WAYS}
    summary, unknown = _summary(found["ours"], found["plain"])
    print(summary)
    if not found[told.way or "ours"]:
        print((FOLDER / f"{told.way or 'ours'}-0.txt").read_text(encoding="utf-8")[-2000:])
    (FOLDER / "summary.txt").write_text(summary + "\n", encoding="utf-8")
    if os.environ.get("OUT"):
        for path in [FOLDER / "summary.txt", *FOLDER.glob("*.tsv"), *FOLDER.glob("*.txt")]:
            shutil.copyfile(path, Path(os.environ["OUT"]) / path.name)
    return 1 if unknown or not found[told.way or "ours"] else 0


def _run_shared(tests, way, told, others):
    for old in FOLDER.glob(f"{way}-*"):
        old.unlink()
    if told.failed:
        told.only = [name for name, (outcome, _) in _outcomes("ours").items() if outcome == "failed"]
        if not told.only:
            return
    until = time.monotonic() + told.seconds
    with ThreadPoolExecutor(told.jobs) as pool:
        for share in range(told.jobs):
            pool.submit(_run, tests, way, share, told, others, until)


def _run(tests, way, share, told, others, until):
    """One share of the tests, begun again where a test ended its process."""
    lines = FOLDER / f"{way}-{share}.tsv"
    plugins = ["tests.upstream.sharing", *(["tests.upstream.replacing"] if way == "ours" else [])]
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", f"--rootdir={tests}", "-p", "no:cacheprovider"]
    command += ["--tb=short", *(part for plugin in plugins for part in ("-p", plugin)), *others, WANTED[0]]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | settings(share, told.jobs, told.every, lines, told.only) | {"PYTHONPATH": paths}
    before = -1
    while len(lines_of(lines)) > before:  # each time it gets further, or all is done
        before = len(lines_of(lines))
        with (FOLDER / f"{way}-{share}.txt").open("a", encoding="utf-8") as said:
            left = until - time.monotonic()
            try:
                limit = None if left == float("inf") else max(left, 0.0)
                ended = subprocess.run(
                    command, cwd=tests, env=environment, stdout=said, stderr=said, check=False, timeout=limit
                )
            except subprocess.TimeoutExpired:
                return
        if ended.returncode in (0, 1, 5):  # of pytest: all is run
            return


def _outcomes(way):
    """Of each test that began, what became of it and why."""
    found = {}
    for path in sorted(FOLDER.glob(f"{way}-*.tsv")):
        found |= lines_of(path)
    return {name: ("failed", ENDED) if outcome == "begun" else (outcome, why) for name, (outcome, why) in found.items()}


def _summary(ours, plain):
    """In words; and how many failures nobody has a reason for."""
    said = []
    for way, outcomes in (("ours", ours), ("plain", plain)):
        counts = Counter(outcome for outcome, _ in outcomes.values())
        said.append(f"{WAYS[way]}: " + ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped")))
    missing = len(plain.keys() - ours.keys()) if ours else 0
    if missing:
        said.append(f"{missing} of plain SDPA's were not run with ours")
    unknown = 0
    for name in sorted(name for name, (found, _) in ours.items() if found == "failed"):
        if plain.get(name, ("", ""))[0] == "failed":
            continue
        reason = reason_for(name)
        unknown += reason is None
        said.append(f"  {name}: {reason or f'not known: {ours[name][1]}'}")
    return "\n".join(said), unknown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
