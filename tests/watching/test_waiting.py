"""Kernels that wait to be measured tell what they would have told as they ran."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import attnscale
from attnscale.errors import NotFollowedWarning
from attnscale.watching.kernels import waiting

LENGTH, WIDTH, HEADS = 80, 24, 3


class Attends(nn.Module):
    def __init__(self, scale=None, is_causal=False):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale, self.is_causal = scale, is_causal

    def projected(self, x):
        return (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))

    def forward(self, x):
        mixed = F.scaled_dot_product_attention(*self.projected(x), scale=self.scale, is_causal=self.is_causal)
        return x + mixed.transpose(1, 2).flatten(2)


class WritesAfterwards(Attends):
    """Uses the memory of its queries and keys for something else, once it has attended."""

    def forward(self, x):
        query, key, value = self.projected(x)
        mixed = F.scaled_dot_product_attention(query, key, value)
        query.fill_(100.0)
        key.fill_(100.0)
        return x + mixed.transpose(1, 2).flatten(2)


class SharesACache(nn.Module):
    """Layers that take turns at one buffer for their keys."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.register_buffer("keys", torch.zeros(1, HEADS, LENGTH, WIDTH // HEADS), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            query, key, value = layer.projected(x)
            self.keys.copy_(key)
            x = x + F.scaled_dot_product_attention(query, self.keys, value).transpose(1, 2).flatten(2)
        return x


class Written(Attends):
    def forward(self, x):
        query, key, value = self.projected(x)
        weights = (query @ key.mT / (WIDTH // HEADS) ** 0.5).softmax(-1)
        return x + (weights @ value).transpose(1, 2).flatten(2)


def made(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for layer in layers))


def seen_of(model, gradients, rows=None, batch=1):
    torch.manual_seed(1)
    x = torch.randn(batch, LENGTH, WIDTH)
    with torch.set_grad_enabled(gradients), attnscale.watch(model, rows=rows or LENGTH * batch) as seen:
        model(x)
    return seen


def assert_alike(found, expected):
    """All but what a sample of rows changes."""
    assert list(found.layers) == list(expected.layers)
    for layer, other in zip(found.layers.values(), expected.layers.values(), strict=True):
        torch.testing.assert_close(layer.scales, other.scales)
        torch.testing.assert_close(layer.query_norm, other.query_norm)
        torch.testing.assert_close(layer.key_norm, other.key_norm)
        for field in ("kind", "heads", "kv_heads", "head_dim", "causal", "calls", "model_dims", "wiring", "reading"):
            assert getattr(layer, field) == getattr(other, field), field


def assert_same_scores(found, expected):
    for layer, other in zip(found.layers.values(), expected.layers.values(), strict=True):
        for name in ("mean", "std", "entropy", "max"):
            torch.testing.assert_close(getattr(layer.stats, name), getattr(other.stats, name), msg=name)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
def test_what_waits_is_what_is_seen_at_once(is_causal, batch):
    model = made(*(lambda: Attends(is_causal=is_causal) for _ in range(3)), lambda: Attends(scale=0.7))
    at_once = seen_of(model, gradients=True, batch=batch)
    assert_alike(seen_of(model, gradients=False, batch=batch), at_once)
    assert_same_scores(seen_of(model, gradients=False, batch=batch), at_once)


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_of_several_layers_are_their_own(is_causal):
    """Each layer has scores of another size, so that a row of another one would tell."""
    model = made(*(lambda scale=scale: Attends(scale, is_causal) for scale in (0.1, 1.0, 10.0)))
    exact, sampled = seen_of(model, gradients=True), seen_of(model, gradients=False, rows=40)
    assert_alike(sampled, exact)
    for layer, other in zip(sampled.layers.values(), exact.layers.values(), strict=True):
        assert not layer.stats.exact
        # of another layer it is tenfold
        torch.testing.assert_close(layer.stats.std, other.stats.std, rtol=0.5, atol=0.0)
        assert (layer.stats.max <= other.stats.max + 1e-4).all()
        assert (layer.stats.max_bound >= other.stats.max).all()


@pytest.mark.parametrize(
    "model", [lambda: made(WritesAfterwards, WritesAfterwards), lambda: SharesACache(made(Attends, Attends))]
)
def test_what_is_written_to_is_measured_before(model):
    net = model()
    found = seen_of(net, gradients=False)
    with torch.no_grad(), attnscale.watch(net, rows=None) as at_once:
        torch.manual_seed(1)
        net(torch.randn(1, LENGTH, WIDTH))
    assert_same_scores(found, at_once)
    assert all(float(layer.stats.max.max()) < 50 for layer in found.layers.values())


def test_layers_are_in_the_order_they_ran_whatever_computes_them():
    model = made(Attends, Written, Attends, Written)
    assert list(seen_of(model, gradients=False).layers) == ["0", "1", "2", "3"]


def test_what_has_run_can_be_read_while_the_model_runs():
    model, told = made(Attends, Attends, Attends), []
    with torch.no_grad(), attnscale.watch(model, rows=8) as seen:
        model[1].register_forward_hook(lambda *_: told.append(list(seen.layers)))
        model(torch.randn(1, LENGTH, WIDTH))
    assert told == [["0", "1"]]
    assert list(seen.layers) == ["0", "1", "2"]


def test_what_ran_before_an_error_is_seen():
    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("on purpose")

    model = made(Attends, Attends, Fails)
    with torch.no_grad(), attnscale.watch(model, rows=8) as seen:
        with pytest.raises(RuntimeError, match="on purpose"):
            model(torch.randn(1, LENGTH, WIDTH))
        assert list(seen.layers) == ["0", "1"]


@pytest.mark.parametrize("held", ["query", "mask"])
def test_no_more_waits_than_a_few_megabytes(monkeypatch, held):
    size = {"query": 2 * LENGTH * WIDTH, "mask": HEADS * LENGTH**2}[held]
    monkeypatch.setattr(waiting, "HELD", 3 * size * 4)  # of three layers
    alive, most = [], []

    class Counts(Attends):
        def forward(self, x):
            query, key, value = self.projected(x)
            mask = torch.randn(1, HEADS, LENGTH, LENGTH) if held == "mask" else None
            alive.append(weakref.ref(query if mask is None else mask))
            most.append(sum(each() is not None for each in alive))
            return x + F.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2).flatten(2)

    model = made(*[Counts] * 9)
    with torch.no_grad(), attnscale.watch(model, rows=8) as seen:
        model(torch.randn(1, LENGTH, WIDTH))
        assert not any(each() is not None for each in alive)  # nothing waits once it has run
    assert 1 < max(most) <= 5
    assert len(seen.layers) == 9


