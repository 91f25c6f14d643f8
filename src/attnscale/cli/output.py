"""What the commands share: the --json option, printing, and telling what is wrong."""

import json
from typing import Annotated

import typer

from attnscale.show.naming import printable

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(value: object) -> None:
    """Print a value as JSON, one readable block."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


def tell(sentence: object) -> None:
    """Say one sentence on stderr."""
    typer.echo(f"attnscale: {printable(str(sentence))}", err=True)
