import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnscale.declared import Authority, Declared
from attnscale.diagnose.checks import findings_of
from attnscale.diagnose.scale import scale_findings

from .layers import codes, configured, in_half, layer_of, random_layer

DIMS = st.integers(2, 160)
HEADS = st.integers(2, 7)


def found(layer, trained=False):
    return codes(scale_findings(layer, trained))


@given(heads=st.integers(1, 8), head_dim=st.integers(1, 160))
def test_the_usual_scale_gets_nothing(heads, head_dim):
    assert found(random_layer(heads, head_dim, length=5, batch=1)) == []


@given(heads=HEADS, head_dim=DIMS)
def test_no_scale_is_unscaled_at_any_width(heads, head_dim):
    assert found(random_layer(heads, head_dim, length=5, scale=1.0)) == ["unscaled"]


@given(heads=HEADS, head_dim=st.integers(3, 160))
def test_d_k_for_its_root_is_scaled_by_dim(heads, head_dim):
    layer = random_layer(heads, head_dim, length=5, batch=1, scale=1 / head_dim, model_dims=(heads * head_dim + 1009,))
    assert found(layer) == ["scaled_by_dim"]


@given(heads=HEADS, head_dim=st.integers(2, 160))
def test_root_of_the_model_is_scaled_by_model_dim(heads, head_dim):
    scale = (heads * head_dim) ** -0.5
    assert found(random_layer(heads, head_dim, length=5, batch=1, scale=scale)) == ["scaled_by_model_dim"]


def test_one_head_has_no_model_width_to_mistake():
    assert found(random_layer(heads=1, head_dim=13)) == []
    assert found(random_layer(heads=1, head_dim=13, scale=1 / 13)) == ["scaled_by_dim"]


def test_where_both_coincide_the_message_says_both():
    (finding,) = scale_findings(random_layer(heads=8, head_dim=8, scale=1 / 8), trained=False)
    assert finding.code == "scaled_by_model_dim"
    assert "√64" in finding.message
    assert "1/d_k" in finding.message


def test_a_module_that_restates_the_root_and_gets_its_square_was_scaled_twice():
    said = Declared(8**-0.5, "attention.scale", scale_readings=(8**-0.5,), scale_authority=Authority.NAMED)
    (finding,) = scale_findings(random_layer(heads=8, head_dim=8, scale=1 / 8, declared=said), trained=False)
    assert finding.code == "scaled_by_dim"
    assert "√64" in finding.message


def test_numbers_are_given_with_the_finding():
    (finding,) = scale_findings(random_layer(heads=3, head_dim=16, scale=1.0), trained=False)
    assert (finding.measured, finding.expected, finding.head) == (1.0, 0.25, None)
    assert finding.severity == "error"


def test_in_a_trained_model_a_wrong_scale_is_no_error():
    (finding,) = scale_findings(random_layer(scale=1.0), trained=True)
    assert finding.severity == "warning"


@given(off=st.floats(-0.009, 0.009))
def test_a_percent_is_measurement(off):
    assert found(random_layer(head_dim=32, length=3, batch=1, scale=32**-0.5 * (1 + off))) == []


def test_half_precision_is_measured_to_two_percent():
    layer = random_layer(head_dim=32, scale=32**-0.5 * 1.015)
    assert found(layer) == ["unusual_scale"]
    assert found(in_half(layer)) == []


# The scale folded into the weights


@pytest.mark.parametrize("head_dim", [8, 16, 64, 128])
def test_a_scale_folded_into_the_query_is_no_mistake(head_dim):
    # T5 draws the query's projection smaller by √d_k, and multiplies by nothing
    assert found(random_layer(head_dim=head_dim, scale=1.0, query_std=head_dim**-0.5)) == []


@given(head_dim=st.integers(2, 128), gain=st.floats(0.1, 3.0))
def test_no_scale_with_query_and_key_of_one_size_is_a_mistake_whatever_the_size(head_dim, gain):
    layer = random_layer(head_dim=head_dim, length=7, scale=1.0, query_std=gain, key_std=gain)
    assert found(layer) == ["unscaled"]


@pytest.mark.parametrize("d_model", [16, 64, 256])
@pytest.mark.parametrize("head_dim", [2, 8, 16])
def test_no_scale_after_torchs_own_initialisation_is_a_mistake(d_model, head_dim):
    x = torch.nn.functional.layer_norm(torch.randn(3, 17, d_model), (d_model,))
    query, key = (
        torch.nn.Linear(d_model, d_model)(x).unflatten(-1, (-1, head_dim)).transpose(1, 2).detach() for _ in range(2)
    )
    assert found(layer_of(query, key, 1.0)) == ["unscaled"]


# What the model declares


def test_what_the_configuration_sets_is_right():
    assert found(random_layer(scale=0.07, declared=configured(0.07))) == []
    assert found(random_layer(scale=1 / 11, declared=configured(1 / 11, "config.attention_multiplier"))) == []
    assert found(random_layer(scale=1.0, declared=configured(1.0, "the published t5"))) == []


def test_a_configuration_that_is_not_applied_is_a_mismatch():
    (finding,) = scale_findings(random_layer(declared=configured(0.07)), trained=False)
    assert finding.code == "config_mismatch"
    assert "config.softmax_scale sets 0.07" in finding.message
    assert finding.expected == 0.07


