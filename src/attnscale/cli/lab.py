"""`attnscale lab`: run an experiment."""

from pathlib import Path
from typing import Annotated

import typer

from attnscale.cli.arguments import progress, require_writable
from attnscale.cli.output import AsJson, print_json, print_message
from attnscale.extras import require_extra
from attnscale.files import write_whole
from attnscale.plain import json_text


def lab(
    name: Annotated[
        str | None, typer.Argument(help="The experiment to run; without a name, lists them.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run a small grid, in seconds.")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of runs of each cell, each with its own seed.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of processes, by default one per core; with another executor, number of tasks, by default "
            "one per cell.",
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

    An experiment is a grid of cells. Each cell is saved in one file in OUT/cells, named by its configuration. Saved
    cells are not run again, so the same command resumes an interrupted run. Numbers depend only on the seeds, not on
    the executor.

    Example: attnscale lab divisors --quick
    """
    from attnscale.errors import SettingError
    from attnscale.lab.experiments import EXPERIMENTS

    if name is None:
        experiments = EXPERIMENTS.values()
        if json:
            keys = ("name", "question", "core_minutes")
            print_json([{key: getattr(own, key) for key in keys} | {"cells": len(own.cells())} for own in experiments])
        else:
            from attnscale.show.lab import show_experiments

            show_experiments(experiments)
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

    cells, tasks = out / "cells", None if executor == "pool" else jobs
    done = total = 0
    with progress() as report, executor_for(executor, jobs) as pool:

        def show(*counts: int) -> None:
            nonlocal done, total
            done, total = counts
            report(f"{name}: {done} of {total} cells", done, total)

        try:
            experiment = EXPERIMENTS[name]
            result = sweep(experiment, cells, pool, quick=quick, seeds=seeds, device=device, tasks=tasks, progress=show)
        except KeyboardInterrupt:
            print_message(f"Stopped. {done} of {total} cells are saved in {cells}; run the same command to resume.")
            raise
    from attnscale.show.report import lab_page

    write_whole(data, json_text(result.to_dict()) + "\n")
    write_whole(page, lab_page(result))
    if json:
        print_json(result.to_dict())
    else:
        from attnscale.show.lab import show_result

        show_result(result)
    print_message(f"Plots are in {page}, the numbers in {data}.")
