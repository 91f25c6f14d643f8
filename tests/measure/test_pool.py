"""Layers pooled at once have the numbers of each pooled by itself."""

import pytest
import torch

from attnscale.measure import score_stats
from attnscale.measure.pool import POOLED_FIELDS, pooled_together

from .test_ops import DEVICES


def assert_pooled(many):
    together = pooled_together(many)
    for stats, pooled in zip(many, together, strict=True):
        for name in POOLED_FIELDS:
            torch.testing.assert_close(getattr(pooled, name), getattr(stats.pooled, name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [11, None])
def test_calls_of_several_kinds(device, rows):
    torch.manual_seed(0)
    shapes = [(2, 3, 53, 16), (2, 3, 53, 16), (2, 5, 53, 16), (3, 3, 97, 16), (2, 3, 53, 16)]
    pairs = [[torch.randn(shape, device=device) * 3 for _ in range(2)] for shape in shapes]
    given = [{}, {}, {}, {}, {"scale": 0.5}]
    assert_pooled(
        [score_stats(*pair, rows=rows, is_causal=True, **each) for pair, each in zip(pairs, given, strict=True)]
    )
