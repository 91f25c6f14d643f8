"""A plan holds what a trace found out, and probes measure by it what a trace measures."""

import pickle

import pytest
import torch
from torch import nn

from attnscale import Monitor
from attnscale.watching.plan import Plan
from attnscale.watching.watch import watched
from attnscale.watching.watcher import Settings

from .runs import VOCABULARY, LlamaLogits, Reused, small_model, tokens


class Encoder(nn.Module):
    """torch's own encoder layer, twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 30)
        layer = nn.TransformerEncoderLayer(30, 3, 41, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, given):
        return self.layers(self.embedding(given))


MODELS = {
    "decoder": small_model,
    "attention that runs three times": Reused,
    "Llama, SDPA": lambda: LlamaLogits("sdpa", 32, 2),
    "Llama, written out": lambda: LlamaLogits("eager", 32, 2),
    "torch's encoder": Encoder,
}


def plan_of(model):
    with watched(model, Settings(None, training=True)) as seen:
        model(tokens(0)[:, :-1]).square().mean().backward()
    return seen.plan


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_can_be_pickled_and_holds_no_tensor_of_the_model(name):
    model = MODELS[name]()
    plan = plan_of(model)
    data = pickle.dumps(plan)
    again = pickle.loads(data)
    assert isinstance(again, Plan)
    assert again.modules.keys() == plan.modules.keys()
    for path, module in plan.modules.items():
        assert len(again.modules[path].calls) == len(module.calls)
        for one, other in zip(module.calls, again.modules[path].calls, strict=True):
            sources = [[part.parameter for part in call.template.origins.query.sources()] for call in (one, other)]
            assert sources[0] == sources[1] != []
    held = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert len(data) < held + 2**16


@pytest.mark.parametrize("name", MODELS)
def test_a_probed_step_records_the_numbers_of_a_traced_one(name):
    torch.manual_seed(0)
    model, records = MODELS[name](), []
    monitor = Monitor(model, every=1, rows=None, sinks=[records.append])
    for _ in range(3):  # the same step: the first is traced, the others are probed
        model(tokens(0)[:, :-1]).square().mean().backward()
        model.zero_grad()
        monitor.step()
    monitor.close()
    traced, *probed = records
    for record in probed:
        assert list(record.layers) == list(traced.layers)
        for path, layer in record.layers.items():
            for statistic, values in layer.numbers.items():
                assert values == pytest.approx(traced.layers[path].numbers[statistic], rel=2e-4, abs=1e-6), statistic


def test_layers_of_a_probed_step_are_those_of_a_traced_one():
    model = small_model()
    monitor, found = Monitor(model, every=1, rows=None), []
    for _ in range(2):
        model(tokens(0)[:, :-1]).square().mean().backward()
        monitor.step()
        found.append(monitor.layers)
    monitor.close()
    for name, traced in found[0].items():
        probed = found[1][name]
        for field in ("kind", "heads", "kv_heads", "head_dim", "query_len", "key_len", "causal", "softcap", "calls"):
            assert getattr(probed, field) == getattr(traced, field), field
        assert probed.scale_applied == pytest.approx(traced.scale_applied)
        assert probed.scale_expected == traced.scale_expected
        torch.testing.assert_close(probed.stats.std, traced.stats.std)


@pytest.mark.parametrize("name", ["attention that runs three times", "Llama, written out"])
def test_micro_batches_of_a_probed_step_add_up_as_in_a_traced_one(name):
    model, records = MODELS[name](), []
    monitor = Monitor(model, every=1, rows=None, sinks=[records.append])
    for _ in range(2):
        for part in range(3):
            model(tokens(part)[:, :-1]).square().mean().backward()
        model.zero_grad()
        monitor.step()
    monitor.close()
    traced, probed = records
    for path, layer in probed.layers.items():
        for statistic, values in layer.numbers.items():
            assert values == pytest.approx(traced.layers[path].numbers[statistic], rel=2e-4, abs=1e-6), statistic


def test_later_steps_leave_the_layers_of_an_earlier_one_as_they_were():
    model = small_model()
    monitor, found = Monitor(model, every=1, rows=None), []
    for step in range(4):
        model(tokens(step)[:, :-1]).square().mean().backward()
        monitor.step()
        layer = next(iter(monitor.layers.values()))
        found.append((layer, layer.stats.max.clone(), layer.query_norm.clone(), layer.query_gradient.clone()))
    monitor.close()
    for layer, *numbers in found:
        now = layer.stats.max, layer.query_norm, layer.query_gradient
        assert all(map(torch.equal, now, numbers))
    assert not torch.equal(found[1][1], found[2][1])
