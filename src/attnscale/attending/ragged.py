"""Attention over sequences that are laid end to end, each of which sees itself alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnscale.attending.call import Call, above_zero, fold
from attnscale.attending.sequences import Layout, Sequences
from attnscale.errors import ShapeError
from attnscale.inputs import check_sinks
from attnscale.rules.apply import Scale, apply_scale_to_sequences
from attnscale.visibility import EVERYTHING, Visibility


@dataclass(frozen=True)
class Ragged:
    """One row of all tokens, whose visibility is that of every sequence by itself; what `calls` gives, is run."""

    row: Call
    rows: Layout
    keys: Layout

    def with_sinks(self, sinks: Tensor | None) -> "Ragged":
        """Return the same with a logit of each head, (heads,), in the denominator of each of its rows."""
        check_sinks(sinks, self.row.query)
        return replace(self, row=replace(self.row, sinks=sinks))

    def calls(self) -> Iterator[Call]:
        """Each sequence as an attention of its own."""
        row = self.row
        queries = row.query.split(self.rows.lengths, dim=-2)
        keys, values = (tensor.split(self.keys.lengths, dim=-2) for tensor in (row.key, row.value))
        for query, key, value in zip(queries, keys, values, strict=True):
            seen = row.visibility.within(query.shape[-2], key.shape[-2])
            yield replace(row, query=query, key=key, value=value, visibility=seen)

    def as_documents(self) -> Call | None:
        """The same as one attention in which every sequence is a document; None where limits differ by sequence."""
        seen, aligned = self.row.visibility, self.rows.equals(self.keys)
        if not aligned and (seen.last is not None or seen.first is not None):
            return None
        last, first = seen.last, seen.first
        if aligned:  # no key further away than the longest sequence: kernels leave out what is
            furthest = max(self.rows.longest - 1, 0)
            last, first = furthest if last is None else last, -furthest if first is None else first
        own = self.rows.sequence_of(self.row.query.shape[-2])
        theirs = own if aligned else self.keys.sequence_of(self.row.key.shape[-2])
        return replace(self.row, visibility=Visibility(last, first, documents=(own, theirs)))


def scaled_sequences(
    query: Sequences,
    key: Sequences,
    value: Sequences,
    visibility: Visibility,
    scale: Scale,
    enable_gqa: bool,
    softcap: float | None,
    dropout_p: float = 0.0,
) -> Ragged:
    """An attention over aligned sequences, its scale a float, whatever rule gave it; rules count the keys of each."""
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
    return Ragged(Call(*folded, visibility, dropout_p, factor, softcap), query.layout, key.layout)


def visible_keys(rows: Layout, keys: Layout, seen: Visibility, tokens: int) -> Tensor:
    """How many keys of its own sequence each of the rows sees, (tokens,)."""
    sequence = rows.sequence_of(tokens)
    q_len, kv_len = rows.sizes[sequence], keys.sizes[sequence]
    at = torch.arange(tokens, device=sequence.device) - rows.offsets[sequence]
    at = at + (kv_len - q_len) if seen.from_the_end else at
    after = kv_len if seen.last is None else torch.minimum((at + seen.last + 1).clamp(min=0), kv_len)
    before = 0 if seen.first is None else torch.minimum((at + seen.first).clamp(min=0), kv_len)
    return (after - before).clamp(min=0)


def aligned(query: Sequences, key: Sequences, value: Sequences) -> tuple[Sequences, Sequences, Sequences]:
    """As many sequences of each, where one may be shared by all, and in each of them one value a key."""
    count = max(each.layout.count for each in (query, key, value))
    query, key, value = _shared("query", query, count), _shared("key", key, count), _shared("value", value, count)
    if key.layout.differs(value.layout):
        raise ShapeError("Expected one value a key in every sequence, got key and value of other lengths.")
    return query, key, value


def _shared(name: str, sequences: Sequences, count: int) -> Sequences:
    """A batch of one sequence is shared by all."""
    found = sequences.layout.count
    if found not in (1, count):
        raise ShapeError(f"Expected {count} sequences in {name}, as many as in the others, got {found}.")
    return sequences.repeated(count)
