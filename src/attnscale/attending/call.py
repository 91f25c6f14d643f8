"""One attention in the form that kernels expect: four-dimensional tensors and a scale that is a float."""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.rules.rule import Scaled
from attnscale.shapes import broadcast
from attnscale.visibility import Visibility

CUDA_ALIGNMENT = 8  # CUDA kernels require head dimensions that are multiples of this
WIDEST_HEAD = 256  # largest head dimension for flash attention and for grouped queries
ALMOST_ZERO = 1e-30  # replaces a scale of zero: every score rounds to the same weight


@dataclass(frozen=True)
class Call:
    """An attention to run; query (batch, heads, q_len, head_dim), key and value (batch, kv_heads, kv_len, …)."""

    query: Tensor
    key: Tensor
    value: Tensor
    visibility: Visibility  # with a mask of shape (batch or 1, heads or 1, q_len or 1, kv_len)
    dropout_p: float
    scale: float
    softcap: float | None
    sinks: Tensor | None = None  # (heads,), one logit per head that joins the denominator of each row

    @property
    def group(self) -> int:
        """Number of query heads that share a key head."""
        return self.query.shape[1] // max(self.key.shape[1], 1)

    @property
    def grouped(self) -> bool:
        """True if query heads share key heads; a plain boolean, since torch's kernels refuse a symbolic one."""
        if self.group > 1:  # noqa: SIM103  # the branch turns a symbolic boolean into a plain one
            return True
        return False

    @property
    def mask_learns(self) -> bool:
        """True if a gradient must reach the mask."""
        mask = self.visibility.mask
        return mask is not None and mask.requires_grad and torch.is_grad_enabled()


def folded_call(
    scaled: Scaled,
    value: Tensor,
    visibility: Visibility,
    enable_gqa: bool,
    softcap: float | None,
    dropout_p: float,
    sinks: Tensor | None,
) -> Call:
    """Return an attention in the form that kernels expect, from query, key and scale as a rule returns them."""
    query, key, scale = scaled
    if scale <= 0.0 and not (visibility.last is None and visibility.first is None):
        # Torch's fused kernels set scores that are hidden by position to −∞ before they scale: a scale of zero gives
        # NaN, and a negative scale turns them into +∞.
        query, scale = (query, ALMOST_ZERO) if scale == 0.0 else (query * -1.0, -scale)
    return Call(*fold(query, key, value, visibility, enable_gqa), dropout_p, scale, softcap, sinks)


def fold(
    query: Tensor, key: Tensor, value: Tensor, visibility: Visibility, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Visibility]:
    """Fold all leading dimensions into one batch; torch's kernels are fused for four dimensions only."""
    query, key, value = (tensor if tensor.dim() > 2 else tensor.unsqueeze(0) for tensor in (query, key, value))
    lead = broadcast(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = [query.shape[-3], key.shape[-3], value.shape[-3]]
    if not enable_gqa:
        heads = list(broadcast(query.shape[-3:-2], key.shape[-3:-2], value.shape[-3:-2])) * 3
    elif heads[1] != heads[2]:  # no kernel supports groups of two sizes: repeat keys and values for every query head
        key, value = key.repeat_interleave(heads[0] // heads[1], -3), value.repeat_interleave(heads[0] // heads[2], -3)
        heads = [heads[0]] * 3
    query, key, value = (
        _fold_lead(tensor, lead, count) for tensor, count in zip((query, key, value), heads, strict=True)
    )
    if visibility.mask is not None:
        visibility = replace(visibility, mask=_fold_mask(visibility.mask, lead, key.shape[-2]))
    if visibility.documents is not None:
        rows, keys = (_fold_documents(ids, lead) for ids in visibility.documents)
        visibility = replace(visibility, documents=(rows, keys))
    return query, key, value, visibility


def _fold_lead(tensor: Tensor, lead: torch.Size, heads: int) -> Tensor:
    if tensor.dim() == 4 and tensor.shape[:2] == (*lead, heads):
        return tensor
    return tensor.expand(*lead, heads, *tensor.shape[-2:]).reshape(math.prod(lead), heads, *tensor.shape[-2:])


def _fold_mask(attn_mask: Tensor, lead: torch.Size, kv_len: int) -> Tensor:
    if attn_mask.dim() < 3:
        attn_mask = attn_mask.unsqueeze(0)
    if attn_mask.shape[-1] != kv_len:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], kv_len)
    block = attn_mask.shape[-3:]
    if math.prod(attn_mask.shape[:-3]) == 1:
        return attn_mask.reshape(1, *block)
    return attn_mask.expand(*lead, *block).reshape(math.prod(lead), *block)


def _fold_documents(ids: Tensor, lead: torch.Size) -> Tensor:
    if math.prod(ids.shape[:-1]) == 1:
        return ids.reshape(-1)
    return ids if ids.dim() == 2 and len(lead) == 1 else ids.expand(*lead, -1).reshape(math.prod(lead), ids.shape[-1])


def aligned_width(tensor: Tensor) -> int:
    """Return the head dimension, rounded up to what the kernels of the tensor's device require."""
    width = tensor.shape[-1]
    return -(-width // CUDA_ALIGNMENT) * CUDA_ALIGNMENT if tensor.device.type == "cuda" else width


def padded(tensor: Tensor, width: int) -> Tensor:
    """Pad the tensor with zeros to this head dimension, which changes no dot product."""
    return tensor if tensor.shape[-1] == width else F.pad(tensor, (0, width - tensor.shape[-1]))
