"""Device time of every kernel behind a call: `python benchmarks/kernels.py`."""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from attnscale import attention_with_stats
from attnscale.bench.dense import H200 as SHAPES
from attnscale.measure.cuda import hopper, triton

CALLS = 9
BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


def kernels(call: Callable[[], object]) -> dict[str, float]:
    """Median microseconds of each kernel of a call, by name."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    times = defaultdict(list)
    for event in seen.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name[:40]].append(event.time_range.elapsed_us())
    return {name: statistics.median(each) * len(each) / CALLS for name, each in times.items()}


def host(call: Callable[[], object], calls: int = 200) -> float:
    """Microseconds of the host for a call, the least of five rounds."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return min(found)


def plain(qkv: list[Tensor], is_causal: bool, backend: SDPBackend) -> Tensor:
    """SDPA on one backend."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(*qkv, is_causal=is_causal, enable_gqa=qkv[0].shape[1] != qkv[1].shape[1])


def show(label: str, call: Callable[[], object]) -> None:
    """Print the kernels of a call, or why it does not run."""
    try:
        found = kernels(call)
        parts = "  ".join(f"{name} {taken:.1f}" for name, taken in found.items())
        print(f"  {label:28} {sum(found.values()):8.1f} µs | {parts}", flush=True)
    except Exception as error:
        print(f"  {label:28} {type(error).__name__}: {str(error)[-300:]}", flush=True)


def look(shape: tuple[int, int, int, int, int, int, str], is_causal: bool, tune: bool) -> None:
    """One shape."""
    batch, heads, kv_heads, q_len, kv_len, head_dim, name = shape
    dtype = getattr(torch, name)
    q = torch.randn(batch, heads, q_len, head_dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, kv_len, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    options = {"is_causal": is_causal, "enable_gqa": heads != kv_heads}
    scale = head_dim**-0.5
    print(f"{shape} {'causal' if is_causal else 'full'}", flush=True)
    for backend in BACKENDS:
        show(f"plain {backend.name.lower()[:9]}", partial(plain, [q, k, v], is_causal, backend))
    show("every row", lambda: attention_with_stats(q, k, v, **options))
    show("64 rows", lambda: attention_with_stats(q, k, v, **options, rows=64))
    if batch * heads * q_len * kv_len < 2**28:
        for rows in (None, 64):
            taken = host(lambda rows=rows: attention_with_stats(q, k, v, **options, rows=rows))
            print(f"  host, {rows or 'every'} rows: {taken:.0f} µs", flush=True)
    if not tune:
        return
    if hopper.supported(q, k, v):
        for moments in (False, True):
            call = partial(hopper.attend_rows, q, k, v, scale, is_causal, moments)
            show(f"Hopper, moments {moments}", call)
    _, _, sums = triton.attend_rows(q, k, v, scale, is_causal, moments=True)
    show("pooling", partial(triton.finish_scored, sums, kv_len, is_causal))


def main() -> None:
    """Look at every shape, or at some."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", type=int, default=list(range(len(SHAPES))))
    parser.add_argument("--tune", action="store_true", help="also the kernels behind it")
    arguments = parser.parse_args()
    for number in arguments.shapes:
        for is_causal in (False, True):
            if not (is_causal and SHAPES[number][3] == 1):
                look(SHAPES[number], is_causal, arguments.tune)


if __name__ == "__main__":
    main()
