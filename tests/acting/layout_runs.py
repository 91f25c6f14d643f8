"""Clipping in every layout of ranks, once by clip_qk_ and in training by QKClip: on ranks, and in one process."""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import attnscale
from attnscale import QKClip

from .models import Attention, Normed, before_and, watched

D_MODEL, LENGTH, THRESHOLD, STEPS, GROWTH = 44, 13, 30.0, 4, 1.15


@dataclass(frozen=True)
class Case:
    """How a model is laid out over ranks, and which batches all ranks see together."""

    layout: str
    world: int
    kind: str = "plain"
    heads: int = 4
    kv_heads: int = 4
    batches: tuple[int, ...] = (0,)
    compiled: str = ""  # in training: "whole" or "parts"
    blind: tuple[int, ...] = ()  # ranks that measured nothing for clip_qk_
    idle: tuple[tuple[int, int], ...] = ()  # in training: ranks that run no forward, and in which step
    left: str = ""  # why no head can be clipped


class Layers(nn.Module):
    """Attentions one after the other, with a projection behind each."""

    def __init__(self, kind, heads, kv_heads):
        super().__init__()
        self.attentions = nn.ModuleList(kind(D_MODEL, heads, kv_heads) for _ in range(2))
        self.outputs = nn.ModuleList(nn.Linear(D_MODEL, D_MODEL) for _ in range(2))

    def forward(self, x):
        for attention, output in zip(self.attentions, self.outputs, strict=True):
            x = x + output(attention(x).transpose(1, 2).flatten(2))
        return x


class GainOfEachHead(Attention):
    """QK-norm with gains of every head, of which a rank takes those of its own heads."""

    def __init__(self, d_model, heads, kv_heads=None):
        super().__init__(d_model, heads, kv_heads)
        self.q_gain = nn.Parameter(torch.linspace(0.5, 2, heads * self.head_dim).view(heads, 1, self.head_dim))
        self.first = 0

    def make(self, x):
        query, key = super().make(x)
        gain = self.q_gain[self.first : self.first + self.heads]
        return nn.functional.rms_norm(query, query.shape[-1:]) * gain, key


class SomeKeys(Attention):
    """All queries and a part of the keys, on a rank of a context-parallel run."""

    part = slice(None)

    def forward(self, x):
        query, key = self.make(x)
        return F.scaled_dot_product_attention(query, key[..., self.part, :], self.value(x)[..., self.part, :])


KINDS = {"plain": Attention, "normed": Normed, "gains": GainOfEachHead}


