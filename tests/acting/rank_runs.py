"""What each rank of a distributed test runs; a module of its own, so that spawned processes can import it."""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import attnscale
from attnscale.models import CausalTransformer

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


def tensor_parallel(rank, folder):
    """Heads shared out over the ranks: queries, keys and values by rows, the output by columns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model, x = exploding_transformer()
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in ("query", "key", "value")} | {"output": RowwiseParallel()}
        parallelize_module(block.attention, mesh, plan)
        block.attention.heads //= WORLD
    report = attnscale.clip_qk_(model, watched(model, (x,)), THRESHOLD)
    highest = max(float(layer.stats.max.max()) for layer in watched(model, (x,)).layers.values())
    whole = {
        name: getattr(parameter, "full_tensor", lambda value=parameter: value)().detach()
        for name, parameter in model.named_parameters()
    }
    told = [(head.layer, head.head, head.gamma) for head in report.heads]
    torch.save((whole, told, [str(left) for left in report.left], highest), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def exploding_transformer():
    """Two layers of four heads, of which head 1 of the first and head 2 of the second explode."""
    torch.manual_seed(3)
    model = CausalTransformer(17, 32, 2, 4)
    with torch.no_grad():
        model.blocks[0].attention.query.weight[8:16] *= 200
        model.blocks[1].attention.query.weight[16:24] *= 300
    return model, torch.randint(0, 17, (2, 11))


def flattened(rank, folder):
    """FSDP1, of which the model and what is inside it are given to all that writes: what each answers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    answers = []
    for own in (False, True):
        inner, (x, _) = model_and_batches()
        inner.first = FullyShardedDataParallel(inner.first, use_orig_params=own, device_id=torch.device("cpu"))
        outer = FullyShardedDataParallel(inner, use_orig_params=own, device_id=torch.device("cpu"))
        for model in (outer, inner, inner.first.module):
            for act in (
                lambda model: attnscale.QKClip(model, 1.0),
                lambda model: attnscale.clip_qk_(model, SimpleNamespace(layers={}), 1.0),
                lambda model, x=x: attnscale.calibrate_(model, (x,)),
            ):
                try:
                    act(model)
                    answers.append("nothing")
                except attnscale.errors.SettingError as error:
                    answers.append(str(error))
    Path(folder, f"{rank}.txt").write_text("\n".join(answers), encoding="utf-8")
    dist.destroy_process_group()
