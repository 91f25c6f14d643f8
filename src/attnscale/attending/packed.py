"""Packed tokens, (total, heads, width), as flash-attn and torch.nn.attention.varlen take them -> their sequences."""

import torch
from torch import Tensor

from attnscale.attending.ragged import Ragged, scaled_sequences
from attnscale.attending.sequences import Layout, Sequences, as_one_row
from attnscale.errors import DeviceError, DtypeError, InputError, SettingError, ShapeError
from attnscale.inputs import check_inputs
from attnscale.rules.apply import Scale
from attnscale.torch_internals import unseen
from attnscale.visibility import Visibility

Window = tuple[int, int]
NO_WINDOW: Window = (-1, -1)
Given = tuple[Tensor | None, Tensor | None, int | None, int | None, Tensor | None]  # what layouts() takes


def packed_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Layout,
    keys: Layout,
    visibility: Visibility,
    scale: Scale,
    enable_gqa: bool,
    softcap: float | None,
    dropout_p: float,
) -> Ragged:
    """An attention over these sequences."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.is_nested or tensor.dim() != 3:
            found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) and not tensor.is_nested else "another"
            raise ShapeError(f"Expected {name} as packed tokens (total, heads, head_dim), got {found}.")
    tensors = [as_one_row(tensor) for tensor in (query, key, value)]
    check_inputs(tensors[0], tensors[1], tensors[2], None, False, enable_gqa, softcap, dropout_p)
    if rows.count != keys.count:
        raise ShapeError(f"Expected as many sequences of keys as of queries, got {keys.count} and {rows.count}.")
    rows.check_end("query", tensors[0])
    keys.check_end("key", tensors[1])
    own, theirs, values = (
        Sequences(tensor, layout) for tensor, layout in zip(tensors, (rows, keys, keys), strict=True)
    )
    return scaled_sequences(own, theirs, values, visibility, scale, enable_gqa, softcap, dropout_p)


def layouts(
    query: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    document_ids: Tensor | None,
) -> tuple[Layout, Layout]:
    """Where the sequences of queries and keys begin; those of keys where the queries' do, unless they are given."""
    if (cu_seqlens_q is None) == (document_ids is None):
        raise InputError("Expected either cu_seqlens_q or document_ids to say where sequences begin, got both or none.")
    if document_ids is not None:
        rows = _of_documents(query, document_ids)
        return rows, rows
    assert cu_seqlens_q is not None
    rows = _checked("cu_seqlens_q", cu_seqlens_q, query, max_seqlen_q)
    if cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q:
        return rows, rows
    return rows, _checked("cu_seqlens_k", cu_seqlens_k, query, max_seqlen_k)


def window_of(window_size: Window, is_causal: bool) -> Visibility:
    """So many keys to the left and right of a row, −1 for all; counted from the last key, as those libraries do."""
    left, right = window_size
    if min(left, right) < -1:
        raise SettingError(f"Expected window_size as keys to the left and right, −1 for all, got {window_size}.")
    last = 0 if is_causal else (None if right < 0 else right)
    return Visibility(last, None if left < 0 else -left, from_the_end=True)


def _checked(name: str, starts: Tensor, query: Tensor, longest: int | None) -> Layout:
    if starts.dim() != 1 or starts.shape[0] == 0 or starts.is_floating_point() or starts.dtype == torch.bool:
        raise DtypeError(
            f"Expected {name} as whole numbers (sequences + 1,), got {starts.dtype} of shape {tuple(starts.shape)}."
        )
    if starts.device != query.device:
        raise DeviceError(f"Expected {name} on the query's device, {query.device}, got {starts.device}.")
    layout = Layout(starts if starts.dtype in (torch.int32, torch.int64) else starts.long(), longest)
    layout.check_starts(name)
    return layout


def _of_documents(query: Tensor, document_ids: Tensor) -> Layout:
    """A sequence is a run of tokens of one document."""
    if document_ids.shape != query.shape[:1]:
        raise ShapeError(
            f"Expected the document of each of the {query.shape[0]} tokens, got shape {tuple(document_ids.shape)}; "
            "rows of several documents in a batch take Visibility.of_documents(…) as attn_mask."
        )
    if unseen(document_ids):
        return Layout(_starts_of_as_many(document_ids))
    begins = (document_ids.diff() != 0).nonzero().squeeze(-1) + 1
    ends = begins.new_tensor([document_ids.shape[0]] if document_ids.shape[0] else [])
    return Layout(torch.cat([begins.new_zeros(1), begins, ends]))


def _starts_of_as_many(document_ids: Tensor) -> Tensor:
    """The same with as many sequences as there are tokens, the last of them empty: a graph knows no other number."""
    total = document_ids.shape[0]
    begins = torch.cat([document_ids.new_zeros(min(total, 1), dtype=torch.long), (document_ids.diff() != 0).long()])
    at = torch.arange(total, device=document_ids.device)
    nothing = torch.full((total + 1,), total, device=document_ids.device)
    return nothing.scatter_reduce(0, begins.cumsum(0), at, "amin")
