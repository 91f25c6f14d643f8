"""Measure the cost of variants of attention relative to plain SDPA.

Machines are noisy, and a GPU's clock depends on the power of the previous work. So each timing of a variant is paired
with a timing of the fastest plain SDPA, alternately before and after it, and a cost is the median of the ratios.

A step is timed as called from Python, and on a GPU also as a CUDA graph, which excludes the host's time. In training
the host runs ahead of the GPU, so its time matters only if it exceeds the GPU's.
"""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnscale.bench import dense, ragged
from attnscale.bench.dense import OURS, PLAIN, Case

Step = Callable[[], None]
Clock = Callable[[], float]  # milliseconds per step
KINDS = {"dense": dense, "ragged": ragged}
CALLS, GRAPH, HOST = "calls", "graph", "host"
QUEUED = 50  # number of calls that fit into the GPU's queue
TIMED = 20.0  # milliseconds of steps in one timing on a GPU: long enough for the host to run ahead
CAPTURED = 4.0  # milliseconds of steps in a graph; much longer than its launch, too short for a change of the clock
LONGEST_CAPTURED = 20.0  # milliseconds; longer steps hide the host's time, and a graph would keep their memory
ROUNDS = 9
TRIALS = 3  # timings of each plain backend, to find the fastest


@dataclass(frozen=True)
class Timing:
    """Time of one variant, and its ratio to the fastest plain SDPA: median and quartiles over rounds."""

    milliseconds: float
    ratio: float
    quartiles: tuple[float, float]


@dataclass(frozen=True)
class Cost:
    """Cost of one variant in one case."""

    case: Case
    variant: str
    calls: Timing  # steps called from Python
    graph: Timing | None  # steps in a CUDA graph: time of the device; None if not captured
    peak_bytes: int | None  # peak memory without the inputs; None on a CPU
    host_microseconds: float | None = None  # host time per call; None on a CPU


def cases(device: str, quick: bool = False, kind: str | None = None) -> list[Case]:
    """Return the cases of docs/speed.md for a device, of one kind or all; with `quick`, small cases."""
    return [case for name, each in KINDS.items() if kind in (None, name) for case in each.cases(device, quick)]


def measure_case(case: Case, device: str, progress: Callable[[str], None] = lambda name: None) -> list[Cost]:
    """Time every variant of one case; the fastest plain SDPA comes first."""
    ways, memory = {}, {}
    for name, (forward, inputs) in KINDS[case.kind].variants(case, device).items():
        step = partial(_step, forward, inputs, case.backward)
        progress(name)
        try:
            step()
            memory[name] = _peak(step, device)
        except (RuntimeError, NotImplementedError, ValueError, ImportError):
            if name.startswith(OURS):
                raise
            continue  # the backend does not support this case, or the matrix does not fit
        ways[name] = clocks(step, device)
    called, captured = (
        _compare({name: own[way] for name, own in ways.items() if way in own}) for way in (CALLS, GRAPH)
    )
    hosts = {name: own[HOST]() * 1e3 if HOST in own else None for name, own in ways.items()}
    costs = [Cost(case, name, called[name], captured.get(name), memory[name], hosts[name]) for name in ways]
    return sorted(costs, key=lambda cost: (cost.graph or cost.calls).ratio != 1.0)


def _compare(timers: dict[str, Clock]) -> dict[str, Timing]:
    """Time every variant, paired with the fastest plain backend."""
    plain = [name for name in timers if name.startswith(PLAIN)]
    if not plain:
        return {}
    base = min(plain, key=lambda name: statistics.median(timers[name]() for _ in range(TRIALS)))
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in timers if name != base}
    for turn in range(ROUNDS):
        for name, readings in pairs.items():
            first, second = (name, base) if turn % 2 else (base, name)
            taken = {first: timers[first](), second: timers[second]()}
            readings.append((taken[name], taken[base]))
    references = [reference for readings in pairs.values() for _, reference in readings] or [timers[base]()]
    compared = {base: Timing(statistics.median(references), 1.0, (1.0, 1.0))}
    for name, readings in pairs.items():
        low, middle, high = statistics.quantiles([own / reference for own, reference in readings], n=4)
        compared[name] = Timing(statistics.median(own for own, _ in readings), middle, (low, high))
    return compared


def to_dict(costs: Sequence[Cost], device: str) -> dict[str, Any]:
    """Return the timings and a description of the machine as a dict for JSON."""
    machine: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    machine["threads"] = torch.get_num_threads()
    if device == "cuda":
        machine |= {"gpu": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
    machine["system"] = f"{platform.system()} {platform.machine()}"
    return {"machine": machine, "device": device, "costs": [asdict(cost) for cost in costs]}


def _step(forward: Callable[..., Tensor], inputs: list[Tensor], backward: bool) -> None:
    output = forward(*inputs)
    if backward:
        torch.autograd.grad(output, inputs, output)


def _peak(step: Step, device: str) -> int | None:
    if device == "cpu":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() - before


def clocks(step: Step, device: str) -> dict[str, Clock]:
    """Return the clocks of a step: calls, and a CUDA graph if the step is short and can be captured."""
    if device == "cpu":
        return {CALLS: lambda: _milliseconds_of(step)}
    _events(step, 1)  # warm up: the first call after other work is slower
    duration = _events(step, 1)
    found: dict[str, Clock] = {CALLS: lambda: _events(step, max(1, round(TIMED / duration))), HOST: lambda: _host(step)}
    steps = max(1, round(CAPTURED / duration))
    graph = _captured(step, steps) if duration < LONGEST_CAPTURED else None
    if graph is not None:
        replay = graph.replay
        found[GRAPH] = lambda: _events(replay, 1) / steps
    return found


def _captured(step: Step, steps: int) -> torch.cuda.CUDAGraph | None:
    torch.cuda.init()  # creates the default generator
    graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[torch.cuda.current_device()]
    numbers = generator.clone_state()
    try:
        with torch.cuda.graph(graph):
            for _ in range(steps):
                step()
    except RuntimeError:  # a step that synchronises with the GPU cannot be captured
        torch.cuda.synchronize()
        generator.graphsafe_set_state(numbers)  # a failed capture does not reset the generator
        return None
    return graph


def _milliseconds_of(step: Step, times: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(times):
        step()
    return (time.perf_counter() - start) * 1e3 / times


def _host(step: Step) -> float:
    """Time a call until it returns, on an idle GPU; the minimum of five rounds."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        found.append(_milliseconds_of(step, QUEUED))
    torch.cuda.synchronize()
    return min(found)


def _events(step: Step, times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / times
