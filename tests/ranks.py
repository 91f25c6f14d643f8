"""The processes of a distributed test, forked from one that has imported what all of them need, where there is fork."""

import multiprocessing

import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"  # all that Windows has
NEEDED = [
    "torch._dynamo",  # what shards a model imports it, and it takes longer than all that a rank does
    "tests.train.clip_rank_runs",
    "tests.train.logs",
    "tests.train.step_runs",
    "tests.acting.rank_runs",
]


KEPT = []


def processes():
    """What makes them: `processes().Process(target=…)`."""
    context = mp.get_context(METHOD)
    if METHOD == "forkserver":
        context.set_forkserver_preload(NEEDED)
    return context


def on_ranks(run, world, *arguments):
    """Call `run(rank, *arguments)` in `world` processes; what one of them raises is raised here."""
    mp.start_processes(_run, (run, *arguments), nprocs=world, start_method=processes().get_start_method())


def _run(rank, run, *arguments):
    """Keep DDP's modules until the process has ended: their destructor may wait forever for a thread of gloo."""
    made = DistributedDataParallel.__init__

    def kept(self, *given, **options):
        made(self, *given, **options)
        KEPT.append(self)

    DistributedDataParallel.__init__ = kept
    run(rank, *arguments)
