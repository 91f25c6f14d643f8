"""Compiled models in training: no further compilation, every forward counted once, what takes no probe uncompiled."""

import pickle
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch._dynamo.utils import counters

from attnscale import Monitor
from attnscale.errors import NotInsideWarning, NotRecordedWarning
from attnscale.train import Record

from .models import MODELS, Layers, checkpointed, fused, small_model, tokens, written
from .runs import (
    TORCH_WARNINGS,
    assert_same,
    assert_same_classes,
    each_block,
    eager,
    monitored,
    start_monitor,
    train,
    whole,
)

pytestmark = TORCH_WARNINGS


def biased(query, key, value):
    """Add a bias to the scores of near keys, which no probe can follow."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return (scores + 0.5 * torch.eye(query.shape[-2])).softmax(-1) @ value


def by_exponentials(query, key, value):
    powers = (query @ key.mT * query.shape[-1] ** -0.5).exp()
    return powers / powers.sum(-1, keepdim=True) @ value


class Unrolled(Layers):
    """Two layers without a loop, so that a graph may end between them."""

    def forward(self, given):
        x = self.embedding(given)
        x = x + self.blocks[0](x)
        return self.head(x + self.blocks[1](x))


@pytest.mark.parametrize(
    ("make", "way", "expected_graphs", "warned"),
    [
        (small_model, whole(fullgraph=True), [0, 1, 2], False),  # traced; the plain graph; that of sampled steps
        (lambda: Layers(written, fused), whole(fullgraph=True), [0, 1, 2], False),
        (lambda: small_model(layers=4), each_block(), [0, 1, 2], False),  # one graph serves all blocks
        (lambda: Unrolled(fused, biased), each_block(), [0, 2, 3], True),
        (lambda: Unrolled(fused, biased), whole(), [0, 1, 3], True),
    ],
)
def test_sampled_and_plain_steps_alternate_with_no_further_compilation(make, way, expected_graphs, warned):
    model, plain = make(), make()
    run, graphs = way(model), []
    monitor = Monitor(model, every=2)
    with pytest.warns(NotInsideWarning) if warned else nullcontext():
        losses = train(model, run, 8, after=lambda: (monitor.step(), graphs.append(counters["stats"]["unique_graphs"])))
    monitor.close()
    assert graphs == expected_graphs + expected_graphs[-1:] * 5
    assert torch.equal(train(plain, way(plain), 8), losses)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    assert_same_classes(model, plain)


def test_an_attention_that_takes_no_probe_runs_uncompiled_alone():
    def make():
        return Layers(fused, biased, written, by_exponentials)

    with pytest.warns(NotInsideWarning):
        expected, losses = monitored(make, eager, 3, micro=2)
    with pytest.warns(NotInsideWarning, match=r"uncompiled.* blocks\.1: .*; blocks\.3: its scores") as warned:
        found, same = monitored(make, each_block(), 3, micro=2)
    assert len([each for each in warned if each.category is NotInsideWarning]) == 1
    assert torch.equal(losses, same)
    assert_same(found, expected, 1e-4)
    for record in (found[-1], Record.from_dict(found[-1].to_dict())):
        assert [layer.uncompiled for layer in record.layers.values()] == [False, True, False, True]
    assert not any(layer.uncompiled for layer in expected[0].layers.values())  # all of it was traced


@pytest.mark.parametrize(("kind", "fullgraph"), [(Unrolled, True), (Layers, False)])
def test_a_graph_that_may_not_end_between_layers_is_not_cut(kind, fullgraph):
    with pytest.warns(NotInsideWarning, match="the whole model is traced, uncompiled") as warned:
        records, _ = monitored(lambda: kind(fused, biased), whole(fullgraph=fullgraph), 6, every=2)
    assert len([each for each in warned if each.category is NotInsideWarning]) == 1
    assert [set(record.layers) for record in records] == [{"blocks.0", "blocks.1"}] * 3
    assert counters["stats"]["unique_graphs"] == 1


def test_an_evaluation_inside_a_sampled_step_is_no_part_of_it():
    model = small_model(layers=1)
    run, monitor, records = start_monitor(model, whole())
    for _ in range(3):
        with torch.no_grad():
            model.eval()
            run(tokens(9, batch=7)[:, :-1])
            model.train()
        train(model, run, 1)
        monitor.step()
    monitor.close()
    assert len({record.layers["blocks.0.attention"].rows for record in records}) == 1


class Warming(Layers):
    """Its scale is a number that the loop changes."""

    def __init__(self):
        super().__init__(self.attend)
        self.scale = 0.5

    def attend(self, query, key, value):
        return (query @ key.mT * self.scale).softmax(-1) @ value


def test_a_scale_that_changes_in_training_is_read_again():
    model = Warming()
    run, monitor, records = start_monitor(model, whole())
    for scale in (0.5, 0.5, 0.25):
        model.scale = scale
        train(model, run, 1, after=monitor.step)
    monitor.close()
    scales = [record.layers["blocks.0"].numbers["scale_applied"] for record in records]
    assert scales == [pytest.approx([2 * scale] * 2, rel=1e-4) for scale in (0.5, 0.5, 0.25)]


def steps_of_two_forwards(make, compiled, both=True, order=(0, 7)):
    """Return the records of steps with two forwards, then a backward from both or from one of them."""
    model, kept = make(), []
    call, monitor, records = start_monitor(model, compiled)
    for step in range(3):
        outputs = {shift: call(tokens(step + shift)[:, :-1]) for shift in order}
        kept.append(outputs)  # with its graph
        (outputs[0] - outputs[7] if both else outputs[0]).square().mean().backward()
        model.zero_grad()
        monitor.step()
    monitor.close()
    return records


@pytest.mark.parametrize(("both", "order"), [(True, (0, 7)), (False, (0, 7)), (False, (7, 0))])
@pytest.mark.parametrize(
    ("model", "backend"),
    [
        ("one layer", "aot_eager"),
        pytest.param("one layer", "inductor", marks=pytest.mark.slow),
        ("checkpoints", "aot_eager"),
        pytest.param("checkpoints", "inductor", marks=pytest.mark.slow),
        ("torch's encoder", "aot_eager"),
    ],
)
def test_two_forwards_may_come_before_a_backward_of_both_or_of_one(model, backend, both, order):
    expected = steps_of_two_forwards(MODELS[model], eager, both, order)
    found = steps_of_two_forwards(MODELS[model], whole(backend), both, order)
    assert_same(found, expected, 1e-3 if backend == "inductor" else 1e-5)


@pytest.mark.parametrize("compiled", [whole(), each_block()])
def test_recomputation_of_reentrant_checkpoints_is_not_counted_again(compiled):
    records = []
    for way in (eager, compiled):
        with pytest.warns(NotRecordedWarning, match="with gradients off") as warned:
            records.append(steps_of_two_forwards(lambda: checkpointed(small_model(), True), way))
    assert len(warned) == 1  # at the first step, which ran uncompiled
    expected, found = records
    for one, other in zip(found, expected, strict=True):
        for name, layer in other.layers.items():
            assert one.layers[name].rows == layer.rows == 2 * 2 * 3 * 24  # forwards, heads, batch, length
            assert one.layers[name].numbers["spread"] == pytest.approx(layer.numbers["spread"], rel=1e-5)
    for record in found[1:]:
        assert all(min(layer.numbers["query_gradient"]) > 0 for layer in record.layers.values())


def test_copies_and_pickles_of_a_probed_model_are_plain():
    model = small_model()
    run, monitor = torch.compile(model, backend="aot_eager"), Monitor(model, 1)
    train(model, run, 2, after=monitor.step)
    plain = small_model().blocks[0].attention
    assert type(model.blocks[0].attention) is not type(plain)
    assert str(model) == str(small_model())
    for copy in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_classes(copy, small_model())
        assert vars(copy.blocks[0].attention).keys() == vars(plain).keys()
        assert torch.equal(copy(tokens(0)), model(tokens(0)))
    monitor.close()
    assert_same_classes(model, small_model())
    assert vars(model.blocks[0].attention).keys() == vars(plain).keys()
