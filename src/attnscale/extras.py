"""Extras: packages that only some need, which extra brings each, and the sentence where one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from attnscale.errors import SettingError

# What pyproject.toml's extras bring, by the names that are imported.
EXTRAS = {
    "cli": ("typer", "rich", "safetensors"),
    "report": ("jinja2", "markupsafe"),
    "hf": ("transformers", "tokenizers", "safetensors", "accelerate"),
    "lab": ("submitit",),
}


def extra_of(package: str | None) -> str | None:
    """The extra that brings a package; None where none does.

    >>> extra_of("rich.console"), extra_of("wandb")
    ('cli', None)
    """
    name = (package or "").partition(".")[0]
    return next((extra for extra, packages in EXTRAS.items() if name in packages), None)


def require_extra(extra: str, what: str) -> None:
    """Refuse at once what would fail after the work for want of a package."""
    missing = [package for package in EXTRAS[extra] if find_spec(package) is None]
    if missing:
        raise SettingError(_sentence(what, missing[0], extra))


@contextmanager
def needing(what: str) -> Iterator[None]:
    """Within it, a package that is missing and that an extra brings is told in one sentence."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = extra_of(error.name)
        if error.name is None or extra is None:
            raise
        raise SettingError(_sentence(what, error.name, extra)) from None


def _sentence(what: str, package: str, extra: str) -> str:
    return f"{what} needs the package {package}, which is not here: pip install 'attnscale[{extra}]'."
