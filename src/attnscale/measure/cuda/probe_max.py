"""The largest score of each head that passes a limit, prepared once for a layout: the probe of QKClip on a GPU."""
# mypy: disable-error-code="import-untyped"

from functools import lru_cache

import torch
from torch import Tensor

from attnscale.measure.cuda.layout import Layout, kernels_take_as_they_are, layout_key, mask_strides
from attnscale.measure.cuda.probe import no_document


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
    if not kernels_take_as_they_are(query, key, mask):
        return False
    given = (None if each is None else layout_key(each) for each in (mask, padding))
    prepared = _prepared(layout_key(query), layout_key(key), *given, scale, is_causal)
    longest = torch.empty(prepared.chunks, dtype=torch.float32, device=query.device)
    prepared.measure_keys(key, longest)
    visible = query if mask is None else mask.view(torch.uint8)
    own, others = (query, query) if padding is None else (padding.view(torch.uint8), no_document(query.device))
    prepared.launch(query, key, query, visible, own, others, largest, longest, limit, limit, largest, calls)
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
        from attnscale.measure.cuda.triton.masked_rows import bind_longest, masked_launch

        (batch, heads, q_len, _), query_strides, *_ = query
        (_, kv_heads, kv_len, _), key_strides, *_ = key
        self.chunks, self.measure_keys = bind_longest(key)
        flags = False, False, is_causal, False
        launch = masked_launch(query, key, mask, padding, padding, *flags, None, self.chunks[-1])
        self.launch = launch.bind(
            (-(-q_len // launch.tiles.rows) * batch * heads, 1),
            *(*query_strides[:3], *key_strides[:3], *mask_strides(mask)),
            *((0, 0) if padding is None else padding[1]),
            *(0, 0, heads, heads // kv_heads, q_len, kv_len, kv_len, 0, 0, scale, 1.0),
        )


@lru_cache(maxsize=256)
def _prepared(
    query: Layout, key: Layout, mask: Layout | None, padding: Layout | None, scale: float, is_causal: bool
) -> _Prepared:
    return _Prepared(query, key, mask, padding, scale, is_causal)
