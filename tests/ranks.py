"""The processes of a distributed test, forked from one that has imported what all of them need, where there is fork."""

import multiprocessing
import time

import pytest
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"  # all that Windows has
NEEDED = [
    "torch._dynamo",  # what shards a model imports it, and it takes longer than all that a rank does
    "tests.train.logs",
    "tests.train.rank_runs",
    "tests.acting.layout_runs",
]
LONGEST = 300  # seconds that the ranks of a test may take together
KEPT = []


def processes():
    """What makes them: `processes().Process(target=…)`."""
    context = mp.get_context(METHOD)
    if METHOD == "forkserver":
        context.set_forkserver_preload(NEEDED)
    return context


def on_ranks(run, world, *arguments):
    """Call `run(rank, *arguments)` in `world` processes; what one of them raises is raised here."""
    method = processes().get_start_method()
    ranks = mp.start_processes(_run, (run, *arguments), nprocs=world, join=False, start_method=method)
    deadline = time.monotonic() + LONGEST
    while not ranks.join(max(0.0, deadline - time.monotonic())):
        if time.monotonic() >= deadline:
            for process in ranks.processes:
                process.kill()
            pytest.fail(f"The ranks did not end within {LONGEST} s.")


def _run(rank, run, *arguments):
    """Keep DDP's modules until the process has ended: their destructor may wait forever for a thread of gloo."""
    made = DistributedDataParallel.__init__

    def kept(self, *given, **options):
        made(self, *given, **options)
        KEPT.append(self)

    DistributedDataParallel.__init__ = kept
    run(rank, *arguments)
