"""Sharp heads of published models: judged by the gradient that reaches them, and not accused."""

import pytest
import torch
import torch.nn.functional as F

from attnscale import audit
from attnscale.diagnose.scores import UNREACHED, gradient_shares
from attnscale.models import load_bundled
from tests.real_models import rxnfp

from .layers import random_layer


def test_without_a_backward_nothing_is_known():
    assert gradient_shares({"a": random_layer(), "b": random_layer()}) == {}


def test_every_head_of_the_bundled_model_gets_its_share():
    model, tokens = load_bundled()
    found = audit(model, tokens, loss=lambda out: F.cross_entropy(out[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
    shares = torch.cat(list(gradient_shares(found.layers).values()))
    assert float(shares.median()) == pytest.approx(1.0)
    assert float(shares.min()) == pytest.approx(0.91, rel=0.05)


def test_a_healthy_model_with_sharp_heads_is_not_accused_and_they_are_told_apart_from_dead_ones():
    model, tokens = rxnfp()
    assert {finding.severity for finding in audit(model, tokens).findings} == {"note"}
    found = audit(model, tokens, loss=lambda out: out.pooler_output.square().mean())
    shares = gradient_shares(found.layers)
    sharp = [float(shares[each.layer][each.head]) for each in found.findings if each.code == "sharp"]
    assert {finding.severity for finding in found.findings} == {"note"}
    assert len(sharp) == 11
    assert min(sharp) == pytest.approx(0.0155, rel=0.1)  # of the median head's: far above where one is dead
    assert max(sharp) == pytest.approx(0.67, rel=0.1)
    assert min(sharp) > 10 * UNREACHED
