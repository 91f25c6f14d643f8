"""Kernels that wait to be measured together, while a model runs without gradients on a CPU.

A model's own operations leave none of ours in a core's caches: measured as it runs, a call takes longer than right
after another one. What waits must stay as it is, so all is measured before anything is written to.
"""

from collections.abc import Callable
from typing import NamedTuple

from attnscale.torch_internals import without_function_modes
from attnscale.watching.call import SeenCall
from attnscale.watching.kernels.kernel_call import KernelCall, Measured
from attnscale.watching.kernels.together import measured_together

HELD = 2**23  # bytes of queries, keys and masks that may wait


class Waiting(NamedTuple):
    """A call in the module at this path, and who is told what was seen of it."""

    path: str
    kernel: KernelCall
    rows: int
    note: Callable[[SeenCall], None]


class WaitingKernels:
    """Calls in the order they ran."""

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []
        self._held: dict[int, int] = {}  # bytes, by the address where they lie
        self.failures: list[str] = []

    def add(self, call: Waiting) -> None:
        """Have it wait; where much waits, all is measured now."""
        self._waiting.append(call)
        self._held |= call.kernel.memory
        if sum(self._held.values()) > HELD:
            self.measure()

    def measure(self) -> None:
        """Measure all that waits, and tell of it in its order."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        self._held.clear()
        with without_function_modes():  # which do not reach what is measured as it runs
            for call, measured in zip(waiting, _measured(waiting), strict=True):
                try:
                    call.note(call.kernel.seen(call.rows, keep=False, measured=measured))
                except Exception as error:  # a model that runs must go on running
                    self.failures.append(f"{call.path}: {type(error).__name__}: {error}")


def _measured(waiting: list[Waiting]) -> list[Measured | None]:
    try:
        return measured_together([call.kernel for call in waiting], waiting[0].rows)
    except Exception:  # of one of them, which says so when it is measured by itself
        return [None] * len(waiting)
