"""A model that was followed once is known by its kernels; the numbers are those of following it again."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import attnscale
from attnscale.models import CausalTransformer
from attnscale.watching import watcher
from tests.zoo.entry import SelfAttention

MODELS = {
    "plain": lambda: CausalTransformer(17, 24, 2, 3),
    "QK-norm": lambda: CausalTransformer(17, 24, 2, 3, qk_norm=True),
    "GPT-2": lambda: GPT2Model(GPT2Config(n_embd=24, n_head=3, n_layer=2, vocab_size=17)),
    "Llama": lambda: LlamaModel(
        LlamaConfig(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=2, vocab_size=17)
    ),
}
NUMBERS = ("scales", "query_norm", "key_norm", "query_gradient", "key_gradient", "alignment")


@pytest.fixture(autouse=True)
def failures_raise(monkeypatch):
    monkeypatch.setattr(watcher, "RAISE_FAILURES", True)


def run(model, length=13, known=None):
    tokens = torch.randint(0, 17, (2, length), generator=torch.Generator().manual_seed(length))
    with attnscale.watch(model, rows=None, training=True, known=known) as seen:
        output = model(tokens)
        (output if isinstance(output, torch.Tensor) else output[0]).square().sum().backward()
    return seen


def assert_same(found, followed):
    assert list(found.layers) == list(followed.layers)
    for name, layer in followed.layers.items():
        other = found.layers[name]
        torch.testing.assert_close(other.stats.std, layer.stats.std)
        torch.testing.assert_close(other.stats.entropy, layer.stats.entropy)
        for number in NUMBERS:
            torch.testing.assert_close(getattr(other, number), getattr(layer, number))
        for field in ("kind", "heads", "kv_heads", "head_dim", "query_len", "key_len", "causal", "wiring", "calls"):
            assert getattr(other, field) == getattr(layer, field), field


@pytest.mark.parametrize("kind", MODELS)
def test_a_known_model_gives_the_numbers_of_following_it(kind):
    torch.manual_seed(0)
    model = MODELS[kind]().train()
    model.requires_grad_(True)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    known = run(model).recognised
    assert known is not None
    again = run(model, 11, known)
    assert again.recognised is known
    assert_same(again, run(model, 11))


class Scaled(SelfAttention):
    """Multiplies its queries by what it is given, and the kernel by nothing."""

    factor = 0.25

    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(F.scaled_dot_product_attention(query * self.factor, key, value, scale=1.0))


def seen_scale(model, known=None):
    with attnscale.watch(model, known=known) as seen:
        model(torch.randn(2, 7, 33))
    return seen


def test_a_constant_before_the_kernel_is_remembered():
    model = Scaled(33, 3)
    known = seen_scale(model).recognised
    assert next(iter(seen_scale(model, known).layers.values())).scale_applied == pytest.approx(0.25)


def test_what_a_tensor_multiplies_is_followed_every_time():
    model = Scaled(33, 3)
    model.__dict__["factor"] = torch.full((3, 1, 1), 0.25)
    assert seen_scale(model).recognised is None


def test_attention_written_out_is_followed_every_time():
    class Eager(SelfAttention):
        def forward(self, x):
            query, key, value = self.project(x)
            return self.merge(torch.softmax(query @ key.mT * self.head_dim**-0.5, -1) @ value)

    assert seen_scale(Eager(33, 3)).recognised is None


def test_a_module_that_did_not_run_before_is_followed():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.both = Scaled(33, 3), Scaled(33, 3), False

        def forward(self, x):
            x = self.first(x)
            return self.second(x) if self.both else x

    model = Sometimes()
    known = seen_scale(model).recognised
    model.both = True
    model.second.factor = 0.5
    seen = seen_scale(model, known)
    assert [layer.scale_applied for layer in seen.layers.values()] == pytest.approx([0.25, 0.5])
    assert seen.recognised is None  # all of it is followed the next time


def test_another_call_in_a_known_module_makes_the_next_watch_follow():
    class Changes(Scaled):
        twice = False

        def forward(self, x):
            query, key, value = self.project(x)
            out = F.scaled_dot_product_attention(query, key, value)
            if self.twice:
                out = F.scaled_dot_product_attention(2 * query, key, value)
            return self.merge(out)

    model = Changes(33, 3)
    known = seen_scale(model).recognised
    assert seen_scale(model, known).recognised is known
    model.twice = True
    seen = seen_scale(model, known)
    assert len(seen.layers) == 1  # the call it knows
    assert seen.recognised is None


def test_masks_may_come_and_go():
    class Masked(Scaled):
        mask = None

        def forward(self, x):
            query, key, value = self.project(x)
            return self.merge(F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask))

    model = Masked(33, 3)
    known = seen_scale(model).recognised
    model.mask = torch.ones(7, 7, dtype=torch.bool).tril()
    with attnscale.watch(model, rows=None, known=known) as seen:
        model(torch.randn(2, 7, 33))
    assert seen.recognised is known
    (layer,) = seen.layers.values()
    assert layer.stats.count.tolist() == [2 * 28] * 3
