"""Visibility: the keys that each row sees, by limits, documents and a mask."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from attnscale.numerics import constant_on
from attnscale.torch_internals import sizes_vary

NOT_LEFT_OUT = np.zeros(1, dtype=np.bool_)  # document of all keys: only rows of document False see them
COUNTING_ROWS = 256  # rows per block; counting converts masks to integers, and blocks limit the memory
# A mask value below this hides a key. Common ones are −1e9, −1e20 and the lowest numbers of float32 and bfloat16.
NEVER_A_SCORE = -1e8
# A mask value this far below the mask's highest hides a key too, because e^−50 is negligible. Swin subtracts 100, old
# BERTs subtract 10,000.
HIDING_GAP = 50.0


@dataclass(frozen=True)
class Visibility:
    """Row i sees key j if i + first ≤ j ≤ i + last, both are in the same document, and the mask shows the key.

    None means no limit. Key padding is a mask of one row, (batch, 1, 1, kv_len). Attention accepts a Visibility in
    place of a mask. With `from_the_end`, limits count from the last row and the last key, as with a KV cache.

    >>> Visibility.causal(window=2).counts(q_len=4, kv_len=4, device="cpu").tolist()
    [1, 2, 2, 2]
    >>> Visibility.causal(from_the_end=True).within(q_len=2, kv_len=5).counts(2, 5, "cpu").tolist()
    [4, 5]
    """

    last: int | None = None  # 0: causal like SDPA's flag; kv_len − q_len: causal, and the last row sees every key
    first: int | None = None
    mask: Tensor | None = None  # broadcasts to (…, q_len, kv_len); True: visible; floats: added to the scores
    documents: tuple[Tensor, Tensor] | None = None  # (…, q_len) and (…, kv_len): the document of each row and key
    from_the_end: bool = False  # limits are relative to the last row and the last key

    @classmethod
    def of(cls, attn_mask: "Mask", is_causal: bool) -> "Visibility":
        """Return the visibility of SDPA's two arguments; `is_causal` is aligned to the first key."""
        if isinstance(attn_mask, Visibility):
            return attn_mask
        variant = getattr(attn_mask, "variant", None)
        if variant is not None:  # torch.nn.attention.bias.CausalBias, a tensor without elements
            return cls.causal(from_the_end=variant.name == "LOWER_RIGHT")
        if attn_mask is not None and attn_mask.dim() < 2:
            attn_mask = attn_mask.reshape(1, -1)
        return cls(last=0 if is_causal else None, mask=attn_mask)

    @classmethod
    def causal(cls, offset: int = 0, window: int | None = None, *, from_the_end: bool = False) -> "Visibility":
        """Show each row the keys up to its position plus the offset; a window limits their number."""
        return cls(offset, None if window is None else offset - window + 1, from_the_end=from_the_end)

    @classmethod
    def of_documents(cls, rows: Tensor, keys: Tensor | None = None, *, is_causal: bool = False) -> "Visibility":
        """Show each row the keys of its document; `rows` and `keys` are ids, (…, q_len) and (…, kv_len)."""
        return cls(last=0 if is_causal else None, documents=(rows, rows if keys is None else keys))

    def within(self, q_len: int, kv_len: int) -> "Visibility":
        """Return the visibility for these lengths, with limits counted from the start and without redundant ones."""
        moved = kv_len - q_len if self.from_the_end else 0
        if not moved and self.last in (None, 0) and self.first is None:
            return replace(self, from_the_end=False) if self.from_the_end else self
        last, first = (None if limit is None else limit + moved for limit in (self.last, self.first))
        if sizes_vary(q_len, kv_len):
            return replace(self, last=last, first=first, from_the_end=False)
        last = None if last is not None and last != 0 and last >= kv_len - 1 else last
        first = None if first is not None and first <= 1 - q_len else first
        return replace(self, last=last, first=first, from_the_end=False)

    @property
    def is_full(self) -> bool:
        """True if every row sees every key, and nothing is added to the scores."""
        return self.last is None and self.first is None and self.mask is None and self.documents is None

    @property
    def is_causal(self) -> bool:
        """True if it equals SDPA's causal flag."""
        return self.last == 0 and self.first is None and self.mask is None and self.documents is None

    @property
    def is_plain(self) -> bool:
        """True if a kernel with a causal flag and without a mask can compute it."""
        return self.is_full or self.is_causal

    @property
    def is_mask(self) -> bool:
        """True if there is a mask and nothing else."""
        return self.last is None and self.first is None and self.documents is None and self.mask is not None

    @property
    def bias(self) -> Tensor | None:
        """Float mask, which is added to the scores; None if there is none."""
        return self.mask if self.mask is not None and self.mask.is_floating_point() else None

    @property
    def hides_by_numbers(self) -> bool:
        """True if a finite number hides a key; a row with only such numbers still has weights."""
        return self.bias is not None and bool((~shown_by(self.bias) & (self.bias != -math.inf)).any())

    def with_infinite_mask(self) -> "Visibility":
        """Return the visibility with −∞ for every number of the mask that hides a key."""
        bias = self.bias
        return self if bias is None else replace(self, mask=bias.masked_fill(~shown_by(bias), -math.inf))

    def counts(self, q_len: int, kv_len: int, device: torch.device | str) -> Tensor | None:
        """Return the number of visible keys of each row, broadcastable to (…, heads, q_len); None if all are."""
        if self.is_full:
            return None
        if self.mask is None and self.documents is None:
            return self.counts_at(torch.arange(q_len, device=device), kv_len)
        if sizes_vary(q_len):
            return self._count_keys([slice(0, q_len)], kv_len, device)
        starts = range(0, max(q_len, 1), COUNTING_ROWS)
        return self._count_keys([slice(start, min(start + COUNTING_ROWS, q_len)) for start in starts], kv_len, device)

    def _count_keys(self, blocks: list[slice], kv_len: int, device: torch.device | str) -> Tensor:
        if self.is_mask and self.mask is not None:
            blocks = blocks if self.mask.shape[-2] > 1 else [slice(0, 1)]
            counted = [_shows(self._part(rows, slice(0, kv_len))).sum(-1) for rows in blocks]
            return torch.cat(counted, dim=-1) * (kv_len if self.mask.shape[-1] == 1 else 1)
        shown = (self.shown(rows, slice(0, kv_len), device) for rows in blocks)
        return torch.cat([block.sum(-1) for block in shown if block is not None], dim=-1)

    def counts_at(self, rows: Tensor, kv_len: int) -> Tensor:
        """Return the number of visible keys of rows at these positions by the limits, without mask and documents."""
        after = torch.full_like(rows, kv_len) if self.last is None else (rows + self.last + 1).clamp(0, kv_len)
        before = 0 if self.first is None else (rows + self.first).clamp(0, kv_len)
        return (after - before).clamp(min=0)

    def span(self, lowest: int, highest: int, kv_len: int) -> slice:
        """Return the keys that rows from `lowest` to `highest` may see by the limits, without mask and documents."""
        stop = kv_len if self.last is None else min(max(highest + self.last + 1, 0), kv_len)
        start = 0 if self.first is None else min(max(lowest + self.first, 0), stop)
        return slice(start, stop)

    def sure(self, lowest: int, keys: slice) -> int:
        """Return the number of leading keys in `keys` that all rows from `lowest` on certainly see."""
        if self.is_full:
            return len(range(keys.start, keys.stop))
        if self.last is None or self.first is not None or self.mask is not None or self.documents is not None:
            return 0
        return len(range(keys.start, min(lowest + self.last + 1, keys.stop)))

    def shown(self, rows: slice | Tensor, keys: slice, device: torch.device | str) -> Tensor | None:
        """Return True where a row sees a key, broadcastable to (…, rows, keys); None if everything is visible."""
        parts = [*self._limits(rows, keys, device), *(() if self.mask is None else [_shows(self._part(rows, keys))])]
        return reduce(torch.logical_and, parts) if parts else None

    def added(self, rows: slice | Tensor, keys: slice, like: Tensor) -> Tensor | None:
        """Return the bias on the scores of these rows: the float mask, or 0 for visible and −∞ for hidden keys."""
        if self.bias is None:
            shown = self.shown(rows, keys, like.device)
            return None if shown is None else _hide(torch.zeros((), dtype=like.dtype, device=like.device), shown)
        limits = list(self._limits(rows, keys, like.device))
        part = self._part(rows, keys).to(like.dtype)
        return _hide(part, reduce(torch.logical_and, limits)) if limits else part

    def without_rows(self, left_out: Tensor) -> "Visibility":
        """Hide all keys from the rows `left_out`, (batch, q_len), by documents, because a mask would be large."""
        if self.documents is None:
            return replace(self, documents=(left_out, constant_on(left_out.device, NOT_LEFT_OUT)))
        rows, keys = self.documents
        return replace(self, documents=(torch.where(left_out, -1, rows), keys))

    def at(self, entry: int, heads: slice) -> "Visibility":
        """Return the visibility of some heads of a batch entry; the mask must have four dimensions or be None."""
        mask, documents = self.mask, self.documents
        if mask is not None:
            mask = mask[entry if mask.shape[0] > 1 else 0]
            mask = mask[heads] if mask.shape[0] > 1 else mask
        if documents is not None:
            rows, keys = (ids if ids.dim() == 1 else ids[entry if ids.shape[0] > 1 else 0] for ids in documents)
            documents = rows, keys
        return (
            self if mask is self.mask and documents is self.documents else replace(self, mask=mask, documents=documents)
        )

    def _limits(self, rows: slice | Tensor, keys: slice, device: torch.device | str) -> Iterator[Tensor]:
        """Yield boolean masks of the limits and the documents."""
        if self.last is not None or self.first is not None:
            at = torch.arange(rows.start, rows.stop, device=device) if isinstance(rows, slice) else rows.to(device)
            ahead = torch.arange(keys.start, keys.stop, device=device) - at.unsqueeze(-1)
            if self.last is not None:
                yield ahead <= self.last
            if self.first is not None:
                yield ahead >= self.first
        if self.documents is not None:
            own, theirs = self.documents
            same = own[..., rows].unsqueeze(-1) == theirs[..., None, keys]
            yield same.unsqueeze(-3) if same.dim() > 2 else same

    def _part(self, rows: slice | Tensor, keys: slice) -> Tensor:
        assert self.mask is not None
        part = self.mask if self.mask.shape[-2] == 1 else self.mask[..., rows, :]
        return part if part.shape[-1] == 1 else part[..., keys]


