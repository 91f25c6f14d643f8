"""Each call of a fused kernel is measured when it runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import attnscale
from attnscale.errors import NotFollowedWarning
from attnscale.watching import watcher
from attnscale.watching.kernels.kernel_call import KernelCall
from tests.watching.layers import Fused, Plain

LENGTH, WIDTH, HEADS = 80, 24, 3


class Attends(Fused):
    def __init__(self, scale=None):
        super().__init__(WIDTH, HEADS)
        self.scale = scale

    def forward(self, x):
        return x + self.merge(F.scaled_dot_product_attention(*self.project(x), scale=self.scale))


class Written(Plain):
    def __init__(self):
        super().__init__(WIDTH, HEADS)


class SharesACache(nn.Module):
    """Layers that take turns at one buffer for their keys."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.register_buffer("keys", torch.zeros(1, HEADS, LENGTH, WIDTH // HEADS), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            query, key, value = layer.project(x)
            self.keys.copy_(key)
            x = x + layer.merge(F.scaled_dot_product_attention(query, self.keys, value))
        return x


def made(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for layer in layers))


def seen_of(model):
    torch.manual_seed(1)
    with torch.no_grad(), attnscale.watch(model, rows=LENGTH) as seen:
        model(torch.randn(1, LENGTH, WIDTH))
    return seen


def test_a_call_is_measured_before_the_next_layer_overwrites_a_shared_cache():
    found = seen_of(SharesACache(made(Attends, Attends)))
    expected = seen_of(made(Attends, Attends))
    assert len(found.layers) == len(expected.layers) == 2  # of one line, told apart by what makes their queries
    for shared, own in zip(found.layers.values(), expected.layers.values(), strict=True):
        torch.testing.assert_close(shared.stats.max, own.stats.max)


def test_layers_are_in_the_order_in_which_they_ran():
    model = made(Attends, Written, Attends, Written)
    assert list(seen_of(model).layers) == ["0", "1", "2", "3"]


def test_finished_layers_can_be_read_during_a_run_and_after_an_error():
    def fail(*_):
        assert list(seen.layers) == ["0", "1"]
        raise RuntimeError("on purpose")

    model = made(Attends, Attends, Attends)
    model[1].register_forward_hook(fail)
    with torch.no_grad(), attnscale.watch(model, rows=8) as seen:
        with pytest.raises(RuntimeError, match="on purpose"):
            model(torch.randn(1, LENGTH, WIDTH))
        assert list(seen.layers) == ["0", "1"]


def test_a_default_device_does_not_reach_the_measurement():
    model, x = made(Attends, Attends), torch.randn(1, LENGTH + 9, WIDTH)  # a length of which nothing is known yet
    with torch.no_grad(), torch.device("meta"), attnscale.watch(model, rows=11) as seen:
        model(x)
    assert all(layer.stats.std.isfinite().all() for layer in seen.layers.values())
    assert len(seen.layers) == 2


def test_a_mode_of_functions_sees_the_model_alone():
    class Tells(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            told.append(func)
            return func(*args, **(kwargs or {}))

    model, told = made(Attends, Attends), []
    with torch.no_grad(), attnscale.watch(model, rows=8), Tells():
        model(torch.randn(1, LENGTH, WIDTH))
    assert F.scaled_dot_product_attention in told
    assert not {torch.bmm, torch.amax, torch.exp2}.intersection(told)


def test_one_call_that_cannot_be_measured_gives_a_warning_and_leaves_the_others(monkeypatch):
    plain = KernelCall.measure

    def measure(self, *args, **kwargs):
        if self.scale == 3.0:
            raise ValueError("on purpose")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(KernelCall, "measure", measure)
    monkeypatch.setattr(watcher, "RAISE_FAILURES", False)
    model = made(Attends, lambda: Attends(scale=3.0), Attends)
    with pytest.warns(NotFollowedWarning, match="ValueError: on purpose"):
        found = seen_of(model)
    assert list(found.layers) == ["0", "2"]


@pytest.mark.parametrize(
    ("what", "undefined"), [("key", True), ("query", True), ("value", False), ("nothing", False), ("mask", False)]
)
def test_nan_weights_give_a_warning(what, undefined):
    """Also where rows see nothing, which SDPA makes zeros of; values that are infinite are not the softmax's doing."""

    class Odd(Attends):
        def forward(self, x):
            given = dict(zip(("query", "key", "value"), self.project(x), strict=True))
            if what in given:
                given[what] = given[what] + torch.full((), torch.inf if what == "value" else torch.nan)
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1) if what == "mask" else None
            return F.scaled_dot_product_attention(**given, attn_mask=mask).transpose(1, 2).flatten(2)

    (layer,) = seen_of(made(Odd)).layers.values()
    assert any(softmax.undefined is not None and bool(softmax.undefined) for softmax in layer.softmaxes) is undefined
