"""Second derivatives of attention, in shapes for which SDPA forms the full matrix and a fused kernel has none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnscale
from attnscale.attending import sdpa

q_len, kv_len, head_dim, value_dim = 5, 7, 3, 2
SHAPES = {
    "no batch": ((q_len, head_dim), (kv_len, head_dim), (kv_len, head_dim)),
    "no heads": ((2, q_len, head_dim), (2, kv_len, head_dim), (2, kv_len, head_dim)),
    "other values": ((2, 3, q_len, head_dim), (2, 3, kv_len, head_dim), (2, 3, kv_len, value_dim)),
    "a query for all": ((2, 1, q_len, head_dim), (2, 3, kv_len, head_dim), (2, 3, kv_len, head_dim)),
    "five axes": ((2, 1, 3, q_len, head_dim), (2, 1, 3, kv_len, head_dim), (2, 1, 3, kv_len, head_dim)),
}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.rand(q_len, kv_len) < 0.6 + torch.eye(q_len, kv_len)},
    "bias": {"attn_mask": torch.randn(q_len, kv_len, dtype=torch.float64)},
}


def tensors(shapes, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_second_derivatives_are_those_of_sdpa(shapes, options):
    inputs = tensors(SHAPES[shapes])
    found = []
    for run in (attnscale.attention, F.scaled_dot_product_attention):
        output = run(*inputs, **OPTIONS[options])
        first = torch.autograd.grad(output.sin().sum(), inputs, create_graph=True)
        found.append((output, first, torch.autograd.grad(sum(each.sin().sum() for each in first), inputs)))
    torch.testing.assert_close(*found)


def test_grouped_queries_have_second_derivatives():
    inputs = tensors(((6, q_len, head_dim), (3, kv_len, head_dim), (3, kv_len, head_dim)))
    assert torch.autograd.gradgradcheck(lambda *given: attnscale.attention(*given, enable_gqa=True), inputs)


def test_a_single_backward_is_that_of_the_kernel_to_the_last_bit(monkeypatch):
    inputs = tensors(SHAPES["no heads"], torch.float32)
    found = [torch.autograd.grad(attnscale.attention(*inputs).sin().sum(), inputs)]
    monkeypatch.setattr(sdpa, "differentiates_twice", lambda *_: False)
    found.append(torch.autograd.grad(attnscale.attention(*inputs).sin().sum(), inputs))
    torch.testing.assert_close(*found, rtol=0.0, atol=0.0)


def test_a_retained_graph_runs_backward_twice_for_the_tensors_that_need_it():
    query, key, value = tensors(SHAPES["no heads"])
    loss = attnscale.attention(query, key.detach(), value).square().sum()
    first, second = (torch.autograd.grad(loss, (query, value), retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second)


class Attention(nn.Module):
    """Three axes: one head."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(7, 7) for _ in range(3))

    def forward(self, x):
        return attnscale.attention(self.query(x), self.key(x), self.value(x))


def test_watch_monitor_and_clip_see_such_an_attention_and_its_gradients():
    model, records = Attention(), []
    x = torch.randn(2, 11, 7)
    with attnscale.watch(model) as seen:
        model(x).square().sum().backward()
    assert seen.layers["Attention"].query_gradient is not None
    monitor = attnscale.Monitor(model, every=1, sinks=[records.append])
    clip = attnscale.QKClip(model, threshold=100.0)
    for _ in range(4):
        model(x).square().sum().backward()
        monitor.step()
        clip.step()
    monitor.close()
    clip.close()
    assert [list(record.layers) for record in records] == [["Attention"]] * 4