EVERYTHING = Visibility()
Mask: TypeAlias = Tensor | Visibility | None  # type of attn_mask


def is_plain_mask(attn_mask: Mask) -> TypeGuard[Tensor]:
    """Return True for a tensor with elements, not a Visibility or torch's CausalBias."""
    return isinstance(attn_mask, Tensor) and getattr(attn_mask, "variant", None) is None


def shown_by(mask: Tensor) -> Tensor:
    """Return True where a boolean or float mask shows a key, without synchronising with a GPU.

    >>> shown_by(torch.tensor([0.0, -1e4, -torch.inf])).tolist(), shown_by(torch.tensor([0.0, -1.0, -60.0])).tolist()
    ([True, False, False], [True, True, True])
    """
    if mask.dtype == torch.bool or not mask.numel():
        return _shows(mask)
    mask = mask.detach()
    highest = mask.amax()
    lowest_score = highest - 0.5 * min(-NEVER_A_SCORE, -torch.finfo(mask.dtype).min)
    next_to_highest = mask.masked_fill((mask == highest) | (mask < lowest_score), -math.inf).amax()
    limit = torch.where(highest - next_to_highest >= HIDING_GAP, highest, lowest_score)
    return _shows(mask) & ~(mask < limit)  # a NaN hides nothing


def _shows(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask != -math.inf


def _hide(added: Tensor, shown: Tensor) -> Tensor:
    return added.masked_fill(~shown, -math.inf)
