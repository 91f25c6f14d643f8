"""Kernels that probes launch compile for a GPU, which Triton's interpreter does not show; no GPU is needed for it."""

import importlib.util
import subprocess
import sys

import pytest

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attnscale.measure.cuda import score_matrix
from attnscale.measure.cuda.masked_rows import longest_kernel

def compiled(kernel, constants, types):
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs={(kernel.arg_names.index(k),): v for k, v in constants.items()})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))

for scores in ("*bf16", "*fp32"):
    for is_special in (False, True):
        types = {"scores_at": scores, "rows_at": "*i32", "left_out_at": "*u8", "sums_at": "*fp32"}
        compiled(score_matrix.matrix_kernel, {"LEAVES_OUT": is_special, "TILE": 256}, types)
        operands = {name: "*bf16" for name in ("query_at", "key_at")} | {"positions_at": "*i64"}
        numbers = {name: "*fp64" for name in ("multiplier_at", "stated_at", "scales_at")}
        types = {"scores_at": scores, "softcap": "fp32", "disagreement": "fp32"} | operands | numbers
        sizes = {"ROWS": 4, "HEAD_DIM": 24, "WIDTH": 32, "TILE": 64, "CAPPED": is_special}
        compiled(score_matrix.slope_kernel, sizes, types)
    types = {"key_at": scores, "longest_at": "*fp32"}
    compiled(longest_kernel, {"HEAD_DIM": 24, "WIDTH": 32, "TILE": 64}, types)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_of_probes_compile_for_a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    subprocess.run([sys.executable, "-c", COMPILE], check=True)
