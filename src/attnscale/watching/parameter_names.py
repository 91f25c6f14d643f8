"""Parameters of a model -> their names."""

from torch import Tensor, nn

from attnscale.torch_internals import local_part


class ParameterNames:
    """Parameters of a model -> their names; under FSDP2 a running module holds others than one at rest."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[int, tuple[Tensor, str]] = {}  # asked for when the first is met

    def _now(self) -> dict[int, tuple[Tensor, str]]:
        named = list(reversed(list(self._model.named_parameters(remove_duplicate=False))))
        # a rank that holds some heads of a layer multiplies by its own part of the parameter
        local = [(name, part) for name, parameter in named if (part := local_part(parameter)) is not None]
        return {id(tensor): (tensor, name) for name, tensor in [*local, *named]}

    def __call__(self, tensor: Tensor) -> str | None:
        """The name, the first of several; None for what is no parameter of the model."""
        if not self._known or (isinstance(tensor, nn.Parameter) and id(tensor) not in self._known):
            self._known = self._now() | self._known
        return self._known.get(id(tensor), (tensor, None))[1]
