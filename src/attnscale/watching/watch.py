"""watch(model): measure every attention of a running model without editing it.

A dispatch mode receives each operation after it ran, and follows tensors from projections to products to softmaxes.
No operation is replaced, so outputs are bitwise unchanged.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from attnscale.errors import InputError
from attnscale.torch_internals import can_watch, causal_bias_under_modes
from attnscale.watching.sdpa_names import Redirected, names_of_sdpa
from attnscale.watching.seen import Seen
from attnscale.watching.watcher import DEFAULT_ROWS, Settings, Watcher


class SharedContext(AbstractContextManager[None]):
    """A context entered by its first holder and exited by its last."""

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
    """Silence the warning of compiled modules about global hooks."""
    warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
    own = warnings.filters[0]
    try:
        yield
    finally:
        if own in warnings.filters:
            warnings.filters.remove(own)  # type: ignore[attr-defined]


UNDER_A_MODE = (SharedContext(_quiet_about_hooks), SharedContext(causal_bias_under_modes))
WHILE_WATCHING = (SharedContext(lambda: torch.compiler.set_stance("force_eager")), *UNDER_A_MODE)


def watch(model: nn.Module, rows: int | None = DEFAULT_ROWS, *, keep: bool = False) -> AbstractContextManager[Seen]:
    """Measure every attention that runs inside the model, whatever computes it.

    `rows` are sampled per head and call; None measures all rows. `keep` stores the queries, keys, values and masks of
    all calls, to try other scales on. A backward pass adds the norm of the gradient that reached queries and keys.
    Compiled parts of the model run uncompiled inside the context. Leaving it raises an error if no attention ran.

    >>> import torch
    >>> from torch import nn
    >>> layer = nn.MultiheadAttention(64, 2, batch_first=True)
    >>> x = torch.randn(1, 10, 64)
    >>> with watch(layer) as seen:
    ...     _ = layer(x, x, x)
    >>> round(1 / seen.layers["MultiheadAttention"].scale_applied ** 2)
    32
    """
    return watched(model, Settings(rows, keep))


@contextmanager
def watched(model: nn.Module, settings: Settings) -> Iterator[Seen]:
    """Measure every attention that runs inside the model, with these settings."""
    if not isinstance(model, nn.Module):
        raise InputError(f"Expected a torch.nn.Module to watch, got {type(model).__name__}.")
    if not can_watch():
        raise InputError("Expected a version of torch with dispatch modes, which watch() needs.")
    watcher = Watcher(model, settings)
    with ExitStack() as stack:
        for change in WHILE_WATCHING:
            stack.enter_context(change)
        if settings.training:
            stack.enter_context(Redirected(names_of_sdpa()))
        watcher.stack.attach()
        stack.callback(watcher.stack.detach)
        yield watcher.seen
    watcher.conclude()
