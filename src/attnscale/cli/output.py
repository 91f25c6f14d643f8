"""What the commands share: the --json option, printing, and telling what is wrong."""

from typing import Annotated

import typer

from attnscale.plain import json_text, printable

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(value: object) -> None:
    """Print a value as JSON, one readable block."""
    typer.echo(json_text(value))


def tell(sentence: object) -> None:
    """Say one sentence on stderr."""
    typer.echo(f"attnscale: {printable(str(sentence))}", err=True)
