"""The norms of queries and keys that a model was built with, and whether they take part."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from attnscale.tracing.lineage import Ledger, Node

NORM_OF_QUERY_OR_KEY = re.compile(
    r"(q|k|qk|query|key)_?(layer|rms)?_?(norm|ln)|(layer|rms)?_?(norm|ln)_?(q|k|query|key)"
)


class QueryKeyNorms:
    """The norms of queries and keys that a model was built with, and whether they take part."""

    def __init__(self, modules: Mapping[str, nn.Module], ledger: Ledger) -> None:
        self._ledger = ledger
        self._outputs: dict[str, list[Node]] = {}
        self.built = {name: module for name, module in modules.items() if _is_norm(name, module)}  # by their path

    def ran(self, name: str, output: Any) -> None:
        """A module of the model ran."""
        if name in self.built and isinstance(output, Tensor):
            self._outputs.setdefault(name, []).append(self._ledger.node(output))

    def took(self, args: Iterable[Any]) -> None:
        """An operation took these as its operands."""
        for arg in args:
            for item in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(item, Tensor):
                    self._ledger.node(item).used = True

    def unused(self, path: str) -> tuple[str, ...]:
        """The norms that belong to the attention at this path and never took part."""
        return tuple(
            name
            for name, module in self.built.items()
            if _belongs(name.rpartition(".")[0], path) and not self._takes_part(name, module)
        )

    def _takes_part(self, name: str, module: nn.Module) -> bool:
        if name in self._outputs:
            return any(node.used for node in self._outputs[name])
        nodes = [self._ledger.known(parameter) for parameter in module.parameters()]
        return any(node is not None and node.used for node in nodes)


def _is_norm(path: str, module: nn.Module) -> bool:
    name = path.rpartition(".")[2].lower()
    return NORM_OF_QUERY_OR_KEY.fullmatch(name) is not None and not isinstance(module, nn.Identity)


def _belongs(parent: str, path: str) -> bool:
    return not parent or path == parent or path.startswith(f"{parent}.")
