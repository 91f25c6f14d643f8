"""The front door: one command a file, each importing what it needs only when it runs."""

import sys
from typing import Annotated

import typer

from attnscale import __version__
from attnscale.cli.bench import bench
from attnscale.cli.check import check
from attnscale.cli.claims import claims
from attnscale.cli.compare import compare
from attnscale.cli.demo import demo
from attnscale.cli.explore import explore
from attnscale.cli.lab import lab
from attnscale.cli.output import tell
from attnscale.cli.predict import predict
from attnscale.cli.rules import rules
from attnscale.cli.watch_log import watch_log
from attnscale.errors import AttnscaleError

INTERRUPTED = 130  # what a shell reports for Ctrl-C

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)
app.command()(demo)
app.command()(check)
app.command()(compare)
app.command()(predict)
app.command()(rules)
app.command()(claims)
app.command()(explore)
app.command()(lab)
app.command()(bench)
app.command()(watch_log)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attnscale {__version__}")
        raise typer.Exit


@app.callback()
def attnscale(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keep attention scores in range: check a model, predict their spread, choose a scale, test what is claimed."""


def main() -> None:
    """Run the command line; bad input ends with one sentence on stderr and status 2."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without √ shows a question mark
    try:
        app(prog_name="attnscale")
    except AttnscaleError as error:
        tell(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
