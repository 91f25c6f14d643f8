"""How a command is called: its help, and in one sentence what is wrong with a call."""

from collections.abc import Sequence
from typing import Any

import typer

UsageError: Any = typer.BadParameter.__base__  # of the click that typer brings, or of the package, by its version


def in_paragraphs(docstring: str) -> str:
    """Help whose paragraphs are one line each, for the terminal to break where it ends.

    >>> in_paragraphs("One.\\n\\n    Two\\n    lines.")
    'One.\\n\\nTwo lines.'
    """
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in docstring.strip().split("\n\n"))


def usage_sentence(message: str, context: Any, parameter: Any, arguments: Sequence[str]) -> str:
    """What the parser says, what came where that is known, and where to look."""
    options = getattr(parameter, "opts", ())
    given = next((value for option in options if (value := _given(option, arguments)) is not None), None)
    came = f", got {given!r}" if given is not None and given not in message else ""
    command = "attnscale" if context is None else context.command_path
    return f"{message.rstrip('.')}{came}; run '{command} --help' to see what it takes."


def _given(option: str, arguments: Sequence[str]) -> str | None:
    """
    >>> _given("--heads", ["predict", "--heads", "many"]), _given("--heads", ["predict", "--heads=few"])
    ('many', 'few')
    """
    for position, argument in enumerate(arguments):
        if argument == option and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2]
    return None
