"""Clipping in every layout of ranks: what each rank runs, and the same in one process."""

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import attnscale

from .models import Attention, Normed

D_MODEL, LENGTH, THRESHOLD = 44, 13, 30.0


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


KINDS = {"plain": Attention, "normed": Normed, "gains": GainOfEachHead}


def made(kind, heads, kv_heads):
    """Some heads explode, by different amounts, in both halves of the heads."""
    torch.manual_seed(7)
    model = Layers(KINDS[kind], heads, kv_heads)
    with torch.no_grad():
        for number, attention in enumerate(model.attentions):
            if kind == "normed":
                attention.q_norm.weight.mul_(13 + number)
            elif kind == "gains":
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


def laid_out(layout, model, world):
    """The model given to clip_qk_, the model that is called, and which batch this rank has."""
    rank, shape = dist.get_rank(), (2, world // 2)
    if layout in ("ddp", "inside ddp"):
        wrapped = nn.parallel.DistributedDataParallel(model)
        return (model if layout == "inside ddp" else wrapped), wrapped, rank
    if layout == "tp elsewhere":
        for output in model.outputs:
            parallelize_module(output, init_device_mesh("cpu", (world,)), ColwiseParallel(output_layouts=Replicate()))
        return model, model, 0
    if layout == "tp":
        split_heads(model, init_device_mesh("cpu", (world,)))
        return model, model, 0
    if layout == "ddp x tp":
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        split_heads(model, mesh["tp"])
        return model, model, mesh["dp"].get_local_rank()
    mesh = init_device_mesh(
        "cpu", shape if "x" in layout else (world,), mesh_dim_names=("dp", "tp")[: 1 + ("x" in layout)]
    )
    which = rank
    if layout == "fsdp x tp":
        split_heads(model, mesh["tp"])
        mesh, which = mesh["dp"], mesh["dp"].get_local_rank()
    for attention in model.attentions:
        fully_shard(attention, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model, which


def whole(model):
    return {
        name.removeprefix("module."): getattr(each, "full_tensor", lambda value=each: value)().detach().clone()
        for name, each in model.named_parameters()
    }


def clip_all(rank, folder, world, cases):
    """One case after the other on the same ranks: what each rank then holds, saw and told."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    found = []
    for case in cases:
        found.append(clip(rank, *case))
        dist.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def clip(rank, layout, world, kind, heads, kv_heads, _, blind):
    """Clip by what this rank saw; `blind` of them saw nothing."""
    given, called, which = laid_out(layout, made(kind, heads, kv_heads), world)
    group = None
    if layout == "ddp x tp":
        group = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))["dp"].get_group()
    x = data(which)
    with torch.no_grad(), attnscale.watch(given, rows=None) as seen:
        called(x)
    scales = [float(scale) for layer in seen.layers.values() for scale in layer.scales]
    report = attnscale.clip_qk_(given, SimpleNamespace(layers={}) if rank in blind else seen, THRESHOLD, group=group)
    return whole(given), scales, [str(left) for left in report.left]


def flattened(rank, folder):
    """FSDP1, of which the model and what is inside it are given to all that writes: what each answers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    answers = []
    for own in (False, True):
        inner = made("plain", 4, 4)
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
