import pytest

from attnscale.declared import Declared
from attnscale.diagnose.noop import noop_findings

from .layers import codes, random_layer

CAPPED = Declared(softcap=50.0, softcap_source="config.attn_logit_softcapping")
NORMED = Declared(qk_norm=True, qk_norm_source="config.use_qk_norm")


def found(layer):
    return codes(noop_findings(layer))


def test_a_soft_cap_that_is_set_and_not_applied_is_inert():
    (finding,) = noop_findings(random_layer(declared=CAPPED))
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
    (finding,) = noop_findings(random_layer(unused_norms=("attn.q_norm", "attn.k_norm")))
    assert finding.code == "inert_qk_norm"
    assert finding.message == "attn.q_norm and attn.k_norm were built and never called."


def test_a_norm_that_is_asked_for_and_not_applied_is_inert():
    assert found(random_layer(declared=NORMED)) == ["inert_qk_norm"]
    assert found(random_layer(declared=NORMED, normalised=True)) == []


def test_a_plain_layer_has_nothing_to_be_inert():
    assert found(random_layer()) == []
