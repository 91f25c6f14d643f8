"""Monitors and QK-Clip on one model: whatever one of them does, the others see every step."""

import pytest
import torch

from attnscale import Monitor, QKClip, attention_varlen

from .models import one_layer, small_model, tokens
from .runs import TORCH_WARNINGS, assert_same, assert_same_parameters, each_block, eager, train, whole

pytestmark = TORCH_WARNINGS
THRESHOLD = 0.8


def trained_with_both(layers, compiled, between):
    """Train with a monitor of every other step and QK-Clip of every step; `between` runs after three of seven steps."""
    model, records = small_model(layers=layers), []
    run = compiled(model)
    clip, monitor = QKClip(model, THRESHOLD), Monitor(model, 2, None, [records.append])

    def step(number):
        train(model, run, 1, after=clip.step, batches=lambda _, device: tokens(number))
        monitor.step()

    for number in range(7):
        if number == 3:
            other = between(model)
            step(3)
            other.close()
        step(number)
    clip.close()
    monitor.close()
    return model, records


def another_monitor(model):
    """It traces the model first, while the others have probes in it."""
    return Monitor(model, 1, None, [])


def another_clip(model):
    return QKClip(model, 1e6)


def clip_of_another_model(model):
    """While it traces, nothing in the process runs compiled."""
    return QKClip(small_model(), THRESHOLD)


@pytest.mark.parametrize("between", [another_monitor, another_clip, clip_of_another_model])
@pytest.mark.parametrize(("compiled", "layers"), [(whole(), 1), (each_block(), 2)])
def test_a_tracing_monitor_hides_nothing_from_probes(compiled, layers, between):
    found, records = trained_with_both(layers, compiled, between)
    expected, expected_records = trained_with_both(layers, eager, between)
    assert [record.step for record in records] == [0, 2, 4, 6]
    assert_same(records, expected_records, 1e-3)
    assert_same_parameters(found, expected, rtol=1e-4, atol=1e-5)
    for record, wanted in zip(records, expected_records, strict=True):
        for name, layer in wanted.layers.items():
            assert record.layers[name].clipped == pytest.approx(layer.clipped, rel=1e-3)


def test_two_monitors_of_one_model_record_the_same():
    model, first, second = one_layer(), [], []
    run = torch.compile(model, backend="aot_eager")
    monitors = [Monitor(model, 1, None, [records.append]) for records in (first, second)]
    train(model, run, 3, after=lambda: [monitor.step() for monitor in monitors])
    for monitor in monitors:
        monitor.close()
    assert_same(first, second, 1e-12)


class Packed(torch.nn.Module):
    """Attend to packed tokens, which takes a kernel for each sequence on a CPU."""

    def __init__(self):
        super().__init__()
        self.projections = torch.nn.Linear(12, 36)

    def forward(self, given):
        query, key, value = self.projections(given).unflatten(-1, (9, 4)).chunk(3, 1)
        return attention_varlen(query, key, value, torch.tensor([0, 3, 5, 11]), is_causal=True)


def test_a_module_of_several_kernels_is_recorded_at_every_step():
    model, records = Packed(), []
    monitor, clip = Monitor(model, 1, None, [records.append]), QKClip(model, 5.0)
    for _ in range(4):
        model(torch.randn(11, 12)).square().sum().backward()
        clip.step()
        monitor.step()
    assert [record.step for record in records] == [0, 1, 2, 3]
    monitor.close()
    clip.close()
