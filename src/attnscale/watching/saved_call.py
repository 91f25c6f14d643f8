"""SavedCall: the tensors of one call, stored to try other scales on it."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnscale.numerics import wide_dtype
from attnscale.visibility import EVERYTHING, Visibility

ROUNDING = 1e-5  # relative to the largest score; a larger remainder is a bias


@dataclass(eq=False)
class SavedCall:
    """One call. Scores are scales · q·k, soft-capped, plus the bias and mask in `visibility`.

    If each query has its own keys, each query is a batch entry.
    """

    query: Tensor  # (batch, heads, queries, features), straight from the projection
    key: Tensor  # (batch, key heads, keys, features)
    scales: Tensor  # one value per head
    visibility: Visibility = EVERYTHING
    softcap: float | None = None
    value: Tensor | None = None  # None if it could not be identified

    def scores(self) -> Tensor:
        """Return scales · q·k, soft-capped, (batch, heads, queries, keys)."""
        key = self.key.repeat_interleave(self.query.shape[1] // self.key.shape[1], 1)
        scores = self.query.to(wide_dtype(self.query)) @ key.to(wide_dtype(key)).mT
        scores = scores * self.scales.to(scores)[:, None, None]
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def weights(self, head: int) -> Tensor:
        """Return a head's weights in the first batch entry, (queries, keys); zeros for rows that see no key."""
        shared = head // (self.query.shape[1] // self.key.shape[1])
        scales = self.scales[head : head + 1]
        one = replace(self, query=self.query[:1, [head]], key=self.key[:1, [shared]], scales=scales)
        scores = one.scores()[0, 0]
        seen = self.visibility.at(0, slice(head, head + 1))
        added = seen.added(slice(0, scores.shape[-2]), slice(0, scores.shape[-1]), scores)
        scores = scores if added is None else scores + added.reshape(-1, *added.shape[-2:])[0]
        return scores.softmax(-1).nan_to_num(0.0)


def added_to(predicted: Tensor, scores: Tensor, visible: Tensor | None) -> Visibility:
    """Return the mask or bias that turns predicted scores into scores, (batch, heads, rows, keys)."""
    rest = scores - predicted
    shown = rest if visible is None else rest.masked_fill(~visible, 0.0)
    if bool(shown.abs().amax() > ROUNDING * predicted.abs().amax()) if shown.numel() else False:
        return Visibility(mask=rest if visible is None else rest.masked_fill(~visible, -math.inf))
    return EVERYTHING if visible is None else Visibility(mask=visible)
