"""Training stacks that a Monitor works in, each on two processes or in one; importable by spawned processes."""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from attnscale import Monitor
from attnscale.diagnose import is_trained
from tests.zoo.entry import Block, SelfAttention

from .rank_runs import begin, write

BATCH, LENGTH, HEADS, HEAD_DIM, STEPS = 2, 7, 3, 8, 3


class Attention(SelfAttention):
    def forward(self, x):
        return self.merge(F.scaled_dot_product_attention(*self.project(x)))


def biased_model(has_norm=True):
    """Attention whose projections have biases, with a norm before it or none."""
    torch.manual_seed(0)
    blocks = [Block(HEADS * HEAD_DIM, Attention(HEADS * HEAD_DIM, HEADS)) for _ in range(2)]
    for block in blocks:
        block.norm = block.norm if has_norm else nn.Identity()
    return nn.Sequential(*blocks)


def inputs():
    return torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(0))


def train(model, monitor, world=1, rank=0):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        loss = model(inputs().chunk(world)[rank]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss=loss)
    monitor.close()


def fsdp1(rank, world, folder, use_orig_params, has_norm):
    begin(rank, world, folder)
    model = FullyShardedDataParallel(
        biased_model(has_norm),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitor = Monitor(model, every=1, rows=None, sinks=[f"{folder}/scores.jsonl"], timeout=30)
        train(model, monitor, world, rank)
    told = [str(each.message) for each in caught if "attnscale" in type(each.message).__module__]
    write(folder, f"told{rank}", [told, is_trained(model)])
    dist.destroy_process_group()
