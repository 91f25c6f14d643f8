"""Placing a look at a module: for as long as it is there the module has a class of its own, which Dynamo guards on."""

import copyreg
from collections.abc import Callable
from functools import cache, partial, update_wrapper
from typing import Any, Protocol

import torch
from torch import nn

from attnscale.inside import marks
from attnscale.inside.frames import KERNEL, Carried
from attnscale.torch_internals import is_exporting

PREFIX = "_attnscale_"
APART = "apart"  # in the name of a look that follows the module from outside


class Follower(Protocol):
    """What follows modules that run apart."""

    def run(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """Follow one run of it."""
        ...


def place(module: nn.Module, look: str, carried: "Carried | Follower", layouts: str | None = None) -> str:
    """Look at what a module attends with from now on; the name by which it is taken away again.

    `layouts` are those of its attentions that are written out, as frames take them; None leaves what others know.
    """
    names = _names(module)
    layouts = getattr(type(module), "_attnscale_layouts", KERNEL) if layouts is None else layouts
    number = next(number for number in range(len(names) + 1) if f"{look}{number}" not in names)
    name = f"{look}{number}"
    module.__dict__[PREFIX + name] = carried
    _change(module, (*names, name), layouts)
    return name


def take_away(module: nn.Module, name: str) -> None:
    """Look no more."""
    layouts = getattr(type(module), "_attnscale_layouts", "")
    _change(module, tuple(each for each in _names(module) if each != name), layouts)
    module.__dict__.pop(PREFIX + name, None)


def can_be_placed(module: nn.Module) -> bool:
    """Whether its class says what it does: not where its forward was replaced, nor where it has no room for a look."""
    return "forward" not in vars(module) and hasattr(module, "__dict__")


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Its class where nobody looks at it."""
    plain: type[nn.Module] = getattr(type(module), "_attnscale_plain", type(module))
    return plain


def _names(module: nn.Module) -> tuple[str, ...]:
    return getattr(type(module), "_attnscale_looks", ())


def _change(module: nn.Module, names: tuple[str, ...], layouts: str) -> None:
    own = type(module)
    if "_attnscale_plain" in vars(own):
        own = vars(own)["_attnscale_plain"]
    elif _names(module):
        return  # wrapped since in another class of its own; a look that carries nothing does nothing
    module.__class__ = looked_at(own, names, layouts) if names else own  # type: ignore[arg-type]


def _attribute(name: str) -> str:
    return PREFIX + name


def _run_apart(
    module: nn.Module, following: tuple[str, ...], forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run a module uncompiled, each of its followers around the next."""
    call = partial(forward, module, *args, **kwargs)
    for name in following:
        follower = module.__dict__.get(name)
        call = call if follower is None else partial(follower.run, module, call)
    return call()


def _is_written_down() -> bool:
    """Whether what runs becomes a program, which must not know of looks."""
    return is_exporting() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def new(kind: type, *args: Any) -> Any:
    """What copyreg.__newobj__ makes, which pickle takes for objects of its class alone."""
    return kind.__new__(kind, *args)


@cache
def looked_at(plain: type[nn.Module], names: tuple[str, ...], layouts: str) -> type[nn.Module]:
    """A class of modules that do the same between two marks; copies and pickles are of the plain one."""
    marks.stand_in_graphs()
    looks, followers = ([name for name in names if name.startswith(APART) == is_apart] for is_apart in (False, True))
    joined, attributes, following = " ".join(looks), tuple(map(_attribute, looks)), tuple(map(_attribute, followers))
    run_apart = torch.compiler.disable(_run_apart) if followers else None

    has_slots = plain.__basicsize__ != nn.Module.__basicsize__  # bases of another layout cannot be set later
    root: Any = plain if has_slots else nn.Module

    class LookedAt(root, metaclass=type(plain)):  # type: ignore[misc, metaclass]
        _attnscale_plain, _attnscale_looks, _attnscale_layouts = plain, names, layouts

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not (self.training or torch.is_grad_enabled()) or _is_written_down():
                return plain.forward(self, *args, **kwargs)
            if run_apart is not None:
                return run_apart(self, following, plain.forward, args, kwargs)
            carried: list[Any] = [getattr(self, name, None) for name in attributes]
            if any(each is None for each in carried):
                return plain.forward(self, *args, **kwargs)
            if torch.compiler.is_dynamo_compiling():
                marks.begin_in_graph(joined, layouts, *carried)
                output = plain.forward(self, *args, **kwargs)
                marks.end_in_graph(*carried)
                return output
            marks.begin(joined, layouts, *carried)
            try:
                return plain.forward(self, *args, **kwargs)
            finally:
                marks.end()

        def __reduce_ex__(self, protocol: Any) -> Any:
            make, given, state, *rest = super().__reduce_ex__(protocol)
            state = {key: value for key, value in state.items() if not key.startswith(PREFIX)}
            make = new if make is copyreg.__newobj__ else make  # type: ignore[attr-defined]
            return make, tuple(plain if each is type(self) else each for each in given), state, *rest

    update_wrapper(LookedAt.forward, plain.forward, assigned=(), updated=())  # for whoever asks for its arguments
    LookedAt.__bases__ = (plain,)  # set later, so that its __init_subclass__, which may keep a register, is not called
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(LookedAt, name, getattr(plain, name))
    return LookedAt
