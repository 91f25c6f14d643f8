from dataclasses import replace

import pytest

from attnscale.declared import Declared
from attnscale.diagnose.checks import future_findings, qk_norm_findings, softcap_findings

from .layers import codes, random_layer

CAPPED = Declared(softcap=50.0, softcap_source="config.attn_logit_softcapping")
NORMED = Declared(qk_norm=True, qk_norm_source="config.use_qk_norm")


def found(layer):
    return codes([*softcap_findings(layer, False), *qk_norm_findings(layer, False)])


def test_a_soft_cap_that_is_set_and_not_applied_is_inert():
    (finding,) = softcap_findings(random_layer(declared=CAPPED), False)
    assert finding.code == "inert_softcap"
    assert finding.expected == 50.0
    assert "config.attn_logit_softcapping sets a soft-cap of 50" in finding.message


def test_a_soft_cap_that_is_discarded_is_inert():
    assert found(random_layer(softcap_discarded=True)) == ["inert_softcap"]
    assert found(random_layer(declared=CAPPED, softcap_discarded=True)) == ["inert_softcap"]


@pytest.mark.parametrize(("cap", "expected"), [(30.0, []), (50.0, []), (1000.0, []), (1e4, ["inert_softcap"])])
def test_a_soft_cap_too_high_to_protect_is_inert(cap, expected):
    assert found(random_layer(softcap=cap)) == expected


def test_a_soft_cap_that_is_applied_is_not():
    assert found(random_layer(softcap=50.0, declared=CAPPED)) == []


def test_a_norm_that_was_built_and_never_called_is_inert():
    (finding,) = qk_norm_findings(random_layer(unused_norms=("attn.q_norm", "attn.k_norm")), False)
    assert finding.code == "inert_qk_norm"
    assert finding.message == "attn.q_norm and attn.k_norm were built and never used."


def test_a_norm_that_is_asked_for_and_not_applied_is_inert():
    assert found(random_layer(declared=NORMED)) == ["inert_qk_norm"]
    assert found(random_layer(declared=NORMED, normalised=True)) == []


def test_a_plain_layer_has_nothing_to_be_inert():
    assert found(random_layer()) == []


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
