"""Attention that was possibly missed: softmaxes outside any layer, idle attention modules, and unused QK-norms."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from attnscale.tracing.following import Trace, follow
from attnscale.tracing.lineage import Lineage, Node

NORM_OF_QUERY_OR_KEY = re.compile(
    r"(q|k|qk|query|key)_?(layer|rms)?_?(norm|ln)|(layer|rms)?_?(norm|ln)_?(q|k|query|key)"
)
# Names of parameters that multiply queries, keys or scores.
GAIN_OR_SCALE = re.compile(
    r"(q|k|qk|query|key)_?((norm_?)?(gain|gamma|scale)|norm_?weight)|(gain|gamma|g)_?(q|k|query|key)"
    r"|(attn_?|attention_?)?(logit_?scale|log_?scale|temperature|tau|softmax_scale)|qk_norm_scale"
)
ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)


@dataclass
class MissedAttention:
    """Softmaxes and modules that may be attention but belong to no measured layer."""

    softmaxes: Counter[str] = field(default_factory=Counter)  # count per module; no product of two activations found
    mixing: tuple[str, ...] = ()  # modules in which these softmaxes, or exponentials, mix values
    modules: tuple[str, ...] = ()  # named after attention, but no attention ran in them
    nothing: str = ""  # why there is no layer; empty if there is one

    @property
    def sentences(self) -> tuple[str, ...]:
        """One sentence for each kind of missed attention."""
        sentences = [self.nothing] if self.nothing else []
        if self.mixing:
            sentences.append(f"Values are mixed by weights of unknown origin in {_listed(self.mixing)}.")
        others = {module: times for module, times in self.softmaxes.items() if module not in self.mixing}
        if others:
            count = sum(others.values())
            what = "1 softmax takes" if count == 1 else f"{count} softmaxes take"
            where = _listed(others)
            sentences.append(f"{what} no product of two activations, in {where}: not attention, or not recognised.")
        if self.modules:
            sentences.append(f"Modules named after attention in which none ran: {_listed(self.modules)}.")
        return tuple(sentences)


def modules_that_never_attended(modules: Mapping[str, nn.Module], layers: Collection[str]) -> tuple[str, ...]:
    """Return the innermost modules with a class named after attention that share no path with a measured layer."""
    named = [(path, module) for path, module in modules.items() if path and ATTENTION.search(type(module).__name__)]
    untouched = [(path, module) for path, module in named if not any(_share_a_path(path, layer) for layer in layers)]
    unseen = [path for path, module in untouched if any(True for _ in module.parameters())]
    return tuple(path for path in unseen if not any(other.startswith(f"{path}.") for other in unseen))


def _share_a_path(path: str, layer: str) -> bool:
    return path == layer or path.startswith(f"{layer}.") or layer.startswith((f"{path}.", f"{path}[", f"{path}#"))


def _listed(names: Iterable[str], most: int = 8) -> str:
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


class QueryKeyNorms:
    """Record which norms of queries and keys, gains and learned scales of a model are used."""

    def __init__(self, modules: Mapping[str, nn.Module], lineage: Lineage) -> None:
        self._lineage = lineage
        self._outputs: dict[str, list[Node]] = {}
        self._used_names: set[str] = set()
        self.built = {name: module for name, module in modules.items() if _is_norm(name, module)}  # by path
        self.parameters = {
            f"{path}.{name}" if path else name: parameter
            for path, module in modules.items()
            for name, parameter in module.named_parameters(recurse=False)
            if (path in self.built and "bias" not in name) or GAIN_OR_SCALE.fullmatch(name.lower())
        }

    def note_output(self, name: str, output: Any) -> None:
        if name in self.built and isinstance(output, Tensor):
            self._outputs.setdefault(name, []).append(self._lineage.node(output))

    @property
    def are_none(self) -> bool:
        return not self.built and not self.parameters

    def note_operands(self, args: Iterable[Any], is_detach: bool) -> None:
        """Record the operands of an operation as used; detaching a norm's output does not use it."""
        for arg in args:
            for item in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(item, Tensor) and (not is_detach or isinstance(item, nn.Parameter)):
                    node = self._lineage.node(item)
                    node.used = True
                    if node.name is not None:
                        self._used_names.add(node.name)

    def unused(self, path: str) -> tuple[str, ...]:
        """Return the unused norms, gains and scales of the attention at this path."""
        own = [name for name in self.built if _belongs(name.rpartition(".")[0], path)]
        norms = [name for name in own if not self._takes_part(name, self.built[name])]
        read = [name for name in own if any(_is_normalised(node) for node in self._outputs.get(name, ()))]
        parameters = (name for name in self.parameters if name.rpartition(".")[0] in (*read, path))
        return (*norms, *(name for name in parameters if not self._is_used(self.parameters[name], name)))

    def misplaced(self, path: str) -> tuple[str, ...]:
        """Return the norms of this attention that normalise the output of one of its own projections."""
        own = (name for name in self.built if _belongs(name.rpartition(".")[0], path))
        return tuple(name for name in own if any(_is_projected_in(path, node) for node in self._outputs.get(name, ())))

    def _takes_part(self, name: str, module: nn.Module) -> bool:
        if name in self._outputs:
            return any(node.used for node in self._outputs[name])
        return any(self._is_used(parameter, f"{name}.{own}") for own, parameter in module.named_parameters())

    def _is_used(self, parameter: Tensor, name: str) -> bool:
        """Return True if a parameter was used; FSDP2 replaces the tensor of this name while a module runs."""
        node = self._lineage.known(parameter)
        return name in self._used_names or (node is not None and node.used)


def _traces(node: Node) -> list[Trace]:
    return follow(node, np.zeros((1, len(node.shape)), dtype=np.int64)) if all(node.shape) else []


def _is_normalised(node: Node) -> bool:
    return any(trace.normalised for trace in _traces(node))


def _is_projected_in(path: str, node: Node) -> bool:
    traces = _traces(node)
    names = (trace.node.projection.weight.whole.name for trace in traces if trace.node.projection is not None)
    return any(name is not None and _belongs(path, name.rpartition(".")[0]) for name in names)


def _is_norm(path: str, module: nn.Module) -> bool:
    name = path.rpartition(".")[2].lower()
    return NORM_OF_QUERY_OR_KEY.fullmatch(name) is not None and not isinstance(module, nn.Identity)


def _belongs(parent: str, path: str) -> bool:
    return not parent or path == parent or path.startswith(f"{parent}.")
