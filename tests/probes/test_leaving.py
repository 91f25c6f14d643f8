"""Models that are moved while they are looked at, and runs that are broken off."""

from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from attnscale import Monitor, QKClip
from attnscale.errors import NotInsideWarning
from attnscale.probes import intercept

from .runs import small_model, tokens, train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports


def test_an_error_in_the_middle_of_tracing_leaves_nothing_in_place():
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


def test_the_threshold_is_not_changed_unnoticed():
    clip = QKClip(small_model(), 100.0)
    with pytest.raises(AttributeError):
        clip.threshold = 50.0
    clip.close()


class Announced(nn.Module):
    """Tells whoever keeps a register of layers."""

    register: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, family, **given):
        super().__init_subclass__(**given)
        cls.register.append(f"{family} {cls.__name__}")


class Attention(Announced, family="plain"):
    def __init__(self):
        super().__init__()
        self.heads, self.projections = 3, nn.Linear(21, 63)

    def forward(self, x):
        query, key, value = self.projections(x).unflatten(-1, (3, self.heads, -1)).transpose(-4, -2).unbind(-3)
        return F.scaled_dot_product_attention(query, key, value).transpose(-3, -2).flatten(-2)


def test_a_class_that_announces_its_subclasses_is_looked_at_unannounced():
    model = Attention()
    with QKClip(model, 0.05) as clip:
        for _ in range(2):
            model(torch.randn(2, 5, 21)).sum().backward()
            clip.step()
        assert clip.is_inside
    assert Announced.register == ["plain Attention"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, of vmap
class Slotted(nn.Module):
    """Holds more than any module does."""

    __slots__ = ("more",)

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(21, 21)

    def forward(self, x):
        x = self.inner(x).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x)


def test_a_class_with_slots_is_looked_at():
    model = Slotted()
    with QKClip(model, 0.05) as clip:
        for _ in range(3):
            model(torch.randn(2, 5, 21)).sum().backward()
            assert clip.step() is not None
        assert clip.is_inside
    assert type(model) is Slotted


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, of whoever maps over SDPA first
def test_gradients_of_each_sample_by_torch_func_run_on():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 5, 21)

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


def test_a_model_is_exported_and_traced_as_if_nobody_looked():
    model, x = Attention().eval(), torch.randn(2, 5, 21)
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


def test_a_clip_that_is_attached_to_a_compiled_optimiser_is_no_part_of_its_graph(caplog):
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
    for wanted, found in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_backward_after_its_step_was_cancelled_changes_no_record_of_the_next():
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
