"""The host's side of the passes over rows that see some of the keys: their sums, or their largest score alone."""
# mypy: disable-error-code="import-untyped"

from collections.abc import Hashable

import torch
from torch import Tensor

from attnscale.attending.call import Call
from attnscale.measure.cuda.triton.largest import largest_kernel, longest_kernel
from attnscale.measure.cuda.triton.launch import LEAST_WIDTH, unit_stride
from attnscale.measure.cuda.triton.launching import capability, launch, on_device, precision
from attnscale.measure.cuda.triton.shown import ADDED, BOOLEAN, NO_MASK, shown_kernel
from attnscale.measure.cuda.triton.tiles import Tiles, largest_tiles, padded_width, shown_sample_tiles, shown_tiles

PLANES = 7  # SCORED, and the number of visible keys
CHUNK, MOST_CHUNKS = 128, 64  # keys whose longest one program looks for, and programs a head
LENGTHS_AT_ONCE = 128  # keys


def shown_rows(call: Call, rows: Tensor | None, span: int, cut: Tiles | None = None, kind: Hashable = None) -> Tensor:
    """SCORED of every row, or of those at these positions, (batch, rows), over each span of keys, and its visible keys.

    (7, spans, batch, heads, rows). The mask's hidden keys are False or −∞.
    """
    query, key = unit_stride(call.query), unit_stride(call.key)
    batch, heads, q_len, head_dim = query.shape
    kv_len, count = key.shape[2], q_len if rows is None else rows.shape[1]
    spans = -(-kv_len // span)
    seen = call.visibility
    mask, mask_strides = _mask(seen.mask, query)
    mask_by_row = mask_strides[2] != 0
    if cut is None:
        known = head_dim, query.dtype, capability(query.device.index)
        banded = seen.first is not None
        cut = shown_tiles(*known, mask_by_row) if rows is None else shown_sample_tiles(count, *known, banded)
    own, own_strides = _documents(seen.documents and seen.documents[0], batch, q_len, query)
    theirs, their_strides = _documents(seen.documents and seen.documents[1], batch, kv_len, query)
    sums = torch.empty((PLANES, spans, batch, heads, count), dtype=torch.float32, device=query.device)
    with on_device(query):
        launch(
            shown_kernel,
            (-(-count // cut.rows) * batch * heads, spans),
            (
                *(query, key, query if rows is None else rows.contiguous(), mask, own, theirs, sums),
                *(*query.stride()[:3], *key.stride()[:3], *mask_strides, *own_strides, *their_strides),
                *(heads, heads // key.shape[1], count, kv_len, span, seen.first or 0, seen.last or 0),
                *(float(call.scale), float(call.softcap or 1.0)),
            ),
            (
                *(head_dim, padded_width(head_dim, LEAST_WIDTH), cut.rows, cut.keys, rows is not None),
                (NO_MASK if seen.mask is None else BOOLEAN if seen.bias is None else ADDED).value,
                mask_by_row,
                *(seen.first is not None, seen.last is not None, seen.documents is not None),
                *(call.softcap is not None, precision(query)),
            ),
            (cut.warps, cut.stages),
            kind,
        )
    return sums


def raise_largest_(
    largest: Tensor, limit: Tensor, calls: Tensor, call: Call, added: Tensor | None, slack: float,
    cut: Tiles | None = None, kind: Hashable = None,
) -> None:  # fmt: skip
    """Lift `largest`, a float32 a head, to the largest score of every head that has one above the limit.

    `added` is the most that is added to a score; rounding lifts none by more than `slack`. `calls` goes up by one.
    """
    query, key = unit_stride(call.query), unit_stride(call.key)
    batch, heads, q_len, head_dim = query.shape
    kv_len, seen = key.shape[2], call.visibility
    longest = _longest(key, kind)
    chunks = longest.shape[-1]
    mask, mask_strides = _mask(seen.mask, query)
    own, own_strides = _documents(seen.documents and seen.documents[0], batch, q_len, query)
    theirs, their_strides = _documents(seen.documents and seen.documents[1], batch, kv_len, query)
    known = head_dim, query.dtype, capability(query.device.index)
    cut = largest_tiles(*known, mask_strides[2] != 0) if cut is None else cut
    width = padded_width(head_dim, LEAST_WIDTH)
    with on_device(query):
        launch(
            largest_kernel,
            (-(-q_len // cut.rows) * batch * heads,),
            (
                *(query, key, mask, own, theirs, longest, limit if added is None else added, limit, largest, calls),
                *(*query.stride()[:3], *key.stride()[:3], *mask_strides, *own_strides, *their_strides),
                *(heads, heads // key.shape[1], q_len, kv_len, seen.first or 0, seen.last or 0),
                *(float(call.scale), float(call.softcap or 1.0)),
            ),
            (
                *(slack, chunks, head_dim, width, cut.rows, cut.keys),
                (NO_MASK if seen.mask is None else BOOLEAN if seen.bias is None else ADDED).value,
                mask_strides[2] != 0,
                *(seen.first is not None, seen.last is not None, seen.documents is not None),
                *(call.softcap is not None, precision(query)),
            ),
            (cut.warps, cut.stages),
            None if kind is None else (kind, chunks),
        )


def longest_squared(vectors: Tensor, kind: Hashable = None) -> Tensor:
    """The largest squared length among the vectors of each batch entry and head; NaN where one has it."""
    return _longest(unit_stride(vectors), kind).amax(-1)


def _longest(vectors: Tensor, kind: Hashable) -> Tensor:
    """The same of each chunk of them, (batch, heads, chunks)."""
    batch, heads, length, head_dim = vectors.shape
    chunks = min(MOST_CHUNKS, padded_width(-(-length // CHUNK), 1))
    longest = torch.empty((batch, heads, chunks), dtype=torch.float32, device=vectors.device)
    with on_device(vectors):
        launch(
            longest_kernel,
            (longest.numel(),),
            (vectors, longest, *vectors.stride()[:3], heads, length, -(-length // chunks)),
            (chunks, head_dim, padded_width(head_dim, LEAST_WIDTH), LENGTHS_AT_ONCE),
            (4, 2),
            None if kind is None else (kind, chunks),
        )
    return longest


def _mask(mask: Tensor | None, query: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The mask, or something in its place, and its strides: none along what it is the same for."""
    if mask is None:
        return query, (0, 0, 0, 0)
    strides = tuple(0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return _as_numbers(mask), strides


def _documents(ids: Tensor | None, batch: int, length: int, query: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    if ids is None:
        return query, (0, 0)
    whole = ids.expand(batch, length)
    return _as_numbers(whole), whole.stride()


def _as_numbers(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
