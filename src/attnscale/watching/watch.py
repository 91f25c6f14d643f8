"""watch(model): see every attention of a running model, with no edit to it.

One mode between the model and torch's kernels sees each operation after it ran, and follows tensors from projections
to products to softmaxes. Nothing is replaced, so outputs stay as they are to the last bit.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn

from attnscale.errors import InputError
from attnscale.torch_internals import can_watch
from attnscale.watching.held import WHILE_WATCHING
from attnscale.watching.sdpa_names import Redirected, names_of_sdpa
from attnscale.watching.seen import Seen
from attnscale.watching.settings import DEFAULT_ROWS, Settings
from attnscale.watching.watcher import Watcher


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
        watcher.running.attach()
        stack.callback(watcher.running.detach)
        yield watcher.seen
    watcher.conclude()
