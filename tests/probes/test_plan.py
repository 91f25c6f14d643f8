"""A plan holds what a trace found out, and probes measure by it what a trace measures."""

import pickle

import pytest
import torch

from attnscale import Monitor
from attnscale.watching.watch import watched
from attnscale.watching.watcher import Settings

from .models import MODELS, small_model, tokens
from .runs import assert_same_layers

NAMES = ("transformer", "an attention that runs again", "Llama, SDPA", "Llama, written out", "torch's encoder")


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_can_be_pickled_and_holds_no_tensor_of_the_model(name):
    model = MODELS[name]()
    with watched(model, Settings(None, training=True)) as seen:
        model(tokens(0)[:, :-1]).square().mean().backward()
    data = pickle.dumps(seen.plan)
    again = pickle.loads(data)
    assert again.modules.keys() == seen.plan.modules.keys()
    for path, module in seen.plan.modules.items():
        for one, other in zip(module.calls, again.modules[path].calls, strict=True):
            sources = [[part.parameter for part in call.template.origins.query.sources()] for call in (one, other)]
            assert sources[0] == sources[1] != []
    held = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert len(data) < held + 2**16


CASES = [*((name, 1) for name in NAMES), ("an attention that runs again", 3), ("Llama, written out", 3)]


@pytest.mark.parametrize(("name", "micro_batches"), CASES)
def test_a_probed_step_records_the_numbers_of_a_traced_one(name, micro_batches):
    model, records = MODELS[name](), []
    monitor = Monitor(model, every=1, rows=None, sinks=[records.append])
    for _ in range(3):  # the same step: the first is traced, the others are probed
        for part in range(micro_batches):
            model(tokens(part)[:, :-1]).square().mean().backward()
        model.zero_grad()
        monitor.step()
    monitor.close()
    traced, *probed = records
    for record in probed:
        assert_same_layers(record, traced, 2e-4)


def test_layers_of_a_probed_step_are_those_of_a_traced_one_and_later_steps_leave_them_as_they_are():
    model = small_model()
    monitor, found = Monitor(model, every=1, rows=None), []
    for step in (0, 0, 1, 2):
        model(tokens(step)[:, :-1]).square().mean().backward()
        monitor.step()
        layers = monitor.layers
        found.append((layers, [tensor.clone() for layer in layers.values() for tensor in tensors_of(layer)]))
    monitor.close()
    for layers, kept in found:
        assert all(map(torch.equal, (tensor for layer in layers.values() for tensor in tensors_of(layer)), kept))
    assert not torch.equal(found[1][1][0], found[2][1][0])
    for name, traced in found[0][0].items():
        probed = found[1][0][name]
        for field in ("kind", "heads", "kv_heads", "head_dim", "query_len", "key_len", "causal", "softcap", "calls"):
            assert getattr(probed, field) == getattr(traced, field), field
        assert probed.scale_applied == pytest.approx(traced.scale_applied)
        assert probed.scale_expected == traced.scale_expected
        torch.testing.assert_close(probed.stats.std, traced.stats.std)


def tensors_of(layer):
    return layer.stats.max, layer.query_norm, layer.query_gradient
