"""Run PyTorch's own tests of attention with ours in place, and tell what fails that plain SDPA passes.

Ends with status 1 where something fails that reasons.py does not know. Arguments go to pytest: `-k nested`, `-n 2`.
`ours` or `plain` before them runs that alone, and compares with what the other left behind, if it did. On a machine
without a network, bring build/upstream along.
"""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from tests.upstream.fetching import WANTED, fetched
from tests.upstream.reasons import reason_for

ROOT = Path(__file__).parents[2]
WAYS = ["ours", "plain"]
FOLDER = ROOT / "build" / "upstream"


def main(arguments: list[str]) -> int:
    """Both runs, and the difference."""
    tests = fetched(FOLDER)
    wanted = [arguments.pop(0)] if arguments and arguments[0] in WAYS else WAYS
    for way in wanted:
        _run(tests, way, arguments)
    ours, plain = (_outcomes(way) for way in WAYS)
    for way, outcomes in (("attnscale.attention", ours), ("plain SDPA", plain)):
        counts = {kind: sum(found == kind for found in outcomes.values()) for kind in ("passed", "failed", "skipped")}
        print(f"{way}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    unknown = 0
    for name in sorted(name for name, found in ours.items() if found == "failed" and plain.get(name) != "failed"):
        reason = reason_for(name)
        unknown += reason is None
        print(f"  {name}: {reason or 'not known'}")
    return 1 if unknown or not ours else 0


def _run(tests: Path, way: str, arguments: list[str]) -> None:
    report = FOLDER / f"{way}.xml"
    report.unlink(missing_ok=True)
    plugin = ["-p", "tests.upstream.replacing"] if way == "ours" else []
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", f"--rootdir={tests}", "-p", "no:cacheprovider"]
    command += ["--tb=line", f"--junit-xml={report}", *plugin, *arguments, WANTED[0]]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    with (FOLDER / f"{way}.txt").open("w", encoding="utf-8") as said:
        subprocess.run(command, cwd=tests, env=environment, stdout=said, stderr=said, check=False)


def _outcomes(way: str) -> dict[str, str]:
    """passed, failed or skipped, of each test."""
    report = FOLDER / f"{way}.xml"
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    return {_name(case): _outcome(case) for case in cases}


def _name(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name')}"


def _outcome(case: ElementTree.Element) -> str:
    kinds = {part.tag for part in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
