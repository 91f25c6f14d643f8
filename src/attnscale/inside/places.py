"""Places: the modules of a known model that attend, and a look at each of them for as long as it is wanted."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from attnscale.inside import marks, names
from attnscale.inside.frames import BETWEEN, KERNEL, Carried
from attnscale.inside.placing import can_be_placed, place, take_away
from attnscale.inside.unseen import that_may_attend
from attnscale.watching.known.known_model import KnownModel
from attnscale.watching.running import modules_by_path


class Places:
    """The modules at which a known model attends: those that are looked at, and those that are followed apart."""

    def __init__(self, model: nn.Module, known: KnownModel) -> None:
        self.model, self.known = model, known
        modules = modules_by_path(model)
        every = sorted(known.attending | known.unknown)
        self._are_found = all(path in modules for path in every)
        inside = [path for path in known.orders if path in modules and self._is_seen(path, modules[path])]
        self.modules = {path: modules[path] for path in inside}
        self.apart = {path: modules[path] for path in every if path in modules and path not in self.modules}
        self.unseen = that_may_attend(modules, known.called, every)
        files = {line[0] for _, line, *_ in known.calls if isinstance(line, tuple)}
        runs_eager = not all(order.is_compiled for order in known.orders.values())
        self._names = names.names_in(files) if runs_eager else []

    @property
    def are_complete(self) -> bool:
        """Whether all that is known of the model can be seen from inside, or apart from what is."""
        if not self._are_found or not self.modules:
            return False
        return all(self._runs_apart(path, module) for path, module in self.apart.items())

    def _runs_apart(self, path: str, module: nn.Module) -> bool:
        """Whether a module can be followed by itself: no other that attends is around it or inside."""
        others = (other for other in (*self.modules, *self.apart) if other != path)
        nested = any(f"{other}.".startswith(f"{path}.") or f"{path}.".startswith(f"{other}.") for other in others)
        return path not in self.known.bound and can_be_placed(module) and not nested

    def _is_seen(self, path: str, module: nn.Module) -> bool:
        return path not in self.known.unknown and can_be_placed(module) and self._is_read(path)

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
    def looked_at(self, look: str, carried_at: Callable[[str], Carried]) -> Iterator[None]:
        """Look at all of them; each carries what this gives for its path."""
        with ExitStack() as stack:
            stack.callback(marks.abandon)
            names.hold(self._names)
            stack.callback(names.let_go, self._names)
            for path, module in self.modules.items():
                stack.callback(take_away, module, place(module, look, carried_at(path), self._layouts(path)))
            yield
