"""A batch of sequences of one length: plain attention, attention with statistics, and what people do today."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscale.bench.cases import BACKENDS, OURS, PLAIN, SAMPLED_ROWS, Case, Variant, backend_name
from attnscale.measure import ScoreStats, attention_with_stats
from attnscale.measure.statistics import of_scores

# What people run: long sequences, shared key heads, a very long one, GPT-2's shape, a length that fits no tile, the
# head dimensions beside 128, a step of decoding, and float32.
H200 = (
    (4, 16, 16, 4096, 4096, 128, "bfloat16"),
    (2, 32, 8, 8192, 8192, 128, "bfloat16"),
    (1, 8, 8, 32768, 32768, 128, "bfloat16"),
    (8, 12, 12, 1024, 1024, 64, "bfloat16"),
    (2, 16, 16, 3001, 3001, 128, "bfloat16"),
    (2, 16, 16, 4096, 4096, 96, "bfloat16"),
    (2, 16, 16, 4096, 4096, 256, "bfloat16"),
    (32, 32, 8, 1, 8192, 128, "bfloat16"),
    (2, 8, 8, 2048, 2048, 64, "float32"),
)
TRAINED = [(4, 4096, 128)]  # batch, length and head dimension of what is timed with a backward too
CPU = tuple((1, 8, 8, length, length, 64, "float32") for length in (512, 1024, 4096))
FLEX = Case(4, 16, 16, 4096, 4096, 128, False, False, "bfloat16")  # compiling it takes longer than all timings
LARGEST_MATRIX = 2**31  # scores, of those that are formed all at once: half a dozen such matrices in float32


def cases(device: str, quick: bool) -> list[Case]:
    """Those of the table in docs/speed.md, or one small one."""
    if quick:
        return [Case(1, 2, 2, 256, 256, 64, False, False, "float32" if device == "cpu" else "bfloat16")]
    return [
        Case(batch, heads, kv_heads, q_len, kv_len, head_dim, is_causal, backward, dtype)
        for batch, heads, kv_heads, q_len, kv_len, head_dim, dtype in (CPU if device == "cpu" else H200)
        for is_causal in ((False, True) if q_len > 1 else (False,))  # a causal query alone would see one key
        for backward in ((False, True) if (batch, q_len, head_dim) in TRAINED else (False,))
    ]


def variants(case: Case, device: str) -> dict[str, Variant]:
    """By name, what takes query, key and value to the output, with statistics or without."""
    dtype = getattr(torch, case.dtype)
    shapes = [(case.heads, case.q_len), (case.kv_heads, case.kv_len), (case.kv_heads, case.kv_len)]
    given = [
        torch.randn(case.batch, *shape, case.head_dim, device=device, dtype=dtype, requires_grad=case.backward)
        for shape in shapes
    ]
    return {name: Variant(forward, given) for name, forward in _ways(case, device).items()}


def _ways(case: Case, device: str) -> dict[str, Callable[..., Tensor]]:
    plain = {f"{PLAIN}, {backend_name(backend)}": partial(sdpa, backend, case) for backend in BACKENDS[device]}
    ours = {
        f"{OURS}, every row": partial(_ours, case, None),
        f"{OURS}, {SAMPLED_ROWS} rows": partial(_ours, case, SAMPLED_ROWS),
    }
    others: dict[str, Callable[..., Tensor]] = {}
    whole = case.batch * case.heads * case.q_len * case.kv_len
    if not case.backward and whole <= LARGEST_MATRIX:  # where it is kept for a backward, it no longer fits
        others["eager with statistics"] = partial(_eager, case.is_causal)
    if device == "cuda" and case == FLEX:
        others["FlexAttention, lse and max"] = _flex()
    return plain | ours | others


def sdpa(backend: SDPBackend, case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's own, by one of its kernels."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=case.is_causal, enable_gqa=case.heads != case.kv_heads
        )


def _ours(case: Case, rows: int | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output, and every statistic read: a tensor of each on the device, as eager code has them."""
    output, stats = attention_with_stats(
        query, key, value, is_causal=case.is_causal, enable_gqa=case.heads != case.kv_heads, rows=rows
    )
    read(stats)
    return output


def read(stats: ScoreStats) -> None:
    """Every statistic, as a tensor on the device."""
    for name in of_scores():
        getattr(stats, name)


def _eager(is_causal: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What one writes by hand: the full matrix, its softmax, and the same statistics from it."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ key.mT).float() * query.shape[-1] ** -0.5
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1)
    with torch.no_grad():
        logs = torch.where(weights > 0, weights, 1.0).log()
        finite = scores.masked_fill(hidden, 0.0) if is_causal else scores
        _ = (-(weights * logs).sum(-1), weights.square().sum(-1), scores.amax(-1), finite.mean(-1), finite.var(-1))
    output: Tensor = weights.to(value.dtype) @ value
    return output


def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = compiled(query, key, value, return_aux=AuxRequest(lse=True, max_scores=True))[0]
        return output

    return run
