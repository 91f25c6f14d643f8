"""Kernels that wait to be measured together, while a model runs without gradients on a CPU.

Between its own operations a model leaves no cache with ours in it: measured where it ran, a call takes twice as long as
right after another one. Nothing may write to what waits, or to what is known of it, so whatever writes is told of first.
"""

from collections.abc import Callable

from torch import Tensor

from attnscale.watching.call import SeenCall
from attnscale.watching.kernels.kernel_call import KernelCall, Measured
from attnscale.watching.kernels.together import measured_of

HELD = 2**24  # bytes of queries and keys that may wait

Note = Callable[[SeenCall], None]


class WaitingKernels:
    """Calls in the order they ran, each with whom to tell what was seen of it."""

    def __init__(self) -> None:
        self._calls: list[tuple[KernelCall, int, Note]] = []
        self._held: dict[int, int] = {}  # bytes, by the address of what holds them
        self.failures: list[str] = []

    def add(self, call: KernelCall, rows: int, note: Note) -> None:
        """Have it wait; where much waits, all is measured now."""
        self._calls.append((call, rows, note))
        self._held |= map(_memory, (call.query, call.key))
        if sum(self._held.values()) > HELD:
            self.measure()

    def measure(self) -> None:
        """Measure all that waits, and tell of it."""
        calls, self._calls = self._calls, []
        self._held.clear()
        for (call, rows, note), measured in zip(calls, _measured(calls), strict=True):
            try:
                note(call.seen(rows, keep=False, measured=measured))
            except Exception as error:  # a model that runs must go on running
                self.failures.append(f"{call.kind}: {type(error).__name__}: {error}")


def _measured(calls: list[tuple[KernelCall, int, Note]]) -> list[Measured | None]:
    try:
        return measured_of([call for call, _, _ in calls], calls[0][1]) if calls else []
    except Exception:  # of one of them: by itself it says why
        return [None] * len(calls)


def _memory(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
