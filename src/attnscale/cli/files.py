"""Files that commands read, and places they will write to: usable, or one sentence."""

import tempfile
from pathlib import Path

from attnscale.errors import SettingError
from attnscale.files import read_whole

MOST_TEXT = 2**26  # bytes: of a text no more is looked at than a model takes tokens


def read_text(path: Path) -> str:
    """The text in a file."""
    try:
        return read_whole(path, MOST_TEXT).decode("utf-8")
    except OSError as error:
        raise SettingError(f"Could not read {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise SettingError(f"Expected UTF-8 text in {path}, and it is not.") from None


def require_writable(path: Path) -> None:
    """Refuse a place that cannot be written to, before the work and not after it."""
    if path.is_dir():
        raise SettingError(f"Expected a file to write, and {path} is a folder.")
    if path.exists() and not path.is_file():
        return  # a pipe or a terminal: nothing can be tried there
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise SettingError(f"Could not write {path}: {parent} is no folder.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SettingError(f"Could not write {path}: {error.strerror or error}.") from None
