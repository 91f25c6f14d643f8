"""Attention written out is measured inside compiled models as well, alone and beside fused kernels."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from attnscale import Monitor

from .runs import VOCABULARY, WAYS, LlamaLogits, clipped, monitored, tokens, train, whole
from .test_compiled import assert_same

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what its compiler imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
WIDTH, HEADS = 12, 2


def hidden_after(length):
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def fused(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def plain(query, key, value):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return scores.masked_fill(hidden_after(query.shape[-2]), -math.inf).softmax(-1) @ value


def masked_by_addition(query, key, value):
    mask = torch.where(hidden_after(query.shape[-2]), torch.finfo(query.dtype).min, 0.0)
    weights = F.softmax(torch.matmul(query, key.transpose(2, 3)) * 0.4 + mask, dim=-1, dtype=torch.float32)
    return torch.matmul(F.dropout(weights, 0.0), value)


def capped(query, key, value):
    scores = 3.0 * torch.tanh(query @ key.mT * 0.5 / 3.0)
    return scores.masked_fill(hidden_after(query.shape[-2]), -math.inf).softmax(-1) @ value


def by_einsum(query, key, value):
    scores = torch.einsum("bhid,bhjd->bhij", query, key) * query.shape[-1] ** -0.5
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), value)


def by_baddbmm(query, key, value):
    rows, keys, values = (part.flatten(0, 1) for part in (query, key, value))
    scores = torch.baddbmm(rows.new_zeros(1, 1, 1), rows, keys.mT, beta=0, alpha=query.shape[-1] ** -0.5)
    return (scores.softmax(-1) @ values).unflatten(0, query.shape[:2])


def keys_first(query, key, value):
    scores = key @ query.mT * query.shape[-1] ** -0.5
    return scores.softmax(-2).mT @ value


WRITTEN = (plain, masked_by_addition, capped, by_einsum, by_baddbmm, keys_first)


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend, self.made, self.output = attend, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.made(x).chunk(3, -1))
        return self.output(self.attend(2 * query, key, value).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """A layer for each of these ways to attend, with residuals; run again in the backward pass perhaps."""

    def __init__(self, *ways, again=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers, self.again = nn.ModuleList(map(Attention, ways)), again

    def forward(self, given):
        x = self.embedding(given)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.again else layer(x))
        return self.head(x)


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


def test_the_numbers_are_those_of_an_eager_run():
    def make():
        return Model(fused, *WRITTEN)

    expected, losses = monitored(make, lambda model: model, 3, micro=2)
    found, same = monitored(make, whole(fullgraph=True), 3, micro=2)
    assert torch.equal(losses, same)
    assert_same(found, expected, 1e-4)
    assert counters["stats"]["unique_graphs"] == 1  # of sampled steps; the first was followed


@pytest.mark.parametrize(("way", "again"), [*((way, False) for way in WAYS), ("each layer", True)])
def test_the_numbers_are_those_of_an_eager_run_however_it_is_compiled(way, again):
    def make():
        return Model(plain, again=again)

    expected, losses = monitored(make, lambda model: model, 2)
    found, same = monitored(make, WAYS[way], 2)
    assert torch.equal(losses, same)
    assert_same(found, expected, 1e-4)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_the_numbers_are_those_of_an_eager_run_with_inductor():
    expected, losses = monitored(lambda: Model(plain), lambda model: model, 2)
    found, same = monitored(lambda: Model(plain), whole("inductor"), 2)
    assert torch.allclose(losses, same, rtol=1e-5)
    assert_same(found, expected, 1e-3)
    assert counters["stats"]["unique_graphs"] == 1


def test_sampled_and_plain_steps_alternate_with_no_further_compilation():
    model, plain_one = Model(plain, fused), Model(plain, fused)
    run, graphs = torch.compile(model, backend="aot_eager", fullgraph=True), []
    monitor = Monitor(model, every=2)
    losses = train(model, run, 8, after=lambda: (monitor.step(), graphs.append(counters["stats"]["unique_graphs"])))
    monitor.close()
    assert graphs == [0, 1, *[2] * 6]
    assert torch.equal(train(plain_one, torch.compile(plain_one, backend="aot_eager"), 8), losses)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain_one.parameters(), strict=True))


class Padded(Model):
    """Keys of padding are hidden from every query, and queries that stand there do not count."""

    def __init__(self):
        super().__init__(self.attend)

    def forward(self, given):
        self.shown = (given != 0)[:, None, None, :]
        return super().forward(given)

    def attend(self, query, key, value):
        scores = query @ key.mT * query.shape[-1] ** -0.5
        scores = scores.masked_fill(~self.shown, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ value


def padded_tokens(step, **given):
    drawn = tokens(step, **given)
    drawn[0, 10 + step % 3 :] = 0
    return drawn


def test_queries_of_padding_are_left_out():
    expected, _ = monitored(Padded, lambda model: model, 3, batches=padded_tokens)
    found, _ = monitored(Padded, whole(), 3, batches=padded_tokens)
    assert_same(found, expected, 1e-4)
    one, _, _ = clipped(Padded, lambda model: model, 0.5, 3, batches=padded_tokens)
    other, clip, _ = clipped(Padded, whole(), 0.5, 3, batches=padded_tokens)
    assert clip.last.heads
    for (name, wanted), each in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_half_precision_by_autocast_is_measured_inside():
    expected, _ = monitored(lambda: Model(plain), lambda model: model, 3, bfloat16=True)
    found, _ = monitored(lambda: Model(plain), whole(), 3, bfloat16=True)
    assert_same(found, expected, 2e-2)


class Warming(Model):
    """Its scale is a number that the loop changes."""

    def __init__(self):
        super().__init__(self.attend)
        self.scale = 0.5

    def attend(self, query, key, value):
        return (query @ key.mT * self.scale).softmax(-1) @ value


def test_a_scale_that_is_changed_meanwhile_is_read_again():
    model, records = Warming(), []
    run, monitor = torch.compile(model, backend="aot_eager"), Monitor(model, 1, None, [records.append])
    for scale in (0.5, 0.5, 0.25):
        model.scale = scale
        train(model, run, 1, after=monitor.step)
    monitor.close()
    scales = [record.layers["layers.0"].numbers["scale_applied"] for record in records]
    assert scales == [pytest.approx([2 * scale] * HEADS, rel=1e-4) for scale in (0.5, 0.5, 0.25)]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_of_hugging_face_tells_the_same_compiled(implementation):
    expected, losses = monitored(lambda: LlamaLogits(implementation, 16, 1), lambda model: model, 3)
    found, same = monitored(lambda: LlamaLogits(implementation, 16, 1), whole(), 3)
    assert torch.allclose(losses, same, rtol=1e-5)
    assert_same(found, expected, 1e-4)
    assert counters["stats"]["unique_graphs"] >= 1
