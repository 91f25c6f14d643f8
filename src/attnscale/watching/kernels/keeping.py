"""A call of a kernel, kept whole: queries and keys as they left their projections, its values, and what it hid."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from attnscale.tracing.following import Way
from attnscale.visibility import Visibility
from attnscale.watching.call import Factors
from attnscale.watching.kept import Kept, added_to

if TYPE_CHECKING:
    from attnscale.watching.kernels.kernel_call import KernelCall


def kept_of(call: "KernelCall", scales: Factors, ways: tuple[Way, Way], softcap: float | None) -> Kept:
    """All of it; `scales` multiply the queries and keys as they left their projections, which `ways` lead to."""
    query_factor, key_factor = (np.abs(way.factor) for way in ways)
    seen = _visibility(call, scales / (query_factor * np.repeat(key_factor, call.group)), softcap)
    return Kept(
        call.query.detach() / _by_head(query_factor, call.query),
        call.key.detach() / _by_head(key_factor, call.key),
        torch.from_numpy(scales),
        seen if call.padding is None else seen.without_rows(call.padding),
        softcap,
        None if call.value is None else call.value.detach(),
    )


def _visibility(call: "KernelCall", multiplier: Factors, softcap: float | None) -> Visibility:
    """What is added to the scores: as its arguments say, or as the user's function does."""
    if call.score_mod is None:
        seen = call.visibility.with_infinite_mask()
        return seen if seen.mask is None else replace(seen, mask=seen.mask[(None,) * (4 - seen.mask.dim())])
    every = torch.arange(call.query.shape[-2])
    plain = call.scores(every)
    predicted = plain * _by_head(multiplier / call.scale, plain)
    predicted = predicted if softcap is None else softcap * torch.tanh(predicted / softcap)
    return added_to(predicted, *call.score_mod(plain, every))


def _by_head(factor: Factors, like: Tensor) -> Tensor:
    return torch.from_numpy(factor).to(like)[:, None, None]
