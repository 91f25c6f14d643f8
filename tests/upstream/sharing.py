"""A plugin of pytest: one share of the tests, a part of those that are many alike, and a line for each that has run.

Lines are written as tests begin and end, so that a process that dies loses one test: run again, it goes on after it.
"""

import os
from pathlib import Path

MANY = "mask_vs_math"  # 3,072 cases of one test
SETTINGS = "UPSTREAM_SHARE"


def lines_of(path):
    """Of each test, what became of it and why: begun, passed, failed or skipped."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {name: (outcome, why) for name, outcome, why in (line.split("\t") for line in lines)}


def settings(share, shares, every, path, only=()):
    """What a process is told by its environment; of `only` some tests, by a list beside the path."""
    if only:
        _list_beside(path).write_text("\n".join(only) + "\n", encoding="utf-8")
    return {SETTINGS: f"{share} {shares} {every} {path}"}


def _list_beside(path):
    return path.with_suffix(".only")


def _told():
    share, shares, every, path = os.environ[SETTINGS].split(maxsplit=3)
    return int(share), int(shares), int(every), Path(path)


def chosen(names, share, shares, every):
    """One share of all names, with every so many-th of those that are many."""
    many = [name for name in names if MANY in name]
    left_out = set(many) - set(many[::every])
    return [name for name in names if name not in left_out][share::shares]


def pytest_collection_modifyitems(config, items):
    """Keep what is this process's, and was not run yet."""
    share, shares, every, path = _told()
    known = lines_of(path)
    wanted = [_name(item) for item in items]
    if _list_beside(path).exists():
        only = set(_list_beside(path).read_text(encoding="utf-8").split("\n"))
        wanted, every = [name for name in wanted if name in only], 1
    mine = set(chosen(wanted, share, shares, every)) - set(known)
    config.hook.pytest_deselected(items=[item for item in items if _name(item) not in mine])
    items[:] = [item for item in items if _name(item) in mine]


def pytest_runtest_logstart(nodeid):
    """A test begins."""
    _write(nodeid.partition("::")[2].replace("::", "."), "begun", "")


def pytest_runtest_logreport(report):
    """A part of a test has ended."""
    if report.when == "call" or report.outcome != "passed":
        why = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") if report.failed else ""
        _write(report.nodeid.partition("::")[2].replace("::", "."), report.outcome, why)


def _name(item):
    return item.nodeid.partition("::")[2].replace("::", ".")


def _write(name, outcome, why):
    with _told()[3].open("a", encoding="utf-8") as file:
        file.write(f"{name}\t{outcome}\t{' '.join(why.split())[:300]}\n")
