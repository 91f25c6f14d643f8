"""Ragged batches: concatenated sequences that each attend to themselves only, from nested or packed tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from attnscale.attending.call import Call, above_zero, fold
from attnscale.errors import DeviceError, DtypeError, InputError, SettingError, ShapeError
from attnscale.inputs import check_inputs, check_sinks
from attnscale.rules.apply import Scale, apply_scale_to_sequences
from attnscale.torch_internals import unseen
from attnscale.visibility import EVERYTHING, Visibility

Window = tuple[int, int]
NO_WINDOW: Window = (-1, -1)
Starts = tuple[Tensor | None, Tensor | None, int | None, int | None, Tensor | None]  # arguments of layouts()


@dataclass(frozen=True)
class Layout:
    """Start positions of the sequences, and the end of the last one."""

    offsets: Tensor  # (sequences + 1,), on the device of the tokens
    known_longest: int | None = None  # length of the longest sequence, if the caller passed it

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Layout":
        """Return the layout of sequences of these lengths."""
        return cls(torch.tensor([0, *lengths]).cumsum(0).to(device, non_blocking=True))

    @classmethod
    def even(cls, count: int, length: int, device: torch.device) -> "Layout":
        """Return the layout of sequences of one length."""
        return cls(torch.arange(count + 1, device=device) * length, length)

    @property
    def count(self) -> int:
        """Number of sequences."""
        return self.offsets.shape[0] - 1  # in a graph, len() would be a constant

    @property
    def sizes(self) -> Tensor:
        """Length of each sequence, on the device."""
        return self.offsets.diff()

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Length of each sequence, on the host; synchronises with a GPU."""
        return tuple(self.sizes.tolist())

    @property
    def longest(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths, default=0) if self.known_longest is None else self.known_longest

    @property
    def is_at_hand(self) -> bool:
        """True if the offsets can be read without a synchronisation."""
        return self.offsets.device.type == "cpu" and not unseen(self.offsets)

    def check_starts(self, name: str) -> None:
        """Refuse offsets that decrease or do not begin with 0; unchecked on a GPU, to avoid a synchronisation."""
        if self.is_at_hand and (int(self.offsets[0]) != 0 or bool((self.offsets.diff() < 0).any())):
            raise InputError(f"Expected {name} to begin with 0 and never decrease, got {self.offsets.tolist()}.")

    def check_end(self, name: str, row: Tensor) -> None:
        """Refuse offsets that do not end with the number of tokens of a row (1, heads, total, width)."""
        total = row.shape[-2]
        if self.is_at_hand and int(self.offsets[-1]) != total:
            raise ShapeError(
                f"Expected the last offset to equal the {name}'s {total} tokens, got {int(self.offsets[-1])}."
            )

    def sequence_of(self, tokens: int) -> Tensor:
        """Return the index of the sequence of each token."""
        every = torch.arange(self.count, device=self.offsets.device)
        return every.repeat_interleave(self.sizes, output_size=tokens)

    def equals(self, other: "Layout") -> bool:
        """Return True if both have equal offsets; False if a graph or transform hides their values."""
        if self is other or self.offsets is other.offsets:
            return True
        return not unseen(self.offsets) and torch.equal(self.offsets, other.offsets)


@dataclass(frozen=True)
class Sequences:
    """Concatenated tokens of all sequences, (1, heads, total, width)."""

    tokens: Tensor
    layout: Layout

    def shared_by(self, name: str, count: int) -> "Sequences":
        """Return `count` sequences; a single one is repeated."""
        if self.layout.count not in (1, count):
            found = self.layout.count
            raise ShapeError(f"Expected {count} sequences in {name}, like the other tensors, got {found}.")
        if self.layout.count == count:
            return self
        length = self.tokens.shape[-2]
        return Sequences(self.tokens.repeat(1, 1, count, 1), Layout.even(count, length, self.tokens.device))


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
        positions, limits = self._positions(), self.row.visibility
        (own, at, q_len, kv_len), (theirs, key_at, *_) = positions
        at = at + (kv_len - q_len) if limits.from_the_end else at
        ahead = key_at - at.unsqueeze(-1)
        shown = own.unsqueeze(-1) == theirs
        shown = shown if limits.last is None else shown & (ahead <= limits.last)
        shown = shown if limits.first is None else shown & (ahead >= limits.first)
        return replace(self.row, visibility=Visibility(mask=shown[None, None]))

    def _positions(self) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]:
        rows = positions_in(self.rows, self.keys, self.row.query.shape[-2])
        return rows, rows if self.rows is self.keys else positions_in(self.keys, self.rows, self.row.key.shape[-2])

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


