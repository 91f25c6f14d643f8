"""Recognition: what is known of a model already, and what is learned of it while it is followed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from attnscale.torch_internals import in_backward, recorded_operations
from attnscale.watching.call import SeenCall
from attnscale.watching.gradients import of_recorded
from attnscale.watching.kernels import KernelCall
from attnscale.watching.known.graph import is_legible, kernel_behind, recorded_call
from attnscale.watching.known.known_model import KnownModel, remembered
from attnscale.watching.known.orders import Orders
from attnscale.watching.known.traces import Signature, Traces
from attnscale.watching.known.waiting import WaitingCall
from attnscale.watching.running import Line
from attnscale.watching.settings import Settings
from attnscale.watching.written.layout import KnownWritten


class Runs(NamedTuple):
    """How a module runs that attends."""

    is_compiled: bool
    is_bound: bool  # to the graph around it
    depth: int  # runs of it before, in the same forward


class Recognition:
    """Decides which modules a mode must look into, and whether the model can be known again."""

    def __init__(self, settings: Settings) -> None:
        self.known, self._settings = settings.known, settings
        self.only_known = False  # nothing but known kernels is looked at in the module that is running
        self._attending = frozenset() if self.known is None else self.known.attending
        self._can_be_known = True  # so far: all attention was kernels
        self._calls: dict[Signature, SeenCall] = {}  # that were followed
        self._written: dict[Signature, KnownWritten] = {}  # those of them that are no kernels
        self._taken_apart: set[Signature] = set()  # those of SDPA, where it ran none
        self._unknown: set[str] = set()  # modules that must be followed every time
        self._bound: set[str] = set()  # modules that cannot run apart from what is around them
        self._traces, self._orders = Traces(), Orders()

    def give_up(self) -> None:
        """Something ran that the model cannot be known by: all of it is followed the next time."""
        self._can_be_known = False

    def forget(self) -> None:
        """A module was replaced: what is known is that of another, and all is followed from here on."""
        self.known, self.only_known, self._can_be_known = None, False, False

    def begins(self, name: str) -> bool:
        """Whether to look at what runs in a module: a kernel that is known, or all of a module that is not."""
        if self.known is None:
            return True
        self.only_known = name in self._attending
        if self._settings.reads_graph and name in self.known.traces and is_legible():
            return False  # its kernel is read from the graph when it has run
        return self.only_known or name not in self.known.called

    @property
    def is_compiled(self) -> bool:
        """Whether what is known is a model that torch.compile made graphs of."""
        return self.known is not None and self.known.is_compiled

    def saw(self, known_by: Signature, kernel: KernelCall, call: SeenCall | None, runs: Runs) -> None:
        """A kernel was followed, in a module that runs so."""
        if call is None:
            return
        if call.factors is None or (call.biased and call.kind != "flex"):  # more than its tensors may change
            self._cannot_know(known_by, runs)
            return
        self._calls[known_by] = call
        self._orders.saw(known_by, runs.is_compiled)
        self._bind(known_by, runs)
        if self._settings.reads_graph:
            self._traces.saw(known_by, kernel)

    def wrote(self, known_by: Signature, known: KnownWritten | None, call: SeenCall, runs: Runs) -> None:
        """An attention written out was followed; it has no factors where it cannot be known again.

        Nothing is known of what is written where SDPA wrote it: the function is seen again, with what it is given.
        """
        if call.factors is None:
            self._cannot_know(known_by, runs)
            return
        self._calls[known_by] = call
        if known is None:
            self._taken_apart.add(known_by)
        else:
            self._written[known_by] = known
        self._orders.saw(known_by, runs.is_compiled)
        self._bind(known_by, runs)

    def _cannot_know(self, known_by: Signature, runs: Runs) -> None:
        self._unknown.add(str(known_by[0]))
        self._bind(known_by, runs)
        if self.known is not None:
            self.give_up()

    def _bind(self, known_by: Signature, runs: Runs) -> None:
        if not known_by[0] or runs.depth or runs.is_bound:
            self._bound.add(str(known_by[0]))

    def again(self, kernel: KernelCall, known_by: Signature) -> SeenCall | None:
        """A known call on other tensors; None where it is not known."""
        return None if self.known is None else self.known.again(kernel, known_by, self._settings.rows)

    def ran(self, name: str, output: Any, began: int, depth: int, is_watched: bool) -> tuple[Line, WaitingCall] | None:
        """A module has run; the line and the call of its kernel, where the graph alone tells of it."""
        if not in_backward():  # which runs modules again, unseen
            self._orders.ran(name, depth)
        if not self._settings.reads_graph:
            return None
        if self.known is None:
            self._traces.ran(name, output, began)
            return None
        if name not in self.known.traces or is_watched or not is_legible():
            return None
        return self._from_graph(self.known, name, output, began)

    def _from_graph(self, known: KnownModel, name: str, output: Any, began: int) -> tuple[Line, WaitingCall] | None:
        """The kernel of a known module; measured when its gradient passes, when a GPU has work."""
        trace = known.traces[name]
        if recorded_operations() - began not in trace.lengths:  # it does not run as it did
            self.give_up()
        node = kernel_behind(output, began, trace.way)
        kernel = None if node is None else recorded_call(node)
        call = None
        if kernel is not None and trace.fits(kernel):
            call = known.later(kernel, trace.signature, self._settings.rows)
        if call is None:
            self.give_up()
            return None
        call.call.gradients = of_recorded(node, call.call.heads, call.call.key_owners, call.measure)
        return trace.line, call

    def concluded(self, called: set[str], unused_norms: Callable[[str], tuple[str, ...]]) -> KnownModel | None:
        """What a later watcher may know the model by; None where all of it must be followed."""
        if not self._can_be_known or (self._unknown and (not self._calls or self._unknown & self._bound)):
            return None
        if self.known is None:
            traces, orders = self._traces.legible, self._orders.known
            known = remembered(called, self._calls, unused_norms, traces, orders, self._written)
            return replace(
                known,
                taken_apart=frozenset(self._taken_apart),
                unknown=frozenset(self._unknown),
                bound=frozenset(self._bound),
            )
        return None if self._calls else self.known  # something new is followed with all the rest, the next time
