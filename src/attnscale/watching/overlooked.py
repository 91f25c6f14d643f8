"""Overlooked: what ran in a watched model and is in no layer: softmaxes, and modules that call themselves attention."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)


@dataclass
class Overlooked:
    """What was seen and is in no layer."""

    softmaxes: Counter[str] = field(default_factory=Counter)  # by module: not followed to a product of two activations
    mixing: tuple[str, ...] = ()  # modules in which such weights, or exponentials, went on to mix values
    modules: tuple[str, ...] = ()  # named after attention, in which none was seen
    nothing: str = ""  # why there is no layer at all

    @property
    def sentences(self) -> tuple[str, ...]:
        """One each, of what there is to say."""
        told = [self.nothing] if self.nothing else []
        if self.mixing:
            told.append(f"Values are mixed by weights that were not understood, in {_listed(self.mixing)}.")
        others = {module: times for module, times in self.softmaxes.items() if module not in self.mixing}
        if others:
            count = sum(others.values())
            what = "1 softmax takes" if count == 1 else f"{count} softmaxes take"
            told.append(f"{what} no product of two activations, in {_listed(others)}: no attention, or not understood.")
        if self.modules:
            told.append(f"No attention was seen in {_listed(self.modules)}, named after it.")
        return tuple(told)


def unseen_attentions(modules: Mapping[str, nn.Module], layers: Collection[str]) -> tuple[str, ...]:
    """Modules whose class is named after attention, and at, around or inside which none was seen; the innermost."""
    named = [(path, module) for path, module in modules.items() if path and ATTENTION.search(type(module).__name__)]
    untouched = [(path, module) for path, module in named if not any(_touch(path, layer) for layer in layers)]
    unseen = [path for path, module in untouched if any(True for _ in module.parameters())]
    return tuple(path for path in unseen if not any(other.startswith(f"{path}.") for other in unseen))


def _touch(path: str, layer: str) -> bool:
    return path == layer or path.startswith(f"{layer}.") or layer.startswith((f"{path}.", f"{path}[", f"{path}#"))


def _listed(names: Iterable[str], most: int = 8) -> str:
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
