"""Files that commands read and write: whole, or one sentence."""

import os
import tempfile
from pathlib import Path

from attnscale.errors import SettingError


def read_text(path: Path) -> str:
    """The text in a file."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingError(f"Could not read {path}: {error.strerror or error}.") from None
    except UnicodeDecodeError:
        raise SettingError(f"Expected UTF-8 text in {path}, and it is not.") from None


def require_writable(path: Path) -> None:
    """Refuse a place that cannot be written to, before the work and not after it."""
    if path.is_dir():
        raise SettingError(f"Expected a file to write, and {path} is a folder.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SettingError(f"Could not write {path}: {error.strerror or error}.") from None


def write_whole(path: Path, text: str) -> None:
    """Write a file at once: whoever looks sees the old one or the new one, never a part."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        part.chmod(0o666 & ~_umask())
        part.replace(path)
    except OSError as error:
        raise SettingError(f"Could not write {path}: {error.strerror or error}.") from None
    finally:
        part.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
