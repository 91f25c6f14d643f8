"""The modules of a model as they were when it was followed: where one was replaced since, what is known is stale."""

import weakref

from torch import nn

from attnscale.torch_internals import held_by

Known = weakref.ref[nn.Module] | None  # None: a name that stands for no module


class Structure:
    """Remembers which modules a model holds, each with those it holds itself, and keeps none of them alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._modules = [(weakref.ref(module), list(map(_known, held_by(module)))) for module in model.modules()]

    def is_that_of(self, model: nn.Module) -> bool:
        """Whether the model holds the same modules in the same order; asked at every step, of modules in hundreds."""
        return self._model() is model and all(_holds(known(), those) for known, those in self._modules)


def _known(module: nn.Module | None) -> Known:
    return None if module is None else weakref.ref(module)


def _holds(module: nn.Module | None, those: list[Known]) -> bool:
    if module is None:
        return False
    held = held_by(module)
    if len(held) != len(those):
        return False
    for each, known in zip(held, those, strict=True):
        if each is not (None if known is None else known()) or (each is None) != (known is None):
            return False
    return True
