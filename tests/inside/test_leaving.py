"""Models that are moved while they are looked at, and runs that are broken off."""

import pytest
import torch
import torch.nn.functional as F

import attnscale
from attnscale import QKClip
from attnscale.inside import frames

from .runs import small_model, tokens, train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what its compiler imports


def test_a_model_that_is_converted_is_followed_anew():
    model = small_model()
    with QKClip(model, 0.05) as clip:
        train(model, steps=2, after=clip.step)
        assert clip.is_inside
        model.double()
        train(model, steps=1, after=clip.step)  # noticed
        assert not clip.is_inside
        reports = []
        train(model, steps=2, after=lambda: reports.append(clip.step()))
        assert clip.is_inside
    assert reports[-1].heads
    with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
        model(tokens(1)[:, :-1])
    assert max(float(layer.stats.max.max()) for layer in seen.layers.values()) < 0.1


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
    assert not frames.FRAMES.open
    assert torch.overrides._len_torch_function_stack() == 0


def test_the_threshold_is_not_changed_unnoticed():
    clip = QKClip(small_model(), 100.0)
    with pytest.raises(AttributeError):
        clip.threshold = 50.0
    clip.close()
