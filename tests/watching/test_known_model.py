"""A model that was followed once is known by its kernels; the numbers are those of following it again."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from attnscale.errors import NotFollowedWarning
from attnscale.models import CausalTransformer
from attnscale.watching import watcher
from attnscale.watching.kernels import KernelCall
from attnscale.watching.settings import Settings
from attnscale.watching.watch import watched
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
    with watched(model, Settings(rows=None, training=True, known=known)) as seen:
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


def without_dropout(model):
    for part in model.train().modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_a_known_model_gives_the_numbers_of_following_it(kind):
    model = without_dropout(MODELS[kind]())
    known = run(model).known_model
    assert known is not None
    again = run(model, 11, known)
    assert again.known_model is known
    assert_same(again, run(model, 11))


class Scaled(SelfAttention):
    """Multiplies its queries by what it is given, and the kernel by nothing."""

    factor = 0.25

    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(F.scaled_dot_product_attention(query * self.factor, key, value, scale=1.0))


def seen_scale(model, known=None):
    """By the mode: what keeps all of a call does not read it from the graph."""
    with watched(model, Settings(training=True, keep=True, known=known)) as seen:
        model(torch.randn(2, 7, 33))
    return seen


def test_a_constant_before_the_kernel_is_remembered():
    model = Scaled(33, 3)
    known = seen_scale(model).known_model
    assert next(iter(seen_scale(model, known).layers.values())).scale_applied == pytest.approx(0.25)


def test_what_a_tensor_multiplies_is_followed_every_time():
    model = Scaled(33, 3)
    model.__dict__["factor"] = torch.full((3, 1, 1), 0.25)
    assert seen_scale(model).known_model is None


@pytest.mark.parametrize("learns", [True, False])
def test_a_watch_outside_training_learns_nothing_to_know_a_model_by(learns):
    model = Scaled(33, 3)
    with torch.set_grad_enabled(learns), watched(model, Settings()) as seen:
        model(torch.randn(2, 7, 33))
    assert seen.calls == 1
    assert seen.known_model is None


def test_a_module_that_did_not_run_before_is_followed():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.both = Scaled(33, 3), Scaled(33, 3), False

        def forward(self, x):
            x = self.first(x)
            return self.second(x) if self.both else x

    model = Sometimes()
    known = seen_scale(model).known_model
    model.both = True
    model.second.factor = 0.5
    seen = seen_scale(model, known)
    assert [layer.scale_applied for layer in seen.layers.values()] == pytest.approx([0.25, 0.5])
    assert seen.known_model is None  # all of it is followed the next time


def test_another_call_in_a_known_module_is_told_and_seen_by_its_scores_and_the_next_watch_follows():
    class Changes(Scaled):
        twice = False

        def forward(self, x):
            query, key, value = self.project(x)
            out = F.scaled_dot_product_attention(query, key, value)
            if self.twice:
                out = F.scaled_dot_product_attention(2 * query, key, value)
            return self.merge(out)

    model = Changes(33, 3)
    known = seen_scale(model).known_model
    assert seen_scale(model, known).known_model is known
    model.twice = True
    with pytest.warns(NotFollowedWarning, match="the scores are known and not the scale"):
        seen = seen_scale(model, known)
    assert seen.known_model is None
    first, second = seen.layers.values()
    assert first.scale_applied == pytest.approx(11**-0.5)
    assert math.isnan(second.scale_applied)
    torch.testing.assert_close(second.stats.max, 2 * first.stats.max)


def test_masks_may_come_and_go():
    class Masked(Scaled):
        mask = None

        def forward(self, x):
            query, key, value = self.project(x)
            return self.merge(F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask))

    model = Masked(33, 3)
    known = seen_scale(model).known_model
    model.mask = torch.ones(7, 7, dtype=torch.bool).tril()
    with watched(model, Settings(rows=None, training=True, known=known)) as seen:
        model(torch.randn(2, 7, 33))
    assert seen.known_model is known
    (layer,) = seen.layers.values()
    assert layer.stats.count.tolist() == [2 * 28] * 3


@pytest.fixture
def operations(monkeypatch):
    """What the mode was shown."""
    seen, traits_of = [], watcher.traits_of
    monkeypatch.setattr(watcher, "traits_of", lambda func: seen.append(func) or traits_of(func))
    return seen


@pytest.mark.parametrize("kind", MODELS)
def test_in_training_a_known_kernel_is_read_from_the_graph_and_measured_as_its_gradient_passes(
    kind, operations, monkeypatch
):
    model = without_dropout(MODELS[kind]())
    known = run(model).known_model
    operations.clear()
    measured, stats = [], KernelCall.stats
    monkeypatch.setattr(
        KernelCall, "stats", lambda *given: measured.append(torch._C._current_graph_task_id() != -1) or stats(*given)
    )
    run(model, known=known)
    assert not operations
    assert measured == [True, True]


def test_what_no_gradient_passes_is_measured_in_the_end():
    model = MODELS["plain"]()
    known = run(model).known_model
    tokens = torch.zeros(2, 13, dtype=torch.int64)
    with watched(model, Settings(rows=None, training=True, known=known)) as seen:
        model(tokens)
    with watched(model, Settings(rows=None, training=True)) as followed:
        model(tokens)
    for name, layer in followed.layers.items():
        torch.testing.assert_close(seen.layers[name].stats.std, layer.stats.std)
        assert seen.layers[name].query_gradient is None


def test_no_more_waits_to_be_measured_than_may(monkeypatch):
    model = MODELS["plain"]()
    known = run(model).known_model
    tokens = torch.zeros(2, 13, dtype=torch.int64)
    call = 2 * 2 * 13 * 24 * 4  # bytes of a query and its key
    monkeypatch.setattr("attnscale.watching.seen.HELD", 3 * call)
    measured, stats = [], KernelCall.stats
    monkeypatch.setattr(KernelCall, "stats", lambda *given: measured.append(1) or stats(*given))
    with watched(model, Settings(rows=None, training=True, known=known)) as seen:
        for _ in range(5):  # of two layers each, and no backward pass
            model(tokens)
        assert len(measured) == 7
    assert [(layer.calls, layer.stats.rows.tolist()) for layer in seen.layers.values()] == [(5, [5 * 26] * 3)] * 2


def test_a_query_written_to_after_its_attention_is_left_out():
    class Overwrites(SelfAttention):
        def forward(self, x):
            query, key, value = self.project(x)
            self.query = query
            return self.merge(F.scaled_dot_product_attention(query, key, value))

    model = nn.ModuleList([Overwrites(33, 3), Overwrites(33, 3)])
    model.forward = lambda x: model[1](model[0](x))
    x = torch.randn(2, 7, 33)

    def run_watched(known=None, overwrite=False):
        with watched(model, Settings(training=True, known=known)) as seen:
            model(x)
            if overwrite:
                model[0].query.detach().zero_()
        return seen

    known = run_watched().known_model
    with pytest.warns(UserWarning, match="0: a query or key was written to after its attention"):
        seen = run_watched(known, overwrite=True)
    assert list(seen.layers) == ["1"]
    assert seen.known_model is None


class Twice(SelfAttention):
    """Attends once or twice, the second time to what the first gave, or as if there had been no first."""

    chained = discarded = False

    def forward(self, x):
        query, key, value = self.project(x)
        out = F.scaled_dot_product_attention(query, key, value)
        if self.chained:
            out = F.scaled_dot_product_attention(out, key, value)
        if self.discarded:
            out = F.scaled_dot_product_attention(2 * query, key, value)
        return self.merge(out)


def trained(model, known=None):
    x = torch.randn(2, 7, 33, generator=torch.Generator().manual_seed(0))
    with watched(model, Settings(rows=None, training=True, known=known)) as seen:
        model(x).square().sum().backward()
    return seen


def test_a_module_with_two_kernels_is_seen_by_the_mode(operations):
    model = Twice(33, 3)
    model.chained = True
    known = trained(model).known_model
    operations.clear()
    seen = trained(model, known)
    assert operations
    assert_same(seen, trained(model))
    assert len(seen.layers) == 2


@pytest.mark.parametrize("change", ["chained", "discarded"])
def test_in_training_a_module_that_runs_otherwise_makes_the_next_watch_follow(change):
    model = Twice(33, 3)
    known = trained(model).known_model
    assert trained(model, known).known_model is known
    setattr(model, change, True)
    with pytest.warns(NotFollowedWarning, match="did not run as when the model was followed"):
        assert trained(model, known).known_model is None


def test_a_known_module_that_is_checkpointed_all_at_once_is_counted_once(operations):
    model = Twice(33, 3)
    known = trained(model).known_model
    x = torch.randn(2, 7, 33, requires_grad=True)
    operations.clear()
    with watched(model, Settings(rows=None, training=True, known=known)) as seen:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert operations
    (layer,) = seen.layers.values()
    assert (layer.calls, layer.stats.rows.tolist()) == (1, [14] * 3)
