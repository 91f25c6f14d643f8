"""A monitor and QK-Clip on one model: whatever one of them does, the other sees every step."""

import pytest
import torch

from attnscale import Monitor, QKClip, attention_varlen

from .runs import small_model, tokens, train
from .test_compiled import assert_same, each_block, nothing_compiled, pytestmark, whole  # noqa: F401

THRESHOLD = 0.8
WAYS = [(whole("aot_eager"), 1), (each_block("aot_eager"), 2)]  # and of how many layers: all blocks are one graph


class Both:
    """A model in training with a monitor of every other step and QK-Clip at every one."""

    def __init__(self, model, compiled):
        self.model, self.run, self.records = model, compiled(model), []
        self.clip = QKClip(model, THRESHOLD)
        self.monitor = Monitor(model, 2, None, [self.records.append])

    def step(self, number, steps=1):
        for each in range(number, number + steps):
            train(self.model, self.run, 1, after=self.clip.step, batches=lambda _, device, at=each: tokens(at))
            self.monitor.step()

    def close(self):
        self.clip.close()
        self.monitor.close()


def assert_alike(ours, theirs):
    assert_same(ours.records, theirs.records, 1e-3)
    for (name, one), other in zip(ours.model.state_dict().items(), theirs.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
    for record, expected in zip(ours.records, theirs.records, strict=True):
        for name, layer in expected.layers.items():
            assert record.layers[name].clipped == pytest.approx(layer.clipped, rel=1e-3)


def runs(compiled, layers, between):
    """Seven steps, eager and compiled, with something between the fourth and the fifth."""
    found = []
    for each in (compiled, lambda model: model):
        both = Both(small_model(layers=layers), each)
        both.step(0, 3)
        between(both)
        both.step(3, 4)
        both.close()
        found.append(both)
    return found


def another_monitor(both):
    """It follows the model from outside first, while the others are inside."""
    both.other = Monitor(both.model, 1, None, [])
    both.step(3)
    both.other.close()


def another_clip(both):
    both.other = QKClip(both.model, 1e6)
    both.step(3)
    both.other.close()


def another_model(both):
    """Somebody watches another one meanwhile, and nothing in the process runs compiled."""
    other = QKClip(small_model(), THRESHOLD)
    both.step(3)
    other.close()


@pytest.mark.parametrize("between", [another_monitor, another_clip, another_model])
@pytest.mark.parametrize(("compiled", "layers"), WAYS)
def test_one_that_follows_the_model_from_outside_hides_nothing_from_one_inside(compiled, layers, between):
    ours, theirs = runs(compiled, layers, between)
    assert [record.step for record in ours.records] == [0, 2, 4, 6][: len(ours.records)]
    assert_alike(ours, theirs)


class Packed(torch.nn.Module):
    """Attends to packed tokens, on a CPU by as many kernels as there are sequences."""

    def __init__(self):
        super().__init__()
        self.made = torch.nn.Linear(12, 36)

    def forward(self, given):
        query, key, value = self.made(given).unflatten(-1, (9, 4)).chunk(3, 1)
        return attention_varlen(query, key, value, torch.tensor([0, 3, 5, 11]), is_causal=True)


def test_a_module_of_several_kernels_loses_no_record_when_it_is_measured_inside():
    torch.manual_seed(0)
    model, records = Packed(), []
    monitor, clip = Monitor(model, 1, None, [records.append]), QKClip(model, 5.0)
    for _ in range(4):
        model(torch.randn(11, 12)).square().sum().backward()
        clip.step()
        monitor.step()
    assert [record.step for record in records] == [0, 1, 2, 3]
    monitor.close()
    clip.close()
