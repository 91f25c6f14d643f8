"""What every variant of a case costs, as multiples of plain SDPA.

Machines are noisy, so every variant runs once a round, the order drawn anew, and a cost is the median over rounds of
its time over that of plain SDPA's best backend in the same round, timed the same way.
"""

import platform
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.bench.cases import Case
from attnscale.bench.clocks import CALLS, GRAPH, Step, clocks
from attnscale.bench.variants import PLAIN, variants

ROUNDS = {"cpu": 9, "cuda": 15}
SHUFFLE = random.Random(0)


@dataclass(frozen=True)
class Timing:
    """The time of one variant, and how it compares with plain SDPA's best backend: median and quartiles of rounds."""

    milliseconds: float
    ratio: float
    quartiles: tuple[float, float]


@dataclass(frozen=True)
class Cost:
    """What one variant cost in one case."""

    case: Case
    variant: str
    calls: Timing  # called from Python
    graph: Timing | None  # replayed as a CUDA graph: the device's time alone; None where it was not captured
    peak_bytes: int | None  # above the tensors given, where the device tells


def measure_case(case: Case, device: str, progress: Callable[[str], None] = lambda name: None) -> list[Cost]:
    """Time every variant of one case in turns, plain SDPA's best backend first."""
    dtype = getattr(torch, case.dtype)
    shape = case.batch, case.heads, case.length, case.head_dim
    qkv = [torch.randn(shape, device=device, dtype=dtype, requires_grad=case.backward) for _ in range(3)]
    ways, memory = {}, {}
    for name, forward in variants(case, device).items():
        step = partial(_step, forward, qkv, case.backward)
        progress(name)
        try:
            step()
            memory[name] = _peak(step, device)
        except (RuntimeError, NotImplementedError, ValueError):  # a backend that does not take this case
            continue
        ways[name] = clocks(step, device)
    times: dict[str, dict[str, list[float]]] = {CALLS: {}, GRAPH: {}}
    turns = [(way, name, clock) for name, found in ways.items() for way, clock in found.items()]
    for _ in range(ROUNDS[device]):
        SHUFFLE.shuffle(turns)  # a GPU's clock follows the power of what ran before: let that be anything
        for way, name, clock in turns:
            times[way].setdefault(name, []).append(clock())
    timed = {way: _compared(readings) for way, readings in times.items()}
    costs = [Cost(case, name, timed[CALLS][name], timed[GRAPH].get(name), memory[name]) for name in ways]
    return sorted(costs, key=lambda cost: (cost.graph or cost.calls).ratio != 1.0)


def _compared(readings: dict[str, list[float]]) -> dict[str, Timing]:
    """Each variant's timing, against the plain backend that is fastest when timed this way."""
    medians = {name: statistics.median(times) for name, times in readings.items()}
    plain = [name for name in readings if name.startswith(PLAIN)]
    if not plain:
        return {}
    base = readings[min(plain, key=medians.__getitem__)]
    compared = {}
    for name, times in readings.items():
        ratios = [taken / reference for taken, reference in zip(times, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        compared[name] = Timing(medians[name], middle, (low, high))
    return compared


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


def _step(forward: Callable[..., Tensor], qkv: list[Tensor], backward: bool) -> None:
    output = forward(*qkv)
    if backward:
        torch.autograd.grad(output, qkv, output)


def _peak(step: Step, device: str) -> int | None:
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before
