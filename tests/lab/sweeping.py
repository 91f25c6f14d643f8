"""What the tests of sweeps share: a small grid of a real experiment, and a table of what it came to."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from attnscale.lab.catalogue import EXPERIMENTS
from attnscale.lab.sweep import sweep

VARIANCE = EXPERIMENTS["variance"]
SMALL = replace(VARIANCE, grid=lambda quick: VARIANCE.grid(True)[:10])  # two cases at five sizes

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"  # all that Windows has
processes = multiprocessing.get_context(METHOD)
if METHOD == "forkserver":
    processes.set_forkserver_preload([__name__])


def swept(folder, executor=None, experiment=SMALL, **settings):
    settings = {"seeds": 3, **settings}
    if executor is not None:
        return sweep(experiment, folder, executor, **settings)
    with ThreadPoolExecutor(1) as one:
        return sweep(experiment, folder, one, **settings)


def findings(result):
    found = result.to_dict()
    del found["settings"]
    return found


def identities(folder):
    """Which file each cell lies in, and when it was written: another run of the cell would change both."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.json")}
