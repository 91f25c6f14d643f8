"""Running a cell, in whatever process it landed."""

import threading
import time
from pathlib import Path

import torch

from attnscale.lab.catalogue import EXPERIMENTS
from attnscale.lab.cell import Cell
from attnscale.lab.store import Store, Stored

# Threads of one process share torch's random state and its number of threads: their cells take turns.
_TURN = threading.Lock()


def run_cell(cell: Cell) -> Stored:
    """Compute a cell from its seed, on one thread: the same numbers wherever, and beside whatever, it runs."""
    run = EXPERIMENTS[cell.experiment].run
    with _TURN, torch.random.fork_rng():
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            torch.manual_seed(int(cell.settings["seed"] or 0))
            start = time.perf_counter()
            outcome = run(**cell.settings)
            return Stored(outcome, time.perf_counter() - start)
        finally:
            torch.set_num_threads(threads)


def run_stored(folder: Path, cell: Cell) -> Stored:
    """Compute a cell and keep it, unless it is there, or another process is at it: then wait, and take that."""
    store = Store(folder)
    with store.turn(cell):
        stored = store.read(cell)
        if stored is None:
            stored = run_cell(cell)
            store.write(cell, stored)
        return stored
