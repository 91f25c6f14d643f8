"""In which order a module calls its kernels: learned while a model is followed, so that each is known by its number."""

from dataclasses import dataclass

from attnscale.watching.known.traces import Signature


@dataclass(frozen=True)
class Order:
    """The calls of one run of a module, and how often it runs in one forward of the model."""

    calls: tuple[Signature, ...]
    depth: int = 1
    is_compiled: bool = False  # called by what torch.compile made, where nobody follows it


class Orders:
    """What was seen of each module, run by run."""

    def __init__(self) -> None:
        self._running: dict[str, list[Signature]] = {}
        self._compiled: set[str] = set()
        self._found: dict[str, Order] = {}
        self._uneven: set[str] = set()

    def saw(self, signature: Signature, is_compiled: bool) -> None:
        """A kernel ran."""
        if is_compiled:
            self._compiled.add(str(signature[0]))
        self._running.setdefault(str(signature[0]), []).append(signature)

    def ran(self, path: str, depth: int) -> None:
        """The module has run, after so many runs of it in the same forward."""
        calls = tuple(self._running.pop(path, ()))
        if not calls and path not in self._found:
            return
        known = self._found.get(path)
        if known is not None and known.calls != calls:
            self._uneven.add(path)
        depth = max(depth + 1, 1 if known is None else known.depth)
        self._found[path] = Order(calls, depth, path in self._compiled)

    @property
    def known(self) -> dict[str, Order]:
        """Modules whose runs were all alike."""
        return {path: order for path, order in self._found.items() if path not in self._uneven}
