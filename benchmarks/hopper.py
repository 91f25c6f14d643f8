"""Whether the Hopper kernel is right, and how its time compares with cuDNN's: `python benchmarks/hopper.py`."""

import argparse
import math
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscale.measure.cuda import hopper

ROUNDS = 15  # timings of each kernel, interleaved; the median is printed
CALLS = 5  # calls in one timing, so that the events' own cost does not show
CHUNK = 256  # rows of the reference at a time
SHAPES = ((4, 16, 4096, 128), (4, 16, 4096, 64), (1, 16, 16384, 128))
CHECKED = ((2, 4, 2, 128, 128), (1, 3, 1, 200, 1000), (2, 2, 2, 1000, 200), (1, 2, 1, 4096, 4096), (1, 1, 1, 1, 77))
NAMES = ("output", "lse", "max", "total", "gap", "participation")
POISON = 12345.0


def reference(query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, ...]:
    """Output and statistics in float64, some rows at a time."""
    query, key, value = query.double(), key.double(), value.double()
    ratio = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(ratio, 1), value.repeat_interleave(ratio, 1)
    chunks = []
    for start in range(0, query.shape[2], CHUNK):
        scores = query[:, :, start : start + CHUNK] @ key.transpose(-1, -2) * scale
        if is_causal:
            rows = torch.arange(start, start + scores.shape[2], device=scores.device)[:, None]
            scores.masked_fill_(torch.arange(scores.shape[3], device=scores.device) > rows, -math.inf)
        largest = scores.amax(-1)
        below = scores - largest[..., None]
        exponentials = below.exp()
        total = exponentials.sum(-1)
        weights = exponentials / total[..., None]
        gap = -(weights * below).nan_to_num(0.0).sum(-1)
        lse = largest + total.log()
        chunks.append((weights @ value, lse, largest, total, gap, weights.square().sum(-1)))
    return tuple(torch.cat(parts, 2) for parts in zip(*chunks, strict=True))


def poison(like: Tensor) -> None:
    """Leave memory that is wrong everywhere where the allocator takes the next outputs from."""
    blocks = [torch.full_like(like, POISON), torch.full((5, *like.shape[:3]), POISON, device=like.device)]
    del blocks


def check(variant: str, dtype: torch.dtype, head_dim: int, is_causal: bool) -> list[float]:
    """The largest error of the output and of each statistic: absolute, or relative for the total."""
    worst = [0.0] * len(NAMES)
    for batch, heads, kv_heads, q_len, kv_len in CHECKED:
        for loud in (1.0, 4.0):  # loud scores make rows nearly one-hot and move the running maximum
            query = loud * torch.randn(batch, heads, q_len, head_dim, device="cuda")
            key, value = (torch.randn(batch, kv_heads, kv_len, head_dim, device="cuda") for _ in range(2))
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            scale = head_dim**-0.5
            poison(query)
            output, lse, sums = hopper.attend_rows(query, key, value, scale, is_causal, variant=variant)
            found = output, lse, *sums
            wanted = reference(query, key, value, scale, is_causal)
            for place, (have, want) in enumerate(zip(found, wanted, strict=True)):
                error = (have.double() - want).abs()
                if NAMES[place] == "total":
                    error = error / want
                worst[place] = max(worst[place], error.nan_to_num(math.inf).max().item())
    return worst


def backend(which: SDPBackend, qkv: tuple[Tensor, Tensor, Tensor], is_causal: bool) -> Callable[[], object]:
    """A call of SDPA on one backend."""

    def call() -> Tensor:
        with sdpa_kernel(which):
            return F.scaled_dot_product_attention(*qkv, is_causal=is_causal)

    return call


def kernel(variant: str, qkv: tuple[Tensor, Tensor, Tensor], is_causal: bool) -> Callable[[], object]:
    """A call of one variant of the kernel."""
    return lambda: hopper.attend_rows(*qkv, qkv[0].shape[-1] ** -0.5, is_causal, variant=variant)


def recorded(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Several calls as a CUDA graph: its replay costs no Python, so that short kernels are timed and not launches."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """Device time of one of a graph's calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS


def compare(shape: tuple[int, int, int, int], is_causal: bool, variants: list[str]) -> None:
    """Print the median time of every kernel at one shape, timed in turns."""
    qkv = tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    calls = {
        "cudnn": backend(SDPBackend.CUDNN_ATTENTION, qkv, is_causal),
        "flash": backend(SDPBackend.FLASH_ATTENTION, qkv, is_causal),
        **{variant: kernel(variant, qkv, is_causal) for variant in variants},
    }
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = recorded(call)
            milliseconds(graphs[name])
        except Exception as error:
            print(f"{name}: {str(error)[-400:]}")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(milliseconds(graph))
    batch, heads, length, head_dim = shape
    work = 4 * batch * heads * length**2 * head_dim / (2 if is_causal else 1)
    base = statistics.median(times["cudnn"])
    print(f"{shape} {'causal' if is_causal else 'full'}")
    for name, taken in times.items():
        middle = statistics.median(taken)
        print(f"  {name:26} {middle:7.3f} ms {work / middle / 1e9:6.0f} TFLOP/s {middle / base:6.3f}×", flush=True)


def main() -> None:
    """Check every variant, then time it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="*", default=list(hopper.VARIANTS), help="timed")
    parser.add_argument("--checked", nargs="*", default=[hopper.DEFAULT], help="checked at every dtype and size")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for variant in arguments.checked:
        for dtype in (torch.bfloat16, torch.float16):
            for head_dim in (40, 64, 96, 128, 256):
                for is_causal in (False, True):
                    label = f"{variant} {str(dtype)[6:]} {head_dim} {'causal' if is_causal else 'full'}"
                    try:
                        errors = check(variant, dtype, head_dim, is_causal)
                        print(f"{label:40}", *(f"{n} {e:.1e}" for n, e in zip(NAMES, errors, strict=True)), flush=True)
                    except Exception as error:
                        print(f"{label}: {str(error)[-400:]}")
    for shape in SHAPES if arguments.variants else ():
        fitting = [name for name in arguments.variants if shape[-1] == 64 or hopper.VARIANTS[name].consumers == 2]
        for is_causal in (False, True):
            compare(shape, is_causal, fitting)


if __name__ == "__main__":
    main()
