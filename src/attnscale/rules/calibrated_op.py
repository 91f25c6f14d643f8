"""The scale that gives unit variance over sequences, as an operator: in a graph their lengths are not known."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnscale.numerics import wide_dtype


def pairs_of_sequences(
    query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Queries and keys of each sequence that has both, (1, heads, length, head_dim)."""
    queries, keys = (
        tensor.split(starts.diff().tolist(), dim=-2) for tensor, starts in ((query, starts_q), (key, starts_k))
    )
    for own, theirs in zip(queries, keys, strict=True):
        if own.shape[-2] and theirs.shape[-2]:
            yield own, theirs


@torch.library.custom_op("attnscale::calibrated_factor", mutates_args=())
def calibrated_factor(query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor) -> Tensor:
    """1 / std(q·k), (heads,), over every pair of a query and a key of one sequence."""
    from attnscale.rules.calibrated import calibrated_sequences  # which asks for this one

    return calibrated_sequences(query, key, starts_q, starts_k).clone()


@calibrated_factor.register_fake
def _calibrated_factor_fake(query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor) -> Tensor:
    return query.new_empty(query.shape[1], dtype=wide_dtype(query))


@torch.library.custom_op("attnscale::calibrated_factor_backward", mutates_args=())
def calibrated_factor_backward(
    grad: Tensor, factor: Tensor, query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor
) -> tuple[Tensor, Tensor]:
    """Of 1/√V with V = Σ(s − μ)²/n, which moves by 2/n Σⱼ(sᵢⱼ − μ)kⱼ with a query, and likewise with a key."""
    group = query.shape[1] // key.shape[1]
    own, theirs = query.double(), key.double().repeat_interleave(group, dim=1)
    pairs = list(pairs_of_sequences(own, theirs, starts_q, starts_k))
    count = sum(each.shape[-2] * other.shape[-2] for each, other in pairs)
    sums = [each.sum(-2, keepdim=True) @ other.sum(-2, keepdim=True).mT for each, other in pairs]
    mean = torch.stack(sums).sum(0) / count if pairs else 0.0
    outer = (-grad.double() * factor.double().pow(3) / max(count, 1))[:, None, None]
    of_query, of_key = torch.zeros_like(own), torch.zeros_like(theirs)
    parts = zip(
        pairs_of_sequences(of_query, of_key, starts_q, starts_k), pairs_of_sequences(own, theirs, starts_q, starts_k),
        strict=True,
    )  # fmt: skip
    for (into_query, into_key), (queries, keys) in parts:
        into_query += outer * (queries @ (keys.mT @ keys) - mean * keys.sum(-2, keepdim=True))
        into_key += outer * (keys @ (queries.mT @ queries) - mean * queries.sum(-2, keepdim=True))
    of_key = of_key.unflatten(1, (-1, group)).sum(2)
    return of_query.to(query.dtype), of_key.to(key.dtype)


@calibrated_factor_backward.register_fake
def _calibrated_factor_backward_fake(
    grad: Tensor, factor: Tensor, query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, *inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *calibrated_factor_backward(grad, *ctx.saved_tensors), None, None


calibrated_factor.register_autograd(_backward, setup_context=_save)
