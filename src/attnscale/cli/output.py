"""What the commands share: the --json option, printing, and telling what is wrong."""

import sys
from typing import Annotated

import typer

from attnscale.plain import json_text, printable

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def say(text: str) -> None:
    """Print what was asked for; typer's echo has streams of its own, which end differently where they fail."""
    print(text, flush=True)


def print_json(value: object) -> None:
    """Print a value as JSON, one readable block."""
    say(json_text(value))


def tell(sentence: object) -> None:
    """Say one sentence on stderr."""
    print(f"attnscale: {printable(str(sentence))}", file=sys.stderr, flush=True)
