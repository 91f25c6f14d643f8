"""Modules that never ran while their model was followed, and may attend: whether one runs after all, unseen.

A tower that another kind of batch needs, a layer that was dropped. Each carries a count of its runs, in the host's
memory, so that no device is waited for to read it.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from attnscale.inside.frames import LOOKS, Look
from attnscale.inside.placing import can_be_placed, place, plain_class, take_away

LOOK = "unseen"


@torch.library.custom_op("attnscale::noted_run", mutates_args=("runs",), tags=(torch.Tag.cudagraph_unsafe,))
def noted_run(runs: Tensor) -> None:
    """Count a run of a module, inside a compiled graph."""
    runs += 1


@noted_run.register_fake
def _(_: Tensor) -> None:
    return None


def _begins(runs: Tensor, is_traced: bool) -> None:
    if is_traced and type(runs) is not Tensor:
        noted_run(runs)
    else:
        runs.data.add_(1)


LOOKS[LOOK] = Look(lambda given, *_: given, lambda *_: None, _begins)


class Unseen:
    """Counts the runs of modules, until they are left."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._runs = {path: torch.tensor([0]) for path in modules}
        self._stack = ExitStack()
        for path, module in modules.items():
            self._stack.callback(take_away, module, place(module, LOOK, self._runs[path]))

    def ran_since(self) -> set[str]:
        """Paths of those that ran since this was last asked."""
        found = {path for path, runs in self._runs.items() if int(runs)}
        for path in found:
            self._runs[path].zero_()
        return found

    def leave(self) -> None:
        """Count no more."""
        self._stack.close()


def that_may_attend(
    modules: Mapping[str, nn.Module], called: Collection[str], attending: Collection[str]
) -> dict[str, nn.Module]:
    """Modules that did not run, nor anything in them; not where others of their class ran, and did not attend."""
    above = {parent for path in called for parent in _parents(path)}
    holders = {parent for path in attending for parent in (path, *_parents(path))}
    ran, attended = ({plain_class(modules[path]) for path in some if path in modules} for some in (called, holders))
    return {
        path: module
        for path, module in modules.items()
        if path not in called and path not in above and plain_class(module) not in ran - attended
        if _may_attend(module)
    }


def _parents(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(len(parts)))


def _may_attend(module: nn.Module) -> bool:
    """Not torch's own layers that hold no others."""
    is_torch_own = plain_class(module).__module__.startswith("torch.nn.")
    return can_be_placed(module) and (not is_torch_own or any(module.children()))
