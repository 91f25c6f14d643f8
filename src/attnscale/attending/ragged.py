"""Ragged batches: concatenated sequences that each attend to themselves only, from nested or packed tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnscale.attending.call import Call, folded_call
from attnscale.errors import DeviceError, DtypeError, InputError, SettingError, ShapeError
from attnscale.inputs import check_inputs, check_sinks
from attnscale.rules.apply import Scale, apply_scale, apply_scale_to_sequences, can_scale_as_one_row
from attnscale.torch_internals import unseen
from attnscale.visibility import Visibility

Window = tuple[int, int]
NO_WINDOW: Window = (-1, -1)
Starts = tuple[Tensor | None, Tensor | None, int | None, int | None, Tensor | None]  # arguments of attention_varlen()


@dataclass(frozen=True)
class Layout:
    """Start positions of the sequences, and the end of the last one."""

    offsets: Tensor  # (sequences + 1,), on the device of the tokens
    known_longest: int | None = None  # length of the longest sequence, if the caller passed it
    symbol: Any = None  # ragged size of a jagged tensor; equal for equal lengths, also in a graph

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Layout":
        """Return the layout of sequences of these lengths."""
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(device, non_blocking=True)
        return cls(offsets, max(lengths, default=0))

    @property
    def count(self) -> int:
        """Number of sequences."""
        return self.offsets.shape[0] - 1  # in a graph, len() would be a constant

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Length of each sequence, on the host; synchronises with a GPU."""
        return tuple(self.offsets.diff().tolist())

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths, default=0) if self.known_longest is None else self.known_longest

    def sequence_of(self, tokens: int) -> Tensor:
        """Return the index of the sequence of each token."""
        every = torch.arange(self.count, device=self.offsets.device)
        return every.repeat_interleave(self.offsets.diff(), output_size=tokens)

    def equals(self, other: "Layout") -> bool:
        """Return True if both have equal offsets; False if a graph or transform hides their values."""
        if self.offsets is other.offsets or (self.symbol is not None and self.symbol == other.symbol):
            return True
        return not unseen(self.offsets) and torch.equal(self.offsets, other.offsets)


@dataclass(frozen=True)
class Sequences:
    """Concatenated tokens of all sequences, (1, heads, total, width)."""

    tokens: Tensor
    layout: Layout


def as_one_row(tokens: Tensor) -> Tensor:
    """Return (total, heads, width) as (1, heads, total, width)."""
    return tokens.transpose(0, 1).unsqueeze(0)


def as_tokens(row: Tensor) -> Tensor:
    """Return (1, heads, total, width) as (total, heads, width)."""
    return row.squeeze(0).transpose(0, 1)


@dataclass(frozen=True)
class Ragged:
    """Attention over concatenated sequences; its visibility applies within each sequence."""

    row: Call
    rows: Layout
    keys: Layout

    def calls(self) -> Iterator[Call]:
        """Yield each sequence as a separate attention."""
        row = self.row
        queries = row.query.split(self.rows.lengths, dim=-2)
        keys, values = (tensor.split(self.keys.lengths, dim=-2) for tensor in (row.key, row.value))
        for query, key, value in zip(queries, keys, values, strict=True):
            seen = row.visibility.within(query.shape[-2], key.shape[-2])
            yield replace(row, query=query, key=key, value=value, visibility=seen)

    def joined(self, outputs: list[Tensor]) -> Tensor:
        """Concatenate the outputs of the sequences."""
        if outputs:
            return torch.cat(outputs, dim=-2)
        return self.row.query.new_empty(*self.row.query.shape[:-1], self.row.value.shape[-1])

    def as_masked(self) -> Call:
        """Return one attention over all tokens with a mask, for a graph, where lengths are unknown."""
        query, key = self.row.query, self.row.key
        first, stop = visible_range(self.rows, self.keys, self.row.visibility, query.shape[-2])
        at = torch.arange(key.shape[-2], device=key.device)
        shown = (at >= first.unsqueeze(-1)) & (at < stop.unsqueeze(-1))
        return replace(self.row, visibility=Visibility(mask=shown[None, None]))

    def as_documents(self) -> Call | None:
        """Return one attention with every sequence as a document; None if position limits differ by sequence."""
        seen, aligned = self.row.visibility, self.rows.equals(self.keys)
        if not aligned and (seen.last is not None or seen.first is not None):
            return None
        last, first = seen.last, seen.first
        if aligned:  # kernels skip keys further away than the longest sequence
            furthest = max(self.rows.longest - 1, 0)
            last, first = furthest if last is None else last, -furthest if first is None else first
        own = self.rows.sequence_of(self.row.query.shape[-2])
        theirs = own if aligned else self.keys.sequence_of(self.row.key.shape[-2])
        return replace(self.row, visibility=Visibility(last, first, documents=(own, theirs)))


def visible_range(rows: Layout, keys: Layout, seen: Visibility, tokens: int) -> tuple[Tensor, Tensor]:
    """Return for each row the position of its first visible key, and the position after its last visible key."""
    sequence = rows.sequence_of(tokens)
    start, end = keys.offsets[sequence], keys.offsets[sequence + 1]
    own_start, own_end = rows.offsets[sequence], rows.offsets[sequence + 1]
    at = torch.arange(tokens, device=sequence.device) + (end - own_end if seen.from_the_end else start - own_start)
    first = start if seen.first is None else (at + seen.first).clamp(start, end)
    stop = end if seen.last is None else (at + seen.last + 1).clamp(start, end)
    return first, torch.maximum(first, stop)


