"""Places: the modules of a known model that attend, and a look at each of them for as long as it is wanted."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from attnscale.inside import marks, names
from attnscale.inside.frames import BETWEEN, KERNEL
from attnscale.inside.placing import can_be_placed, place, take_away
from attnscale.watching.known.known_model import KnownModel
from attnscale.watching.running import modules_by_path


class Places:
    """The modules at which a known model attends."""

    def __init__(self, model: nn.Module, known: KnownModel) -> None:
        self.model, self.known = model, known
        modules = modules_by_path(model)
        self.modules = {path: modules[path] for path in known.orders if path in modules}
        files = {line[0] for _, line, *_ in known.calls if isinstance(line, tuple)}
        runs_eager = not all(order.is_compiled for order in known.orders.values())
        self._names = names.names_in(files) if runs_eager else []

    @property
    def are_complete(self) -> bool:
        """Whether all that is known of the model can be seen from inside."""
        are_all = self.known.attending == frozenset(self.modules)
        return are_all and all(map(can_be_placed, self.modules.values())) and all(map(self._is_read, self.modules))

    def _is_read(self, path: str) -> bool:
        """Whether a module calls what can be read: FlexAttention only in a graph, since outside it compiles itself."""
        order = self.known.orders[path]
        kernels = {self.known.calls[each].kind for each in order.calls if each not in self.known.written}
        return kernels <= ({"sdpa", "flex"} if order.is_compiled else {"sdpa"})

    def _layouts(self, path: str) -> str:
        """Of its calls in a run, as frames take them."""
        known = (self.known.written.get(signature) for signature in self.known.orders[path].calls)
        return BETWEEN.join(KERNEL if each is None else each.layout.code for each in known)

    @contextmanager
    def looked_at(self, look: str, tensor_of: Callable[[str], Tensor]) -> Iterator[None]:
        """Look at all of them, with a tensor of its own for each path."""
        with ExitStack() as stack:
            stack.callback(marks.abandon)
            names.hold(self._names)
            stack.callback(names.let_go, self._names)
            for path, module in self.modules.items():
                stack.callback(take_away, module, place(module, look, tensor_of(path), self._layouts(path)))
            yield
