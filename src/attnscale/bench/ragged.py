"""Benchmark batches of different lengths, packed, jagged or padded, against a plain batch with as many tokens.

The sequences of the plain batch have a length that gives about as many scores.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnscale.bench.dense import BACKENDS, OURS, PLAIN, SAMPLED_ROWS, Case, Variant, backend_name, measured, sdpa
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
    """Return the variants of a case by name, on packed tokens or on a plain batch."""
    draw = partial(torch.randn, device=device, dtype=getattr(torch, case.dtype), requires_grad=case.backward)
    total, scores = sum(case.lengths), sum(length**2 for length in case.lengths)
    equal = round(scores / total)  # as many tokens and scores, in sequences of equal length
    plain = [draw(math.ceil(total / equal), case.heads, equal, case.head_dim) for _ in range(3)]
    padded = [draw(case.batch, case.heads, case.q_len, case.head_dim) for _ in range(3)]
    packed = [draw(total, case.heads, case.head_dim) for _ in range(3)]
    starts = torch.tensor([0, *case.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    nested = _nested(starts, packed)

    causal: dict[str, Any] = {"is_causal": case.is_causal}
    varlen: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": case.q_len, "max_seqlen_k": case.q_len} | causal
    found: dict[str, Variant] = {
        f"{PLAIN}, as many tokens, {backend_name(backend)}": (partial(sdpa, backend, case), plain)
        for backend in BACKENDS[device]
    }
    found[f"{OURS}, packed"] = partial(attention_varlen, **varlen), packed
    sampled = {"every row": None, f"{SAMPLED_ROWS} rows": SAMPLED_ROWS}
    for name, rows in sampled.items():
        found[f"{OURS}, packed, {name}"] = measured(attention_varlen_with_stats, rows=rows, **varlen), packed
    if device == "cuda":
        found["torch's varlen_attn"] = partial(_varlen_attn, case, starts), packed
    for name, rows in sampled.items():
        found[f"{OURS}, jagged, {name}"] = measured(attention_with_stats, rows=rows, **causal), nested
    if device == "cuda":  # on a CPU, torch's SDPA of nested tensors is 14 times slower
        found["torch's SDPA, jagged"] = partial(F.scaled_dot_product_attention, **causal), nested
    found["padded, with a mask"] = partial(F.scaled_dot_product_attention, attn_mask=_mask(case, device)), padded
    return found


def _varlen_attn(case: Case, starts: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if case.is_causal else (-1, -1)
    output = varlen_attn(query, key, value, starts, starts, case.q_len, case.q_len, window_size=window)
    assert isinstance(output, Tensor)  # varlen_attn returns a tuple only with lse
    return output


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
