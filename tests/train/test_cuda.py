"""A monitor on a GPU: the forward is the same to the last bit, takes no more memory, and nothing is waited for."""

import gc

import pytest
import torch
import torch.nn.functional as F

from attnscale import Monitor
from attnscale.models import CausalTransformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's own, which differ from version to version
]


def train(steps, rate=1e-3, same=False, **settings):
    gc.collect()  # an optimizer of an earlier run lies in a reference cycle, with three times the weights
    torch.manual_seed(0)
    model = CausalTransformer(512, 256, 4, 4).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    records, losses = [], []
    monitor = Monitor(model, every=2, sinks=[records.append], **settings) if settings else None
    for step in range(steps):
        if step == 1:  # the first is traced
            torch.cuda.reset_peak_memory_stats()
        tokens = torch.randint(0, 512, (8, 513), generator=torch.Generator().manual_seed(0 if same else step)).to(
            "cuda"
        )
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.detach())  # its graph would keep the weights, and count in the next run
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
    if monitor is not None:
        monitor.close()
    return losses, records, torch.cuda.max_memory_allocated()


def test_the_forward_is_the_same_to_the_last_bit_and_takes_no_more_memory():
    """At rate 0, since backward passes of attention add up in any order."""
    watched, records, most = train(7, rate=0.0, rows=64)  # first: cuBLAS keeps its workspace, 32 MB, from then on
    plain, _, least = train(7, rate=0.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert [record.step for record in records] == [0, 2, 4, 6]
    assert most < 1.01 * least


def test_probed_steps_give_the_numbers_of_traced_ones():
    _, (traced, probed, *_), _ = train(3, rate=0.0, same=True, rows=None)
    for name, layer in traced.layers.items():
        for number, values in layer.numbers.items():
            assert probed.layers[name].numbers[number] == pytest.approx(values, rel=1e-2), number


def test_a_busy_gpu_is_not_waited_for():
    model = CausalTransformer(64, 64, 2, 2).to("cuda")
    records = []
    monitor = Monitor(model, every=1, sinks=[records.append])
    tokens = torch.zeros(2, 65, dtype=torch.int64, device="cuda")
    model(tokens).sum().backward()
    monitor.step()  # traced; the next is probed
    model(tokens).sum().backward()
    torch.cuda._sleep(4_000_000_000)  # cycles, some two seconds: a step on a busy host takes less
    woken = torch.cuda.Event()
    woken.record()
    monitor.step()
    assert [record.step for record in records] == [0]
    assert not woken.query()
    assert monitor.last is records[-1]
    assert [record.step for record in records] == [0, 1]
    monitor.close()


class SharedKeys(torch.nn.Module):
    """Eight query heads on two keys, which the kernel shares or which are copied for it."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.query, self.key = torch.nn.Linear(128, 128), torch.nn.Linear(128, 32)

    def forward(self, x):
        query, key = (each(x).unflatten(-1, (-1, 16)).transpose(1, 2) for each in (self.query, self.key))
        if self.way == "copied":
            key = key.repeat_interleave(4, 1)
        elif self.way == "copied in turns":
            key = key.repeat(1, 4, 1, 1)
        return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=self.way == "shared")


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("way", ["shared", "copied", "copied in turns"])
def test_nothing_of_a_sampled_step_is_waited_for(way, micro_batches):
    model = torch.nn.Sequential(SharedKeys(way)).to("cuda", torch.bfloat16)
    records = []
    monitor = Monitor(model, every=1, sinks=[records.append])
    x = torch.randn(2, 128, 128, device="cuda", dtype=torch.bfloat16)

    def step():
        for _ in range(micro_batches):
            model(x).sum().backward()
        monitor.step()

    for _ in range(3):  # followed, then known, compiling kernels
        step()
    monitor.flush()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert monitor.last.step == 3
    followed, known = (record.layers["0"].numbers["key_gradient"] for record in (records[0], records[3]))
    assert known == pytest.approx(followed, rel=1e-2)
    monitor.close()
