"""Training stacks that a Monitor works in, each on two processes or in one; importable by spawned processes."""

import json
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from attnscale import Monitor
from attnscale.diagnose import is_trained

BATCH, LENGTH, HEADS, HEAD_DIM, STEPS = 2, 7, 3, 8, 3


class Biased(nn.Module):
    """Attention whose projections have biases, with a norm before it or none."""

    def __init__(self, has_norm):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.norm = nn.LayerNorm(width) if has_norm else nn.Identity()
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        projected = (projection(self.norm(x)) for projection in (self.query, self.key, self.value))
        query, key, value = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in projected)
        return x + self.output(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


def biased_model(has_norm=True):
    torch.manual_seed(0)
    return nn.Sequential(Biased(has_norm), Biased(has_norm))


def train(model, monitor, world=1, rank=0):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs = torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(0))
    for _ in range(STEPS):
        loss = model(inputs.chunk(world)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss=loss)
    monitor.close()


def fsdp1(rank, world, folder, use_orig_params, has_norm):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    model = FullyShardedDataParallel(
        biased_model(has_norm),
        auto_wrap_policy=ModuleWrapPolicy({Biased}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = Monitor(model, every=1, rows=None, sinks=[f"{folder}/scores.jsonl"], timeout=30)
        train(model, monitor, world, rank)
    told = [str(each.message) for each in caught if "attnscale" in type(each.message).__module__]
    Path(f"{folder}/told{rank}.json").write_text(json.dumps([told, is_trained(model)]), encoding="utf-8")
    dist.destroy_process_group()
