"""Triton's interpreter, in which the kernels run where there is no GPU: chosen before triton is imported."""

import importlib.util
import os
import sys

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)
if torch.cuda.is_available():  # the interpreter is for the whole process: it would take the GPU tests' kernels as well
    pytest.skip("the kernels run on the GPU, in test_ops.py", allow_module_level=True)
if "triton" in sys.modules and "TRITON_INTERPRET" not in os.environ:
    pytest.skip("triton was imported before its interpreter was chosen", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

from attnscale.measure.cuda import triton as kernels

__all__ = ["kernels", "loops_over_tensors"]


@pytest.fixture(autouse=True)
def loops_over_tensors(monkeypatch):
    """NumPy 2.4 no longer converts arrays of one element, which is what triton 3.6 asks of it for a loop's bounds."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
