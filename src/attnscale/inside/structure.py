"""The modules of a model as they were when it was followed: where one was replaced since, what is known is stale."""

import weakref

from torch import nn


class Structure:
    """Remembers which modules a model holds, and keeps none of them alive."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [weakref.ref(module) for module in model.modules()]

    def is_that_of(self, model: nn.Module) -> bool:
        """Whether the model holds the same modules in the same order."""
        modules = list(model.modules())
        if len(modules) != len(self._modules):
            return False
        return all(known() is module for known, module in zip(self._modules, modules, strict=True))
