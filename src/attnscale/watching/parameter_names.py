"""Parameters of a model -> their names."""

import weakref

from torch import Tensor, nn

from attnscale.torch_internals import local_part


class ParameterNames:
    """Parameters of a model -> their names; under FSDP2 a running module holds others than one at rest."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._has_parts = model, False
        self._known: dict[int, tuple[Tensor, str]] = {}  # asked for when the first is met
        self._others: dict[int, weakref.ref[Tensor]] = {}  # tensors that were looked for and are none

    def _now(self) -> dict[int, tuple[Tensor, str]]:
        named = list(reversed(list(self._model.named_parameters(remove_duplicate=False))))
        # a rank that holds some heads of a layer multiplies by its own part of the parameter
        local = [(name, part) for name, parameter in named if (part := local_part(parameter)) is not None]
        self._has_parts |= bool(local)
        return {id(tensor): (tensor, name) for name, tensor in [*local, *named]}

    def __call__(self, tensor: Tensor) -> str | None:
        """The name, the first of several; None for what is no parameter of the model."""
        if not self._known or (id(tensor) not in self._known and self._may_be_one(tensor)):
            self._known = self._now() | self._known
            if id(tensor) not in self._known and self._has_parts:
                self._others[id(tensor)] = weakref.ref(tensor)
        return self._known.get(id(tensor), (tensor, None))[1]

    def _may_be_one(self, tensor: Tensor) -> bool:
        """Whether to look again: also for a plain tensor where parameters have local parts, which FSDP2 makes anew."""
        if isinstance(tensor, nn.Parameter) or not self._has_parts:
            return isinstance(tensor, nn.Parameter)
        refused = self._others.get(id(tensor))
        return tensor.is_leaf and (refused is None or refused() is not tensor)
