"""A sweep: every cell of an experiment that is not done yet, on any executor; the sweep can stop at any moment."""

import os
import platform
import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from attnscale import __version__
from attnscale.errors import AttnscaleError
from attnscale.lab.cell import Cell
from attnscale.lab.experiment import Experiment
from attnscale.lab.outcomes import Outcomes
from attnscale.lab.result import Result
from attnscale.lab.running import SweepError, run_stored
from attnscale.lab.store import Store, Stored

ONE_SEED = (
    "One seed has no bands, so nothing here is told from chance: the tables show what it gave. Two seeds or more make "
    "a conclusion."
)
PATIENCE = 2.0  # seconds without a cell done, after which it is told who holds one
Progress = Callable[[int, int], None]  # cells done, cells in all


def sweep(
    experiment: Experiment,
    folder: Path,
    executor: Executor,
    *,
    quick: bool = False,
    seeds: int | None = None,
    device: str = "cpu",
    tasks: int | None = None,
    progress: Progress = lambda done, total: None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> Result:
    """Run what is missing, and say what all of it shows. Cells that are done are read, never run again.

    Where it waits for cells that another sweep of the same folder is running, it says so, and for whom.

    Each cell is a task of the executor, unless the number of `tasks` to make of them is given.
    """
    cells = experiment.cells(quick, seeds, device)
    store = Store(folder)
    done = {cell.digest: stored for cell in cells if (stored := store.read(cell)) is not None}
    missing = [cell for cell in cells if cell.digest not in done]
    progress(len(done), len(cells))
    for cell, stored in _run(missing, folder, executor, tasks or len(missing), tell):
        if store.read(cell) is None:  # a worker with a disk of its own
            store.write(cell, stored)
        done[cell.digest] = stored
        progress(len(done), len(cells))
    settings = {
        "quick": quick,
        "seeds": seeds if seeds is not None else (experiment.quick_seeds if quick else experiment.seeds),
        "device": device if experiment.trains else "cpu",
        "cells": len(cells),
        "cell_seconds": sum(stored.seconds for stored in done.values()),
        "versions": versions(),
    }
    return concluded(experiment, [(cell, done[cell.digest]) for cell in cells], settings)


def concluded(experiment: Experiment, done: Iterable[tuple[Cell, Stored]], settings: dict[str, Any]) -> Result:
    """What the outcomes of all cells show."""
    outcomes = Outcomes([(cell.settings, stored.outcome) for cell, stored in done])
    found = experiment.conclude(outcomes)
    if len(outcomes.values("seed")) == 1:
        found = replace(found, text=ONE_SEED)
    return Result(
        experiment.name, experiment.question, found.text, found.checks, found.tables, found.plots, settings
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {
        "attnscale": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _run(
    cells: list[Cell], folder: Path, executor: Executor, tasks: int, tell: Callable[[str], None]
) -> Iterable[tuple[Cell, Stored]]:
    shares, whose = [cells[first::tasks] for first in range(min(tasks, len(cells)))], _name_of_this_sweep()
    futures: dict[Future[list[Stored]], list[Cell]] = {
        executor.submit(run_stored, folder, share, whose): share for share in shares
    }
    # Ctrl-C inside concurrent.futures.wait() may leave locks of futures held, and the executor waits for them at exit.
    finished: SimpleQueue[Future[list[Stored]]] = SimpleQueue()
    for future in futures:
        future.add_done_callback(finished.put)
    left, known = set(futures), {whose}
    while left:
        try:
            future = finished.get(timeout=PATIENCE)
        except Empty:
            _tell_whom_it_waits_for([cell for future in left for cell in futures[future]], Store(folder), known, tell)
            continue
        left.discard(future)
        yield from zip(futures[future], _outcomes(future), strict=True)


def _name_of_this_sweep() -> str:
    return f"process {os.getpid()} on {platform.node()}, {secrets.token_hex(4)}"


def _tell_whom_it_waits_for(cells: list[Cell], store: Store, known: set[str], tell: Callable[[str], None]) -> None:
    """Name each other sweep that holds one of the cells, once."""
    holders = Counter(holder for cell in cells if (holder := store.holder(cell)) is not None)
    for holder, held in holders.items():
        if holder not in known:
            known.add(holder)
            told = "a cell" if held == 1 else f"{held} cells"
            tell(f"Waiting for {told} that {holder.rpartition(',')[0] or holder} is running in the same folder.")


def _outcomes(future: "Future[list[Stored]]") -> list[Stored]:
    try:
        return future.result()
    except BrokenProcessPool:
        raise SweepError(
            "A worker process died (killed, or out of memory). Cells that are done are kept; run the same command to "
            "go on, with fewer --jobs if memory was the reason."
        ) from None
    except AttnscaleError:
        raise
    except Exception as error:
        raise SweepError(f"A task failed: {type(error).__name__}: {error}") from error
