"""Store: one file a cell, written whole, checked when read, and made by one process at a time."""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from attnscale.errors import DamagedFileWarning, SettingError
from attnscale.files import read_whole, write_whole
from attnscale.lab.cell import Cell, Outcome, digest_of

MOST_BYTES = 2**27  # of a cell: a thousand times the largest


@dataclass(frozen=True)
class Stored:
    """What a cell came to, and how long it took."""

    outcome: Outcome
    seconds: float


@dataclass(frozen=True)
class Store:
    """The cells that are done, in a folder that several processes and machines may share."""

    folder: Path

    def path(self, cell: Cell) -> Path:
        """Where a cell lies once it is done."""
        return self.folder / f"{cell.experiment}-{cell.digest}.json"

    def read(self, cell: Cell) -> Stored | None:
        """A cell that is done; None where it is not. A damaged file is set aside, and said."""
        path = self.path(cell)
        try:
            found = json.loads(read_whole(path, MOST_BYTES))
            return _verified(found, cell)
        except FileNotFoundError:
            return None
        except SettingError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError):
            self._set_aside(path)
            return None
        except OSError as error:
            raise SettingError(f"Could not read {path}: {error.strerror or error}.") from None

    def write(self, cell: Cell, stored: Stored) -> None:
        """Keep a cell: whoever looks sees none of it or all of it, also after a loss of power."""
        value = {
            "experiment": cell.experiment,
            "version": cell.version,
            "settings": dict(cell.settings),
            "outcome": stored.outcome,
            "seconds": stored.seconds,
            "digest": digest_of(stored.outcome),
        }
        self._make_folder()
        write_whole(self.path(cell), json.dumps(value, ensure_ascii=False, indent=1))

    @contextmanager
    def turn(self, cell: Cell, whose: str = "") -> Iterator[None]:
        """Hold a cell: another process that wants it waits, and finds `whose` it is. The hold ends with its process."""
        self._make_folder()
        lock, holder = (self.path(cell).with_suffix(suffix) for suffix in (".lock", ".holder"))
        with FileLock(lock):
            with suppress(OSError):  # it is only told
                holder.write_text(whose, encoding="utf-8")
            yield
            holder.unlink(missing_ok=True)
            # Whoever waits for it, or makes a new one, finds the cell done. Windows keeps a file that is open.
            with suppress(OSError):
                lock.unlink()

    def holder(self, cell: Cell) -> str | None:
        """Whose turn it is with a cell; None where nobody's."""
        try:
            return read_whole(self.path(cell).with_suffix(".holder"), 2**10).decode("utf-8", "replace") or None
        except (OSError, SettingError):
            return None

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"Could not make the folder {self.folder}: {error.strerror or error}.") from None

    def _set_aside(self, path: Path) -> None:
        number = 0
        while (aside := path.with_suffix(f".damaged{number or ''}")).exists():
            number += 1
        with suppress(FileNotFoundError):  # another process has done so
            path.replace(aside)
            told = f"{path.name} was damaged; it is set aside as {aside.name} and run again."
            warnings.warn(told, DamagedFileWarning, stacklevel=3)


def _verified(found: dict[str, Any], cell: Cell) -> Stored:
    is_the_cell = (found["experiment"], found["version"]) == (cell.experiment, cell.version)
    if not is_the_cell or found["settings"] != dict(cell.settings) or found["digest"] != digest_of(found["outcome"]):
        raise ValueError("not what was written")
    return Stored(found["outcome"], float(found["seconds"]))
