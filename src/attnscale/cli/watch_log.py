"""`attnscale watch-log`: what a training run recorded."""

from pathlib import Path
from typing import Annotated

import typer

from attnscale.cli.files import require_writable
from attnscale.cli.output import AsJson, print_json
from attnscale.files import write_whole


def watch_log(
    file: Annotated[Path, typer.Argument(help="A log that attnscale.Monitor wrote.", show_default=False)],
    thin: Annotated[
        bool,
        typer.Option("--thin", help="First rewrite the log with fewer old records, each keeping their extremes."),
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Write a report, one page that needs nothing else.")] = None,
    json: AsJson = False,
) -> None:
    """Show a recorded training run: growth of the largest score by layer, alarms, and when it will pass a threshold.

    Per layer: the largest score at the first and at the last record, by what it is multiplied in 1,000 steps (a
    robust fit to its logarithm over the latest records), and, where that growth is certain, the next of 100, 1,000
    and 10,000 that it will pass and the step. Ends with status 1 if an alarm is an error.
    """
    from attnscale.errors import SettingError
    from attnscale.train.log import read_log
    from attnscale.train.room import rewrite_thinned
    from attnscale.train.run import summarise

    if html is not None:
        require_writable(html)
    log = read_log(file)
    if not log.records:
        raise SettingError(f"Expected records of attnscale.Monitor in {file}, and found none in it.")
    if thin:
        rewrite_thinned(file)
        log = read_log(file)
    run = summarise(log.records, log.damaged)
    if html is not None:
        from attnscale.show.report import run_page

        write_whole(html, run_page(file.name, log.records, log.damaged))
    if json:
        print_json(run.to_dict())
    else:
        from attnscale.show.run import show_run

        show_run(run)
    raise typer.Exit(1 if run.worst == "error" else 0)
