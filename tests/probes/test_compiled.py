"""A compiled model is measured inside its graphs: the numbers of an eager run, and no further compilation."""

import pickle
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from attnscale import Monitor
from attnscale.errors import NotFollowedWarning, NotInsideWarning, NotRecordedWarning

from .runs import VOCABULARY, Reused, monitored, small_model, tokens, train

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what its compiler imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),
]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def whole(backend, **settings):
    return lambda model: torch.compile(model, backend=backend, **settings)


def each_block(backend):
    def compiled(model):
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return model

    return compiled


def the_step(backend):
    return lambda model: torch.compile(lambda given: model(given), backend=backend)


class Encoder(nn.Module):
    """torch's own encoder, which attends in a function of several."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, given):
        mask = nn.Transformer.generate_square_subsequent_mask(given.shape[1])
        return self.head(self.encoder(self.embedding(given), mask=mask, is_causal=True))


class Checkpointed(nn.Module):
    """Blocks that are run again in the backward pass."""

    def __init__(self, use_reentrant, layers=2):
        super().__init__()
        self.inner, self.use_reentrant = small_model(layers=layers), use_reentrant

    def forward(self, given):
        x = self.inner.embedding(given)
        for block in self.inner.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.inner.head(self.inner.norm(x))


def made(kind, *given):
    def make():
        torch.manual_seed(0)
        return kind(*given)

    return make


def one_layer():
    """Where it does not matter how many there are: each takes a second or two to compile."""
    return small_model(layers=1)


MODELS = {
    "transformer": small_model,
    "one layer": one_layer,
    "torch's encoder": made(Encoder),
    "an attention that runs again": made(Reused),
    "checkpoints": made(Checkpointed, False, 1),
}
WAYS = {
    "aot_eager": whole("aot_eager"),
    "fullgraph": whole("aot_eager", fullgraph=True),
    "dynamic": whole("aot_eager", dynamic=True),
    "no autograd": whole("eager"),
    "the step": the_step("aot_eager"),
}


def assert_same(found, expected, tolerance):
    assert [record.step for record in found] == [record.step for record in expected]
    for one, other in zip(found, expected, strict=True):
        assert list(one.layers) == list(other.layers)
        for name, layer in other.layers.items():
            assert one.layers[name].rows == layer.rows
            assert set(one.layers[name].numbers) == set(layer.numbers)
            for number, values in layer.numbers.items():
                assert one.layers[name].numbers[number] == pytest.approx(values, rel=tolerance, abs=1e-6), number


# One layer in every way, several in one graph. The others not where symbolic lengths take long to compile, or make
# Dynamo fail, and not where a graph that may break would be the whole one again.
PAIRS = [
    (model, way)
    for model in MODELS
    for way in (["fullgraph"] if model == "transformer" else WAYS)
    if model == "one layer" or way not in ("aot_eager", "dynamic")
]


@pytest.mark.parametrize(("model", "way"), PAIRS)
def test_the_numbers_are_those_of_an_eager_run(model, way):
    expected, plain = monitored(MODELS[model], lambda model: model, 5, every=2, micro=2)
    found, losses = monitored(MODELS[model], WAYS[way], 5, every=2, micro=2)
    assert torch.equal(losses, plain)
    assert_same(found, expected, 1e-5)
    assert counters["stats"]["unique_graphs"] >= 2  # also sampled steps ran compiled


@pytest.mark.parametrize(
    ("model", "compiled"),
    [
        ("one layer", whole("inductor")),
        pytest.param("transformer", each_block("inductor"), marks=pytest.mark.slow),
        pytest.param("checkpoints", whole("inductor"), marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_of_an_eager_run_with_inductor(model, compiled):
    expected, plain = monitored(MODELS[model], lambda model: model, 4, every=2)
    found, losses = monitored(MODELS[model], compiled, 4, every=2)
    assert torch.allclose(losses, plain, rtol=1e-4)
    assert_same(found, expected, 1e-3)


def test_sampled_and_plain_steps_alternate_with_no_further_compilation():
    model = small_model()
    run, graphs = torch.compile(model, backend="aot_eager", fullgraph=True), []
    monitor = Monitor(model, every=2)
    train(model, run, 12, after=lambda: (monitor.step(), graphs.append(counters["stats"]["unique_graphs"])))
    monitor.close()
    assert graphs == [0, 1, *[2] * 10]  # followed; the plain graph; that of sampled steps


def test_one_graph_serves_all_blocks_that_are_compiled_alike():
    model, graphs = small_model(layers=4), []
    each_block("aot_eager")(model)
    monitor = Monitor(model, every=2)
    train(model, None, 6, after=lambda: (monitor.step(), graphs.append(counters["stats"]["unique_graphs"])))
    monitor.close()
    assert graphs[1] == graphs[2] / 2 == 1
    assert set(graphs[2:]) == {2}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_not_counted_again_where_blocks_are_compiled(use_reentrant):
    def compiled(model):
        for block in model.inner.blocks:
            block.compile(backend="aot_eager")
        return model

    make = made(Checkpointed, use_reentrant)
    found = []
    for way in (lambda model: model, compiled):  # the first step is traced uncompiled, and tells
        with pytest.warns(NotRecordedWarning) if use_reentrant else nullcontext():
            found.append(monitored(make, way, 3)[0])
    expected, found = found
    for one, other in zip(found, expected, strict=True):
        for name, layer in other.layers.items():
            assert one.layers[name].rows == layer.rows
            assert one.layers[name].numbers["spread"] == pytest.approx(layer.numbers["spread"], rel=1e-5)
    gradients = [layer.numbers["query_gradient"] for layer in found[-1].layers.values()]
    assert (torch.tensor(gradients) > 0).all()


def test_losses_of_200_steps_are_those_of_the_plain_loop():
    plain, watched = one_layer(), one_layer()
    losses = train(plain, torch.compile(plain, backend="aot_eager"), 200)
    monitor = Monitor(watched, every=7)
    assert torch.equal(train(watched, torch.compile(watched, backend="aot_eager"), 200, after=monitor.step), losses)
    monitor.close()


def test_an_evaluation_inside_a_sampled_step_is_no_part_of_it():
    model, records = one_layer(), []
    run = torch.compile(model, backend="aot_eager")

    def evaluate():
        with torch.no_grad():
            model.eval()
            run(tokens(9, batch=7)[:, :-1])
            model.train()

    monitor = Monitor(model, 1, None, [records.append])
    for _ in range(3):
        evaluate()
        train(model, run, 1)
        monitor.step()
    monitor.close()
    assert len({record.layers["blocks.0.attention"].rows for record in records}) == 1


def test_a_model_that_attends_otherwise_than_before_is_followed_again():
    model, records = small_model(), []
    run = torch.compile(model, backend="aot_eager")
    monitor = Monitor(model, 1, None, [records.append])
    train(model, run, 2, after=monitor.step)
    model.blocks[0].attention.forward = model.blocks[1].attention.forward  # no class says what it does now
    with pytest.warns(NotFollowedWarning, match="differs from the trace"):
        train(model, run, 1, after=monitor.step)
    with pytest.warns(NotInsideWarning, match=r"blocks\.0\.attention: its forward was replaced"):
        train(model, run, 2, after=monitor.step)
    monitor.close()
    assert len(records) == 5
    assert list(records[-1].layers)


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (one_layer, "aot_eager"),
        pytest.param(one_layer, "inductor", marks=pytest.mark.slow),
        (made(Checkpointed, False, 1), "aot_eager"),
        pytest.param(made(Checkpointed, False, 1), "inductor", marks=pytest.mark.slow),
    ],
)
def test_two_forwards_may_come_before_a_backward(make, backend):
    def run(compiled):
        model, records = make(), []
        call, monitor = compiled(model), Monitor(model, 1, None, [records.append])
        for step in range(3):
            first, second = (
                call(tokens(step + shift)[:, :-1]) for shift in (0, 7)
            )  # lengths that inductor knows by now
            (first - second).square().mean().backward()
            model.zero_grad()
            monitor.step()
        monitor.close()
        return records

    assert_same(run(whole(backend)), run(lambda model: model), 1e-3 if backend == "inductor" else 1e-5)


def test_two_forwards_of_reentrant_checkpoints_may_come_before_a_backward():
    model, records = made(Checkpointed, True)(), []
    run, monitor = torch.compile(model, backend="aot_eager"), Monitor(model, 1, None, [records.append])
    for step in range(3):
        (run(tokens(step)) - run(tokens(step + 7))).square().mean().backward()
        model.zero_grad()
        with nullcontext() if step else pytest.warns(NotRecordedWarning, match="with gradients off"):
            monitor.step()  # the first ran uncompiled
    monitor.close()
    assert [[layer.rows for layer in record.layers.values()] for record in records] == [[300, 300]] * 3
    assert all("query_gradient" in layer.numbers for record in records[1:] for layer in record.layers.values())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", [one_layer, made(Checkpointed, False, 1), made(Encoder)])
def test_a_forward_that_no_backward_follows_is_counted_without_gradients(make, when):
    def run(compiled):
        model, records, metrics = make(), [], []
        call, monitor = compiled(model), Monitor(model, 1, None, [records.append])
        for step in range(3):
            order = (50, 0) if when == "before" else (0, 50)
            outputs = {shift: call(tokens(step + shift)) for shift in order}
            metrics.append(outputs[50].mean())  # with its graph
            outputs[0].square().mean().backward()
            model.zero_grad()
            monitor.step()
        monitor.close()
        return records

    assert_same(run(whole("aot_eager")), run(lambda model: model), 1e-5)


def test_copies_and_pickles_of_a_model_that_is_looked_at_are_plain():
    model = small_model()
    run, monitor = torch.compile(model, backend="aot_eager"), Monitor(model, 1)
    train(model, run, 2, after=monitor.step)
    plain = type(small_model().blocks[0].attention)
    assert type(model.blocks[0].attention) is not plain
    assert str(model) == str(small_model())
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copy.blocks[0].attention) is plain
        assert vars(copy.blocks[0].attention).keys() == vars(small_model().blocks[0].attention).keys()
        assert torch.equal(copy(tokens(0)), model(tokens(0)))
    monitor.close()
    assert type(model.blocks[0].attention) is plain
    assert vars(model.blocks[0].attention).keys() == vars(small_model().blocks[0].attention).keys()


def test_two_monitors_look_at_one_model():
    model, first, second = one_layer(), [], []
    run = torch.compile(model, backend="aot_eager")
    monitors = [Monitor(model, 1, None, [records.append]) for records in (first, second)]
    train(model, run, 3, after=lambda: [monitor.step() for monitor in monitors])
    for monitor in monitors:
        monitor.close()
    assert_same(first, second, 1e-12)
