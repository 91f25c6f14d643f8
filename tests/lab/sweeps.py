"""Helpers for tests of sweeps: a small grid of a real experiment, and what it gave."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from attnscale.lab.experiment import Cell
from attnscale.lab.experiments import EXPERIMENTS
from attnscale.lab.sweep import sweep

VARIANCE = EXPERIMENTS["variance"]
SMALL = replace(VARIANCE, grid=lambda quick: VARIANCE.grid(True)[:10])  # two cases at five sizes
CELL = Cell("variance", 1, {"case": "normal", "head_dim": 5, "seed": 3})

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"  # Windows has only that
processes = multiprocessing.get_context(METHOD)
if METHOD == "forkserver":
    processes.set_forkserver_preload([__name__])


def swept(folder, executor=None, **settings):
    settings = {"seeds": 3, **settings}
    if executor is not None:
        return sweep(SMALL, folder, executor, **settings)
    with ThreadPoolExecutor(1) as one:
        return sweep(SMALL, folder, one, **settings)


def findings(result):
    found = result.to_dict()
    del found["settings"]
    return found


def identities(folder):
    """Return the inode and time of every cell's file: running a cell again would change both."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.json")}
