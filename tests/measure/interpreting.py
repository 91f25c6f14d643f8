"""Triton's interpreter, in which the kernels run where there is no GPU: chosen before triton is imported."""

import importlib.util
import os
import sys

import pytest
import torch


def _unfit():
    if importlib.util.find_spec("triton") is None:
        return "needs triton"
    if torch.cuda.is_available():  # the interpreter is for the whole process: it would take the GPU tests' kernels too
        return "the kernels run on the GPU, in test_ops.py"
    if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
        return "triton was imported before its interpreter was chosen"
    return None


UNFIT = _unfit()  # why nothing can be interpreted in this process
if UNFIT is None:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def mended_interpreter(monkeypatch):
    """Loops over tensors, and a language that is patched once a launch."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", _with_indices(interpreter._patch_lang_tensor))
    monkeypatch.setattr(interpreter, "_patch_lang", _once_a_launch(interpreter))


def _with_indices(patch):
    """NumPy 2.4 no longer converts arrays of one element, which is what triton 3.6 asks of it for a loop's bounds."""

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    return patched


def _once_a_launch(interpreter):
    """Of each module a kernel's functions come from; triton does it at every call of one, two fifths of the time."""
    patch, done = interpreter._patch_lang, set()

    def patched(function):
        if function.__module__ in done:
            return interpreter._LangPatchScope()
        scope, is_launch = patch(function), not done
        done.add(function.__module__)
        if is_launch:
            undo = scope.restore
            scope.restore = lambda: (done.clear(), undo())
        return scope

    return patched
