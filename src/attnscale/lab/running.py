"""Running a cell, in whatever process it landed."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from attnscale.errors import AttnscaleError
from attnscale.lab.catalogue import EXPERIMENTS
from attnscale.lab.cell import Cell
from attnscale.lab.store import Store, Stored
from attnscale.lab.threads import one_thread


class SweepError(AttnscaleError):
    """A cell failed, or the process that ran it died."""


# Threads of one process share torch's random state and its number of threads: their cells take turns.
_TURN = threading.Lock()


def run_cell(cell: Cell) -> Stored:
    """Compute a cell from its seed, on one thread: the same numbers wherever, and beside whatever, it runs."""
    run = EXPERIMENTS[cell.experiment].run
    with _TURN, torch.random.fork_rng(), one_thread():
        torch.manual_seed(int(cell.settings["seed"] or 0))
        start = time.perf_counter()
        outcome = run(**cell.settings)
        return Stored(outcome, time.perf_counter() - start)


def run_stored(folder: Path, cells: Sequence[Cell], whose: str = "") -> list[Stored]:
    """Compute cells for somebody and keep each as it is done; one that is there, or being made, is taken as found."""
    return [_stored(Store(folder), cell, whose) for cell in cells]


def _stored(store: Store, cell: Cell, whose: str) -> Stored:
    with store.turn(cell, whose):
        stored = store.read(cell)
        if stored is None:
            stored = _told(cell)
            store.write(cell, stored)
        return stored


def _told(cell: Cell) -> Stored:
    try:
        return run_cell(cell)
    except Exception as error:
        raise SweepError(f"The cell {cell} failed: {type(error).__name__}: {error}") from error
