"""What measuring costs: plain attention, attention with statistics, and what people do today, timed in turns.

Machines are noisy, so every variant runs once a round, and a cost is the median over rounds of its time over that of
plain SDPA's best backend in the same round.
"""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscale.measure import attention_with_stats

SAMPLED_ROWS = 64  # what watching and monitoring sample by default
BACKENDS = {
    "cpu": (SDPBackend.FLASH_ATTENTION,),
    "cuda": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
}
ROUNDS = 9
TIMED = 4.0  # milliseconds of calls in one timing on a GPU: the host runs ahead of it, as it does in training
PLAIN, OURS = "plain SDPA", "attnscale"


@dataclass(frozen=True)
class Case:
    """One attention to time."""

    batch: int
    heads: int
    length: int
    head_dim: int
    is_causal: bool
    backward: bool
    dtype: str


@dataclass(frozen=True)
class Cost:
    """What one variant cost in one case: against plain SDPA's best backend, over rounds, and in memory."""

    case: Case
    variant: str
    milliseconds: float
    ratio: float
    quartiles: tuple[float, float]
    peak_bytes: int | None  # above the tensors given, where the device tells


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases of a device: those of the README's table, or one small one."""
    if quick:
        return [Case(1, 2, 256, 64, False, False, "float32" if device == "cpu" else "bfloat16")]
    if device == "cpu":
        shapes, dtype = [(1, 8, 1024, 64), (1, 8, 4096, 64)], "float32"
    else:
        shapes, dtype = [(4, 16, 4096, 128), (4, 16, 4096, 64), (1, 16, 16384, 128)], "bfloat16"
    return [
        Case(*shape, is_causal, backward, dtype)
        for shape in shapes
        for is_causal in (False, True)
        for backward in ((False,) if device == "cpu" else (False, True))
    ]


def measure_case(case: Case, device: str, progress: Callable[[str], None] = lambda name: None) -> list[Cost]:
    """Time every variant of one case in turns, plain SDPA's best backend first."""
    dtype = getattr(torch, case.dtype)
    qkv = [
        torch.randn(case.batch, case.heads, case.length, case.head_dim, device=device, dtype=dtype) for _ in range(3)
    ]
    for tensor in qkv:
        tensor.requires_grad_(case.backward)
    runs, memory = {}, {}
    for name, forward in _variants(case, device).items():
        run = partial(_step, forward, qkv, case.backward)
        try:
            progress(name)
            run()
            memory[name] = _peak(run, device)
        except (RuntimeError, NotImplementedError, ValueError):  # a backend that does not take this case
            continue
        runs[name] = run
    times: dict[str, list[float]] = {name: [] for name in runs}
    calls = {
        name: 1 if device == "cpu" else max(1, round(TIMED / _milliseconds(run, device))) for name, run in runs.items()
    }
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(_milliseconds(run, device, calls[name]))
    plain = min((name for name in times if name.startswith(PLAIN)), key=lambda name: statistics.median(times[name]))
    return [
        _cost(case, name, times[name], times[plain], memory[name]) for name in sorted(times, key=lambda n: n != plain)
    ]


def machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
    return found | {"system": f"{platform.system()} {platform.machine()}"}


def to_dict(costs: Sequence[Cost], device: str) -> dict[str, Any]:
    """The figures and the machine, as JSON takes them."""
    return {"machine": machine(device), "device": device, "costs": [asdict(cost) for cost in costs]}


def _variants(case: Case, device: str) -> dict[str, Callable[..., Tensor]]:
    plain = {
        f"{PLAIN}, {backend.name.lower().removesuffix('_attention')}": partial(_sdpa, backend, case.is_causal)
        for backend in BACKENDS[device]
    }
    ours = {
        f"{OURS}, every row": partial(_ours, case.is_causal, None),
        f"{OURS}, {SAMPLED_ROWS} rows": partial(_ours, case.is_causal, SAMPLED_ROWS),
    }
    others: dict[str, Callable[..., Tensor]] = {}
    if not case.backward:  # where the full matrix is kept for a backward, it no longer fits
        others["eager with statistics"] = partial(_eager, case.is_causal)
    if device == "cuda" and not case.is_causal and not case.backward:
        others["FlexAttention, lse and max"] = _flex()
    return plain | ours | others


def _sdpa(backend: SDPBackend, is_causal: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def _ours(is_causal: bool, rows: int | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention_with_stats(query, key, value, is_causal=is_causal, rows=rows)[0]


def _eager(is_causal: bool, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What one writes by hand: the full matrix, its softmax, and the same statistics from it."""
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


def _step(forward: Callable[..., Tensor], qkv: list[Tensor], backward: bool) -> None:
    output = forward(*qkv)
    if backward:
        torch.autograd.grad(output, qkv, output)


def _milliseconds(run: Callable[[], None], device: str, calls: int = 1) -> float:
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / calls


def _peak(run: Callable[[], None], device: str) -> int | None:
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


def _cost(case: Case, name: str, times: list[float], plain: list[float], peak: int | None) -> Cost:
    ratios = [taken / base for taken, base in zip(times, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Cost(case, name, statistics.median(times), middle, (low, high), peak)
