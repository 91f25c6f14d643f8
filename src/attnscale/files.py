"""Files written whole, or one sentence."""

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from attnscale.errors import SettingError

MARGIN = 2**16  # bytes beyond what a file is said to hold: one under /proc is said to hold none
BY_HANDLE = Path("/proc/self/fd")  # where a file that has no name yet is found


def write_whole(path: Path, text: str) -> None:
    """Write a file at once: whoever looks sees the old one or the new one, also after a loss of power.

    A link is followed, and what is no file, such as /dev/stdout, is written to and not replaced.
    """
    try:
        target = path.resolve()
        content = text.encode("utf-8", "replace")  # half of a character in a name is no reason to fail
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            target.write_bytes(content)
            return
        with replacing(target, target.with_name(f".part-{secrets.token_hex(8)}")) as file:
            file.write(content)
    except OSError as error:
        raise SettingError(f"Could not write {path}: {error.strerror or error}.") from None


def read_whole(path: Path, most: int) -> bytes:
    """What is in a file of at most so many bytes; a pipe or a device is refused at once, and never waited for.

    What the system says of a file that cannot be opened is raised as it is.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise SettingError(f"Expected a file in {path}, and it is none.")
        if found.st_size > most:
            raise SettingError(f"Expected at most {most / 2**20:,.0f} MiB in {path}, got {found.st_size / 2**20:,.0f}.")
        return file.read(min(most, found.st_size + MARGIN))  # asked for more, it takes the memory for it first


@contextmanager
def replacing(target: Path, part: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of another once it is written; `part` is its name for the last moment.

    Before that it has no name, where the system knows such files, so that nothing is left of it if this process is
    killed. What its permissions are is for the system to say, by the umask, which is the whole process's.
    """
    try:
        handle, is_named = _new(part)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not is_named:
                _name(file, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _name(file: BinaryIO, part: Path) -> None:
    """Give a file that has none a name."""
    handles = os.open(BY_HANDLE, os.O_RDONLY)
    try:  # given a folder, os.link() follows the link that stands for the handle; else it does not
        os.link(str(file.fileno()), part, src_dir_fd=handles, follow_symlinks=True)
    except OSError:  # a system that shows no handles to others, or a file system without links
        shutil.copyfile(BY_HANDLE / str(file.fileno()), part)
    finally:
        os.close(handles)


def _new(part: Path) -> tuple[int, bool]:
    if hasattr(os, "O_TMPFILE") and BY_HANDLE.exists():
        try:
            return os.open(part.parent, os.O_TMPFILE | os.O_WRONLY, 0o666), False
        except OSError:  # the file system has none, or the folder is missing, which is told below
            pass
    return os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), True
