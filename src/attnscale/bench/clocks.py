"""How long one step takes: called from Python, or replayed as a CUDA graph, which leaves the host's time out.

In training the host runs ahead of the GPU and its time does not show, unless a step takes it longer than the GPU;
so both are worth knowing.
"""

import time
from collections.abc import Callable

import torch

Step = Callable[[], None]
Clock = Callable[[], float]  # milliseconds of one step
CALLS, GRAPH, HOST = "calls", "graph", "host"
QUEUED = 50  # calls that the GPU's queue takes without stopping the host
TIMED = 20.0  # milliseconds of steps in one timing on a GPU: long enough for the host to run ahead
CAPTURED = 4.0  # milliseconds of steps in one graph: launching it does not show, and the clock has no time to change
LONGEST_CAPTURED = 20.0  # milliseconds; a longer step hides the host's time by itself, and its graph keeps its memory


def clocks(step: Step, device: str) -> dict[str, Clock]:
    """The ways to time a step that runs: calls, and a graph where the step is short and can be captured."""
    if device == "cpu":
        return {CALLS: lambda: _wall(step)}
    _events(step, 1)  # the first call after another kind of work is slower
    taken = _events(step, 1)
    found: dict[str, Clock] = {CALLS: lambda: _events(step, max(1, round(TIMED / taken))), HOST: lambda: _host(step)}
    steps = max(1, round(CAPTURED / taken))
    graph = _captured(step, steps) if taken < LONGEST_CAPTURED else None
    if graph is not None:
        replay = graph.replay
        found[GRAPH] = lambda: _events(replay, 1) / steps
    return found


def _captured(step: Step, steps: int) -> torch.cuda.CUDAGraph | None:
    torch.cuda.init()  # or there is no generator yet
    graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[torch.cuda.current_device()]
    numbers = generator.clone_state()
    try:
        with torch.cuda.graph(graph):
            for _ in range(steps):
                step()
    except RuntimeError:  # something in it waits for the GPU
        torch.cuda.synchronize()
        generator.graphsafe_set_state(numbers)  # a capture that fails leaves it waiting for the end of one
        return None
    return graph


def _wall(step: Step) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def _host(step: Step) -> float:
    """Until a call returns, with nothing to wait for: the least of five rounds."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        found.append(_wall(lambda: _repeat(step, QUEUED)) / QUEUED)
    torch.cuda.synchronize()
    return min(found)


def _repeat(step: Step, times: int) -> None:
    for _ in range(times):
        step()


def _events(step: Step, times: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / times