def positions_in(layout: Layout, other: Layout, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return for each token its sequence, its position in it, and the lengths of that sequence in both layouts."""
    sequence = layout.sequence_of(tokens)
    at = torch.arange(tokens, device=sequence.device) - layout.offsets[sequence]
    return sequence, at, layout.sizes[sequence], other.sizes[sequence]


def visible_keys(rows: Layout, keys: Layout, seen: Visibility, tokens: int) -> Tensor:
    """Return the number of visible keys of each row, (tokens,)."""
    _, at, q_len, kv_len = positions_in(rows, keys, tokens)
    at = at + (kv_len - q_len) if seen.from_the_end else at
    after = kv_len if seen.last is None else torch.minimum((at + seen.last + 1).clamp(min=0), kv_len)
    before = 0 if seen.first is None else torch.minimum((at + seen.first).clamp(min=0), kv_len)
    return (after - before).clamp(min=0)


def aligned(query: Sequences, key: Sequences, value: Sequences) -> tuple[Sequences, Sequences, Sequences]:
    """Return equally many sequences of each, repeating a single one; refuse keys and values of different lengths."""
    count = max(each.layout.count for each in (query, key, value))
    query, key, value = query.shared_by("query", count), key.shared_by("key", count), value.shared_by("value", count)
    if not unseen(key.layout.offsets) and not key.layout.equals(value.layout):
        raise ShapeError("Expected one value per key in every sequence, got key and value of different lengths.")
    return query, key, value


def scaled_sequences(
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
    """Return an attention over aligned sequences with a numeric scale; rules use the key count of each sequence."""
    check_sinks(sinks, query.tokens)
    tokens = query.tokens.shape[-2]
    scaled_query, scaled_key, factor = apply_scale_to_sequences(
        scale,
        query.tokens,
        key.tokens,
        (query.layout.offsets, key.layout.offsets),
        lambda: (query.layout.lengths, key.layout.lengths),
        lambda: query.layout.sequence_of(tokens),
        lambda: visible_keys(query.layout, key.layout, visibility, tokens),
    )
    scaled_query, factor = above_zero(scaled_query, factor, visibility)
    folded = fold(scaled_query, scaled_key, value.tokens, EVERYTHING, enable_gqa)[:3]
    return Ragged(Call(*folded, visibility, dropout_p, factor, softcap, sinks), query.layout, key.layout)


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
    sinks: Tensor | None = None,
) -> Ragged:
    """Return an attention over packed tokens (total, heads, width), the layout of flash-attn."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor) or tensor.is_nested or tensor.dim() != 3:
            found = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) and not tensor.is_nested else "another"
            raise ShapeError(f"Expected {name} as packed tokens (total, heads, head_dim), got {found}.")
    tensors = [as_one_row(tensor) for tensor in (query, key, value)]
    check_inputs(tensors[0], tensors[1], tensors[2], None, False, enable_gqa, softcap, dropout_p)
    if rows.count != keys.count:
        raise ShapeError(f"Expected equally many key and query sequences, got {keys.count} and {rows.count}.")
    rows.check_end("query", tensors[0])
    keys.check_end("key", tensors[1])
    own, theirs, values = map(Sequences, tensors, (rows, keys, keys))
    return scaled_sequences(own, theirs, values, visibility, scale, enable_gqa, softcap, dropout_p, sinks)


def layouts(
    query: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    document_ids: Tensor | None,
) -> tuple[Layout, Layout]:
    """Return the layouts of queries and keys; they are equal if cu_seqlens_k is None."""
    if (cu_seqlens_q is None) == (document_ids is None):
        raise InputError("Expected either cu_seqlens_q or document_ids to define the sequences, got both or none.")
    if document_ids is not None:
        rows = _of_documents(query, document_ids)
        return rows, rows
    assert cu_seqlens_q is not None
    rows = _checked("cu_seqlens_q", cu_seqlens_q, query, max_seqlen_q)
    if cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q:
        return rows, rows
    return rows, _checked("cu_seqlens_k", cu_seqlens_k, query, max_seqlen_k)


def window_of(window_size: Window, is_causal: bool) -> Visibility:
    """Return a window of keys to the left and right of each row, −1 for no limit, aligned to the last key."""
    left, right = window_size
    if min(left, right) < -1:
        raise SettingError(f"Expected window_size as (left, right) numbers of keys, −1 for all, got {window_size}.")
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
