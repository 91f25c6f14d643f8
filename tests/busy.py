"""How much of the machine this process gets: limits on time hold for one that is otherwise idle."""

import os
import time


def held_up(seconds=0.3):
    """How many times longer work takes here than it would alone: a spinning process's time over what it got of it."""
    wall, own = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        pass
    alone = (time.perf_counter() - wall) / (time.process_time() - own)
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
    return max(1.0, alone, waiting)  # a browser is several processes: what waits for any core holds it up too
