"""The largest score of each head that passes a limit, prepared once for a layout: the probe of QKClip on a GPU."""
# mypy: disable-error-code="import-untyped"

from functools import lru_cache

import torch
from torch import Tensor

from attnscale.measure.cuda.prepared import Launch, Layout, Longest, mask_strides, no_document, takes
from attnscale.measure.cuda.ways import ALIGNMENT, layout_of

SLACK = 1 + 1e-4  # by which rounding may lift a score above what lengths allow


def probe_max(
    largest: Tensor,
    limit: Tensor,
    calls: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    scale: float,
    is_causal: bool,
) -> bool:
    """Raise `largest`, a float32 a query head, to the largest score of each head that has one above the limit.

    Return False where no kernel takes the call; nothing is written then. The mask is of booleans.
    """
    if not takes(query, key, mask):
        return False
    given = (None if each is None else layout_of(each) for each in (mask, padding))
    alignment = largest.data_ptr() % ALIGNMENT, len(largest)
    prepared = _prepared(layout_of(query), layout_of(key), *given, alignment, scale, is_causal)
    longest = prepared.longest(key)
    visible = query if mask is None else mask.view(torch.uint8)
    own, others = (query, query) if padding is None else (padding.view(torch.uint8), no_document(query.device))
    prepared.launch(query, key, visible, own, others, longest, limit, limit, largest, calls)
    return True


class _Prepared:
    def __init__(
        self,
        query: Layout,
        key: Layout,
        mask: Layout | None,
        padding: Layout | None,
        scale: float,
        is_causal: bool,
    ) -> None:
        from attnscale.measure.cuda.triton.largest import largest_kernel
        from attnscale.measure.cuda.triton.launch import LEAST_WIDTH
        from attnscale.measure.cuda.triton.launching import capability, precision_of
        from attnscale.measure.cuda.triton.shown import BOOLEAN, NO_MASK
        from attnscale.measure.cuda.triton.tiles import largest_tiles, padded_width

        (batch, heads, q_len, head_dim), query_strides, dtype, index, _ = query
        (_, kv_heads, kv_len, _), key_strides, *_ = key
        self.longest, strides = Longest(key), mask_strides(mask)
        cut = largest_tiles(head_dim, dtype, capability(index), strides[2] != 0)
        self.launch = Launch(
            largest_kernel,
            (-(-q_len // cut.rows) * batch * heads,),
            (
                *(*query_strides[:3], *key_strides[:3], *strides, *((0, 0) if padding is None else padding[1]), 0, 0),
                *(heads, heads // kv_heads, q_len, kv_len, 0, 0, scale, 1.0),
            ),
            (
                *(SLACK, self.longest.shape[-1], head_dim, padded_width(head_dim, LEAST_WIDTH), cut.rows, cut.keys),
                *((NO_MASK if mask is None else BOOLEAN).value, strides[2] != 0, False, is_causal),
                *(padding is not None, False, precision_of(dtype, index)),
            ),
            cut.warps,
            cut.stages,
        )


@lru_cache(maxsize=256)
def _prepared(
    query: Layout,
    key: Layout,
    mask: Layout | None,
    padding: Layout | None,
    written: tuple[int, int],
    scale: float,
    is_causal: bool,
) -> _Prepared:
    """`written` is the alignment of what is written, on which the compilation depends as well."""
    return _Prepared(query, key, mask, padding, scale, is_causal)
