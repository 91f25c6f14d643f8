import math
from dataclasses import replace

import pytest
import torch

from attnscale.diagnose import cause, compare

from .layers import layer_of, random_layer


@pytest.mark.parametrize(
    ("layer", "factor"),
    [
        (lambda: random_layer(head_dim=64, scale=1.0), "multiplier"),
        (lambda: random_layer(head_dim=64, query_std=20.0), "norms"),
        (lambda: random_layer(head_dim=64, query_std=0.05), "norms"),
    ],
)
def test_the_factor_that_is_off_is_the_cause(layer, factor):
    found = cause(layer())
    assert found.factor == factor
    assert found.sentence.startswith(f"The {factor}")


def test_queries_that_point_where_keys_point_are_the_cause():
    direction = torch.randn(64)
    direction *= 8 / direction.norm()
    query = direction + 0.1 * torch.randn(2, 3, 17, 64)
    found = cause(layer_of(query, query))
    assert found.factor == "alignment"
    assert "0.125" in found.sentence
    assert found.alignment == pytest.approx(8.0, rel=0.05)


def test_unit_components_are_where_they_should_be():
    found = cause(random_layer(heads=5, head_dim=64, length=101))
    assert (found.multiplier, found.norms, found.alignment) == pytest.approx((1.0, 1.0, 1.0), rel=0.05)


def test_the_factors_of_one_head_are_its_own():
    layer = random_layer(heads=3, head_dim=32, query_std=torch.tensor([1.0, 9.0, 1.0]).view(3, 1, 1))
    assert cause(layer, 1).norms == pytest.approx(9.0, rel=0.1)
    assert cause(layer, 0).norms == pytest.approx(1.0, rel=0.1)


def test_the_change_between_checkpoints_adds_up():
    before, after = random_layer(head_dim=16), random_layer(head_dim=16, scale=0.5, query_std=3.0, key_std=0.7)
    change = compare(before, after)

    def log_rms(layer):
        return float((layer.stats.variance + layer.stats.mean.square()).sqrt().log().mean())

    assert change.total == pytest.approx(log_rms(after) - log_rms(before), abs=1e-9)
    assert change.multiplier == pytest.approx(math.log(2))
    assert change.query_norm == pytest.approx(math.log(3), abs=0.1)
    assert change.factor == "norms"
    assert "multiplier × 2" in str(change)


def test_nothing_changed_is_all_ones():
    layer = random_layer()
    assert compare(layer, replace(layer)).total == 0.0
