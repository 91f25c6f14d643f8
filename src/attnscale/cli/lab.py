"""`attnscale lab`: run an experiment."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscale.cli.arguments import require_writable
from attnscale.cli.output import AsJson, print_json, tell
from attnscale.extras import require_extra
from attnscale.files import write_whole

if TYPE_CHECKING:
    from attnscale.lab.experiment import Experiment, Result
    from attnscale.lab.sweep import Progress


def lab(
    name: Annotated[
        str | None, typer.Argument(help="The experiment to run; without a name, lists them.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run a small grid, in seconds.")] = False,
    seeds: Annotated[int | None, typer.Option(help="Number of runs of each cell, each with its own seed.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Processes of the pool, by default one per core; for another executor, tasks to divide the cells "
            "among, by default one per cell."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the cells, the result as JSON, and a page with plots.")] = Path(
        "attnscale-lab"
    ),
    executor: Annotated[
        str,
        typer.Option(
            help="Where cells run: pool (processes here), or package.module:callable that returns an executor, such "
            "as submitit.AutoExecutor(FOLDER) or distributed.Client(ADDRESS)."
        ),
    ] = "pool",
    device: Annotated[str, typer.Option(help="Device to train models on: cpu, cuda, cuda:1.")] = "cpu",
    json: AsJson = False,
) -> None:
    """Run an experiment: tables, plots, checks, and a conclusion computed from the numbers.

    Every cell of the grid is one file in OUT/cells, named by its configuration. Cells that exist are not run again, so
    the same command resumes a sweep that was interrupted. Numbers depend on the seeds alone, not on the executor.

    Example: attnscale lab divisors --quick
    """
    from attnscale.errors import SettingError

    for option, value in (("--seeds", seeds), ("--jobs", jobs)):
        if value is not None and value < 1:
            raise SettingError(f"Expected {option} of at least 1, got {value}.")
    from attnscale.lab.experiments import EXPERIMENTS

    if name is None:
        _list(list(EXPERIMENTS.values()), json)
        return
    if name not in EXPERIMENTS:
        raise SettingError(f"Unknown experiment {name!r}. Expected one of: {', '.join(EXPERIMENTS)}.")
    from attnscale.loading.load import require_device

    require_extra("report", "Its page")
    require_device(device)
    page, data = out / f"{name}.html", out / f"{name}.json"
    for path in (page, data):
        require_writable(path)
    from attnscale.lab.executors import executor_for
    from attnscale.lab.sweep import sweep

    cells = out / "cells"
    with _progress(name, cells) as progress, executor_for(executor, jobs) as pool:
        result = sweep(
            EXPERIMENTS[name],
            cells,
            pool,
            quick=quick,
            seeds=seeds,
            device=device,
            tasks=None if executor == "pool" else jobs,
            progress=progress,
        )
    from attnscale.show.report import lab_page

    write_whole(data, as_json(result))
    write_whole(page, lab_page(result))
    if json:
        print_json(result.to_dict())
    else:
        from attnscale.show.lab import show_result

        show_result(result)
    tell(f"Plots are in {page}, the numbers in {data}.")


def as_json(result: "Result") -> str:
    """Return the result as the text of a JSON file."""
    import json

    return json.dumps(result.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _list(experiments: "list[Experiment]", json: bool) -> None:
    if json:
        print_json(
            [
                {
                    "name": own.name,
                    "question": own.question,
                    "cells": len(own.cells()),
                    "core_minutes": own.core_minutes,
                }
                for own in experiments
            ]
        )
        return
    from attnscale.show.lab import show_experiments

    show_experiments(experiments)


@contextmanager
def _progress(name: str, cells: Path) -> "Iterator[Progress]":
    """Show a bar of finished cells on stderr; Ctrl-C says what is kept."""
    import warnings

    from rich.console import Console
    from rich.text import Text

    from attnscale.plain import printable
    from attnscale.show.lab import sweep_progress

    with sweep_progress(Console(stderr=True)) as bar, warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: bar.console.print(Text(f"attnscale: {printable(str(message))}"))
        task = bar.add_task(name, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        try:
            yield progress
        except KeyboardInterrupt:
            bar.stop()
            done, total = bar.tasks[0].completed, bar.tasks[0].total or 0
            tell(f"Stopped. {done:.0f} of {total:.0f} cells are kept in {cells}; the same command goes on.")
            raise
