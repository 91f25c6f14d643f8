"""The command line: one command per file, which imports what it needs when it runs."""

import sys
from typing import Annotated, Any

import typer

from attnscale import __version__
from attnscale.cli.arguments import UsageError, in_paragraphs
from attnscale.cli.bench import bench
from attnscale.cli.check import check
from attnscale.cli.claims import claims
from attnscale.cli.compare import compare
from attnscale.cli.demo import demo
from attnscale.cli.explore import explore
from attnscale.cli.lab import lab
from attnscale.cli.output import CheckedOutput, OutputError, print_message, say
from attnscale.cli.predict import predict
from attnscale.cli.rules import rules
from attnscale.cli.watch_log import watch_log
from attnscale.errors import AttnscaleError
from attnscale.extras import needing

BAD_INPUT = 2
INTERRUPTED = 130  # what a shell reports for Ctrl-C
CLOSED_PIPE = 141  # what a shell reports for a closed pipe, as in `| head`

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)
for command in (demo, check, compare, predict, rules, claims, explore, lab, bench, watch_log):
    app.command(help=in_paragraphs(command.__doc__ or ""))(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"attnscale {__version__}")
        raise typer.Exit


@app.callback()
def attnscale(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keep attention scores in range: check a model, predict their spread, choose a scale, test published claims."""


def main() -> None:
    """Run the command line; bad input ends with one sentence on stderr and status 2."""
    before: Any = sys.stdout
    sys.stdout = CheckedOutput(before)
    try:
        status = _status()
    finally:
        sys.stdout = before
    sys.exit(status)


def _status() -> int:
    try:
        with needing("This command"):
            status = app(prog_name="attnscale", standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        if message := error.format_message():  # empty if the help was shown
            command = "attnscale" if error.ctx is None else error.ctx.command_path
            print_message(f"{message.rstrip('.')}; run '{command} --help' for its arguments.")
        return BAD_INPUT
    except AttnscaleError as error:
        print_message(error)
        return BAD_INPUT
    except OutputError as error:
        if error.is_closed_pipe:
            return CLOSED_PIPE
        print_message(f"Could not write the output: {error}.")
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return int(status or 0)
