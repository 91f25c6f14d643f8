"""watch(model): see every attention of a running model, with no edit to it.

One mode between the model and torch's kernels sees each operation after it ran, and follows tensors from projections
to products to softmaxes. Nothing is replaced, so outputs stay as they are to the last bit.
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
    """Silence the warning of a compiled module that there are global hooks."""
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
    """See every attention that runs inside the model, whatever computes it.

    `rows` are sampled per head and call, None looks at all of them; `keep` holds on to all calls, with their queries,
    keys, values and masks, to try other scales on. A backward pass leaves the length of the gradient that reached
    queries and keys. Compiled parts of the model run uncompiled meanwhile. Where nothing was seen, leaving raises.

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
    """See every attention that runs inside the model, as the settings say."""
    if not isinstance(model, nn.Module):
        raise InputError(f"Expected a torch.nn.Module to watch, got {type(model).__name__}.")
    if not can_watch():
        raise InputError("This version of torch lets nobody see the operations of a model: nothing can be watched.")
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
