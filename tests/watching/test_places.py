"""Calls are grouped into layers by module and line of its own code, never by their caller."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnscale
from tests.watching.layers import Fused
from tests.zoo import ENTRIES
from tests.zoo.entry import SelfAttention


@pytest.mark.parametrize("train", [False, True])
def test_a_layer_of_torchs_own_is_one_though_its_model_is_called_on_two_lines(train):
    model = nn.TransformerEncoderLayer(24, 2, batch_first=True).train(train)
    with attnscale.watch(model) as seen, torch.no_grad():
        model(torch.randn(1, 5, 24))
        model(torch.randn(1, 7, 24))
    assert {name: layer.calls for name, layer in seen.layers.items()} == {"self_attn": 2}


class Runs(nn.Module):
    """One attention, which runs on each of the inputs."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 2, batch_first=True)

    def forward(self, *inputs):
        return [self.attention(x[:, -1:], x, x)[0] for x in inputs]


def inputs_of(*lengths):
    return [torch.randn(1, length, 24) for length in lengths]


@pytest.mark.parametrize("lengths", [(5, 5), (5, 7), (7, 5)])
def test_a_module_that_runs_twice_in_one_forward_is_shown_by_depth(lengths):
    with attnscale.watch(model := Runs()) as seen:
        for _ in range(3):
            model(*inputs_of(*lengths))
    assert {name: layer.calls for name, layer in seen.layers.items()} == {"attention[0]": 3, "attention[1]": 3}
    with pytest.raises(KeyError, match=r"attention\[0\], attention\[1\]"):
        seen.layers["attention"]


def test_a_loop_over_time_is_one_layer():
    with attnscale.watch(model := Runs()) as seen:
        model(*inputs_of(1, 2, 3, 4, 5))
    assert {name: layer.calls for name, layer in seen.layers.items()} == {"attention": 5}


def test_every_depth_has_the_numbers_of_a_module_of_its_own():
    shared = ENTRIES["structures.Shared"].build()[0]
    apart = nn.Sequential(*(copy.deepcopy(shared.block) for _ in range(3)))
    x = torch.randn(2, 13, 33)
    with attnscale.watch(shared, rows=None) as together, attnscale.watch(apart, rows=None) as each:
        assert torch.equal(shared(x), apart(x))
    for depth in range(3):
        found, expected = together.layers[f"block.attention[{depth}]"], each.layers[f"{depth}.attention"]
        assert torch.equal(found.stats.std, expected.stats.std)
        assert torch.equal(found.stats.entropy, expected.stats.entropy)


@pytest.mark.filterwarnings("default")  # reentrant checkpointing shows no gradients, and that is told
@pytest.mark.parametrize("reentrant", [False, True])
def test_depths_are_the_same_at_every_step_with_recomputation(reentrant):
    class Recomputed(Runs):
        def forward(self, x):
            for _ in range(2):
                x = x + sum(checkpoint(super().forward, x, x, use_reentrant=reentrant))
            return x

    model, names = Recomputed(), []
    monitor = attnscale.Monitor(model, every=1, sinks=[lambda record: names.append(sorted(record.layers))])
    for _ in range(4):
        for _ in range(2):  # accumulated
            model(torch.randn(2, 5, 24, requires_grad=True)).square().sum().backward()
        monitor.step()
    monitor.close()
    assert names == [[f"attention[{depth}]" for depth in range(4)]] * 4


def test_two_attentions_of_one_module_are_two_though_one_module_is_the_softmax_of_both():
    class Two(SelfAttention):
        def __init__(self):
            super().__init__(24, 2)
            self.softmax = nn.Softmax(dim=-1)

        def forward(self, x):
            query, key, value = self.project(x)
            first = self.softmax(query @ key.mT / 12**0.5) @ value
            second = self.softmax(key @ query.mT / 12**0.5) @ value
            return self.merge(first + second)

    model = Two()
    with attnscale.watch(model) as seen:
        for _ in range(2):
            model(torch.randn(1, 5, 24))
    assert {name: layer.calls for name, layer in seen.layers.items()} == {"Two": 2, "Two#2": 2}


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["plain", "capped"])
def test_two_attentions_of_one_module_are_two_layers_with_any_operator(options):
    class Two(SelfAttention):
        def forward(self, x):
            query, key, value = self.project(x)
            first = attnscale.attention(query, key, value, **options)
            second, _ = attnscale.attention_with_stats(query, key, value, **options)
            third = attnscale.attention(key, query, value, **options)
            return self.merge(first + second + third)

    model = Two(24, 2)
    with attnscale.watch(model) as seen:
        for _ in range(2):
            model(torch.randn(1, 5, 24))
    assert {name: layer.calls for name, layer in seen.layers.items()} == {"Two": 2, "Two#2": 2, "Two#3": 2}


def test_sequences_that_several_kernels_attend_are_one_attention():
    """One of a single token is plain, and the others have a window."""
    starts = torch.tensor([0, 5, 6, 13])

    class Packed(SelfAttention):
        def forward(self, x):
            tokens = (tensor[0].transpose(0, 1) for tensor in self.project(x))
            output, _ = attnscale.attention_varlen_with_stats(*tokens, starts, is_causal=True, window_size=(2, 0))
            return self.merge(output.transpose(0, 1)[None])

    model = Packed(24, 2)
    with attnscale.watch(model, rows=None) as seen:
        model(torch.randn(1, 13, 24))
    (layer,) = seen.layers.values()
    assert layer.stats.rows.tolist() == [13, 13]


def test_a_table_shown_before_the_backward_pass_does_not_keep_its_gradients_from_being_seen():
    model = Fused(33, 3)
    with attnscale.watch(model) as seen:
        loss = model(torch.randn(2, 7, 33)).square().sum()
        assert "Fused" in str(seen)
        layer = seen.layers["Fused"]
        assert layer.query_gradient is None
        loss.backward()
    for found in (layer, seen.layers["Fused"]):
        assert bool((found.query_gradient > 0).all())
        assert bool((found.key_gradient > 0).all())


@pytest.mark.parametrize("keep", [False, True])
def test_the_dtype_of_a_layer_is_known_whether_its_queries_are_kept_or_not(keep):
    for dtype in (torch.float32, torch.bfloat16):
        model = nn.MultiheadAttention(24, 2, batch_first=True, dtype=dtype)
        x = torch.randn(1, 5, 24, dtype=dtype)
        with attnscale.watch(model, keep=keep) as seen:
            model(x, x, x)
        (layer,) = seen.layers.values()
        assert layer.dtype is dtype
        assert (layer.query is not None) is keep
