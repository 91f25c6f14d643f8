"""Train small models, eager or compiled, with a monitor or a clip, and compare what was recorded."""

import pytest
import torch
import torch.nn.functional as F

from attnscale import Monitor, QKClip

from .models import tokens

TORCH_WARNINGS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what torch's compiler imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of vmap over SDPA
]
CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's own, which differ from version to version
]


def train(model, run=None, steps=4, *, after=lambda: None, micro=1, rate=0.1, batches=tokens, device="cpu", **autocast):
    """Return the losses of these steps of SGD; `run` is called in place of the model, for example its compiled form."""
    run = model if run is None else run
    optimizer = torch.optim.SGD(model.parameters(), rate)
    losses = []
    for step in range(steps):
        for part in range(micro):
            batch = batches(100 * part + step, device=device)
            with torch.autocast(device, torch.bfloat16, enabled=bool(autocast)):
                logits = run(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def start_monitor(model, compiled=None, every=1):
    """Return what runs, a monitor of the model, and the list of its records to come."""
    records = []
    run = model if compiled is None else compiled(model)
    return run, Monitor(model, every, None, [records.append]), records


def monitored(make, compiled, steps=4, *, every=1, **training):
    """Return the records and the losses of a training run; `compiled(model)` is what runs."""
    model = make()
    run, monitor, records = start_monitor(model, compiled, every)
    losses = train(model, run, steps, after=monitor.step, **training)
    monitor.close()
    return records, losses


def clipped(make, compiled, threshold, steps=4, **training):
    """Return a model after training with QKClip, and the closed clip."""
    model = make()
    run = compiled(model)
    clip = QKClip(model, threshold)
    train(model, run, steps, after=clip.step, **training)
    clip.close()
    return model, clip


def eager(model):
    return model


def whole(backend="aot_eager", **settings):
    return lambda model: torch.compile(model, backend=backend, **settings)


def each_block(backend="aot_eager"):
    def compiled(model):
        for block in model.blocks:
            getattr(block, "checkpointed", block).compile(backend=backend)
        return model

    return compiled


def assert_same_layers(found, expected, tolerance):
    assert list(found.layers) == list(expected.layers)
    for name, layer in expected.layers.items():
        assert found.layers[name].rows == layer.rows
        assert set(found.layers[name].numbers) == set(layer.numbers)
        for number, values in layer.numbers.items():
            assert found.layers[name].numbers[number] == pytest.approx(values, rel=tolerance, abs=1e-6), (name, number)


def assert_same(found, expected, tolerance):
    assert [record.step for record in found] == [record.step for record in expected]
    for one, other in zip(found, expected, strict=True):
        assert_same_layers(one, other, tolerance)


def assert_same_parameters(found, expected, rtol=1e-4, atol=1e-6):
    for (name, wanted), each in zip(expected.named_parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(each, wanted, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_classes(found, expected):
    assert [type(module) for module in found.modules()] == [type(module) for module in expected.modules()]
