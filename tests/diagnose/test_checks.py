"""Cases that the zoo has no model for: limits, messages, and stacks of layers."""

from dataclasses import replace

import pytest

from attnscale.declared import Declared
from attnscale.diagnose import diagnose

from .layers import codes, random_layer

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
def test_what_is_built_or_configured_is_applied(layer, code, message):
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
def test_the_one_of_a_stack_that_sees_later_keys_is_accused(causal, accused):
    layers = {name: replace(random_layer(causal=each), name=name) for name, each in causal.items()}
    found = diagnose(layers, trained=False).findings
    assert [finding.layer for finding in found if finding.code == "attends_to_future"] == accused
