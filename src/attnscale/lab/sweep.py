"""Sweeps: run the cells of an experiment on any executor, keep each in a file, and continue an interrupted run."""

import json
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from attnscale import __version__
from attnscale.errors import AttnscaleError, DamagedFileWarning, SettingError
from attnscale.files import read_whole, write_whole
from attnscale.lab.experiment import Cell, Experiment, Outcome, Result
from attnscale.lab.experiments import EXPERIMENTS
from attnscale.lab.outcomes import Outcomes, tally
from attnscale.lab.training import one_thread

MOST_BYTES = 2**27  # limit for the file of a cell: a thousand times the largest one
POLL = 0.02  # seconds between two checks of the running tasks
ONE_SEED = "One seed has no interval, so it decides nothing; the tables show its numbers. Run two seeds or more."
QUICK = "A quick run trains too few and too small models to decide anything. The tables show its numbers."
INTERVALS = "95% interval of the mean over seeds, by Student's t"
Progress = Callable[[int, int], None]  # finished cells, all cells


class SweepError(AttnscaleError):
    """Error of a cell that failed, or of a process that died."""


@dataclass(frozen=True)
class Stored:
    """Outcome of a cell, and the seconds of one core that it took."""

    outcome: Outcome
    seconds: float


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
) -> Result:
    """Run the cells that are not in the folder yet, and draw the conclusion from all cells.

    The executor is one of concurrent.futures, or any object whose submit() returns an object with done(),
    result() and cancel(), such as submitit's executors and a Dask client. Each cell is one task, unless `tasks` gives
    the number of tasks.
    """
    cells = experiment.cells(quick, seeds, device)
    done = {cell.digest: stored for cell in cells if (stored := read_cell(folder, cell)) is not None}
    missing = [cell for cell in cells if cell.digest not in done]
    progress(len(done), len(cells))
    for cell, stored in _run(missing, folder, executor, tasks or len(missing)):
        done[cell.digest] = stored
        progress(len(done), len(cells))
    settings = {
        "quick": quick,
        "seeds": len({cell.settings["seed"] for cell in cells}),
        "±": INTERVALS,
        "device": device if experiment.trains else "cpu",
        "cells": len(cells),
        "cell_seconds": sum(stored.seconds for stored in done.values()),
        "versions": versions(),
    }
    found = experiment.conclude(Outcomes([(cell.settings, done[cell.digest].outcome) for cell in cells]))
    if settings["seeds"] == 1:
        found = replace(found, text=ONE_SEED)
    elif experiment.trains and quick:
        checks = tuple(replace(check, holds=check.holds or None) for check in found.checks)  # none may fail
        found = replace(found, text=f"{QUICK} {tally(checks)}", checks=checks)
    return Result(experiment.name, experiment.question, found.text, found.checks, found.tables, found.plots, settings)


def versions() -> dict[str, str]:
    """Return the versions that the numbers depend on."""
    return {
        "attnscale": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def cell_path(folder: Path, cell: Cell) -> Path:
    """Return the file of a cell, named by its configuration."""
    return folder / f"{cell.experiment}-{cell.digest}.json"


def read_cell(folder: Path, cell: Cell) -> Stored | None:
    """Return the stored outcome of a cell, or None; a damaged file gives a warning and None."""
    path = cell_path(folder, cell)
    try:
        found = json.loads(read_whole(path, MOST_BYTES))
        if found["settings"] != dict(cell.settings):
            raise ValueError("settings of another cell")
        return Stored(dict(found["outcome"]), float(found["seconds"]))
    except FileNotFoundError:
        return None
    except SettingError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError):
        warnings.warn(f"{path.name} is damaged. Its cell is run again.", DamagedFileWarning, stacklevel=2)
        return None
    except OSError as error:
        raise SettingError(f"Could not read {path}: {error.strerror or error}.") from None


def write_cell(folder: Path, cell: Cell, stored: Stored) -> None:
    """Store a cell: its file is complete or does not exist, even after a kill or a loss of power."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"Could not make the folder {folder}: {error.strerror or error}.") from None
    write_whole(cell_path(folder, cell), json.dumps({**asdict(cell), **asdict(stored)}, ensure_ascii=False, indent=1))


_ONE_CELL = threading.Lock()  # threads of a process share torch's random state and its number of threads


def run_cell(cell: Cell) -> Stored:
    """Compute a cell from its seed, on one thread, so that every worker computes the same numbers."""
    run = EXPERIMENTS[cell.experiment].run
    with _ONE_CELL, torch.random.fork_rng(), one_thread():
        torch.manual_seed(int(cell.settings["seed"] or 0))
        start = time.thread_time()
        outcome = run(**cell.settings)
        return Stored(outcome, time.thread_time() - start)


def run_cells(folder: Path, cells: Sequence[Cell]) -> list[Stored]:
    """Compute cells in a worker, and store each as soon as it is finished."""
    done = []
    for cell in cells:
        try:
            stored = run_cell(cell)
        except Exception as error:
            raise SweepError(f"The cell {cell} failed: {type(error).__name__}: {error}") from error
        write_cell(folder, cell, stored)
        done.append(stored)
    return done


def _run(cells: list[Cell], folder: Path, executor: Executor, tasks: int) -> Iterator[tuple[Cell, Stored]]:
    shares = [cells[first::tasks] for first in range(min(tasks, len(cells)))]
    running = [(share, executor.submit(run_cells, folder, share)) for share in shares]
    try:
        while running:
            for share, task in [each for each in running if each[1].done()]:
                yield from _results_of(folder, share, task)
                running.remove((share, task))
            time.sleep(POLL if running else 0)
    except BaseException:
        for _, task in running:
            task.cancel()
        raise


def _results_of(folder: Path, cells: list[Cell], task: Future[list[Stored]]) -> Iterator[tuple[Cell, Stored]]:
    try:
        found = task.result()
    except BrokenProcessPool:
        raise SweepError(
            "A worker process died: it was killed or ran out of memory. Finished cells are kept. Run the same command "
            "to continue, with fewer --jobs if memory was the reason."
        ) from None
    except AttnscaleError:
        raise
    except Exception as error:
        raise SweepError(f"A task failed: {type(error).__name__}: {error}") from error
    for cell, stored in zip(cells, found, strict=True):
        if not cell_path(folder, cell).exists():  # the worker wrote to another disk
            write_cell(folder, cell, stored)
        yield cell, stored
