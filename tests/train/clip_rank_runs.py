"""Models on ranks with QKClip, in every layout, and the same in one process: what each runs."""

import math
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from attnscale import QKClip

from ..acting.layout_runs import D_MODEL, THRESHOLD, data, laid_out, made, whole
from ..acting.models import Attention

STEPS, GROWTH = 4, 1.15
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "all_to_all_single", "barrier")


@dataclass(frozen=True)
class Case:
    """How a model is laid out over ranks, and which batches all ranks see together."""

    layout: str
    world: int
    kind: str = "plain"
    heads: int = 4
    kv_heads: int = 4
    batches: tuple[int, ...] = (0,)
    compiled: str = ""  # "whole" or "parts"
    idle: tuple[tuple[int, int], ...] = ()  # ranks that run no forward, and in which step


class SomeKeys(Attention):
    """As a rank that shares out keys sees it: all queries, and a part of the keys."""

    part = slice(None)

    def forward(self, x):
        query, key = self.make(x)
        return F.scaled_dot_product_attention(query, key[..., self.part, :], self.value(x)[..., self.part, :])


def one_of(case):
    """The model in one process."""
    if case.layout != "keys":
        return made(case.kind, case.heads, case.kv_heads)
    torch.manual_seed(7)
    model = SomeKeys(D_MODEL, case.heads)
    with torch.no_grad():
        model.q_proj.weight.mul_(40)
    return model


def laid_out_as(case):
    """The model that is clipped, what is called, this rank's batch, and the group that QKClip is told."""
    model = one_of(case)
    if case.layout == "keys":
        length = data(0).shape[1]
        size, rank = math.ceil(length / case.world), dist.get_rank()
        model.part = slice(rank * size, (rank + 1) * size)
        return model, model, 0, dist.group.WORLD
    if case.layout == "copies":
        return model, model, dist.get_rank(), dist.group.WORLD
    if case.compiled == "parts":
        for attention in model.attentions:
            attention.compile(backend="aot_eager")
    given, called, which = laid_out(case.layout, model, case.world)
    if case.compiled == "whole":
        called = torch.compile(called, backend="aot_eager")
    group = None
    if case.layout == "ddp x tp":
        groups = [dist.new_group([rank, rank + 2]) for rank in range(2)]
        group = groups[dist.get_rank() % 2]
    return given, called, which, group


def grow_(model):
    """What an optimiser might do, the same on all ranks."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = None
            parameter.mul_(GROWTH)


def in_one_process(case):
    """All data at once: the parameters then, and which heads were clipped at each step."""
    model, told = one_of(case), []
    clip = QKClip(model, THRESHOLD)
    for step in range(STEPS):
        seen = [which for which in case.batches if (which, step) not in case.idle]
        model(torch.cat([data(which) for which in seen])).square().mean().backward()
        grow_(model)
        report = clip.step()
        told.append([] if report is None else [(head.layer, head.head) for head in report.heads])
    clip.close()
    return whole(model), told


def on_ranks(rank, folder, cases):
    """One case after the other on the same ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=cases[0].world)
    found = []
    for case in cases:
        torch._dynamo.reset()
        found.append(_clipped(rank, case))
        dist.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _clipped(rank, case):
    """The parameters, the heads told, the collectives of each step, whether it was measured inside, what was left."""
    given, called, which, group = laid_out_as(case)
    clip, told, counts, left = QKClip(given, THRESHOLD, group=group), [], [], []
    for step in range(STEPS):
        if (rank, step) not in case.idle:
            called(data(which)).square().mean().backward()
        grow_(given)
        with _counted() as count:
            report = clip.step()
        counts.append(count)
        told.append([] if report is None else [(head.layer, head.head) for head in report.heads])
        left += [] if report is None else [str(each) for each in report.left]
    is_inside = clip.is_inside
    clip.close()
    return whole(given), told, counts, is_inside, left


@contextmanager
def _counted():
    """How often each collective is called."""
    plain, count = {name: getattr(dist, name) for name in COLLECTIVES}, {}

    def counting(name):
        def call(*args, **kwargs):
            count[name] = count.get(name, 0) + 1
            return plain[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield count
    finally:
        for name in COLLECTIVES:
            setattr(dist, name, plain[name])
