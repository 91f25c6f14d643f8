"""SDPA that drops weights runs on a CPU as the operations it is made of, and is measured inside all the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import attnscale
from attnscale import Monitor, QKClip
from attnscale.errors import NotInsideWarning

from .runs import VOCABULARY, clipped, monitored, tokens, train, whole
from .test_compiled import assert_same

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what its compiler imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
HEADS, HEAD_DIM, LENGTH = 3, 7, 13
WIDTH = HEADS * HEAD_DIM


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    counters.clear()


class Encoder(nn.Module):
    """torch's own, with the dropout that it has by default; padding and later tokens are hidden perhaps."""

    def __init__(self, hides=""):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 29, batch_first=True)
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.encoder, self.hides = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), hides

    def forward(self, given):
        later = torch.ones(given.shape[1], given.shape[1], dtype=torch.bool).triu(1)
        return self.head(
            self.encoder(
                self.embedding(given),
                mask=later if "later" in self.hides else None,
                is_causal="later" in self.hides,
                src_key_padding_mask=given == 0 if "padding" in self.hides else None,
            )
        )


class GPT2(nn.Module):
    """Hugging Face's, as it is trained by default."""

    def __init__(self):
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        config = GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=37, use_cache=False,
            attn_implementation="sdpa",
        )  # fmt: skip
        self.inner = GPT2LMHeadModel(config)

    def forward(self, given):
        return self.inner(input_ids=given).logits


def by_torch(query, key, value, **given):
    return F.scaled_dot_product_attention(query, key, value, **given)


def by_attnscale(query, key, value, **given):
    return attnscale.attention(query, key, value, is_causal=True, **given)


