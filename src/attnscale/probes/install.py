"""Definition of probe ops, and installation of probes in a module, by giving the module a probed class.

Dynamo guards on the class, so a compiled model has a second graph for the probed class and switches between both
without recompilation. The probed forward calls the plain one between two marker functions, which Dynamo puts into the
graph unchanged. When autograd and the compiler trace the graph, attention calls between the markers are intercepted.
"""

import copyreg
from collections.abc import Callable, Sequence
from functools import cache, partial, update_wrapper
from typing import Any, Protocol

import torch
from torch import nn

from attnscale.probes.intercept import FRAMES, Frame, ProbeTensors
from attnscale.torch_internals import is_exporting, is_fake

PREFIX = "_attnscale_"
FALLBACK = "fallback"  # kind of probe that runs the module uncompiled under the tracer
LIBRARY = torch.library.Library("attnscale", "FRAGMENT")


def define_op(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> Any:
    """Define the op `attnscale::<schema>` and return it; torch.library.custom_op has twice the overhead on the host."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=tuple(tags))
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attnscale::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.attnscale, name).default


def no_result(*_: Any) -> None:
    """Stand in for an op that returns nothing."""


class ModuleTracer(Protocol):
    """Traces a module in which no probe can be installed."""

    def run(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """Trace one run of the module."""
        ...


def install(module: nn.Module, kind: str, tensors: "ProbeTensors | ModuleTracer", layouts: str | None = None) -> str:
    """Install a probe; return the name to pass to remove().

    `layouts` comes from layouts_of() for the module's planned calls; None keeps the present layouts.
    """
    names = _names(module)
    layouts = getattr(type(module), "_attnscale_layouts", "") if layouts is None else layouts
    name = next(f"{kind}{number}" for number in range(len(names) + 1) if f"{kind}{number}" not in names)
    module.__dict__[PREFIX + name] = tensors
    _set_probes(module, (*names, name), layouts)
    return name


def remove(module: nn.Module, name: str) -> None:
    """Remove a probe."""
    layouts = getattr(type(module), "_attnscale_layouts", "")
    _set_probes(module, tuple(each for each in _names(module) if each != name), layouts)
    module.__dict__.pop(PREFIX + name, None)


def can_install(module: nn.Module) -> bool:
    """Return True if the module's forward was not replaced and it has a __dict__."""
    return "forward" not in vars(module) and hasattr(module, "__dict__")


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without probes."""
    plain: type[nn.Module] = getattr(type(module), "_attnscale_plain", type(module))
    return plain


def _names(module: nn.Module) -> tuple[str, ...]:
    return getattr(type(module), "_attnscale_probes", ())


def _set_probes(module: nn.Module, names: tuple[str, ...], layouts: str) -> None:
    own = type(module)
    if "_attnscale_plain" in vars(own):
        own = vars(own)["_attnscale_plain"]
    elif _names(module):
        return  # its class was changed after installation; a probe without tensors does nothing
    probed = _probed_class(own, names, layouts) if names else own  # type: ignore[arg-type]
    object.__setattr__(module, "__class__", probed)  # nn.Module.__setattr__ is several times slower


def enter_in_graph(names: str, layouts: str, *tensors: ProbeTensors) -> None:
    """Mark the beginning of a module's run in a traced graph."""
    if not _is_dynamo_asking(tensors):
        FRAMES.enter(Frame(names, layouts, tensors, is_traced=True))


def exit_in_graph(*tensors: ProbeTensors) -> None:
    """Mark the end of a module's run in a traced graph."""
    if not _is_dynamo_asking(tensors) and FRAMES.innermost is not None:
        FRAMES.exit()


def _is_dynamo_asking(tensors: tuple[ProbeTensors, ...]) -> bool:
    """Return True if Dynamo runs a marker only to infer shapes."""
    first = tensors[0][0] if isinstance(tensors[0], tuple) else tensors[0]
    return is_fake((type(first),))


def close_frames() -> None:
    """Close frames that an error during tracing left open."""
    while FRAMES.innermost is not None:
        FRAMES.exit()


@cache
def _allow_in_graphs() -> None:
    for bracket in (enter_in_graph, exit_in_graph):
        torch.fx.node.has_side_effect(bracket)
        torch.compiler.allow_in_graph(bracket)  # imports Dynamo, which takes a second


def _run_uncompiled(
    module: nn.Module, tracers: tuple[str, ...], forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Run a module under its nested tracers."""
    call = partial(forward, module, *args, **kwargs)
    for name in tracers:
        tracer = module.__dict__.get(name)
        call = call if tracer is None else partial(tracer.run, module, call)
    return call()


def _is_written_down() -> bool:
    """Return True if the model is being exported; the exported program must not contain probes."""
    return is_exporting() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def new_plain(kind: type, *args: Any) -> Any:
    """Create an object like copyreg.__newobj__, which pickle accepts only with the object's own class."""
    return kind.__new__(kind, *args)


@cache
def _probed_class(plain: type[nn.Module], names: tuple[str, ...], layouts: str) -> type[nn.Module]:
    """Return a subclass that runs the plain forward between two markers; copies and pickles have the plain class."""
    _allow_in_graphs()
    probes = [name for name in names if not name.startswith(FALLBACK)]
    joined, attributes = " ".join(probes), tuple(PREFIX + name for name in probes)
    tracers = tuple(PREFIX + name for name in names if name.startswith(FALLBACK))
    run_uncompiled = torch.compiler.disable(_run_uncompiled) if tracers else None

    has_slots = plain.__basicsize__ != nn.Module.__basicsize__  # __bases__ needs an equal memory layout
    root: Any = plain if has_slots else nn.Module

    class Probed(root, metaclass=type(plain)):  # type: ignore[misc, metaclass]
        _attnscale_plain, _attnscale_probes, _attnscale_layouts = plain, names, layouts

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not (self.training or torch.is_grad_enabled()) or _is_written_down():
                return plain.forward(self, *args, **kwargs)
            if run_uncompiled is not None:
                return run_uncompiled(self, tracers, plain.forward, args, kwargs)
            tensors: list[Any] = [getattr(self, name, None) for name in attributes]
            if any(each is None for each in tensors):
                return plain.forward(self, *args, **kwargs)
            if torch.compiler.is_dynamo_compiling():
                enter_in_graph(joined, layouts, *tensors)
                output = plain.forward(self, *args, **kwargs)
                exit_in_graph(*tensors)
                return output
            FRAMES.enter(Frame(joined, layouts, tuple(tensors), is_traced=False))
            try:
                return plain.forward(self, *args, **kwargs)
            finally:
                FRAMES.exit()

        def __reduce_ex__(self, protocol: Any) -> Any:
            make, given, state, *rest = super().__reduce_ex__(protocol)
            state = {key: value for key, value in state.items() if not key.startswith(PREFIX)}
            make = new_plain if make is copyreg.__newobj__ else make  # type: ignore[attr-defined]
            return make, tuple(plain if each is type(self) else each for each in given), state, *rest

    update_wrapper(Probed.forward, plain.forward, assigned=(), updated=())  # for inspect.signature
    Probed.__bases__ = (plain,)  # set late to skip __init_subclass__
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Probed, name, getattr(plain, name))
    return Probed
