"""What watching changes of torch while it lasts, held by any number of watchers at once.

A monitor begins to watch in one call and ends in another, so watchers do not end in the reverse order of their
beginning; what they share is changed with the first and restored with the last, on whichever thread that is.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from attnscale.torch_internals import causal_bias_under_modes


class Held(AbstractContextManager[None]):
    """A context that is entered with its first holder and left with its last."""

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._holders, self._lock = make, 0, threading.RLock()

    def __enter__(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._inner = self._make()
                self._inner.__enter__()
            self._holders += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._inner.__exit__(None, None, None)


@contextmanager
def _quiet_about_hooks() -> Iterator[None]:
    """A compiled module warns of global hooks; the filter is taken out again, whatever was put before it meanwhile."""
    warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
    own = warnings.filters[0]
    try:
        yield
    finally:
        if own in warnings.filters:
            warnings.filters.remove(own)  # type: ignore[attr-defined]


UNDER_A_MODE = (Held(_quiet_about_hooks), Held(causal_bias_under_modes))
WHILE_WATCHING = (Held(lambda: torch.compiler.set_stance("force_eager")), *UNDER_A_MODE)
