"""What each rank of a distributed test runs; a module of its own, so that spawned processes can import it."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import attnscale

from .models import Untied, sharpened, watched

D_MODEL, HEADS, LENGTH, WORLD = 55, 5, 13, 2
THRESHOLD = 100.0


def model_and_batches():
    """A model with two heads that explode, one on the data of each rank; the rows of a head straddle the shards."""
    torch.manual_seed(5)
    model = Untied(D_MODEL, HEADS, tied=False)
    for head, factor in ((2, 3e4), (4, 1e4)):
        model = sharpened(model, "first.q_proj.weight", slice(11 * head, 11 * head + 11), factor)
    return model, [torch.randn(2, LENGTH, D_MODEL) * (1 + rank) for rank in range(WORLD)]


def clip(rank, folder, kind):
    """Clip after a forward on this rank's batch, and save the whole parameters and the report."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    model, batches = model_and_batches()
    if kind == "fsdp":
        for layer in (model.first, model.second):
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    report = attnscale.clip_qk_(model, watched(model, (batches[rank],)), THRESHOLD)
    now = watched(model, (batches[rank],))
    whole = {
        name.removeprefix("module."): getattr(parameter, "full_tensor", lambda value=parameter: value)().detach()
        for name, parameter in model.named_parameters()
    }
    highest = max(float(layer.stats.max.max()) for layer in now.layers.values())
    told = [(head.layer.removeprefix("module."), head.head, head.maximum, head.gamma) for head in report.heads]
    torch.save((whole, told, highest), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
