"""Clipping Hugging Face's architectures: every layout of queries and keys that is in use."""

import pytest
import torch

import attnscale

pytest.importorskip("transformers")

from tests.others import OTHERS_MAY_WARN

from ..watching.architectures import ARCHITECTURES
from .models import assert_changed_as_told, before_and, between, watched

pytestmark = OTHERS_MAY_WARN  # transformers' and torch's own

LEFT = {"Swin v2"}  # normalised without a gain: nothing to scale
EVERY = [
    (name, how)
    for name, architecture in ARCHITECTURES.items()
    for how in architecture.implementations
    if how != "flex_attention" or name == "Gemma 2"
]


def clipped(name, how):
    model, inputs = ARCHITECTURES[name].build(how)
    if name == "BLOOM":  # ALiBi alone adds more than untrained scores are
        with torch.no_grad():
            model.h[0].self_attention.query_key_value.weight *= 4
    seen, before = watched(model, inputs), before_and(model)
    layer = next(iter(seen.layers.values()))
    threshold = between(layer.stats.max)
    report = attnscale.clip_qk_(model, seen, threshold)
    assert_changed_as_told(before, model, [each for head in report.heads for each in head.touched])
    depths = [each.stats.max for each in watched(model, inputs).layers.values() if each.module == layer.module]
    return report, layer, threshold, torch.stack(depths).amax(0)


@pytest.mark.parametrize(("name", "how"), EVERY)
def test_a_clipped_head_meets_the_threshold(name, how):
    report, layer, threshold, now = clipped(name, how)
    if name in LEFT:
        assert report.left
        assert not report.heads
        return
    heads = [head for head in report.heads if head.layer == layer.name]
    assert heads
    for head in heads:
        assert float(now[head.head]) <= threshold
        assert head.maximum <= threshold or float(now[head.head]) > 0.9 * threshold


WHERE = {
    "GPT-2": {"h.0.attn.c_attn.weight", "h.0.attn.c_attn.bias"},
    "GPT-NeoX": {"layers.0.attention.query_key_value.weight", "layers.0.attention.query_key_value.bias"},
    "BLOOM": {"h.0.self_attention.query_key_value.weight", "h.0.self_attention.query_key_value.bias"},
    "Falcon": {"h.0.self_attention.query_key_value.weight"},
    "Llama": {"layers.0.self_attn.q_proj.weight"},
    "Qwen3": {"layers.0.self_attn.q_norm.weight", "layers.0.self_attn.k_norm.weight"},
    "Gemma 2": {"layers.0.self_attn.q_proj.weight"},
    "T5": {"encoder.block.0.layer.0.SelfAttention.q.weight", "encoder.block.0.layer.0.SelfAttention.k.weight"},
    "DeepSeek-V3": {"layers.0.self_attn.q_b_proj.weight", "layers.0.self_attn.kv_b_proj.weight"},
}


@pytest.mark.parametrize("name", WHERE)
def test_a_clip_changes_only_the_query_and_key_parameters(name):
    report, layer, *_ = clipped(name, "eager")
    found = {each.parameter for head in report.heads if head.layer == layer.name for each in head.touched}
    assert found == WHERE[name]


def test_latent_attention_leaves_the_rotary_key_that_its_heads_share():
    report, layer, threshold, _ = clipped("DeepSeek-V3", "eager")
    head = next(head for head in report.heads if head.layer == layer.name and head.maximum > threshold)
    factors = {(each.parameter.split(".")[-2], len(each.rows)): each.factor for each in head.touched}
    assert factors == {
        ("q_b_proj", 13): pytest.approx(head.gamma**0.5),
        ("q_b_proj", 6): pytest.approx(head.gamma),
        ("kv_b_proj", 13): pytest.approx(head.gamma**0.5),
    }


def test_a_module_that_every_layer_calls_is_clipped_once():
    report, layer, threshold, now = clipped("ALBERT", "eager")
    depths = [head for head in report.heads if head.head == report.heads[0].head]
    assert [head.layer for head in depths] == [f"{layer.module}[{depth}]" for depth in range(2)]
    assert len({head.gamma for head in depths}) == 1  # the sharpest decides for all
    assert depths[0].gamma == pytest.approx(threshold / max(head.maximum for head in depths), rel=1e-4)
    assert float(now[depths[0].head]) <= threshold


def test_a_gain_that_is_kept_as_one_plus_weight_is_scaled_as_a_whole():
    report, *_ = clipped("Gemma 3", "eager")
    assert {each.offset for head in report.heads for each in head.touched} == {1.0}