class Attention(nn.Module):
    """Twice as many queries as there are HEADS, and so many keys; both are multiplied before SDPA is given them."""

    def __init__(self, by=1.0, keys=HEADS, call=by_torch, **given):
        super().__init__()
        self.q_proj, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, keys * HEAD_DIM) for _ in range(2))
        self.by, self.call, self.given = by, call, {"enable_gqa": True} | given

    def forward(self, x):
        query, key, value = (
            made(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for made in (self.q_proj, self.k_proj, self.v_proj)
        )
        output = self.call(self.by * query, self.by * key, value, dropout_p=0.1 * self.training, **self.given)
        return self.out(output.transpose(1, 2).flatten(2))


class Layers(nn.Module):
    """Residual layers that attend in these ways."""

    def __init__(self, *layers):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(layers)

    def forward(self, given):
        x = self.embedding(given)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def sdpa_layers():
    """What SDPA may be given; what a layer drops is in what the next is given."""
    first_keys = torch.arange(LENGTH).expand(LENGTH, LENGTH) < 11
    ways = (
        {"is_causal": True},
        {"scale": 1.0, "by": 0.7},  # its own factor is no factor
        {"scale": 0.3, "by": 0.5},
        {"attn_mask": first_keys},
        {"attn_mask": torch.where(first_keys, 0.0, torch.finfo(torch.float32).min)[None, None]},
        {"call": by_attnscale},
        {"keys": 2 * HEADS, "enable_gqa": False},
        {"scale": -0.6},
    )
    return Layers(*(Attention(**way) for way in ways))


def made(kind, *given):
    def make():
        torch.manual_seed(0)
        return kind(*given)

    return make


def batches(step, **given):
    """Some tokens are padding, for those who hide it."""
    drawn = tokens(step, **({"length": LENGTH} | given))
    drawn[0, 7 + step % 3 : -1] = 0
    return drawn


MODELS = {
    "encoder": made(Encoder),
    "encoder, padding": made(Encoder, "padding"),
    "encoder, later": made(Encoder, "later"),
    "encoder, both": made(Encoder, "later, padding"),
    "GPT-2": made(GPT2),
    "every way": made(sdpa_layers),
}


def as_it_is(model):
    return model


@pytest.mark.parametrize("model", MODELS)
def test_the_numbers_are_those_of_an_eager_run(model):
    expected, losses = monitored(MODELS[model], as_it_is, 3, micro=2, batches=batches)
    found, same = monitored(MODELS[model], whole(fullgraph=True), 3, micro=2, batches=batches)
    assert torch.equal(losses, same)
    assert_same(found, expected, 1e-4)
    assert all("key_gradient" in layer.numbers for layer in found[-1].layers.values())
    assert counters["stats"]["unique_graphs"] == 1  # of sampled steps; the first was followed


@pytest.mark.parametrize("compiled", [as_it_is, whole(fullgraph=True)], ids=["eager", "compiled"])
@pytest.mark.parametrize("model", ["encoder, both", "GPT-2", "every way"])
def test_heads_are_clipped_by_what_watch_tells_of_their_largest_score(model, compiled):
    """γ = τ / max by hand, of the step that is measured inside."""
    net, given = MODELS[model](), batches(3)[:, :-1]
    torch.manual_seed(11)
    with attnscale.watch(net, rows=None) as seen:
        net(given)
    largest = {
        (name, head): score
        for name, layer in seen.layers.items()
        for head, score in enumerate(layer.stats.max.tolist())
    }
    threshold = sorted(largest.values())[len(largest) // 2] * 1.001
    run, clip = compiled(net), QKClip(net, 1e9)
    run(given).square().mean().backward()
    assert clip.step() is None
    clip.load_state_dict({"steps": 1, "threshold": threshold})
    with torch.no_grad():
        kept = {name: parameter.clone() for name, parameter in net.named_parameters()}
        for parameter in net.parameters():
            parameter.mul_(1e-3)  # nothing to clip while it is followed
    run(given).square().mean().backward()
    assert clip.step() is None
    assert clip.is_inside
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(kept[name])
    torch.manual_seed(11)
    run(given).square().mean().backward()
    report = clip.step() or clip.last
    clip.close()
    over = {place: threshold / score for place, score in largest.items() if score > threshold}
    assert {(head.layer, head.head) for head in report.heads} == set(over)
    for head in report.heads:
        assert head.gamma == pytest.approx(over[head.layer, head.head], rel=1e-4)


def test_the_gradient_is_that_of_what_sdpa_is_given():
    """As where a kernel runs: weights of which none is dropped have the same, by either way."""
    found = []
    for dropout in (0.0, 1e-12):

        def call(query, key, value, dropout_p, dropout=dropout, **given):
            return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, **given)

        net, records = made(lambda call: Layers(Attention(by=0.5, call=call, scale=0.3)), call)(), []
        monitor = Monitor(net, 1, None, [records.append])
        train(net, steps=1, after=monitor.step, batches=batches)
        monitor.close()
        found.append(records[0].layers["layers.0"].numbers)
    for name in ("query_gradient", "key_gradient"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4)


def test_a_query_that_is_learned_is_measured_inside():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            self.pool, self.query = (
                nn.MultiheadAttention(WIDTH, HEADS, 0.1, batch_first=True),
                nn.Parameter(torch.randn(1, 5, WIDTH)),
            )

        def forward(self, given):
            x = self.embedding(given)
            pooled = self.pool(self.query.expand(len(x), -1, -1), x, x, need_weights=False)[0]
            return self.head(x + pooled.mean(1, keepdim=True))

    expected, losses = monitored(made(Pooled), as_it_is, 3, batches=batches)
    found, same = monitored(made(Pooled), whole(fullgraph=True), 3, batches=batches)
    assert torch.equal(losses, same)
    assert_same(found, expected, 1e-4)
    assert counters["stats"]["unique_graphs"] == 1


def test_keys_of_padding_do_not_count_for_a_clip():
    one, _, _ = clipped(MODELS["encoder, both"], as_it_is, 0.3, 3, batches=batches)
    other, clip, reports = clipped(MODELS["encoder, both"], whole(), 0.3, 3, batches=batches)
    assert clip.last.heads
    assert reports
    for (name, wanted), each in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def without_a_batch(query, key, value, **given):
    """As a function of (heads, length, features), which SDPA takes as well, and no kernel."""
    parts = ((part[entry] for part in (query, key, value)) for entry in range(len(query)))
    return torch.stack([F.scaled_dot_product_attention(*each, **given) for each in parts])


def heads_before_entries(query, key, value, **given):
    turned = (part.transpose(0, 1) for part in (query, key, value))
    return F.scaled_dot_product_attention(*turned, **given).transpose(0, 1)


@pytest.mark.parametrize("call", [without_a_batch, heads_before_entries])
@pytest.mark.parametrize("batch", [5, 2 * HEADS])
def test_queries_of_other_shapes_are_followed_and_that_is_told(call, batch):
    net = made(lambda: Layers(Attention(call=call, keys=2 * HEADS, enable_gqa=False)))()
    with QKClip(net, 0.1) as clip:
        with pytest.warns(NotInsideWarning, match="no probes can be placed in it"):
            train(net, steps=2, batches=lambda step, **given: batches(step, batch=batch, **given), after=clip.step)
        assert not clip.is_inside
        assert clip.last.heads
