"""Attention whose keys are shared out over ranks, or over the turns of a ring, and the same in one piece."""

import warnings
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from attnscale import Monitor

from .rank_runs import begin

BATCH, HEADS, LENGTH, WIDTH, STEPS = 2, 3, 137, 11, 2
CASES = {  # kind, causal, rows
    "every row": ("sdpa", True, None),
    "some rows": ("sdpa", True, 16),
    "written out": ("eager", True, 16),
    "no mask": ("sdpa", False, 16),
}


class Attention(nn.Module):
    """One call for each shard of keys (first, last), put together by their log-sum-exp."""

    def __init__(self, kind, causal, shards, together=lambda out, lse: (out, lse)):
        super().__init__()
        self.query, self.key = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(2))
        self.kind, self.causal, self.shards, self.together = kind, causal, shards, together

    def forward(self, x, start=0, stop=LENGTH):
        query, key = (made(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for made in (self.query, self.key))
        rows = torch.arange(start, stop)
        calls = [self.attend(query[:, :, start:stop], key, rows, first, last) for first, last in self.shards]
        out, lse = self.together(*map(torch.stack, zip(*calls, strict=True)))
        return (out * (lse - lse.logsumexp(0)).exp().unsqueeze(-1)).sum(0)

    def attend(self, query, key, rows, first, last):
        key, columns = key[:, :, first:last], torch.arange(first, last)
        shown = columns <= rows[:, None] if self.causal else torch.ones(len(rows), len(columns), dtype=torch.bool)
        mask = torch.zeros(shown.shape).masked_fill(~shown, -torch.inf)
        if self.kind == "eager":
            scores = query @ key.mT * WIDTH**-0.5 + mask
            return scores.softmax(-1).nan_to_num() @ key, scores.logsumexp(-1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, key, attn_mask=mask)
        return out.nan_to_num(), lse.nan_to_num(nan=-torch.inf, posinf=-torch.inf)


def made(kind, causal, shards, *more):
    torch.manual_seed(0)
    model = Attention(kind, causal, shards, *more)
    with torch.no_grad():
        model.query.weight.mul_(4)  # scores that differ, so that every statistic does
    return model


def run(model, path, rows, group, seeds=(1,), merge_ranks=True, **where):
    """The batches of these seeds are micro-batches of each step."""
    monitor = Monitor(model, 1, rows, [path], key_group=group, merge_ranks=merge_ranks, timeout=30)
    for step in range(STEPS):
        for seed in seeds:
            torch.manual_seed(10 * step + seed)
            model(torch.randn(BATCH, LENGTH, HEADS * WIDTH), **where)
        monitor.step()
    monitor.close()


def cut(world):
    """Uneven shards, so that nothing depends on their being alike."""
    return list(pairwise([0, *(5 + rank * (LENGTH - 5) // world for rank in range(1, world)), LENGTH]))


def gathered_over(group):
    """The shards of all ranks."""

    def together(*tensors):
        for tensor in tensors:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, tensor.detach(), group=group)
            yield torch.cat(parts)

    return together


def everything(rank, world, folder):
    """Every rank has all queries and its own keys; a ring; two key groups of a data-parallel run; mistakes."""
    begin(rank, world, f"{folder}/store")
    group, shards = dist.group.WORLD, cut(world)
    for name, (kind, causal, rows) in CASES.items():
        model = made(kind, causal, [shards[rank]], gathered_over(group))
        run(model, f"{folder}/{name}.jsonl", rows, group)
    for kind in ("sdpa", "eager"):
        start, stop = shards[rank]
        run(made(kind, True, shards), f"{folder}/ring {kind}.jsonl", None, group, start=start, stop=stop)
    halves = [dist.new_group(list(range(first, first + world // 2))) for first in (0, world // 2)]
    own, at = halves[rank // (world // 2)], rank % (world // 2)
    model = made("sdpa", True, [cut(world // 2)[at]], gathered_over(own))
    run(model, f"{folder}/two groups.jsonl", None, own, seeds=[rank // (world // 2)])
    mistakes(rank, group, folder)
    if rank == 0:
        in_one_piece(folder, dist.new_group([0], use_local_synchronization=True))
    dist.destroy_process_group()


def in_one_piece(folder, group):
    """The same on one rank; a key group of its own, so that it draws the same rows."""
    for name, (kind, causal, rows) in CASES.items():
        run(made(kind, causal, [(0, LENGTH)]), f"{folder}/{name} whole.jsonl", rows, group, merge_ranks=False)
    whole = made("sdpa", True, [(0, LENGTH)])
    run(whole, f"{folder}/two batches whole.jsonl", None, group, seeds=[0, 1], merge_ranks=False)
    run(whole, f"{folder}/same batch twice.jsonl", None, group, seeds=[1, 1], merge_ranks=False)


def mistakes(rank, group, folder):
    """Queries that ranks do not have in common; and parts of queries."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(made("sdpa", False, [(0, LENGTH)]), lambda record: None, None, group, seeds=[rank])
        model = made("sdpa", False, [(0, LENGTH)])
        monitor = Monitor(model, 1, None, key_group=group, timeout=30)
        x = torch.randn(BATCH, LENGTH, HEADS * WIDTH)
        for start in (0, LENGTH // 2):
            model(x, start=start)
        monitor.step()
        monitor.close()
    torch.save([str(warning.message) for warning in caught], f"{folder}/told{rank}.pt")
