"""Benchmark batches of different lengths, packed, jagged or padded, against a plain batch with as many tokens.

The sequences of the plain batch have a length that gives about as many scores.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.bench.dense import BACKENDS, OURS, PLAIN, SAMPLED_ROWS, Case, Variant, backend_name, read, sdpa
from attnscale.measure import attention_varlen_with_stats, attention_with_stats
from attnscale.operator import attention_varlen

# Sequences, heads, length of the longest, head dimension: long documents, and GPT-2's shape.
SHAPES = {"cuda": ((16, 16, 4096, 128), (64, 12, 1024, 64)), "cpu": ((8, 8, 512, 64),)}
QUICK = {"cuda": (16, 16, 4096, 128), "cpu": (4, 4, 1024, 64)}
SHORTEST = 16  # ratio of the longest to the shortest sequence


def cases(device: str, quick: bool) -> list[Case]:
    """Return cases with evenly spaced lengths."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    return [
        Case(
            count, heads, heads, longest, longest, width, is_causal, backward, dtype, "ragged", _lengths(count, longest)
        )
        for count, heads, longest, width in ([QUICK[device]] if quick else SHAPES[device])
        for is_causal, backward in ([(True, False)] if quick else [(False, False), (True, False), (True, True)])
    ]


def _lengths(count: int, longest: int) -> tuple[int, ...]:
    return tuple(torch.linspace(longest / SHORTEST, longest, count).round().int().tolist())


def variants(case: Case, device: str) -> dict[str, Variant]:
    """Return the variants of a case by name, for packed tokens or a plain batch."""
    draw = partial(torch.randn, device=device, dtype=getattr(torch, case.dtype), requires_grad=case.backward)
    total, scores = sum(case.lengths), sum(length**2 for length in case.lengths)
    alike = round(scores / total)
    even = [draw(math.ceil(total / alike), case.heads, alike, case.head_dim) for _ in range(3)]
    wide = [draw(case.batch, case.heads, case.q_len, case.head_dim) for _ in range(3)]
    packed = [draw(total, case.heads, case.head_dim) for _ in range(3)]
    plain = {
        f"{PLAIN}, as many tokens, {backend_name(backend)}": Variant(partial(sdpa, backend, case), even)
        for backend in BACKENDS[device]
    }
    starts = torch.tensor([0, *case.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    by_token = {name: Variant(forward, packed) for name, forward in _of_packed(case, starts).items()}
    nested = _nested(starts, packed)
    by_sequence = {name: Variant(forward, nested) for name, forward in _of_nested(case, device).items()}
    padded = {"padded, with a mask": Variant(partial(_padded, _mask(case, device)), wide)}
    return plain | by_token | by_sequence | padded


def _of_packed(case: Case, starts: Tensor) -> Mapping[str, Callable[..., Tensor]]:
    ours = {
        f"{OURS}, packed": partial(_packed, case, starts),
        f"{OURS}, packed, every row": partial(_packed_with_stats, case, starts, None),
        f"{OURS}, packed, {SAMPLED_ROWS} rows": partial(_packed_with_stats, case, starts, SAMPLED_ROWS),
    }
    return ours | ({"torch's varlen_attn": partial(_varlen_attn, case, starts)} if starts.is_cuda else {})


def _of_nested(case: Case, device: str) -> Mapping[str, Callable[..., Tensor]]:
    ours = {
        f"{OURS}, jagged, every row": partial(_jagged_with_stats, case, None),
        f"{OURS}, jagged, {SAMPLED_ROWS} rows": partial(_jagged_with_stats, case, SAMPLED_ROWS),
    }  # not on a CPU, where torch's SDPA of nested tensors is 14 times slower
    return ours | ({"torch's SDPA, jagged": partial(_jagged, case)} if device == "cuda" else {})


def _packed(case: Case, starts: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention_varlen(query, key, value, starts, None, case.q_len, case.q_len, is_causal=case.is_causal)


def _packed_with_stats(
    case: Case, starts: Tensor, rows: int | None, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    longest, causal = case.q_len, case.is_causal
    output, stats = attention_varlen_with_stats(
        query, key, value, starts, None, longest, longest, is_causal=causal, rows=rows
    )
    read(stats)
    return output


def _jagged_with_stats(case: Case, rows: int | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output, stats = attention_with_stats(query, key, value, is_causal=case.is_causal, rows=rows)
    read(stats)
    return output


def _jagged(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=case.is_causal)


def _varlen_attn(case: Case, starts: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if case.is_causal else (-1, -1)
    output = varlen_attn(query, key, value, starts, starts, case.q_len, case.q_len, window_size=window)
    assert isinstance(output, Tensor)  # varlen_attn returns a tuple only with lse
    return output


def _padded(mask: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask)


def _mask(case: Case, device: str) -> Tensor:
    at = torch.arange(case.q_len, device=device)
    inside = at < torch.tensor(case.lengths, device=device).unsqueeze(-1)
    shown = inside[:, None, None, :]
    return shown & (at.unsqueeze(-1) >= at) if case.is_causal else shown


def _nested(starts: Tensor, packed: list[Tensor]) -> list[Tensor]:
    """Return nested tensors with shared offsets and heads before lengths, as from a model's projections."""
    offsets = starts.long()
    found = [torch.nested.nested_tensor_from_jagged(each.detach(), offsets).transpose(1, 2) for each in packed]
    return [made.requires_grad_(each.requires_grad) for made, each in zip(found, packed, strict=True)]
