from dataclasses import replace

from attnscale.diagnose.future import future_findings

from .layers import random_layer


def stack(**causal):
    """Layers by name, causal or not."""
    return {name.replace("_", "."): replace(random_layer(causal=is_causal), name=name.replace("_", "."))
            for name, is_causal in causal.items()}  # fmt: skip


def accused(layers):
    return [finding.layer for finding in future_findings(layers, trained=False)]


def test_the_one_of_a_stack_that_sees_later_keys_is_accused():
    assert accused(stack(h_0_attn=True, h_1_attn=False, h_2_attn=True)) == ["h.1.attn"]


def test_an_encoder_beside_a_decoder_is_not():
    assert accused(stack(encoder_0=False, encoder_1=False, decoder_0=True, decoder_1=True, decoder_2=True)) == []


def test_where_as_many_see_them_as_do_not_nobody_is():
    assert accused(stack(h_0=True, h_1=False, h_2=True, h_3=False)) == []


def test_cross_attention_has_no_future():
    layers = stack(h_0=True, h_1=False, h_2=True)
    layers["h.1"] = replace(layers["h.1"], key_len=7)
    assert accused(layers) == []
