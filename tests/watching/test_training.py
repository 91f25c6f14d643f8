"""Gradients that reach queries and keys, and what ran in training mode alone."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

import attnscale
from attnscale.watching.watch import watched
from attnscale.watching.watcher import Settings
from tests.zoo.entry import SelfAttention


class Kept(SelfAttention):
    """Holds on to its queries and keys, whose gradients autograd then keeps too."""

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value)

    def forward(self, x):
        self.query_seen, self.key_seen, value = self.project(x)
        if self.query_seen.requires_grad:
            self.query_seen.retain_grad()
            self.key_seen.retain_grad()
        return self.merge(self.attend(self.query_seen, self.key_seen, value))


class Eager(Kept):
    def attend(self, query, key, value):
        return torch.softmax(query @ key.mT * self.head_dim**-0.5, -1) @ value


def by_head(gradient):
    return gradient.double().square().sum((0, 2, 3)).sqrt()


@pytest.mark.parametrize("kind", [Kept, Eager])
def test_the_gradient_norm_is_that_of_autograd_over_all_calls(kind):
    model, squares = kind(33, 3), {"query": 0, "key": 0}
    with attnscale.watch(model) as seen:
        for length in (5, 7):
            model(torch.randn(2, length, 33)).square().sum().backward()
            squares["query"] += by_head(model.query_seen.grad) ** 2
            squares["key"] += by_head(model.key_seen.grad) ** 2
    (layer,) = seen.layers.values()
    torch.testing.assert_close(layer.query_gradient, squares["query"].sqrt(), rtol=1e-5, atol=0)
    torch.testing.assert_close(layer.key_gradient, squares["key"].sqrt(), rtol=1e-5, atol=0)


def test_a_second_backward_through_one_graph_adds_as_another_batch_does():
    model, x, found = Kept(33, 3), torch.randn(2, 5, 33), []
    for times in (1, 2):
        with attnscale.watch(model) as seen:
            loss = model(x).square().sum()
            for _ in range(times):
                loss.backward(retain_graph=True)
        found.append(seen.layers["Kept"].key_gradient)
    torch.testing.assert_close(found[1], 2**0.5 * found[0])


class Shared(Kept):
    """Two keys, each shared by three of six heads in the kernel."""

    owners = (0, 0, 0, 1, 1, 1)

    def __init__(self, in_turns):
        super().__init__(66, 6, kv_heads=2)

    def attend(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


class Copied(Kept):
    """Two keys, each copied to three of six heads: side by side, or in turns."""

    def __init__(self, in_turns):
        super().__init__(66, 6, kv_heads=2)
        self.owners = [0, 1] * 3 if in_turns else [0, 0, 0, 1, 1, 1]

    def attend(self, query, key, value):
        key, value = (
            each.repeat(1, 3, 1, 1) if self.owners[1] else each.repeat_interleave(3, 1) for each in (key, value)
        )
        return super().attend(query, key, value)


class CopiedEager(Copied):
    def attend(self, query, key, value):
        key, value = (each[:, self.owners] for each in (key, value))
        return torch.softmax(query @ key.mT * self.head_dim**-0.5, -1) @ value


@pytest.mark.parametrize(
    ("kind", "in_turns"),
    [(Shared, False), (Copied, False), (Copied, True), (CopiedEager, False), (CopiedEager, True)],
)
def test_every_head_shows_the_gradient_of_its_key_summed_over_copies(kind, in_turns):
    model = kind(in_turns)
    with attnscale.watch(model) as seen:
        model(torch.randn(2, 5, 66)).square().sum().backward()
    (layer,) = seen.layers.values()
    expected = by_head(model.key_seen.grad)[list(model.owners)]
    torch.testing.assert_close(layer.key_gradient, expected, rtol=1e-5, atol=0)


def test_evaluation_between_training_steps_is_left_out():
    model = Kept(33, 3)
    with watched(model, Settings(rows=None, training=True)) as seen:
        model(torch.randn(2, 5, 33)).sum().backward()
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, 7, 33))
        model.train()
    (layer,) = seen.layers.values()
    assert layer.calls == 1
    assert layer.query_len == 5


def test_checkpointing_without_reentry_keeps_the_gradient():
    model, x = Eager(33, 3), torch.randn(2, 5, 33)
    with watched(model, Settings(training=True)) as seen:
        checkpoint(model, x, use_reentrant=False).square().sum().backward()
    checkpointed = next(iter(seen.layers.values()))
    with watched(model, Settings(training=True)) as seen:
        model(x).square().sum().backward()
    plain = next(iter(seen.layers.values()))
    torch.testing.assert_close(checkpointed.query_gradient, plain.query_gradient)


def test_no_mode_is_active_outside_the_model():
    model = Kept(33, 3)
    with attnscale.watch(model):
        assert _get_current_dispatch_mode() is None
        model(torch.randn(2, 5, 33))
        assert _get_current_dispatch_mode() is None
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5, 34))
        assert _get_current_dispatch_mode() is None
