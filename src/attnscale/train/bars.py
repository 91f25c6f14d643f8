"""tqdm's bars, where a training loop has some on its terminal: what is written beside them leaves their lines whole."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def bars_on_terminal() -> list[Any]:
    """Those that are drawn there now; none where nobody imported tqdm."""
    tqdm = sys.modules.get("tqdm.std")
    return [] if tqdm is None else [bar for bar in list(tqdm.tqdm._instances) if _is_drawn(bar)]


@contextmanager
def bars_aside() -> Iterator[None]:
    """Take bars away while something else is written, and draw them again below it."""
    bars = bars_on_terminal()
    if not bars:
        yield
        return
    with sys.modules["tqdm.std"].tqdm.external_write_mode(file=sys.stderr):
        yield


def _is_drawn(bar: Any) -> bool:
    """A bar that is switched off has no file, and one in a notebook no terminal."""
    file = getattr(bar, "fp", None)
    return hasattr(bar, "start_t") and file is not None and not file.closed and file.isatty()
