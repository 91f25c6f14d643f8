"""What each rank of a distributed test runs; a module of its own, so that spawned processes can import it."""

import json
import os
import signal
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from attnscale import Monitor
from attnscale.diagnose import Thresholds, is_trained
from attnscale.errors import LostRankWarning
from attnscale.plain import plain
from tests.zoo.entry import Block, SelfAttention

from .training import LENGTH, batch, loss_of, small_model

BATCH, STEPS, TIMEOUT = 8, 3, 5.0
MONITORS = 6
WIDTH, HEADS = 24, 3  # of the model of training stacks
APART = 7, 2.0  # steps, and the time-out, of ranks that fall out of step


def begin(rank, world, folder, port=None):
    torch.set_num_threads(1)
    store = f"file://{folder}/store" if port is None else f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)


def write(folder, name, value):
    Path(f"{folder}/{name}.json").write_text(json.dumps(value), encoding="utf-8")


def wait_for(*files):
    while not all(file.exists() for file in files):
        time.sleep(0.05)


def train(model, monitor, tokens_of, steps=STEPS):
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(steps):
        loss = loss_of(model, tokens_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss=loss, lr=1e-2)
    monitor.close()


def single():
    model, records = small_model(), []
    train(model, Monitor(model, every=1, rows=None, sinks=[records.append]), lambda step: batch(BATCH, step))
    return records


def data_parallel(rank, world, folder, kind):
    begin(rank, world, folder)
    model = small_model()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    monitor = Monitor(model, every=1, rows=None, sinks=[f"{folder}/scores.jsonl"], timeout=30)
    train(model, monitor, lambda step: batch(BATCH, step).chunk(world)[rank])
    write(folder, f"last{rank}", monitor.last.to_dict())
    dist.destroy_process_group()


def tensor_parallel(rank, world, folder):
    begin(rank, world, folder)
    mesh = init_device_mesh("cpu", (world,))
    model = small_model(head_dim=8)
    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in ("query", "key", "value")} | {"output": RowwiseParallel()}
        parallelize_module(block.attention, mesh, plan)
        block.attention.heads //= world
    monitor = Monitor(model, every=1, rows=None, sinks=[f"{folder}/scores.jsonl"], head_group=mesh.get_group())
    train(model, monitor, lambda step: batch(BATCH, step))
    dist.destroy_process_group()


def near_a_floor(rank, world, folder):
    """The alarms of sampled rows under floors below and above what they show."""
    begin(rank, world, folder)
    model = small_model()
    tokens = torch.randint(0, 31, (4, 129), generator=torch.Generator().manual_seed(rank))
    alarms = []
    for floor in (0.05, 0.95):
        limits = Thresholds(jacobian_trace=floor, entropy_ratio=None)
        monitor = Monitor(model, every=1, rows=32, limits=limits, timeout=30)
        loss_of(model, tokens).backward()
        monitor.step()
        alarms.append([alarm.layer for alarm in monitor.last.alarms])
        errors = plain(monitor.layers["blocks.0.attention"].stats.stderr("jacobian_trace").tolist())
        monitor.close()
    write(folder, f"found{rank}", [*alarms, errors])
    dist.destroy_process_group()


def one_rank_stops(rank, world, folder, port, how, who):
    """A rank is killed, or stopped, between two steps; the first rank hosts the store by which they met."""
    begin(rank, world, folder, port)
    model = small_model()
    monitor = Monitor(model, every=1, rows=8, sinks=[f"{folder}/scores.jsonl"], timeout=TIMEOUT)
    told, seconds = [], []
    for step in range(3):
        if rank == who and step == 1:
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        loss_of(model, batch(BATCH, step).chunk(world)[rank]).backward()
        if step == 0:
            dist.barrier()  # on a busy machine they start far apart
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            began = time.monotonic()
            monitor.step()
            seconds.append(time.monotonic() - began)
        told += [str(warning.message) for warning in caught if warning.category is LostRankWarning]
        if step == 0:
            Path(f"{folder}/began{rank}").touch()
            wait_for(*(Path(f"{folder}/began{other}") for other in range(world)))  # they have their answer
    monitor.close()
    write(folder, f"told{rank}", [told, seconds])
    if rank == 0:
        wait_for(*(Path(f"{folder}/told{other}.json") for other in range(world) if other != who))
    os._exit(0)  # a group with a dead member does not shut down


def run(rank, monitor, at_step):
    """Steps that begin together on both ranks, as training with collectives makes them."""
    for step in range(APART[0]):
        dist.barrier()
        loss_of(monitor.model, batch(4, step)).backward()
        if not (rank == 1 and at_step(step)):
            monitor.step()
    monitor.close()


def skips_a_batch(rank, monitor):
    run(rank, monitor, lambda step: step == 2)


def loads_the_state_alone(rank, monitor):
    run(rank, monitor, lambda step: step == 2 and bool(monitor.load_state_dict({"steps": 40, "history": {}})))


def is_late(rank, monitor):
    run(rank, monitor, lambda step: step == 2 and bool(time.sleep(2 * APART[1])))


def raises(rank, monitor):
    for step in range(APART[0]):
        dist.barrier()
        with suppress(ZeroDivisionError), monitor:
            loss_of(monitor.model, batch(4, step)).backward()
            if rank == 1 and step == 2:
                raise ZeroDivisionError
    monitor.close()


def sees_nothing(rank, monitor):
    """Watching fails on one rank: it takes part all the same."""
    if rank == 1:
        monitor.cancel()
        monitor._begin_watching = lambda: 1 / 0
    run(rank, monitor, lambda step: False)


CASES = {each.__name__: each for each in (skips_a_batch, loads_the_state_alone, is_late, raises, sees_nothing)}


def everything(rank, world, folder):
    begin(rank, world, folder)
    found = {}
    for name, case in CASES.items():
        records, model = [], small_model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            monitor = Monitor(model, every=1, rows=8, sinks=[records.append], timeout=APART[1])
            case(rank, monitor)
        told = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
        found[name] = ([(record.step, record.ranks) for record in records], told)
        dist.barrier()
    found["left behind"] = [left_behind() for _ in range(MONITORS)]
    write(folder, rank, found)
    dist.barrier()
    dist.destroy_process_group()


def left_behind():
    """Descriptors and threads of this process, after one more monitor."""
    model = small_model()
    monitor = Monitor(model, every=1, rows=8, timeout=APART[1])
    loss_of(model, batch()).backward()
    monitor.step()
    monitor.close()
    dist.barrier()
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    threads = next(line for line in status.splitlines() if line.startswith("Threads:"))
    return [len(os.listdir("/proc/self/fd")), int(threads.split()[1]), threading.active_count()]


class Attention(SelfAttention):
    def forward(self, x):
        return self.merge(F.scaled_dot_product_attention(*self.project(x)))


def biased_model(has_norm=True):
    """Attention whose projections have biases, with a norm before it or none."""
    torch.manual_seed(0)
    blocks = [Block(WIDTH, Attention(WIDTH, HEADS)) for _ in range(2)]
    for block in blocks:
        block.norm = block.norm if has_norm else nn.Identity()
    return nn.Sequential(*blocks)


def inputs():
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


def train_stack(model, monitor, world=1, rank=0):
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
        train_stack(model, monitor, world, rank)
    told = [str(each.message) for each in caught if "attnscale" in type(each.message).__module__]
    write(folder, f"told{rank}", [told, is_trained(model)])
    dist.destroy_process_group()
