"""Models that bring code, or files that are none: the tests that hold them off, run and counted."""

import sys
from xml.etree import ElementTree

from tests.processes import finished

TESTS = ("tests/loading/test_safety.py", "tests/loading/test_hostile.py", "tests/loading/test_huggingface.py")


def hostile(folder):
    found = folder / "found.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={found}"]
    finished([*command, f"--basetemp={folder / 'pytest'}", *TESTS], timeout=1800)
    cases = list(ElementTree.parse(found).iter("testcase"))
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            print(f"  {case.get('name')}")
    run = [case for case in cases if case.find("skipped") is None]
    return len(run), sum(case.find("failure") is None and case.find("error") is None for case in run)


FAULTS = {"a hostile model runs no code, and is told in a sentence": hostile}
