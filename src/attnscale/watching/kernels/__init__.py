"""Attention computed by a fused kernel: what the arguments of each mean. One library a file, one line a kernel."""

from collections.abc import Callable, Iterator
from typing import Any

from attnscale.tracing.lineage import Ledger
from attnscale.watching.kernels import fast_path, flash, flex, sdpa
from attnscale.watching.kernels.heads_in_batch import with_heads_on_their_axis
from attnscale.watching.kernels.kernel_call import KernelCall

__all__ = ["KernelCall", "is_kernel", "kernel_calls"]

Reader = Callable[[Ledger, dict[str, Any]], Iterator[KernelCall]]

# By the name of an operation; what begins with one that ends in a star is meant too.
READERS: dict[str, Reader] = {
    "aten::_scaled_dot_product_*": sdpa.sdpa,
    "attnscale::attention_rows": sdpa.sdpa,
    "attnscale::one_pass": sdpa.one_pass,
    "aten::_native_multi_head_attention": fast_path.multi_head_attention,
    "aten::_transformer_encoder_layer_fwd": fast_path.encoder_layer,
    "flash_attn::_flash_attn_forward": flash.flash,
    "flash_attn::_flash_attn_varlen_forward": flash.flash_varlen,
    "torch_attn::_varlen_attn": flash.varlen,
    "aten::_flash_attention_forward": flash.varlen,
    "aten::_efficient_attention_forward": flash.efficient,
    "flex_attention": flex.flex,
}
# Of operations that have no schema to tell the names of their arguments.
ARGUMENTS = {"flex_attention": flex.ARGUMENTS}


def is_kernel(name: str) -> bool:
    """Whether an operation is an attention kernel."""
    return _reader(name) is not None


def kernel_calls(ledger: Ledger, name: str, given: dict[str, Any]) -> Iterator[KernelCall]:
    """The attentions that a call of a kernel computes; `given` are its arguments and results by name."""
    reader = _reader(name)
    return iter(()) if reader is None else map(with_heads_on_their_axis, reader(ledger, given))


def _reader(name: str) -> Reader | None:
    begun = (reader for known, reader in READERS.items() if known.endswith("*") and name.startswith(known[:-1]))
    return READERS.get(name) or next(begun, None)