def made(case):
    """A model of which some heads explode, by different amounts, in both halves of the heads."""
    torch.manual_seed(7)
    if case.layout == "keys":
        model = SomeKeys(D_MODEL, case.heads)
        with torch.no_grad():
            model.q_proj.weight.mul_(40)
        return model
    model = Layers(KINDS[case.kind], case.heads, case.kv_heads)
    with torch.no_grad():
        for number, attention in enumerate(model.attentions):
            if case.kind == "normed":
                attention.q_norm.weight.mul_(13 + number)
            elif case.kind == "gains":
                attention.q_gain[:3].mul_(torch.tensor([17.0, 1.0, 29.0])[:, None, None])
                attention.k_proj.weight.mul_(5)
            else:
                attention.q_proj.weight[: D_MODEL // 2].mul_(150 + number)
                attention.q_proj.weight[D_MODEL // 2 :].mul_(260)
    return model


def data(rank):
    torch.manual_seed(11 + rank)
    return torch.randn(2, LENGTH, D_MODEL) * (1 + rank)


def split_heads(model, mesh):
    """Tensor parallel: queries by heads; keys too where every rank has one, else whole on every rank."""
    size, rank = mesh.size(), mesh.get_local_rank()
    for attention, output in zip(model.attentions, model.outputs, strict=True):
        named = ("q_proj", "k_proj", "v_proj") if attention.kv_heads >= size else ("q_proj",)
        parallelize_module(attention, mesh, dict.fromkeys(named, ColwiseParallel()))
        parallelize_module(output, mesh, RowwiseParallel())
        attention.heads //= size
        attention.kv_heads //= size if "k_proj" in named else 1
        attention.first = rank * attention.heads


def laid_out(case):
    """The model that is clipped, the model that is called, this rank's batch, and the group that is passed."""
    model, rank, world, layout = made(case), dist.get_rank(), case.world, case.layout
    if case.compiled == "parts":
        for attention in model.attentions:
            attention.compile(backend="aot_eager")
    if layout == "keys":
        size = math.ceil(LENGTH / world)
        model.part = slice(rank * size, (rank + 1) * size)
        return model, model, 0, dist.group.WORLD
    if layout == "copies":
        return model, model, rank, dist.group.WORLD
    if layout in ("ddp", "inside ddp"):
        wrapped = nn.parallel.DistributedDataParallel(model)
        return (model if layout == "inside ddp" else wrapped), wrapped, rank, None
    if layout == "tp elsewhere":
        for output in model.outputs:
            parallelize_module(output, init_device_mesh("cpu", (world,)), ColwiseParallel(output_layouts=Replicate()))
        return model, model, 0, None
    has_two_axes = "x" in layout
    names = ("dp", "tp") if has_two_axes else ("dp",)
    mesh = init_device_mesh("cpu", (2, world // 2) if has_two_axes else (world,), mesh_dim_names=names)
    if layout == "tp":
        split_heads(model, mesh)
        return model, model, 0, None
    if layout == "ddp x tp":
        split_heads(model, mesh["tp"])
        return model, model, mesh["dp"].get_local_rank(), mesh["dp"].get_group()
    which = rank
    if layout == "fsdp x tp":
        split_heads(model, mesh["tp"])
        mesh, which = mesh["dp"], mesh["dp"].get_local_rank()
    for attention in model.attentions:
        fully_shard(attention, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model, which, None


def whole(model):
    return {
        name.removeprefix("module."): getattr(each, "full_tensor", lambda value=each: value)().detach().clone()
        for name, each in model.named_parameters()
    }


def heads_in(report):
    return [] if report is None else [(head.layer.removeprefix("module."), head.head) for head in report.heads]


def reasons_in(report):
    return [] if report is None else [str(each) for each in report.left]


def on_ranks(rank, folder, cases):
    """One case after the other on the same ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch's own
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=cases[0].world)
    found = []
    for case in cases:
        torch._dynamo.reset()
        found.append((once(rank, case), trained(rank, case)))
        dist.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def once(rank, case):
    """The parameters after clip_qk_, the scales that were seen, and what was left."""
    given, called, which, group = laid_out(case)
    with torch.no_grad(), attnscale.watch(given, rows=None) as seen:
        called(data(which))
    scales = [float(scale) for layer in seen.layers.values() for scale in layer.scales]
    seen = SimpleNamespace(layers={}) if rank in case.blind else seen
    report = attnscale.clip_qk_(given, seen, THRESHOLD, group=group)
    return whole(given), scales, reasons_in(report)


def once_in_one_process(case):
    model = made(case)
    x = torch.cat([data(which) for which in case.batches if which not in case.blind])
    report = attnscale.clip_qk_(model, watched(model, (x,)), THRESHOLD)
    assert report.heads
    return before_and(model)


def trained(rank, case):
    """The parameters, the clipped heads and the collectives of each step, if it is measured inside, what was left."""
    given, called, which, group = laid_out(case)
    called = torch.compile(called, backend="aot_eager") if case.compiled == "whole" else called
    clip, heads, counts, left = QKClip(given, THRESHOLD, group=group), [], [], []
    for step in range(STEPS):
        if (rank, step) not in case.idle:
            called(data(which)).square().mean().backward()
        grow_(given)
        with CommDebugMode() as collectives:
            report = clip.step()
        counts.append({str(name): count for name, count in collectives.get_comm_counts().items()})
        heads.append(heads_in(report))
        left += reasons_in(report)
    is_inside = clip.is_inside
    clip.close()
    return whole(given), heads, counts, is_inside, left


def trained_in_one_process(case):
    """All data at once: the parameters then, and which heads were clipped at each step."""
    model, heads = made(case), []
    with QKClip(model, THRESHOLD) as clip:
        for step in range(STEPS):
            seen = [which for which in case.batches if (which, step) not in case.idle]
            model(torch.cat([data(which) for which in seen])).square().mean().backward()
            grow_(model)
            heads.append(heads_in(clip.step()))
    return before_and(model), heads


def grow_(model):
    """What an optimiser might do, the same on all ranks."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = None
            parameter.mul_(GROWTH)


def flattened(rank, folder):
    """FSDP1, of which the model and what is inside it are given to all that writes: what each answers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    answers = []
    for own in (False, True):
        inner = made(Case("fsdp", 2))
        first = FullyShardedDataParallel(inner.attentions[0], use_orig_params=own, device_id=torch.device("cpu"))
        inner.attentions[0] = first
        outer = FullyShardedDataParallel(inner, use_orig_params=own, device_id=torch.device("cpu"))
        for model in (outer, inner, first.module):
            for act in (
                lambda model: attnscale.QKClip(model, 1.0),
                lambda model: attnscale.clip_qk_(model, SimpleNamespace(layers={}), 1.0),
                lambda model: attnscale.calibrate_(model, (data(rank),)),
            ):
                try:
                    act(model)
                    answers.append("nothing")
                except attnscale.errors.SettingError as error:
                    answers.append(str(error))
    Path(folder, f"{rank}.txt").write_text("\n".join(answers), encoding="utf-8")
    dist.destroy_process_group()
