"""Plain attention, attention with statistics, and what people do today."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscale.bench.cases import Case
from attnscale.measure import attention_with_stats
from attnscale.measure.statistics import of_scores

SAMPLED_ROWS = 64  # what watching and monitoring sample by default
BACKENDS = {
    "cpu": (SDPBackend.FLASH_ATTENTION,),
    "cuda": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
}
PLAIN, OURS = "plain SDPA", "attnscale"
FLEX = Case(4, 16, 16, 4096, 4096, 128, False, False, "bfloat16")  # compiling it takes longer than all timings
LARGEST_MATRIX = 2**31  # scores, of those that are formed all at once: half a dozen such matrices in float32


def variants(case: Case, device: str) -> dict[str, Callable[..., Tensor]]:
    """By name, what takes query, key and value to the output, with statistics or without."""
    plain = {
        f"{PLAIN}, {backend.name.lower().removesuffix('_attention')}": partial(_sdpa, backend, case)
        for backend in BACKENDS[device]
    }
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


def _sdpa(backend: SDPBackend, case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=case.is_causal, enable_gqa=case.heads != case.kv_heads
        )


def _ours(case: Case, rows: int | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output, and every statistic read: a tensor of each on the device, as eager code has them."""
    output, stats = attention_with_stats(
        query, key, value, is_causal=case.is_causal, enable_gqa=case.heads != case.kv_heads, rows=rows
    )
    for name in of_scores():
        getattr(stats, name)
    return output


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
