"""Visible keys of each query of a layer, and a description of their differences between two runs."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnscale.watching.layer import Layer


@dataclass(frozen=True)
class VisibleKeys:
    """Visible keys in the longest call of a layer; `shown` broadcasts to (batch, heads, q_len, kv_len)."""

    shown: Tensor
    padding: Tensor | None  # (batch, q_len): True for padding queries, which are not compared
    is_self: bool  # True if the queries are the last positions of the keys

    @classmethod
    def of(cls, layer: Layer) -> "VisibleKeys | None":
        """Return the visible keys of a layer that was watched with keep=True; None if they are unknown."""
        if not layer.kept or len(layer.kept) < layer.calls:
            return None
        call = max(layer.kept, key=lambda each: each.query.shape[-2])
        rows, keys = call.query.shape[-2], call.key.shape[-2]
        visibility, device = call.visibility.with_infinite_mask().within(rows, keys), call.query.device
        shown = visibility.shown(slice(0, rows), slice(0, keys), device)
        if shown is None:
            shown = torch.ones(1, 1, dtype=torch.bool, device=device)
        shown = shown[(None,) * (4 - shown.dim())].expand(-1, -1, rows, keys)
        if layer.sinks is not None:  # an explicit sink is stored as a key of zeros
            shown = shown[..., (call.key != 0).any(-1).flatten(0, -2).any(0)]
            keys = shown.shape[-1]
        shown = shown.cpu()
        padding = next((each for each in layer.left_out if each.shape == (call.query.shape[0], rows)), None)
        return cls(shown, None if padding is None else padding.cpu(), rows <= keys)

    @property
    def mean(self) -> float:
        """Mean number of visible keys per query, without padding queries."""
        counts = self.shown.sum(-1).double()
        if self.padding is None:
            return float(counts.mean())
        counted = (~self.padding[:, None]).double().expand(max(len(counts), len(self.padding)), counts.shape[1], -1)
        return float((counts * counted).sum() / counted.sum().clamp(min=1))

    @property
    def digest(self) -> str:
        """Digest of the visible keys."""
        counted = self.shown if self.padding is None else self.shown & ~self.padding[:, None, :, None]
        packed = np.packbits(counted.contiguous().numpy())
        return hashlib.sha256(repr(tuple(counted.shape)).encode() + packed.tobytes()).hexdigest()[:16]


def differences(one: VisibleKeys, other: VisibleKeys, name: str) -> Iterator[str]:
    """Describe how the visible keys of `other` differ from those of `one`, the run of backend `name`."""
    if one.shown.shape[-2:] != other.shown.shape[-2:]:
        yield f"it has {_sizes(other)} queries and keys, and {name} has {_sizes(one)}"
        return
    counted = torch.ones((), dtype=torch.bool)
    for padding in (one.padding, other.padding):
        counted = counted if padding is None else counted & ~padding[:, None, :, None]
    yield from _extra_keys(one, other, counted, f"that {name} hides", "sees")
    yield from _extra_keys(other, one, counted, f"that {name} shows", "hides")


def _extra_keys(less: VisibleKeys, more: VisibleKeys, counted: Tensor, relative: str, verb: str) -> Iterator[str]:
    """Describe the keys that `more` shows and `less` hides: padding, later keys, a longer window, or others."""
    extra = more.shown & ~less.shown & counted
    padding = extra & ~(less.shown & counted).any(-2, keepdim=True)
    if padding.any():
        columns = padding.flatten(0, -2).any(0).nonzero().flatten().tolist()
        yield f"it {verb} {_listed(columns)}, {relative} from every query: padding"
    extra = extra & ~padding
    rows, keys = extra.shape[-2:]
    offsets = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    is_causal = less.is_self and not bool((less.shown & counted & (offsets > 0)).any())
    later = extra & (offsets > 0) if is_causal else torch.zeros_like(extra)
    if later.any():
        ahead = int(offsets.expand_as(later)[later].max())
        missing = "its causal limit is off by one" if ahead == 1 else "the causal term is missing"
        why = missing if verb == "sees" else "it is causal"
        yield f"it {verb} later keys {relative}, up to {ahead} ahead: {why}"
    rest = extra & ~later
    if not rest.any():
        return
    short, long = (_window(each, counted, offsets) for each in (less, more))
    if less.is_self and short < long and not (rest & (offsets > -short)).any():
        here, there = (long, short) if verb == "sees" else (short, long)
        limits = ["none" if window >= keys else str(window) for window in (here, there)]
        yield f"it {verb} earlier keys {relative}: its window is {limits[0]}, not {limits[1]}"
    else:
        first = [int(each) for each in rest.nonzero()[0]]
        count = int(rest.flatten(0, -3).any(0).sum())
        yield f"it {verb} {count:,} pairs of query and key {relative}, first key {first[-1]} of query {first[-2]}"


def _window(keys: VisibleKeys, counted: Tensor, offsets: Tensor) -> int:
    """Return the window: the largest number of keys from the earliest visible key to the query itself."""
    shown = keys.shown & counted & (offsets <= 0)
    return 1 - int(offsets.expand_as(shown)[shown].min()) if shown.any() else 0


def _listed(columns: list[int]) -> str:
    if len(columns) == 1:
        return f"key {columns[0]}"
    is_run = columns[-1] - columns[0] == len(columns) - 1
    return f"keys {columns[0]} to {columns[-1]}" if is_run else f"keys {', '.join(map(str, columns[:4]))} …"


def _sizes(keys: VisibleKeys) -> str:
    return " × ".join(map(str, keys.shown.shape[-2:]))
