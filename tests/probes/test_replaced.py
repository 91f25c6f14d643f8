"""Modules and parameters that are replaced or converted while a model is looked at: followed anew, nothing stale."""

import gc
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnscale
from attnscale import Monitor, QKClip

from .runs import small_model, tokens, train

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what its compiler imports
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
THRESHOLD = 0.05


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def replace_attention(model):
    model.blocks[0].attention = small_model().blocks[1].attention


def replace_block(model):
    model.blocks[0] = small_model().blocks[1]


def replace_where_it_lay(model):
    """The new module may have the address of the old one."""
    del model.blocks[0].attention
    gc.collect()
    replace_attention(model)


def replace_parameter(model):
    for module in model.blocks[0].attention.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(2 * module.weight.detach())


def add_block(model):
    model.blocks.append(small_model().blocks[1])


def convert(model):
    model.double()


CHANGES = (replace_attention, replace_where_it_lay, replace_block, replace_parameter, add_block, convert)


def largest(model, step):
    with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
        model(tokens(step)[:, :-1])
    return {name: layer.stats.max for name, layer in seen.layers.items()}


@pytest.mark.parametrize("change", CHANGES)
def test_a_clip_inside_follows_the_model_anew(change):
    model, reports = small_model(), []
    with QKClip(model, THRESHOLD) as clip:
        train(model, steps=2, after=clip.step)
        assert clip.is_inside
        change(model)
        train(model, steps=1, after=clip.step)
        assert not clip.is_inside  # noticed
        train(model, steps=1, after=clip.step)
        assert clip.is_inside
        with torch.no_grad():
            for block in model.blocks:
                block.attention.query.weight.mul_(20)
        train(model, steps=1, rate=0.0, after=lambda: reports.append(clip.step()))
    assert {head.layer for head in reports[-1].heads} == set(largest(model, 0))
    assert all((each <= 1.1 * THRESHOLD).all() for each in largest(model, 0).values())
    plain = {type(module) for module in small_model().modules()}
    assert {type(module) for module in model.modules()} == plain


@pytest.mark.parametrize("change", [replace_attention, convert])
def test_a_monitor_inside_records_the_model_as_it_is(change):
    model, records, watched = small_model(), [], []
    run = torch.compile(model, backend="aot_eager")
    monitor = Monitor(model, 1, None, [records.append])
    train(model, run, 2, after=monitor.step)
    monitor.cancel()
    change(model)
    for _ in range(2):
        expected = largest(model, 0)
        monitor.begin()
        train(model, run, 1, after=monitor.step)
        monitor.cancel()
        watched.append((expected, records[-1]))
    monitor.close()
    assert len(records) == 4
    for expected, record in watched:
        assert set(record.layers) == set(expected)
        for name, values in expected.items():
            assert record.layers[name].numbers["max"] == pytest.approx(values.tolist(), rel=1e-4)
    assert {type(module) for module in model.modules()} == {type(module) for module in small_model().modules()}


def test_a_module_that_is_replaced_in_the_middle_of_a_sampled_step_is_told_and_followed():
    model, records = small_model(), []
    run = torch.compile(model, backend="aot_eager")
    monitor = Monitor(model, 1, None, [records.append])
    train(model, run, 2, after=monitor.step)
    replace_attention(model)
    with pytest.warns(attnscale.errors.NotFollowedWarning, match="differs from the trace"):
        train(model, run, 1, after=monitor.step)
    expected = largest(deepcopy(model), 0)
    train(model, run, 1, after=monitor.step)
    monitor.close()
    for name, values in expected.items():
        assert records[-1].layers[name].numbers["max"] == pytest.approx(values.tolist(), rel=1e-4)


def with_new_data(model, after, steps=4, rate=0.1):
    """A loop that gives every parameter other data at each step."""
    for step in range(steps):
        given = tokens(step)
        F.cross_entropy(model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten()).backward()
        for parameter in model.parameters():
            parameter.data, parameter.grad = parameter.data - rate * parameter.grad, None
        after()


def test_parameters_that_are_given_other_data_at_every_step_are_clipped_at_every_step():
    expected, model, told, reports = small_model(), small_model(), [], []
    with QKClip(expected, THRESHOLD) as clip:
        train(expected, after=lambda: told.append(clip.step()))
    with QKClip(model, THRESHOLD) as clip:
        with_new_data(model, lambda: reports.append(clip.step()))
        assert clip.is_inside
    assert [len(report.heads) for report in reports] == [len(report.heads) for report in told]
    for wanted, found in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)
