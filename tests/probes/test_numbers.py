"""Compiled models are measured inside their graphs: the numbers and the clips of an eager run."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import attnscale
from attnscale import QKClip
from attnscale.errors import NotInsideWarning

from .models import MODELS, Attention, Layers, dropping, padded_tokens, tokens
from .runs import (
    TORCH_WARNINGS,
    assert_same,
    assert_same_parameters,
    clipped,
    each_block,
    eager,
    monitored,
    train,
    whole,
)

pytestmark = TORCH_WARNINGS
WAYS = {
    "aot_eager": whole(),
    "fullgraph": whole(fullgraph=True),
    "dynamic": whole(dynamic=True),
    "no autograd": whole("eager"),
    "the step": lambda model: torch.compile(lambda batch: model(batch), backend="aot_eager"),
    "each block": each_block(),
}
# Every model in one graph. In other ways only where that takes another path and compiles fast.
FULLGRAPH = [(model, "fullgraph") for model in MODELS if "Llama" not in model]
OTHERS = [
    *(("one layer", way) for way in ("aot_eager", "dynamic", "no autograd", "the step")),
    *(("written out", way) for way in ("dynamic", "no autograd", "each block")),
    *(("torch's encoder", way) for way in ("no autograd", "the step")),
    *(("an attention that runs again", way) for way in ("no autograd", "the step")),
    *(("checkpoints", way) for way in ("no autograd", "the step", "each block")),
    ("written out, checkpoints", "each block"),
    ("Llama, written out", "aot_eager"),
    ("Llama, SDPA", "aot_eager"),
]


@pytest.mark.parametrize(("model", "way"), FULLGRAPH + OTHERS)
def test_a_compiled_model_records_the_numbers_of_an_eager_run(model, way):
    expected, losses = monitored(MODELS[model], eager, 3, micro=2, batches=padded_tokens)
    found, same = monitored(MODELS[model], WAYS[way], 3, micro=2, batches=padded_tokens)
    torch.testing.assert_close(same, losses, rtol=1e-5 if "Llama" in model else 0.0, atol=0.0)
    assert_same(found, expected, 1e-5)
    assert all("key_gradient" in layer.numbers for layer in found[-1].layers.values())
    assert counters["stats"]["unique_graphs"] == 1  # that of sampled steps: the first step is traced


@pytest.mark.parametrize(
    ("model", "compiled"),
    [
        ("one layer", whole("inductor")),
        pytest.param("transformer", each_block("inductor"), marks=pytest.mark.slow),
        pytest.param("checkpoints", whole("inductor"), marks=pytest.mark.slow),
        pytest.param("written out", whole("inductor"), marks=pytest.mark.slow),
    ],
)
def test_a_model_compiled_with_inductor_records_the_numbers_of_an_eager_run(model, compiled):
    expected, losses = monitored(MODELS[model], eager, 4, every=2)
    found, same = monitored(MODELS[model], compiled, 4, every=2)
    assert torch.allclose(losses, same, rtol=1e-5)
    assert_same(found, expected, 1e-3)


def test_autocast_to_half_precision_is_measured_inside():
    expected, _ = monitored(MODELS["written out"], eager, 3, bfloat16=True)
    found, _ = monitored(MODELS["written out"], whole(), 3, bfloat16=True)
    assert_same(found, expected, 2e-2)


@pytest.mark.parametrize(("model", "threshold"), [("written out, padding", 0.5), ("dropout, both", 0.3)])
def test_a_compiled_model_with_padding_is_clipped_as_an_eager_one(model, threshold):
    expected, _ = clipped(MODELS[model], eager, threshold, 3, batches=padded_tokens)
    found, clip = clipped(MODELS[model], whole(), threshold, 3, batches=padded_tokens)
    assert clip.last.heads
    assert_same_parameters(found, expected)


@pytest.mark.parametrize("compiled", [eager, whole(fullgraph=True)], ids=["eager", "compiled"])
@pytest.mark.parametrize("model", ["dropout, both", "GPT-2", "every setting of SDPA"])
def test_heads_are_clipped_by_the_largest_score_that_watch_shows(model, compiled):
    """Compute γ = τ / max by hand, of the step that is measured inside."""
    net, batch = MODELS[model](), padded_tokens(3)[:, :-1]
    torch.manual_seed(11)
    with attnscale.watch(net, rows=None) as seen:
        net(batch)
    largest = {
        (name, head): score
        for name, layer in seen.layers.items()
        for head, score in enumerate(layer.stats.max.tolist())
    }
    threshold = sorted(largest.values())[len(largest) // 2] * 1.001
    run, clip = compiled(net), QKClip(net, 1e9)
    run(batch).square().mean().backward()
    assert clip.step() is None
    clip.load_state_dict({"steps": 1, "threshold": threshold})
    kept = deepcopy(net.state_dict())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1e-3)  # nothing to clip while it is traced
    run(batch).square().mean().backward()
    assert clip.step() is None
    assert clip.is_inside
    net.load_state_dict(kept)
    torch.manual_seed(11)
    run(batch).square().mean().backward()
    report = clip.step() or clip.last
    clip.close()
    over = {place: threshold / score for place, score in largest.items() if score > threshold}
    assert {(head.layer, head.head) for head in report.heads} == set(over)
    for head in report.heads:
        assert head.gamma == pytest.approx(over[head.layer, head.head], rel=1e-4)


def test_the_gradient_is_that_of_the_query_and_key_that_sdpa_takes():
    found = []
    for dropout in (0.0, 1e-12):  # by a kernel; by operations, of which no weight is dropped
        attend = dropping(by=0.5, scale=0.3, dropout_p=dropout)
        records, _ = monitored(lambda attend=attend: Layers(attend), eager, 1, batches=padded_tokens)
        found.append(records[0].layers["blocks.0"].numbers)
    for name in ("query_gradient", "key_gradient"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4)


def without_a_batch(query, key, value, **settings):
    """Call SDPA with (heads, length, features), which it takes as well, and no kernel does."""
    parts = ((part[entry] for part in (query, key, value)) for entry in range(len(query)))
    return torch.stack([F.scaled_dot_product_attention(*each, **settings) for each in parts])


def heads_before_batch(query, key, value, **settings):
    turned = (part.transpose(0, 1) for part in (query, key, value))
    return F.scaled_dot_product_attention(*turned, **settings).transpose(0, 1)


@pytest.mark.parametrize("call", [without_a_batch, heads_before_batch])
@pytest.mark.parametrize("batch", [5, 6])
def test_queries_of_other_shapes_are_traced_with_a_warning(call, batch):
    attend = dropping(call=call, enable_gqa=False)
    net = Layers(Attention(attend, heads=6))
    with QKClip(net, 0.01) as clip:
        with pytest.warns(NotInsideWarning, match="no probes can be placed in it"):
            train(net, steps=2, batches=lambda step, device: padded_tokens(step, batch=batch), after=clip.step)
        assert not clip.is_inside
        assert clip.last.heads


KEYS = 2  # of four heads


def by_the_kernel(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def repeated(query, key, value):
    key, value = (part.repeat_interleave(2, 1) for part in (key, value))
    return F.scaled_dot_product_attention(query, key, value)


def expanded(query, key, value):
    key, value = (part[:, :, None].expand(-1, -1, 2, -1, -1).reshape(*query.shape) for part in (key, value))
    return F.scaled_dot_product_attention(query, key, value)


def expanded_where_compiled(query, key, value):
    """Hugging Face does so."""
    return expanded(query, key, value) if torch.compiler.is_compiling() else by_the_kernel(query, key, value)


def written_out(query, key, value):
    key, value = (part.repeat_interleave(2, 1) for part in (key, value))
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value


def grouped(attend):
    return lambda: Layers(attend, heads=4, kv_heads=KEYS)


@pytest.mark.parametrize("attend", [by_the_kernel, repeated, expanded, expanded_where_compiled, written_out])
def test_the_gradient_of_a_shared_key_is_the_same_however_it_is_copied(attend):
    expected, _ = monitored(grouped(written_out), eager, 2)
    for compiled in (eager, whole()):
        found, _ = monitored(grouped(attend), compiled, 2)
        assert_same(found, expected, 1e-4)


def test_the_gradient_of_a_shared_key_is_the_one_that_autograd_finds():
    kept = []

    def attend(query, key, value):
        key.retain_grad()
        kept.append(key)
        return by_the_kernel(query, key, value)

    records, _ = monitored(grouped(repeated), eager, 1)
    monitored(grouped(attend), eager, 1)
    lengths = kept[0].grad.square().sum((0, 2, 3)).sqrt().repeat_interleave(2)
    assert records[0].layers["blocks.0"].numbers["key_gradient"] == pytest.approx(lengths.tolist(), rel=1e-4)


def test_separate_copies_of_a_key_share_its_gradient():
    def copied_in_turns(query, key, value):
        key, value = (part.repeat(1, 2, 1, 1) for part in (key, value))
        return F.scaled_dot_product_attention(query, key, value)

    records, _ = monitored(grouped(copied_in_turns), eager, 2, rate=0.0, batches=lambda _, device: tokens(0))
    traced, probed = (record.layers["blocks.0"].numbers["key_gradient"] for record in records)
    assert probed == pytest.approx(traced, rel=1e-4)
    assert traced[:KEYS] == pytest.approx(traced[KEYS:])
