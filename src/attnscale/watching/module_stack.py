"""ModuleStack: the running modules of a model, and the line of model code behind an operation."""

import dis
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from attnscale.torch_internals import called_module, calls_compiled, refuses_breaks

# Frames in these files are skipped to find the line in the model's own code.
OWN = Path(__file__).parent.parent
Line = tuple[str, int] | None  # file and line number; None if only library code ran
LIBRARIES = (
    *(str(OWN / file) for file in ("operator.py", "numerics.py")),
    *(
        str(room) + os.sep
        for room in (
            Path(torch.__file__).parent,
            *(OWN / room for room in ("attending", "measure", "watching", "tracing", "probes")),
        )
    ),
)


class ModuleStack:
    """The modules of a model that run now or ran before, on the thread that attached this stack.

    Other threads that run the model at the same time, such as an evaluation, are not followed.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        ran: Callable[[str, Any], None],
        meanwhile: AbstractContextManager[Any],
        only_training: bool = False,
    ) -> None:
        """Follow `modules`, given by path.

        `meanwhile` is entered and exited with the outermost module, so that it nests like any other mode.
        """
        self._root = type(modules[""]).__name__
        self._ran, self._meanwhile, self._only_training = ran, meanwhile, only_training
        self._names = {id(module): name for name, module in modules.items()}
        self._entered = 0  # stack length when `meanwhile` was entered; 0 if it was not
        self.stack: list[str] = []
        self.called: set[str] = set()
        self._entries: Counter[str] = Counter()  # runs of each module in this run of the outermost
        self._handles: list[RemovableHandle] = []
        self._own = threading.local()  # `here` is set on the attaching thread; thread ids are reused
        self.ran_elsewhere = False  # a module ran on another thread
        self.is_over = False

    @property
    def is_here(self) -> bool:
        """True on the thread whose modules are followed."""
        return getattr(self._own, "here", False)

    @property
    def innermost(self) -> str:
        return self.stack[-1]

    def depth(self, path: str) -> int:
        """Return how often this module ran before in this run of the outermost: 11 in ALBERT's last layer."""
        return max(0, self._entries[path] - 1)

    def display_name(self, path: str) -> str:
        """Return a module path as it is shown: the model itself by its class."""
        return path or self._root

    def line_within(self, path: str) -> Line:
        """Return the line of code inside the module at this path that led here; None if it is all torch's own code.

        Lines distinguish attentions of one module. A line outside the module would distinguish its callers instead.
        """
        frame, line = sys._getframe(1), None
        while frame.f_back is not None:
            module = called_module(frame)
            if module is not None and self._names.get(id(module)) == path:
                break
            if line is None and not frame.f_code.co_filename.startswith(LIBRARIES):
                line = (frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back
        return line

    def compiled(self) -> tuple[bool, bool]:
        """Return two flags: the innermost module runs in compiled code, and a graph break there is not allowed.

        A break is not allowed under fullgraph or in a loop: Dynamo would then never compile that function again.
        """
        frame: FrameType | None = sys._getframe(1)
        is_inside = is_compiled = is_pinned = is_looped = False
        while frame is not None:
            module = called_module(frame)
            is_inside |= module is not None and self._names.get(id(module)) == self.stack[-1]
            is_looped |= is_inside and is_in_loop(frame)
            if is_inside and calls_compiled(frame):
                is_compiled, is_pinned = True, is_pinned or is_looped or refuses_breaks(frame)
            frame = frame.f_back
        return is_compiled, is_pinned

    def attach(self) -> None:
        """Start to follow modules on this thread."""
        self._own.here = True
        # global hooks, because hooks on a module disable torch's fast path
        enter, leave = self._enter, self._leave
        self._handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]

    def detach(self) -> None:
        """Stop following modules, even if an interrupt left some on the stack.

        A thread must exit its own modes: if another thread calls this during a run, the end of the run cleans up.
        """
        self.is_over = True
        if self._entered and not self.is_here:
            return
        self.stack.clear()
        self._exit()
        self._unhook()
        self._ran, self._meanwhile = lambda name, output: None, nullcontext()  # break the reference cycle

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def run(self, module: nn.Module, call: Callable[[], Any]) -> Any:
        """Follow one run of a module; hooks exist only during the run."""
        output = None
        self.attach()
        self._enter(module, ())
        try:
            output = call()
        finally:
            self._leave(module, (), output)
            self._unhook()
        return output

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        name = self._names.get(id(module))
        if name is None or self.is_over:
            return
        if not self.is_here:
            self.ran_elsewhere = True
            return
        trains = module.training or torch.is_grad_enabled()  # checkpointing runs forwards without gradients
        if self.stack or trains or not self._only_training:
            if not self.stack:
                self._entries.clear()
            self._entries[name] += 1
            self.stack.append(name)
            self.called.add(name)
            if not self._entered:
                self._entered = len(self.stack)
                self._meanwhile.__enter__()

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if name is None or not self.is_here or not self.stack:
            return
        if not self.is_over:
            self._ran(name, output)
        self.stack.pop()
        if len(self.stack) < self._entered:
            self._exit()
            if self.is_over:
                self.detach()

    def _exit(self) -> None:
        if self._entered:
            self._entered = 0
            self._meanwhile.__exit__(None, None, None)


def is_in_loop(frame: FrameType) -> bool:
    """Return True if a frame's current line is inside a loop of its function.

    After a graph break in a loop, Dynamo never compiles that function again.

    >>> import sys
    >>> [is_in_loop(sys._getframe()), *(is_in_loop(sys._getframe()) for _ in range(1))]
    [False, True]
    """
    return any(first <= frame.f_lasti <= last for first, last in _loops(frame.f_code))


@cache
def _loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Return the first and last offset of each loop; a backward jump marks the end."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return tuple(
        (each.argval, each.offset)
        for each in dis.get_instructions(code)
        if each.opcode in jumps and each.argval <= each.offset
    )
