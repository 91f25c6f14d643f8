"""Files written whole, or one sentence."""

import os
import stat
import tempfile
from pathlib import Path

from attnscale.errors import SettingError


def write_whole(path: Path, text: str) -> None:
    """Write a file at once: whoever looks sees the old one or the new one, also after a loss of power.

    A link is followed, and what is no file, such as /dev/stdout, is written to and not replaced.
    """
    try:
        target = path.resolve()
        if target.exists() and not stat.S_ISREG(target.stat().st_mode):
            target.write_text(text, encoding="utf-8")
            return
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".part-")
        part = Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            part.chmod(0o666 & ~_umask())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise SettingError(f"Could not write {path}: {error.strerror or error}.") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
