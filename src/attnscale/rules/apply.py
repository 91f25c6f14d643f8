"""Apply a scale of any accepted type to query and key."""

import math
from collections.abc import Callable
from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor, nn

from attnscale.errors import DeviceError, SettingError, ShapeError
from attnscale.rules.catalogue import get_rule
from attnscale.rules.inverse_sqrt import inverse_sqrt
from attnscale.rules.rule import Rule, Scaled, about_rule, multiply
from attnscale.shapes import broadcasts_to

Scale: TypeAlias = float | Tensor | str | Rule | None


def apply_scale(scale: Scale, query: Tensor, key: Tensor, visible: Callable[[], Tensor | None]) -> Scaled:
    """Apply None (1/√d_k), a number, a tensor, a rule or a rule's name; `visible` is called only if a rule needs it."""
    if scale is None:
        return inverse_sqrt(query, key)
    if isinstance(scale, Tensor):
        return multiply(query, _checked(scale, query)), key, 1.0
    if isinstance(scale, bool):
        raise SettingError(f"Expected a scale as a number, a tensor, a rule or a rule's name, got {scale}.")
    if isinstance(scale, Real | torch.SymFloat | float):
        if not math.isfinite(scale):
            raise SettingError(f"Expected a finite scale, got {scale}; the default, None, is 1/√d_k.")
        return query, key, float(scale)
    rule = get_rule(scale)
    about = about_rule(rule)
    return rule(query, key, visible() if about is None or about.needs_visible else None)


def can_scale_as_one_row(scale: Scale) -> bool:
    """Return True if the scale applies to concatenated sequences at once, as in a graph, where lengths are unknown."""
    if scale is None or isinstance(scale, Tensor | Real | torch.SymFloat | float):
        return True
    about = about_rule(get_rule(scale))
    return about is not None and about.over_sequences is None


def apply_scale_to_sequences(
    scale: Scale,
    query: Tensor,
    key: Tensor,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    visible: Callable[[], Tensor],
) -> Scaled:
    """Apply 'calibrated' or a user's own rule to concatenated sequences, (1, heads, total, head_dim)."""
    assert not isinstance(scale, float | Tensor | None)
    rule = get_rule(scale)
    about = about_rule(rule)
    pairs = list(zip(query.split(q_lens, dim=-2), key.split(kv_lens, dim=-2), strict=True))
    if not pairs:
        return query, key, 1.0
    if about is not None and about.over_sequences is not None:
        return multiply(query, about.over_sequences(pairs)), key, 1.0
    counts = visible().split(q_lens)
    scaled = (rule(own, theirs, count) for (own, theirs), count in zip(pairs, counts, strict=True))
    queries, keys, factors = zip(*scaled, strict=True)
    if len(set(factors)) > 1:
        queries = tuple(multiply(own, own.new_tensor(factor)) for own, factor in zip(queries, factors, strict=True))
        factors = (1.0,)
    return torch.cat(queries, dim=-2), torch.cat(keys, dim=-2), factors[0]


def _checked(scale: Tensor, query: Tensor) -> Tensor:
    rows = (*query.shape[:-1], 1)
    if scale.dim() == 0 and isinstance(scale, nn.Parameter):
        raise SettingError(
            "A learned scale must have at least one dimension, got a zero-dimensional parameter, which FSDP cannot "
            "shard; make it nn.Parameter(torch.full((1,), …))."
        )
    if not broadcasts_to(scale.shape, rows):
        raise ShapeError(
            f"Expected a scale that broadcasts to one number a row, {rows}, got shape {tuple(scale.shape)}; "
            "one number a head is scale.view(-1, 1, 1)."
        )
    if scale.device != query.device and scale.dim() > 0:
        raise DeviceError(f"Expected the scale on the query's device, {query.device}, got {scale.device}.")
    if scale.device.type == "cpu" and not torch.compiler.is_compiling() and not _all_finite(scale):
        raise SettingError("Expected a finite scale, got a tensor with inf or NaN in it; check how it was computed.")
    return scale


def _all_finite(scale: Tensor) -> bool:
    try:
        return bool(scale.isfinite().all())
    except RuntimeError:  # tensors under vmap and fake tensors have no values
        return True
