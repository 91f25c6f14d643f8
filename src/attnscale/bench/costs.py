"""What every variant of a case costs, as multiples of plain SDPA.

Machines are noisy, and a GPU's clock follows the power of what ran just before; so each timing of a variant stands
beside one of plain SDPA's best backend, before it and after it in turns, and a cost is the median of their ratios.
"""

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.bench.cases import OURS, PLAIN, Case
from attnscale.bench.clocks import CALLS, GRAPH, HOST, Clock, Step, clocks
from attnscale.bench.kinds import KINDS

ROUNDS = {"cpu": 9, "cuda": 9}
TRIALS = 3  # of each plain backend, to find the fastest


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
    host_microseconds: float | None = None  # of a call from Python; None where the host is the device


def measure_case(case: Case, device: str, progress: Callable[[str], None] = lambda name: None) -> list[Cost]:
    """Time every variant of one case in turns, plain SDPA's best backend first."""
    ways, memory = {}, {}
    for name, (forward, given) in KINDS[case.kind].variants(case, device).items():
        step = partial(_step, forward, given, case.backward)
        progress(name)
        try:
            step()
            memory[name] = _peak(step, device)
        except (RuntimeError, NotImplementedError, ValueError, ImportError):
            if name.startswith(OURS):
                raise
            continue  # a backend that does not take this case, or a matrix that does not fit
        ways[name] = clocks(step, device)
    timed = {
        way: _compared({name: found[way] for name, found in ways.items() if way in found}, ROUNDS[device])
        for way in (CALLS, GRAPH)
    }
    hosts = {name: found[HOST]() * 1e3 if HOST in found else None for name, found in ways.items()}
    costs = [Cost(case, name, timed[CALLS][name], timed[GRAPH].get(name), memory[name], hosts[name]) for name in ways]
    return sorted(costs, key=lambda cost: (cost.graph or cost.calls).ratio != 1.0)


def _compared(timers: dict[str, Clock], rounds: int) -> dict[str, Timing]:
    """Each variant's timing, against the plain backend that is fastest when timed this way."""
    plain = [name for name in timers if name.startswith(PLAIN)]
    if not plain:
        return {}
    base = min(plain, key=lambda name: statistics.median(timers[name]() for _ in range(TRIALS)))
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in timers if name != base}
    for turn in range(rounds):
        for name, readings in pairs.items():
            if turn % 2:
                own, reference = timers[name](), timers[base]()
            else:
                reference, own = timers[base](), timers[name]()
            readings.append((own, reference))
    references = [reference for readings in pairs.values() for _, reference in readings] or [timers[base]()]
    compared = {base: Timing(statistics.median(references), 1.0, (1.0, 1.0))}
    for name, readings in pairs.items():
        low, middle, high = statistics.quantiles([own / reference for own, reference in readings], n=4)
        compared[name] = Timing(statistics.median(own for own, _ in readings), middle, (low, high))
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


def _step(forward: Callable[..., Tensor], given: list[Tensor], backward: bool) -> None:
    output = forward(*given)
    if backward:
        torch.autograd.grad(output, given, output)


def _peak(step: Step, device: str) -> int | None:
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before