def ragged_call(
    query: Sequences,
    key: Sequences,
    value: Sequences,
    visibility: Visibility,
    scale: Scale,
    enable_gqa: bool,
    softcap: float | None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
) -> Ragged:
    """Return an attention over equally many sequences of each; rules use the number of keys of each sequence."""
    check_inputs(query.tokens, key.tokens, value.tokens, None, False, enable_gqa, softcap, dropout_p)
    check_sinks(sinks, query.tokens)
    rows, keys = query.layout, key.layout

    def counts() -> Tensor:
        first, stop = visible_range(rows, keys, visibility, query.tokens.shape[-2])
        return stop - first

    if isinstance(scale, Tensor) and scale.dim() == 4 and scale.shape[0] > 1 and scale.shape[2] == 1:
        scale = scale[rows.sequence_of(query.tokens.shape[-2]), :, 0].transpose(0, 1).unsqueeze(0)
    if can_scale_as_one_row(scale):
        scaled = apply_scale(scale, query.tokens, key.tokens, counts)
    else:
        scaled = apply_scale_to_sequences(scale, query.tokens, key.tokens, rows.lengths, keys.lengths, counts)
    call = folded_call(scaled, value.tokens, visibility, enable_gqa, softcap, dropout_p, sinks)
    return Ragged(call, rows, keys)


def packed_call(query: Tensor, key: Tensor, value: Tensor, starts: Starts, *options: Any) -> Ragged:
    """Return an attention over packed tokens (total, heads, width), the layout of flash-attn."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.is_nested or tensor.dim() != 3:
            found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) and not tensor.is_nested else "another"
            raise ShapeError(f"Expected {name} as packed tokens (total, heads, head_dim), got {found}.")
    rows, keys = _layouts(query, key, starts)
    row, row_keys, row_values = map(as_one_row, (query, key, value))
    return ragged_call(Sequences(row, rows), Sequences(row_keys, keys), Sequences(row_values, keys), *options)


def _layouts(query: Tensor, key: Tensor, starts: Starts) -> tuple[Layout, Layout]:
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, document_ids = starts
    if (cu_seqlens_q is None) == (document_ids is None):
        raise InputError("Expected either cu_seqlens_q or document_ids to define the sequences, got both or none.")
    if document_ids is not None:
        rows = keys = _of_documents(query, document_ids)
    elif cu_seqlens_q is not None:
        rows = keys = _of_starts("cu_seqlens_q", cu_seqlens_q, query, max_seqlen_q)
        if cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:
            keys = _of_starts("cu_seqlens_k", cu_seqlens_k, key, max_seqlen_k)
    if rows.count != keys.count:
        raise ShapeError(f"Expected equally many key and query sequences, got {keys.count} and {rows.count}.")
    for name, layout, tokens in (("query", rows, query), ("key", keys, key)):
        if _is_readable(layout.offsets) and int(layout.offsets[-1]) != len(tokens):
            found = int(layout.offsets[-1])
            raise ShapeError(f"Expected the last offset to equal the {name}'s {len(tokens)} tokens, got {found}.")
    return rows, keys


def window_of(window_size: Window, is_causal: bool) -> Visibility:
    """Return a window of keys to the left and right of each row, −1 for no limit, aligned to the last key."""
    left, right = window_size
    if min(left, right) < -1:
        raise SettingError(f"Expected window_size as (left, right) numbers of keys, −1 for all, got {window_size}.")
    last = 0 if is_causal else (None if right < 0 else right)
    return Visibility(last, None if left < 0 else -left, from_the_end=True)


def _is_readable(offsets: Tensor) -> bool:
    """Return True if offsets can be checked; those on a GPU are not, which would synchronise."""
    return offsets.device.type == "cpu" and not unseen(offsets)


def _of_starts(name: str, starts: Tensor, tokens: Tensor, longest: int | None) -> Layout:
    if starts.dim() != 1 or starts.shape[0] == 0 or starts.is_floating_point() or starts.dtype == torch.bool:
        raise DtypeError(
            f"Expected {name} as whole numbers (sequences + 1,), got {starts.dtype} of shape {tuple(starts.shape)}."
        )
    if starts.device != tokens.device:
        raise DeviceError(f"Expected {name} on the query's device, {tokens.device}, got {starts.device}.")
    starts = starts if starts.dtype in (torch.int32, torch.int64) else starts.long()
    if _is_readable(starts) and (int(starts[0]) != 0 or bool((starts.diff() < 0).any())):
        raise InputError(f"Expected {name} to begin with 0 and never decrease, got {starts.tolist()}.")
    return Layout(starts, longest)


def _of_documents(query: Tensor, document_ids: Tensor) -> Layout:
    """Return a layout with one sequence for each run of equal document ids."""
    if document_ids.shape != query.shape[:1]:
        raise ShapeError(
            f"Expected document_ids for each of the {query.shape[0]} tokens, got shape {tuple(document_ids.shape)}; "
            "for a batch of rows with several documents, pass Visibility.of_documents(…) as attn_mask."
        )
    total, changes = document_ids.shape[0], document_ids.diff() != 0
    if not unseen(document_ids):
        begins = changes.nonzero().squeeze(-1) + 1
        return Layout(torch.cat([begins.new_zeros(1), begins, begins.new_tensor([total] if total else [])]))
    # A graph does not know the number of sequences: use one per token, and leave the last ones empty.
    runs = torch.cat([document_ids.new_zeros(min(total, 1), dtype=torch.long), changes.long()]).cumsum(0)
    ends = torch.full((total + 1,), total, device=document_ids.device)
    return Layout(ends.scatter_reduce(0, runs, torch.arange(total, device=document_ids.device), "amin"))
