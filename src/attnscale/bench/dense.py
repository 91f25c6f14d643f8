"""Benchmark batches of equal lengths: plain SDPA, attention with statistics, and eager code with statistics."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscale.measure import ScoreStats, attention_with_stats
from attnscale.measure.statistics import of_scores

PLAIN, OURS = "plain SDPA", "attnscale"
SAMPLED_ROWS = 64  # default of watching and monitoring
BACKENDS = {
    "cpu": (SDPBackend.FLASH_ATTENTION,),
    "cuda": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
}


@dataclass(frozen=True)
class Case:
    """Attention to time; query heads share the kv_heads of key and value."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    is_causal: bool
    backward: bool
    dtype: str
    kind: str = "dense"
    lengths: tuple[int, ...] = ()  # sequence lengths of a ragged batch; the largest is q_len


# Common shapes: long sequences, shared key heads, a very long one, GPT-2's shape, a length that fits no tile, other
# head dimensions than 128, a step of decoding, and float32.
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
TRAINED = [(4, 4096, 128)]  # (batch, length, head dimension) of shapes with a timed backward pass
CPU = tuple((1, 8, 8, length, length, 64, "float32") for length in (512, 1024, 4096))
FLEX = Case(4, 16, 16, 4096, 4096, 128, False, False, "bfloat16")  # one case: compiling is slow
LARGEST_MATRIX = 2**31  # number of scores up to which eager code runs; it needs six float32 matrices of this size

# Function for a case, with its query, key and value.
Variant = tuple[Callable[..., Tensor], list[Tensor]]


def backend_name(backend: SDPBackend) -> str:
    """Return the common name of a backend."""
    return backend.name.lower().removesuffix("_attention")


def cases(device: str, quick: bool) -> list[Case]:
    """Return the cases of the table in docs/speed.md, or one case just large enough for reliable ratios."""
    if quick:
        shape = (1, 4, 4, 2048, 2048, 64) if device == "cpu" else (2, 16, 16, 4096, 4096, 128)
        return [Case(*shape, False, False, "float32" if device == "cpu" else "bfloat16")]
    return [
        Case(batch, heads, kv_heads, q_len, kv_len, head_dim, is_causal, backward, dtype)
        for batch, heads, kv_heads, q_len, kv_len, head_dim, dtype in (CPU if device == "cpu" else H200)
        for is_causal in ((False, True) if q_len > 1 else (False,))  # a single causal query would see one key
        for backward in ((False, True) if (batch, q_len, head_dim) in TRAINED else (False,))
    ]


def variants(case: Case, device: str) -> dict[str, Variant]:
    """Return the variants of a case by name."""
    shapes = [(case.heads, case.q_len), (case.kv_heads, case.kv_len), (case.kv_heads, case.kv_len)]
    options: dict[str, Any] = {"device": device, "dtype": getattr(torch, case.dtype), "requires_grad": case.backward}
    inputs = [torch.randn(case.batch, *shape, case.head_dim, **options) for shape in shapes]
    shared = {"is_causal": case.is_causal, "enable_gqa": case.heads != case.kv_heads}
    functions: dict[str, Callable[..., Tensor]] = {
        **{f"{PLAIN}, {backend_name(backend)}": partial(sdpa, backend, case) for backend in BACKENDS[device]},
        f"{OURS}, every row": measured(attention_with_stats, **shared),
        f"{OURS}, {SAMPLED_ROWS} rows": measured(attention_with_stats, rows=SAMPLED_ROWS, **shared),
    }
    whole = case.batch * case.heads * case.q_len * case.kv_len
    if not case.backward and whole <= LARGEST_MATRIX:  # the backward pass needs too much memory
        functions["eager with statistics"] = partial(_eager, case.is_causal)
    if device == "cuda" and case == FLEX:
        functions["FlexAttention, lse and max"] = _flex()
    return {name: (forward, inputs) for name, forward in functions.items()}


def sdpa(backend: SDPBackend, case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Run torch's SDPA on one backend."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=case.is_causal, enable_gqa=case.heads != case.kv_heads
        )


def measured(function: Callable[..., tuple[Tensor, ScoreStats]], **options: Any) -> Callable[..., Tensor]:
    """Return a function that also computes every statistic as a tensor on the device, as eager code does."""

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, stats = function(query, key, value, **options)
        read(stats)
        return output

    return forward


def read(stats: ScoreStats) -> None:
    """Compute every statistic."""
    for name in of_scores():
        getattr(stats, name)


def _eager(is_causal: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute the full matrix, its softmax, and the same statistics in eager code."""
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
