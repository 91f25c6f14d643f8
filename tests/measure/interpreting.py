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
def loops_over_tensors(monkeypatch):
    """NumPy 2.4 no longer converts arrays of one element, which is what triton 3.6 asks of it for a loop's bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
