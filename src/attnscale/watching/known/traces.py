"""Which modules leave their one kernel in the autograd graph: learned while a model is followed, used when it is known.

Reading the graph when a module has run costs its forward nothing, where a mode costs every operation of it.
"""

from dataclasses import dataclass, field
from typing import Any

from attnscale.torch_internals import recorded_operations
from attnscale.watching.kernels import KernelCall
from attnscale.watching.known.graph import is_legible, kernels_behind, recorded_call
from attnscale.watching.running import Line

Signature = tuple[object, ...]  # module path, line, kind, heads, key heads, head dimension


@dataclass(eq=False)
class Trace:
    """One module: by what its call is known, the way to it, and how many operations autograd recorded in a run."""

    signature: Signature
    way: tuple[int, ...]  # from the module's output
    lengths: set[int] = field(default_factory=set)

    @property
    def line(self) -> Line:
        """Where its call stands."""
        line: Line = self.signature[1]  # type: ignore[assignment]
        return line

    def fits(self, kernel: KernelCall) -> bool:
        """Whether a kernel has the heads that are known."""
        return self.signature[3:] == (kernel.query.shape[1], kernel.key.shape[1], kernel.query.shape[-1])


class Traces:
    """What a mode saw of each module, held against what the graph tells."""

    def __init__(self) -> None:
        self._running: dict[str, list[tuple[Signature, KernelCall, bool]]] = {}  # kernels of the present run
        self._found: dict[str, Trace] = {}
        self._illegible: set[str] = set()
        self.lengths: dict[str, set[int]] = {}  # of runs of a model, how many operations autograd recorded

    def saw(self, signature: Signature, kernel: KernelCall) -> None:
        """A kernel ran."""
        self._running.setdefault(str(signature[0]), []).append((signature, kernel, is_legible()))

    def ran(self, path: str, output: Any, began: int) -> None:
        """The module has run."""
        calls = self._running.pop(path, [])
        if len(calls) == 1 and calls[0][2]:
            (signature, kernel, _), lengths = calls[0], recorded_operations() - began
            behind = list(kernels_behind(output, began))
            if len(behind) == 1 and _same(kernel, recorded_call(behind[0].node)):
                trace = self._found.setdefault(path, Trace(signature, behind[0].way))
                if trace.signature == signature:
                    trace.lengths.add(lengths)
                    return
        if calls or path in self._found:
            self._illegible.add(path)

    def ran_whole(self, path: str, began: int) -> None:
        """The outermost module has run."""
        self.lengths.setdefault(path, set()).add(recorded_operations() - began)

    @property
    def legible(self) -> dict[str, Trace]:
        """Modules whose runs all had one kernel, which the graph told as the mode saw it."""
        return {path: trace for path, trace in self._found.items() if path not in self._illegible}


def _same(seen: KernelCall, told: KernelCall) -> bool:
    pairs = [(seen.query, told.query), (seen.key, told.key)]
    return (seen.scale, seen.is_causal) == (told.scale, told.is_causal) and all(
        type(b) is type(a) and (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())
        for a, b in pairs
    )
