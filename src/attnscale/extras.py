"""Optional packages: the extra that installs each, and the error for a missing package."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from attnscale.errors import SettingError

# Packages of each extra in pyproject.toml, by import name.
EXTRAS = {
    "cli": ("typer", "rich", "safetensors"),
    "report": ("jinja2", "markupsafe"),
    "hf": ("transformers", "tokenizers", "safetensors", "accelerate"),
    "lab": ("submitit",),
}


def extra_of(package: str | None) -> str | None:
    """Return the extra that installs a package, or None.

    >>> extra_of("rich.console"), extra_of("wandb")
    ('cli', None)
    """
    name = (package or "").partition(".")[0]
    return next((extra for extra, packages in EXTRAS.items() if name in packages), None)


def require_extra(extra: str, what: str) -> None:
    """Raise an error if a package of an extra is missing, before any work is done."""
    missing = [package for package in EXTRAS[extra] if find_spec(package) is None]
    if missing:
        raise SettingError(_sentence(what, missing[0], extra))


@contextmanager
def needing(what: str) -> Iterator[None]:
    """Turn the ImportError of an optional package into an error with the command that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = extra_of(error.name)
        if error.name is None or extra is None:
            raise
        raise SettingError(_sentence(what, error.name, extra)) from None


def _sentence(what: str, package: str, extra: str) -> str:
    return f"{what} needs the package {package}, which is not installed: pip install 'attnscale[{extra}]'."
