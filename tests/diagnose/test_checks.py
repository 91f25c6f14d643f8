"""The multiplier of the scores, held to 1/√d_k, to what the model declares, and to what was published; other checks."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnscale.declared import Authority, Declared
from attnscale.diagnose import diagnose
from attnscale.diagnose.scale import scale_findings

from .layers import codes, configured, in_half, layer_of, random_layer

DIMS = st.integers(2, 160)


def found(layer, trained=False):
    return codes(scale_findings(layer, trained))


@given(heads=st.integers(1, 8), head_dim=st.integers(1, 160), off=st.floats(-0.009, 0.009))
def test_the_usual_scale_gets_nothing_and_a_percent_is_measurement(heads, head_dim, off):
    assert found(random_layer(heads, head_dim, length=5, batch=1, scale=head_dim**-0.5 * (1 + off))) == []


@given(heads=st.integers(2, 7), head_dim=st.integers(3, 160))
def test_the_three_classic_mistakes_are_distinguished_at_any_width(heads, head_dim):
    width = heads * head_dim
    for scale, dims, code in (
        (1.0, (width,), "unscaled"),
        (1 / head_dim, (width + 1009,), "scaled_by_dim"),
        (width**-0.5, (width,), "scaled_by_model_dim"),
    ):
        assert found(random_layer(heads, head_dim, length=5, batch=1, scale=scale, model_dims=dims)) == [code]


def declaring(scale, source, authority, *readings):
    return Declared(scale, source, scale_readings=readings or (scale,), scale_authority=authority)


TWICE = declaring(8**-0.5, "attention.scale", Authority.NAMED)
BY_WIDTH = declaring(33**-0.5, "attention.scale", Authority.NAMED)
A_RULE = Declared(None, "attention.rule", scale_authority=Authority.CONFIGURED)
A_TENTH = declaring(0.1, "attention.scale", Authority.ATTRIBUTE, 0.1, 10.0)
IGNORED = declaring(0.1, "attention.softmax_scale", Authority.NAMED)


@pytest.mark.parametrize(
    ("layer", "code", "words"),
    [
        # widths that coincide
        (dict(heads=1, head_dim=13, scale=1 / 13), "scaled_by_dim", ""),
        (dict(heads=8, head_dim=8, scale=1 / 8), "scaled_by_model_dim", "(also 1/d_k)"),
        (dict(heads=8, head_dim=8, scale=1 / 8, declared=TWICE), "scaled_by_dim", "(also 1/√64"),
        # what the model declares
        (dict(scale=0.07, declared=configured(0.07)), None, ""),
        (dict(scale=1.0, declared=configured(1.0, "the published t5")), None, ""),
        (dict(declared=configured(0.07)), "config_mismatch", "config.softmax_scale sets 0.07"),
        (dict(scale=1.0, declared=configured(0.07)), "unscaled", ""),
        (dict(scale=0.77, declared=A_RULE), None, ""),
        (dict(scale=0.1, declared=A_TENTH), None, ""),
        (dict(declared=A_TENTH), None, ""),
        (dict(scale=33**-0.5, declared=BY_WIDTH), "scaled_by_model_dim", ""),
        (dict(declared=IGNORED), "config_mismatch", "attention.softmax_scale sets 0.1"),
        # published rules, and numbers near them
        *((dict(scale=(0.1 * math.log(stretch) + 1) ** 2 * 11**-0.5), None, "") for stretch in (2, 4, 40, 128)),
        *((dict(head_dim=dim, scale=8 / dim), None, "") for dim in (16, 32, 128)),
        (dict(length=23, scale=0.43 * math.log(23) * 11**-0.5), None, ""),
        (dict(scale=2 * 11**-0.5), "unusual_scale", "2 times 1/√d_k"),
        (dict(scale=11**0.5), "unusual_scale", "√d_k (multiplied where it should divide)"),
        (dict(scale=0.0), "unusual_scale", "does not depend on q·k"),
        *((dict(scale=scale, normalised=True), None, "") for scale in (1.0, 10.0, 0.5)),
        (dict(bias_is_scaled=True), "unusual_scale", "position bias"),
        (dict(scale=[0.2, 0.3, 0.4]), "unusual_scale", "Each head has its own scale"),
        # after the softmax, or over another axis
        *((dict(scale=1.0, factor_after_softmax=each), "scale_after_softmax", "") for each in (11**-0.5, 1 / 11, 0.2)),
        *((dict(factor_after_softmax=factor), None, "") for factor in (0.5, 1 / 0.9, 2.0)),
        (dict(mixes_along_softmax=False), "softmax_wrong_axis", ""),
    ],
)
def test_a_multiplier_is_judged_by_what_was_declared_and_published(layer, code, words):
    made = random_layer(**layer)
    assert found(made) == ([code] if code else [])
    assert all(words in finding.message for finding in scale_findings(made, trained=False))
    for finding in diagnose({"a": made}, trained=False).findings:  # every message and every advice is a sentence
        assert (finding.message[0].isupper(), finding.message[-1], finding.advice[-1]) == (True, ".", ".")


def test_severity_and_numbers_are_given_with_the_finding():
    layer = random_layer(heads=3, head_dim=16, scale=1.0)
    for trained, severity in ((False, "error"), (True, "warning")):
        (finding,) = scale_findings(layer, trained)
        assert (finding.measured, finding.expected, finding.head, finding.severity) == (1.0, 0.25, None, severity)
    layer.scales[1] = math.nan  # not measured
    assert found(layer) == ["unscaled"]
    for options, severity in ((dict(scale=[0.2, 0.31, 0.44]), "note"), (dict(mixes_along_softmax=False), "error")):
        (finding,) = scale_findings(random_layer(heads=3, **options), trained=True)
        assert finding.severity == severity


def test_half_precision_is_measured_to_two_percent():
    layer = random_layer(head_dim=32, scale=32**-0.5 * 1.015)
    assert (found(layer), found(in_half(layer))) == (["unusual_scale"], [])


@given(head_dim=DIMS, gain=st.floats(0.1, 3.0))
def test_a_scale_folded_into_the_query_is_not_a_missing_scale(head_dim, gain):
    # T5 draws the query's projection smaller by √d_k, and multiplies by nothing
    folded = random_layer(head_dim=head_dim, length=7, scale=1.0, query_std=head_dim**-0.5)
    missing = random_layer(head_dim=head_dim, length=7, scale=1.0, query_std=gain, key_std=gain)
    assert found(missing) == ["unscaled"]
    assert found(folded) == [] or head_dim < 8


@pytest.mark.parametrize("d_model", [16, 256])
@pytest.mark.parametrize("head_dim", [2, 16])
def test_no_scale_after_torchs_own_initialisation_is_a_mistake(d_model, head_dim):
    x = torch.nn.functional.layer_norm(torch.randn(3, 17, d_model), (d_model,))
    query, key = (
        torch.nn.Linear(d_model, d_model)(x).unflatten(-1, (-1, head_dim)).transpose(1, 2).detach() for _ in range(2)
    )
    assert found(layer_of(query, key, 1.0)) == ["unscaled"]


# Cases of soft-caps, norms and masks that the zoo has no model for
CAPPED = Declared(softcap=50.0, softcap_source="config.attn_logit_softcapping")
NORMED = Declared(qk_norm=True, qk_norm_source="config.use_qk_norm")


@pytest.mark.parametrize(
    ("layer", "code", "message"),
    [
        ({"declared": CAPPED}, "inert_softcap", "config.attn_logit_softcapping sets a soft-cap of 50, and none"),
        ({"declared": CAPPED, "softcap": 50.0}, None, ""),
        ({"declared": CAPPED, "softcap_discarded": True}, "inert_softcap", "does not reach the softmax"),
        ({"softcap": 1000.0}, None, ""),
        ({"softcap": 1e4}, "inert_softcap", "The soft-cap is too high to help, 10000"),
        ({"unused_norms": ("attn.q_norm", "attn.k_norm")}, "inert_qk_norm", "attn.q_norm and attn.k_norm were built"),
        ({"declared": NORMED}, "inert_qk_norm", "config.use_qk_norm asks for a QK-norm"),
        ({"declared": NORMED, "normalised": True}, None, ""),
        ({"unused_norms": ("attn.logit_scale",)}, "config_mismatch", "attn.logit_scale is built and never multiplied"),
    ],
)
def test_soft_caps_norms_and_scales_that_exist_and_are_not_applied_are_found(layer, code, message):
    found = diagnose({"a": random_layer(**layer)}, trained=True).findings
    assert codes(found) == ([code] if code else [])
    assert all(message in finding.message for finding in found)


@pytest.mark.parametrize(
    ("causal", "accused"),
    [
        ({"h.0.attn": True, "h.1.attn": False, "h.2.attn": True}, ["h.1.attn"]),
        ({"h.0": True, "h.1": False, "h.2": True, "h.3": False}, []),  # as many see later keys as do not
        ({"encoder.0": False, "encoder.1": False, "decoder.0": True, "decoder.1": True, "decoder.2": True}, []),
    ],
)
def test_the_only_layer_of_a_stack_that_sees_later_keys_is_reported(causal, accused):
    layers = {name: replace(random_layer(causal=each), name=name) for name, each in causal.items()}
    found = diagnose(layers, trained=False).findings
    assert [finding.layer for finding in found if finding.code == "attends_to_future"] == accused