def test_modes_around_the_model_do_not_reach_what_waits():
    """A default device is one: what is made without a device lies there."""
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


def test_one_call_that_cannot_be_measured_is_told_and_leaves_the_others(monkeypatch):
    from attnscale.watching.kernels.kernel_call import KernelCall

    plain = KernelCall.seen

    def seen(self, *args, **kwargs):
        if self.scale == 3.0:
            raise ValueError("on purpose")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(KernelCall, "seen", seen)
    model = made(Attends, lambda: Attends(scale=3.0), Attends)
    with pytest.warns(NotFollowedWarning, match="1: ValueError: on purpose"):
        found = seen_of(model, gradients=False)
    assert list(found.layers) == ["0", "2"]


def test_half_precision_and_shared_keys():
    class Shares(Attends):
        def forward(self, x):
            query, key, value = self.projected(x)
            mixed = F.scaled_dot_product_attention(query, key[:, :1], value[:, :1], enable_gqa=True)
            return x + mixed.transpose(1, 2).flatten(2)

    model = made(Shares, Shares, Shares).to(torch.bfloat16)
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.bfloat16)
    with torch.no_grad(), attnscale.watch(model, rows=LENGTH) as whole:
        model(x)
    with torch.inference_mode(), attnscale.watch(model, rows=40) as some:
        model(x)
    assert_alike(some, whole)
    assert {layer.kv_heads for layer in some.layers.values()} == {1}


@pytest.mark.parametrize(
    ("what", "undefined"), [("key", True), ("query", True), ("value", False), ("nothing", False), ("mask", False)]
)
def test_weights_that_are_no_numbers_are_told(what, undefined):
    """Also where rows see nothing, which SDPA makes zeros of; values that are infinite are not the softmax's doing."""

    class Odd(Attends):
        def forward(self, x):
            given = dict(zip(("query", "key", "value"), self.projected(x), strict=True))
            if what in given:
                given[what] = given[what] + torch.full((), torch.inf if what == "value" else torch.nan)
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1) if what == "mask" else None
            return F.scaled_dot_product_attention(**given, attn_mask=mask).transpose(1, 2).flatten(2)

    (layer,) = seen_of(made(Odd), gradients=False).layers.values()
    assert any(softmax.undefined is not None and bool(softmax.undefined) for softmax in layer.softmaxes) is undefined
