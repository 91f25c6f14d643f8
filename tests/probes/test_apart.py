"""Where an attention cannot be measured inside, its module alone runs uncompiled, at sampled steps alone."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnscale import Monitor
from attnscale.errors import NotInsideWarning
from attnscale.train import Record

from .runs import monitored, train
from .test_compiled import assert_same
from .test_written import Model, fused, plain

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what its compiler imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def biased(query, key, value):
    """What is added to the scores of near keys is seen by following it alone."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return (scores + 0.5 * torch.eye(query.shape[-2])).softmax(-1) @ value


def by_exponentials(query, key, value):
    powers = (query @ key.mT * query.shape[-1] ** -0.5).exp()
    return powers / powers.sum(-1, keepdim=True) @ value


def each_layer(model):
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


class FlexAttention(nn.Module):
    """Attention within documents, by a kernel that takes no probe."""

    def __init__(self, width=32, heads=2, length=24):
        super().__init__()
        self.made, self.heads = nn.Linear(width, 3 * width), heads
        documents = torch.arange(length) // 7
        self.mask = create_block_mask(
            lambda b, h, i, j: documents[i] == documents[j], None, None, length, length, "cpu"
        )

    def forward(self, x):
        parts = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous() for part in self.made(x).chunk(3, -1)
        )
        return flex_attention(*parts, block_mask=self.mask).transpose(1, 2).flatten(2)


@pytest.mark.filterwarnings("default")  # torch's own, of FlexAttention and its compiler
def test_a_model_of_flex_attention_is_traced_at_sampled_steps_and_that_is_told():
    torch.manual_seed(0)
    model, records, given = nn.Sequential(nn.Linear(16, 32), FlexAttention()), [], torch.randn(3, 24, 16)
    run, monitor = torch.compile(model, backend="aot_eager"), Monitor(model, 1, None, [records.append])

    def step():
        with torch.no_grad():  # FlexAttention has gradients on a GPU alone
            run(given)
        monitor.step()

    with pytest.warns(NotInsideWarning, match="the whole model is traced.* 1: flex kernels take no probe"):
        step()
    step()
    monitor.close()
    first, second = (record.layers["1"].numbers["max"] for record in records)
    assert second == pytest.approx(first, rel=1e-4)


class InTurn(Model):
    """No loop over layers."""

    def forward(self, given):
        x = self.embedding(given)
        x = x + self.layers[0](x)
        return self.head(x + self.layers[1](x))


def test_the_numbers_are_those_of_an_eager_run():
    def make():
        return Model(fused, biased, plain, by_exponentials)

    with pytest.warns(NotInsideWarning):
        expected, losses = monitored(make, lambda model: model, 3, micro=2)
    with pytest.warns(NotInsideWarning, match=r"uncompiled.* layers\.1: .*; layers\.3: its scores") as warned:
        found, same = monitored(make, each_layer, 3, micro=2)
    assert len([each for each in warned if each.category is NotInsideWarning]) == 1
    assert torch.equal(losses, same)
    assert_same(found, expected, 1e-4)
    for record in (found[-1], Record.from_dict(found[-1].to_dict())):
        assert [layer.uncompiled for layer in record.layers.values()] == [False, True, False, True]
    assert not any(layer.uncompiled for layer in expected[0].layers.values())  # all of it was traced


@pytest.mark.parametrize("way", [each_layer, lambda model: torch.compile(model, backend="aot_eager")])
def test_sampled_and_plain_steps_alternate_with_no_further_compilation(way):
    model, other = InTurn(fused, biased), InTurn(fused, biased)
    run, graphs = way(model), []
    monitor = Monitor(model, every=2)
    with pytest.warns(NotInsideWarning):
        losses = train(model, run, 7, after=lambda: (monitor.step(), graphs.append(counters["stats"]["unique_graphs"])))
    monitor.close()
    assert graphs[0] == 0  # followed
    assert graphs[1] < graphs[2]  # plain; sampled
    assert len(set(graphs[2:])) == 1
    assert torch.equal(train(other, way(other), 7), losses)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert {type(module) for module in model.modules()} == {type(module) for module in other.modules()}


@pytest.mark.parametrize(("kind", "fullgraph"), [(InTurn, True), (Model, False)])
def test_a_graph_that_must_not_end_is_not_cut(kind, fullgraph):
    model, records = kind(fused, biased), []
    run = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    monitor = Monitor(model, 2, None, [records.append])
    with pytest.warns(NotInsideWarning, match="the whole model is traced, uncompiled") as warned:
        train(model, run, 6, after=monitor.step)
    monitor.close()
    assert len([each for each in warned if each.category is NotInsideWarning]) == 1
    assert [set(record.layers) for record in records] == [{"layers.0", "layers.1"}] * 3
    assert counters["stats"]["unique_graphs"] == 1
