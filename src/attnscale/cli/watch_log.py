"""`attnscale watch-log`: show a recorded training run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from attnscale.cli.arguments import Html, require_report
from attnscale.cli.output import AsJson, end, print_json, print_message
from attnscale.files import write_whole

if TYPE_CHECKING:
    from attnscale.train.run import Survey

POLL = 0.5  # seconds between two checks of the log with --follow


def watch_log(
    file: Annotated[Path, typer.Argument(help="A log that attnscale.Monitor wrote.", show_default=False)],
    run: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Name or number of the run to show; by default the newest in the log."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Redraw the table whenever the log grows, until Ctrl-C.")
    ] = False,
    html: Html = None,
    json: AsJson = False,
) -> None:
    """Show a recorded training run: growth of the largest score by layer, alarms, and a forecast.

    For each layer, the table has the largest score in the first and in the last record, its growth over the latest
    records (a robust fit to its logarithm), and the next of 100, 1,000 and 10,000 if it will be passed soon. Each cause
    of an alarm is shown once, with its layers and steps. If the log has several runs, they are listed and one is shown.
    Damaged lines are counted, and the first three are shown. The exit status is 1 if an alarm is an error.

    Example: attnscale watch-log scores.jsonl --html report.html
    """
    from attnscale.errors import SettingError
    from attnscale.train.run import survey

    if follow and (html is not None or json):
        raise SettingError("Expected --follow without --html and --json: it redraws a table until Ctrl-C.")
    if follow:
        _follow(file, run)
    require_report(html)
    found = survey(file, run)
    if html is not None:
        from attnscale.show.report import run_page

        write_whole(html, run_page(file.name, found.curves(), found.run))
    if json:
        print_json(found.to_dict())
    else:
        _show(found)
    if html is not None:
        print_message(f"The report is in {html}.")
    end(int(found.run.worst == "error"))


def _show(found: "Survey") -> None:
    from attnscale.show.run import show_run, show_runs

    show_runs(found.runs, found.chosen)
    show_run(found.run)


def _follow(file: Path, run: str | None) -> NoReturn:
    """Redraw the run whenever its log changes, until Ctrl-C."""
    import time

    from rich.console import Console

    from attnscale.train.log import log_files
    from attnscale.train.run import survey

    def sizes() -> list[int]:
        return [each.stat().st_size for each in log_files(file) if each.exists()] if file.exists() else []

    last, found = sizes(), survey(file, run)
    try:
        _show(found)
        while True:
            time.sleep(POLL)
            if sizes() != last:
                last, found = sizes(), survey(file, run)
                Console().clear()
                _show(found)
    except KeyboardInterrupt:
        end(int(found.run.worst == "error"))
