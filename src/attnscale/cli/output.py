"""What the commands share: the --json option, and printing."""

import json
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_json(value: object) -> None:
    """Print a value as JSON, one readable block."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))
