"""Time attention with statistics relative to plain SDPA on a GPU, for each shape: `python benchmarks/kernels.py`.

Every statistic is read. Ratios are relative to SDPA's fastest backend, timed alternately. `--kernels` prints the
device time of each kernel of a call instead.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from attnscale import attention_with_stats, score_stats
from attnscale.bench.dense import BACKENDS, H200, Case, backend_name, read, sdpa

ROUNDS = 9
TIMED = 15.0  # milliseconds of one timing; a longer call is timed alone
TRACED = 9  # calls whose kernels are timed
SHAPES = [*H200, (16, 12, 12, 1024, 1024, 64, "float16")]
Call = Callable[[], object]


def with_stats(case: Case, rows: int | None, qkv: list[Tensor]) -> Tensor:
    """Run attention with every statistic read."""
    options = {"is_causal": case.is_causal, "enable_gqa": case.heads != case.kv_heads}
    output, stats = attention_with_stats(*qkv, **options, rows=rows)
    read(stats)
    return output


def stats_alone(case: Case, qkv: list[Tensor]) -> None:
    """Measure scores without an output."""
    read(score_stats(*qkv[:2], is_causal=case.is_causal, enable_gqa=case.heads != case.kv_heads))


def trained(run: Callable[[], Tensor], grad: Tensor, qkv: list[Tensor]) -> None:
    """Run forward and backward."""
    torch.autograd.grad(run(), qkv, grad)


def elapsed(call: Call, times: int) -> float:
    """Return the mean milliseconds of `times` successive calls from Python."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def milliseconds(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Return the milliseconds of each call, timed alternately; calls that fail are omitted."""
    times: dict[str, int] = {}
    for name, call in calls.items():
        try:
            call()
            call()
            times[name] = max(1, round(TIMED / elapsed(call, 2)))
        except RuntimeError as error:
            print(f"  {name}: {str(error)[:200]}")
    found: dict[str, list[float]] = {name: [] for name in times}
    for _ in range(ROUNDS):
        for name, count in times.items():
            found[name].append(elapsed(calls[name], count))
    return found


def ratios(plain: dict[str, Call], ours: dict[str, Call]) -> tuple[float, dict[str, float]]:
    """Return the milliseconds of the fastest plain call, and the ratio of each of our calls to it."""
    first = {name: statistics.median(each) for name, each in milliseconds(plain).items()}
    best = min(first, key=first.__getitem__)
    found = milliseconds({best: plain[best]} | ours)
    base = found.pop(best)
    taken = {name: statistics.median(a / b for a, b in zip(each, base, strict=True)) for name, each in found.items()}
    return statistics.median(base), taken


def compare(case: Case, backward: bool) -> None:
    """Print a row of the table."""
    dtype, grouped = getattr(torch, case.dtype), (case.batch, case.kv_heads, case.kv_len, case.head_dim)
    qkv = [torch.randn(case.batch, case.heads, case.q_len, case.head_dim, device="cuda", dtype=dtype)]
    qkv += [torch.randn(grouped, device="cuda", dtype=dtype) for _ in range(2)]
    plain = {backend_name(backend): partial(sdpa, backend, case, *qkv) for backend in BACKENDS["cuda"]}
    ours = {
        "exact": partial(with_stats, case, None, qkv),
        "64 rows": partial(with_stats, case, 64, qkv),
        "alone": partial(stats_alone, case, qkv),
    }
    base, taken = ratios(plain, ours)
    shape = f"{case.batch},{case.heads}/{case.kv_heads},{case.q_len}×{case.kv_len},{case.head_dim} {case.dtype}"
    line = f"{shape} {'causal' if case.is_causal else 'full'} | SDPA {base:.3f} ms"
    if backward:
        learned, grad = [x.requires_grad_() for x in qkv], torch.randn_like(qkv[0])
        plain = {name: partial(trained, call, grad, learned) for name, call in plain.items()}
        _, both = ratios(plain, {"exact, fwd+bwd": partial(trained, ours["exact"], grad, learned)})
        taken |= both
    print(line, *(f"| {name} {ratio:.2f}" for name, ratio in taken.items()), flush=True)


def device_times(case: Case) -> None:
    """Print the median microseconds of each kernel of a call."""
    dtype = getattr(torch, case.dtype)
    shapes = [(case.heads, case.q_len), (case.kv_heads, case.kv_len), (case.kv_heads, case.kv_len)]
    qkv = [torch.randn(case.batch, *shape, case.head_dim, device="cuda", dtype=dtype) for shape in shapes]
    print(case, flush=True)
    for name, call in {
        "every row": partial(with_stats, case, None, qkv),
        "64 rows": partial(with_stats, case, 64, qkv),
        "alone": partial(stats_alone, case, qkv),
    }.items():
        call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(TRACED):
                call()
            torch.cuda.synchronize()
        times = defaultdict(list)
        for event in seen.events():
            if event.device_type == DeviceType.CUDA:
                times[event.name[:40]].append(event.time_range.elapsed_us())
        parts = (f"{kernel} {statistics.median(each) * len(each) / TRACED:.1f}" for kernel, each in times.items())
        print(f"  {name:10}", *parts, sep="  ", flush=True)


def main() -> None:
    """Print all shapes, or the selected ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", type=int, default=list(range(len(SHAPES))), help="by their number")
    parser.add_argument("--no-backward", action="store_true", help="do not time the backward pass")
    parser.add_argument("--kernels", action="store_true", help="device time of each kernel instead")
    arguments = parser.parse_args()
    for number in arguments.shapes:
        *sizes, dtype = SHAPES[number]
        for is_causal in (False, True) if sizes[3] > 1 else (False,):
            case = Case(*sizes, is_causal, False, dtype)
            device_times(case) if arguments.kernels else compare(case, not arguments.no_backward)


if __name__ == "__main__":
    main()
