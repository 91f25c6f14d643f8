"""What a watcher followed is gone with it: nothing waits for Python to look for garbage, which it may not for long."""

import gc
from contextlib import contextmanager
from functools import partial

import pytest
import torch

import attnscale
from attnscale.models import CausalTransformer
from tests.others import OTHERS_MAY_WARN
from tests.watching.layers import Fused, Plain
from tests.zoo import ENTRIES

KINDS = {"written": partial(Plain, 24, 3), "fused": partial(Fused, 24, 3)}


@contextmanager
def no_garbage():
    """Fails where tensors, or objects of the package, are left that only a search for garbage finds."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
        gc.collect()
        left = [each for each in gc.garbage if type(each) is torch.Tensor or _is_ours(each)]
        told = sorted({getattr(each, "__qualname__", type(each).__qualname__) for each in left})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not told


def _is_ours(each):
    return any(str(getattr(of, "__module__", "")).startswith("attnscale") for of in (each, type(each)))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_activations_are_let_go_of_as_the_model_lets_go_of_them(kind, gradients):
    model, x = kind(), torch.randn(2, 10, 24)
    with torch.set_grad_enabled(gradients), attnscale.watch(model) as seen, no_garbage():
        model(x)
    with no_garbage():
        assert str(seen)
        del seen


@OTHERS_MAY_WARN
@pytest.mark.parametrize("gradients", [False, True])
def test_nothing_is_left_of_the_whole_zoo(gradients):
    built = [entry.build() for entry in ENTRIES.values() if entry.gradients or not gradients]
    with no_garbage(), torch.set_grad_enabled(gradients):
        for model, inputs in built:
            with attnscale.watch(model, keep=True):
                model(*inputs)


def test_keys_that_lead_to_no_parameter_are_let_go_of_when_queries_are_clipped():
    model, inputs = ENTRIES["designs_of_keys.Linformer"].build()

    def clip(threshold):
        with attnscale.watch(model) as seen:
            model(*inputs)
        return attnscale.clip_qk_(model, seen, threshold).heads

    assert clip(0.1)
    with no_garbage():
        assert clip(0.01)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_audit_leaves_nothing(kind):
    model, x = kind(), torch.randn(2, 10, 24)
    attnscale.audit(model, x)
    with no_garbage():
        assert str(attnscale.audit(model, x))


def decoder():
    return CausalTransformer(vocabulary=11, d_model=24, layers=2, heads=3)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("kind", [*KINDS.values(), decoder], ids=[*KINDS, "decoder"])
def test_sampled_and_clipped_steps_leave_nothing(kind, compiles):
    model = kind()
    run = torch.compile(model, backend="aot_eager") if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    records = []
    monitor = attnscale.Monitor(model, every=2, sinks=[records.append])
    clip = attnscale.QKClip(model, threshold=1e-3)

    def steps(count):
        for _ in range(count):
            given = torch.randint(0, 11, (2, 10)) if kind is decoder else torch.randn(2, 10, 24)
            run(given).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            clip.step()
            monitor.step()

    steps(6)
    with no_garbage():
        steps(4)
    assert len(records) == 5
    monitor.close()
    clip.close()
