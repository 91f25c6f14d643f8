"""A model whose modules or parameters are replaced or converted while it is measured is traced again."""

import gc
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnscale
from attnscale import QKClip
from attnscale.errors import NotFollowedWarning, NotInsideWarning

from .models import small_model, tokens
from .runs import TORCH_WARNINGS, assert_same_classes, assert_same_parameters, start_monitor, train, whole

pytestmark = TORCH_WARNINGS
THRESHOLD = 0.05


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
def test_a_clip_traces_a_changed_model_again(change):
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
    assert {type(module) for module in model.modules()} == {type(module) for module in small_model().modules()}


def replace_forward(model):
    model.blocks[0].attention.forward = model.blocks[1].attention.forward  # its class does not show what it does now


@pytest.mark.parametrize(
    ("change", "is_inside_step"),
    [(replace_attention, False), (convert, False), (replace_attention, True), (replace_forward, True)],
)
def test_a_monitor_records_a_changed_model_as_it_is_now(change, is_inside_step):
    model = small_model()
    run, monitor, records = start_monitor(model, whole())
    train(model, run, 2, after=monitor.step)
    if is_inside_step:
        change(model)
        with pytest.warns(NotFollowedWarning, match="differs from the trace"):
            train(model, run, 1, after=monitor.step)
    else:
        monitor.cancel()
        change(model)
        monitor.begin()
    reason = r"blocks\.0\.attention: its forward was replaced"
    with pytest.warns(NotInsideWarning, match=reason) if change is replace_forward else nullcontext():
        for _ in range(2):
            expected = largest(deepcopy(model), 0)
            train(model, run, 1, after=monitor.step)
            assert set(records[-1].layers) == set(expected)
            for name, values in expected.items():
                assert records[-1].layers[name].numbers["max"] == pytest.approx(values.tolist(), rel=1e-4)
    monitor.close()
    assert len(records) == (5 if is_inside_step else 4)
    assert_same_classes(model, small_model())


def test_parameters_that_take_other_data_at_every_step_are_clipped_at_every_step():
    expected, model, wanted, reports = small_model(), small_model(), [], []
    with QKClip(expected, THRESHOLD) as clip:
        train(expected, after=lambda: wanted.append(clip.step()))
    with QKClip(model, THRESHOLD) as clip:
        for step in range(4):
            batch = tokens(step)
            F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
            for parameter in model.parameters():
                parameter.data, parameter.grad = parameter.data - 0.1 * parameter.grad, None
            reports.append(clip.step())
        assert clip.is_inside
    assert [len(report.heads) for report in reports] == [len(report.heads) for report in wanted]
    assert_same_parameters(model, expected, 1.3e-6, 1e-5)
