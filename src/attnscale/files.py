"""Read and write whole files."""

import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from attnscale.errors import SettingError

MARGIN = 2**16  # bytes read beyond the size of a file, because files under /proc have size 0
BY_HANDLE = Path("/proc/self/fd")  # paths of open files without a name


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: readers get the old or the new content, even after a loss of power.

    Links are followed. A special file, such as /dev/stdout, is written to, not replaced.
    """
    try:
        target = path.resolve()
        content = text.encode("utf-8", "replace")  # names may contain half of a surrogate pair
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            target.write_bytes(content)
            return
        _replace(target, content)
    except OSError as error:
        raise SettingError(f"Could not write {path}: {error.strerror or error}.") from None


def read_whole(path: Path, most: int) -> bytes:
    """Read a file of at most `most` bytes; raise an error for a pipe or a device, which could block.

    Raises OSError if the file cannot be opened.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise SettingError(f"Expected a file, and {path} is not a regular file.")
        if found.st_size > most:
            raise SettingError(f"Expected at most {most / 2**20:,.0f} MiB in {path}, got {found.st_size / 2**20:,.0f}.")
        return file.read(min(most, found.st_size + MARGIN))  # read(most) would allocate `most` bytes


def _replace(target: Path, content: bytes) -> None:
    """Write a new file, then give it the name of the target; the umask sets its permissions.

    If the system supports files without a name, the file gets its name only when it is whole, so a killed process
    leaves no file behind.
    """
    part = target.with_name(f".part-{secrets.token_hex(8)}")
    try:
        handle, is_named = _new(part)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            if not is_named:
                _name(file, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _name(file: BinaryIO, part: Path) -> None:
    """Link a file without a name to `part`."""
    handles = os.open(BY_HANDLE, os.O_RDONLY)
    try:  # os.link() follows the link of the handle only with a directory handle
        os.link(str(file.fileno()), part, src_dir_fd=handles, follow_symlinks=True)
    except OSError:  # the system hides its handles, or the file system has no links
        shutil.copyfile(BY_HANDLE / str(file.fileno()), part)
    finally:
        os.close(handles)


def _new(part: Path) -> tuple[int, bool]:
    if hasattr(os, "O_TMPFILE") and BY_HANDLE.exists():
        try:
            return os.open(part.parent, os.O_TMPFILE | os.O_WRONLY, 0o666), False
        except OSError:  # the file system does not support it, or the folder is missing, which fails below
            pass
    return os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), True
