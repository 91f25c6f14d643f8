"""Probes leave nothing behind: errors, unusual classes, torch.func, export, compiled optimisers, cancelled steps."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

from attnscale import Monitor, QKClip
from attnscale.errors import NotInsideWarning
from attnscale.probes import intercept

from .models import Attention, fused, small_model, tokens
from .runs import TORCH_WARNINGS, assert_same_parameters, train

pytestmark = TORCH_WARNINGS


def test_an_error_while_compiling_leaves_nothing_patched():
    model = small_model()

    def broken(graph, inputs):
        def run(*args):
            graph(*args[:0])  # too few

        return run

    before = F.scaled_dot_product_attention
    clip = QKClip(model, 100.0)
    train(model, steps=1, after=clip.step)
    torch._dynamo.reset()
    run = torch.compile(model, backend=broken)
    with pytest.raises(Exception, match=r"."):
        run(tokens(0)[:, :-1])
    clip.close()
    assert F.scaled_dot_product_attention is before
    assert intercept.FRAMES.innermost is None
    assert torch.overrides._len_torch_function_stack() == 0


def test_the_threshold_of_a_clip_is_read_only():
    clip = QKClip(small_model(), 100.0)
    with pytest.raises(AttributeError):
        clip.threshold = 50.0
    clip.close()


class Announced(Attention):
    """Keep a register of subclasses."""

    register: ClassVar[list[str]] = []

    def __init__(self):
        super().__init__(fused, 21, 3)

    def __init_subclass__(cls, *, family, **settings):
        super().__init_subclass__(**settings)
        cls.register.append(f"{family} {cls.__name__}")


class Plain(Announced, family="plain"):
    pass


class Slotted(Attention):
    __slots__ = ("more",)  # which no module of torch has

    def __init__(self):
        super().__init__(fused, 21, 3)


@pytest.mark.parametrize("kind", [Plain, Slotted])
def test_a_class_with_slots_or_a_register_of_subclasses_takes_probes(kind):
    model = kind()
    with QKClip(model, 0.05) as clip:
        for _ in range(3):
            model(torch.randn(2, 5, 21)).sum().backward()
            assert clip.step() is not None
            with torch.no_grad():
                model.projections[0].weight.mul_(10)  # so that the next step clips too
        assert clip.is_inside
    assert type(model) is kind
    assert Announced.register == ["plain Plain"]


def test_gradients_of_each_sample_by_torch_func_are_unchanged():
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(2, 5, 21)

    def loss(parameters, sample):
        return functional_call(model, parameters, (sample.unsqueeze(0),)).square().sum()

    def gradients():
        return vmap(grad(loss), in_dims=(None, 0))({name: each.detach() for name, each in model.named_parameters()}, x)

    expected = gradients()
    with QKClip(model, 100.0) as clip:
        model(x).sum().backward()
        clip.step()
        assert clip.is_inside
        for _ in range(3):
            found = gradients()
            clip.step()
        with pytest.warns(NotInsideWarning, match="did not run where they ran in the trace"):
            clip.step()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def test_a_probed_model_is_exported_and_traced_as_a_plain_one():
    model, x = Plain().eval(), torch.randn(2, 5, 21)
    expected = str(torch.export.export(model, (x,)).graph)
    with QKClip(model, 0.05) as clip:
        model(x).sum().backward()
        clip.step()
        assert clip.is_inside
        for strict in (False, True):
            assert str(torch.export.export(model, (x,), strict=strict).graph) == expected
        traced = torch.jit.trace(model, (x,))
    plain = torch.jit.trace(model, (x,))
    found, wanted = ([node.kind() for node in each.inlined_graph.nodes()] for each in (traced, plain))
    assert found == wanted


def test_a_clip_attached_to_a_compiled_optimiser_is_no_part_of_its_graph(caplog):
    expected, model = small_model(), small_model()
    with QKClip(expected, 0.05) as clip:
        train(expected, after=clip.step)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = torch.compile(optimizer.step, backend="aot_eager")
    with QKClip(model, 0.05) as clip:
        clip.attach(optimizer)
        for number in range(4):
            given = tokens(number)
            F.cross_entropy(model(given[:, :-1]).flatten(0, 1), given[:, 1:].flatten()).backward()
            step()
            optimizer.zero_grad()
        assert clip.steps == 4
    assert "attnscale" not in caplog.text  # Dynamo tells of what it could not trace
    assert_same_parameters(model, expected, 1.3e-6, 1e-5)


def test_a_backward_after_its_step_was_cancelled_changes_no_later_record():
    def gradients(late):
        model, records = small_model(), []
        monitor = Monitor(model, every=1, rows=None, sinks=[records.append])
        for step in range(2):
            model(tokens(step)[:, :-1]).logsumexp(-1).sum().backward()
            monitor.step()
        cancelled = model(tokens(2)[:, :-1]).square().sum()
        monitor.cancel()
        monitor.begin()
        model(tokens(3)[:, :-1]).logsumexp(-1).sum().backward()
        if late:
            cancelled.backward()
        monitor.step()
        monitor.close()
        return [layer.numbers["query_gradient"] for layer in records[-1].layers.values()]

    assert gradients(late=True) == gradients(late=False)
