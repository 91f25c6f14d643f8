"""Parameters that a model does not compute with as they are: whether a factor on them is one on what is made of them.

A weight norm's gain passes every factor on. A weight that is divided by its own spectral norm takes it back.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy, deepcopy

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from attnscale.acting.writing import is_sharded
from attnscale.tracing.parameters import Source

Make = Callable[[Sequence[Tensor]], Tensor]  # of values for some parameters, what the model computes with
TRIED = (0.5, 0.25)  # on one row and on the next; powers of two, by which nothing is rounded
ROUNDINGS = 8  # of the dtype, that what is made may have


@torch.no_grad()
def why_not_multiplied(model: nn.Module, sources: Iterable[Source]) -> str | None:
    """Why rows of parameters, multiplied, would not multiply what the model makes of them; None where they do.

    That is tried, on copies: nothing of the model is changed.
    """
    for make, found in _made_together(model, {source.parameter: source for source in sources}):
        names = " and ".join(source.parameter for source in found)
        values = [model.get_parameter(source.parameter).detach() for source in found]
        if any(map(is_sharded, values)):
            return f"what is made of {names}, which is sharded, cannot be tried"
        try:
            tried = make([_multiplied(*each) for each in zip(values, found, strict=True)])
            is_multiple = _is_multiple(tried + found[0].offset, make(values) + found[0].offset)
        except Exception as error:  # in somebody's code
            return f"what is made of {names} cannot be tried: {type(error).__name__}: {error}"
        if not is_multiple:
            return f"what is made of {names} is no multiple of it"
    return None


def _made_together(model: nn.Module, sources: dict[str, Source]) -> Iterator[tuple[Make, list[Source]]]:
    """What is not computed with as it is: parameters from which one tensor is made, and how."""
    together: dict[str, list[Source]] = {}
    for name, source in sources.items():
        before, behind_one, rest = name.rpartition("parametrizations.")
        path, _, last = name.rpartition(".")
        owner = f"{before}{behind_one}{rest.partition('.')[0]}"
        if behind_one and isinstance(model.get_submodule(owner), ParametrizationList):
            together.setdefault(owner, []).append(source)
        elif (make := _hooked(model.get_submodule(path), last)) is not None:
            yield make, [source]
    for owner, found in together.items():
        names = [source.parameter.removeprefix(f"{owner}.") for source in found]
        yield _parametrized(model.get_submodule(owner), names), found


def _parametrized(owner: nn.Module, names: Sequence[str]) -> Make:
    """What torch.nn.utils.parametrize makes, by a copy: in evaluation, where no power iteration goes on."""
    copied = deepcopy(owner).eval()

    def make(values: Sequence[Tensor]) -> Tensor:
        for name, each in zip(names, values, strict=True):
            copied.get_parameter(name).copy_(each)
        result: Tensor = copied().clone()
        return result

    return make


def _hooked(owner: nn.Module, name: str) -> Make | None:
    """What a hook of torch's older functions, as torch.nn.utils.spectral_norm, makes before a forward."""
    hooks = [hook for hook in owner._forward_pre_hooks.values() if name == f"{getattr(hook, 'name', '')}_orig"]
    if not hooks:
        return None
    copied = copy(owner)  # not deep: what a hook left is no leaf, and refuses that
    vars(copied).update(training=False, _parameters=dict(owner._parameters), _buffers=deepcopy(owner._buffers))

    def make(values: Sequence[Tensor]) -> Tensor:
        copied._parameters[name] = nn.Parameter(values[0])
        hooks[0](copied, ())
        result: Tensor = getattr(copied, name.removesuffix("_orig"))
        return result

    return make


def _multiplied(values: Tensor, source: Source) -> Tensor:
    """Each row by another factor than the one before it."""
    sizes = [1 if axis in source.across else size for axis, size in enumerate(values.shape)]
    factors = torch.tensor(TRIED, dtype=values.dtype, device=values.device)
    rows = torch.arange(torch.Size(sizes).numel(), device=values.device).view(sizes)
    return (values + source.offset) * factors[rows % 2] - source.offset


def _is_multiple(tried: Tensor, made: Tensor) -> bool:
    """Whether every element took one of the factors."""
    ratio, rounding = (tried / made)[made != 0], ROUNDINGS * torch.finfo(made.dtype).eps
    near = [(ratio / factor - 1).abs() <= rounding for factor in TRIED]
    return bool((near[0] | near[1]).all())
