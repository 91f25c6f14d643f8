"""How much of a core this process gets: limits on time hold for a machine that is otherwise idle."""

import time


def held_up(seconds=0.3):
    """How many times longer work takes here than it would alone: a spinning process's time over what it got of it."""
    wall, own = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        pass
    return max(1.0, (time.perf_counter() - wall) / (time.process_time() - own))
