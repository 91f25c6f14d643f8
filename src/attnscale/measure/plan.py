"""Which way a call goes, decided once for each layout of its tensors.

Checks, scale and folding depend on shapes, strides, dtypes and flags alone, where the scale is a number or the
default; a call like one before goes straight to its kernels. On a GPU the host's time shows for short sequences.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from attnscale.measure.cuda.layout import is_intercepted, layout_key
from attnscale.measure.stats import ScoreStats

Planned = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ScoreStats]]
PLANS: dict[Hashable, Planned] = {}
MOST_PLANS = 4096  # lengths that never come again would fill the memory


def kind_of(query: Tensor, key: Tensor, value: Tensor, scale: Any, *flags: Hashable) -> Hashable:
    """What calls that go the same way have in common; None for those that are looked at each time."""
    if not isinstance(query, Tensor):
        return None  # and told so by the checks
    plain = query.is_cuda and key.is_cuda and value.is_cuda and query.dim() == key.dim() == value.dim() == 4
    if not plain or not (scale is None or type(scale) is float) or is_intercepted(query, key, value):
        return None
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return *layout_key(query), *layout_key(key), *layout_key(value), scale, cast, *flags


def keep(kind: Hashable, planned: Planned) -> None:
    """The way of a kind."""
    if len(PLANS) >= MOST_PLANS:
        PLANS.clear()
    PLANS[kind] = planned