def test_the_specific_mistake_is_named_before_the_mismatch():
    assert found(random_layer(scale=1.0, declared=configured(0.07))) == ["unscaled"]


def test_a_rule_that_depends_on_the_tensors_is_a_choice():
    chosen = Declared(None, "attention.rule", scale_authority=Authority.CONFIGURED)
    assert found(random_layer(scale=0.77, declared=chosen)) == []


def test_an_attribute_excuses_what_it_can_mean_and_accuses_of_nothing():
    said = Declared(0.1, "attention.scale", scale_readings=(0.1, 10.0), scale_authority=Authority.ATTRIBUTE)
    assert found(random_layer(scale=0.1, declared=said)) == []
    assert found(random_layer(declared=said)) == []


def test_an_attribute_does_not_excuse_the_mistake_it_makes():
    said = Declared(33**-0.5, "attention.scale", scale_readings=(33**-0.5,), scale_authority=Authority.NAMED)
    assert found(random_layer(heads=3, head_dim=11, scale=33**-0.5, declared=said)) == ["scaled_by_model_dim"]


def test_an_attribute_that_can_only_be_the_scale_and_is_ignored_is_a_mismatch():
    said = Declared(0.1, "attention.softmax_scale", scale_readings=(0.1,), scale_authority=Authority.NAMED)
    assert found(random_layer(declared=said)) == ["config_mismatch"]


# Published rules, learned temperatures, oddities


@pytest.mark.parametrize("stretch", [2, 4, 8, 16, 32, 40, 64, 128])
def test_yarn_is_published(stretch):
    assert found(random_layer(scale=(0.1 * math.log(stretch) + 1) ** 2 * 11**-0.5)) == []


def test_twice_the_scale_is_not_yarn():
    assert found(random_layer(scale=2 * 11**-0.5)) == ["unusual_scale"]


@pytest.mark.parametrize("head_dim", [16, 32, 128])
def test_mup_is_published(head_dim):
    assert found(random_layer(head_dim=head_dim, scale=8 / head_dim)) == []


def test_the_length_rule_is_published():
    assert found(random_layer(length=23, scale=0.43 * math.log(23) * 11**-0.5)) == []


def test_multiplying_by_the_root_is_named():
    (finding,) = scale_findings(random_layer(scale=11**0.5), trained=False)
    assert finding.code == "unusual_scale"
    assert "√d_k" in finding.message


def test_a_temperature_for_each_head_is_a_note():
    (finding,) = scale_findings(random_layer(heads=3, scale=[0.2, 0.31, 0.44]), trained=True)
    assert (finding.code, finding.severity) == ("unusual_scale", "note")
    assert "0.2 to 0.44" in finding.message


def test_a_head_without_a_measured_scale_is_passed_over():
    layer = random_layer(heads=3, scale=1.0)
    layer.scales[1] = math.nan
    assert found(layer) == ["unscaled"]


@pytest.mark.parametrize("scale", [1.0, 10.0, 0.5])
def test_normalised_queries_and_keys_may_have_any_multiplier(scale):
    assert found(random_layer(scale=scale, normalised=True)) == []


def test_a_scaled_bias_is_unusual():
    (finding,) = scale_findings(random_layer(biased=True, bias_is_scaled=True), trained=False)
    assert finding.code == "unusual_scale"
    assert "bias" in finding.message


# After the softmax


@pytest.mark.parametrize("factor", [11**-0.5, 1 / 11, 33**-0.5])
def test_a_scale_after_the_softmax_is_found(factor):
    assert found(random_layer(scale=1.0, factor_after_softmax=factor)) == ["scale_after_softmax"]


def test_any_factor_after_the_softmax_of_unscaled_scores_is_one():
    assert found(random_layer(scale=1.0, factor_after_softmax=0.2)) == ["scale_after_softmax"]


@pytest.mark.parametrize("factor", [1.0, 0.5, 1 / 0.9, 2.0])
def test_a_factor_on_the_output_of_right_scores_is_not(factor):
    assert found(random_layer(factor_after_softmax=factor)) == []


def test_a_softmax_over_another_axis_is_an_error_even_when_trained():
    (finding,) = scale_findings(random_layer(mixes_along_softmax=False), trained=True)
    assert (finding.code, finding.severity) == ("softmax_wrong_axis", "error")


def test_every_message_and_every_advice_is_a_sentence():
    layers = [
        random_layer(scale=1.0), random_layer(scale=1 / 11), random_layer(scale=33**-0.5), random_layer(scale=0.1),
        random_layer(scale=0.0), random_layer(scale=[0.2, 0.3, 0.4]), random_layer(declared=configured(0.1)),
        random_layer(mixes_along_softmax=False), random_layer(bias_is_scaled=True),
        random_layer(scale=1.0, factor_after_softmax=0.3),
    ]  # fmt: skip
    for layer in layers:
        findings = list(findings_of(layer, trained=False))
        assert findings
        for finding in findings:
            assert finding.message.endswith(".")
            assert finding.advice.endswith(".")
            assert finding.message[0].isupper()
