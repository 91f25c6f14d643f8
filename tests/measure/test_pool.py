"""Layers pooled at once have the numbers of each pooled by itself."""

from dataclasses import replace

import pytest
import torch

from attnscale.measure import score_stats
from attnscale.measure.pool import POOLED_FIELDS, pooled_together
from attnscale.measure.pooled import Known
from attnscale.measure.stats import ScoreStats, merged_when_read

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


def refused():
    raise AssertionError("errors are not asked for")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [11, None])
def test_micro_batches_of_several_layers(device, rows):
    torch.manual_seed(0)
    layers = [(2, 3, 53, 16), (2, 5, 53, 16), (2, 3, 53, 16), (1, 2, 31, 8)]
    calls = [
        [score_stats(*(torch.randn(shape, device=device) * 3 for _ in range(2)), rows=rows) for _ in range(count)]
        for shape, count in zip(layers, (2, 2, 3, 1), strict=True)
    ]
    assert_pooled([merged_when_read(each) for each in calls])


def test_micro_batches_are_merged_without_working_out_errors():
    """Of twelve layers on a GPU that took longer than the step, and waited for it."""
    torch.manual_seed(0)
    calls = [score_stats(torch.randn(2, 3, 53, 16), torch.randn(2, 3, 53, 16), rows=11) for _ in range(2)]
    known = [ScoreStats(3, exact=False, pool=Known(replace(each.pooled, errors=refused))) for each in calls]
    (together,) = pooled_together([merged_when_read(known)])
    torch.testing.assert_close(together.mean, merged_when_read(calls).pooled.mean)
