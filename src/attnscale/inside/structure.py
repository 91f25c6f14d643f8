"""The modules of a model as they were when it was followed: where one was replaced since, what is known is stale."""

import operator
import weakref
from itertools import chain

from torch import nn

from attnscale.torch_internals import held_by


class Structure:
    """Remembers which modules a model holds, and each of them itself, and keeps none of them alive."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        held = list(map(held_by, modules))
        number = {id(None): len(modules)} | {id(module): number for number, module in enumerate(modules)}
        self._modules = [weakref.ref(module) for module in modules]
        self._counts = list(map(len, held))
        self._held = [number[id(module)] for module in chain.from_iterable(held)]  # of all, one behind the other

    def is_that_of(self, model: nn.Module) -> bool:
        """Whether the model holds the same modules in the same order; asked at every step, so whole lists at once."""
        modules = [known() for known in self._modules]
        if modules[0] is not model:
            return False
        held = [held_by(module) for module in modules if module is not None]
        if list(map(len, held)) != self._counts:
            return False
        by_number = [*modules, None]
        expected = (by_number[number] for number in self._held)
        return all(map(operator.is_, chain.from_iterable(held), expected))
