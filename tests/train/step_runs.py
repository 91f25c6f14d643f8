"""Ranks that fall out of step, one after the other on the same two processes, and what rank 0 records of it."""

import json
import os
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from attnscale import Monitor

from .rank_runs import begin
from .training import batch, loss_of, small_model

STEPS, TIMEOUT = 7, 2.0
MONITORS = 6


def run(rank, monitor, at_step):
    """Steps that begin together on both ranks, as training with collectives makes them."""
    for step in range(STEPS):
        dist.barrier()
        loss_of(monitor.model, batch(4, step)).backward()
        if not (rank == 1 and at_step(step)):
            monitor.step()
    monitor.close()


def skips_a_batch(rank, monitor):
    run(rank, monitor, lambda step: step == 2)


def loads_the_state_alone(rank, monitor):
    state = {"steps": 40, "history": {"series": {}, "began": {}, "standing": []}}
    run(rank, monitor, lambda step: step == 2 and bool(monitor.load_state_dict(state)))


def is_late(rank, monitor):
    run(rank, monitor, lambda step: step == 2 and bool(time.sleep(2 * TIMEOUT)))


def raises(rank, monitor):
    for step in range(STEPS):
        dist.barrier()
        with suppress(ZeroDivisionError), monitor:
            loss_of(monitor.model, batch(4, step)).backward()
            if rank == 1 and step == 2:
                raise ZeroDivisionError
    monitor.close()


def sees_nothing(rank, monitor):
    """Watching fails on one rank: it takes part all the same."""
    if rank == 1:
        monitor.cancel()
        monitor._begin_watching = lambda: 1 / 0
    run(rank, monitor, lambda step: False)


CASES = {each.__name__: each for each in (skips_a_batch, loads_the_state_alone, is_late, raises, sees_nothing)}


def everything(rank, world, folder):
    begin(rank, world, f"{folder}/store")
    found = {}
    for name, case in CASES.items():
        records, model = [], small_model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monitor = Monitor(model, every=1, rows=8, sinks=[records.append], timeout=TIMEOUT)
            case(rank, monitor)
        told = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
        found[name] = ([(record.step, record.ranks) for record in records], told)
        dist.barrier()
    found["left behind"] = [left_behind() for _ in range(MONITORS)]
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def left_behind():
    """Descriptors and threads of this process, after one more monitor."""
    model = small_model()
    monitor = Monitor(model, every=1, rows=8, timeout=TIMEOUT)
    loss_of(model, batch()).backward()
    monitor.step()
    monitor.close()
    dist.barrier()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    threads = next(line for line in status.splitlines() if line.startswith("Threads:"))
    return [len(os.listdir("/proc/self/fd")), int(threads.split()[1]), threading.active_count()]
