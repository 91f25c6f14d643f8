"""Layers pooled at once have the numbers of each pooled by itself."""

import pytest
import torch

from attnscale.measure import score_stats
from attnscale.measure.cuda.attention import Sampled
from attnscale.measure.cuda.ops import sample_rows
from attnscale.measure.pool import POOLED_FIELDS, pooled_together
from attnscale.measure.sampling import design

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


@pytest.mark.parametrize("is_causal", [False, True])
def test_passes_over_spans_of_keys_each_with_rows_of_its_own(is_causal):
    torch.manual_seed(0)
    heads, length, span, scale = 3, 53, 29, 0.3
    planned = design(11, length, 2, is_causal)
    passes = []
    for _ in range(4):
        query, key = torch.randn(2, 2, heads, length, 8, dtype=torch.float64)
        positions = torch.tensor(planned.draw())
        spans = [sample_rows(query, part, positions, scale, False, True) for part in key.split(span, 2)]
        sums, norms = (torch.cat(each, 1) for each in zip(*spans, strict=True))
        passes.append(Sampled(planned.sample(positions), sums, norms, span, length, scale, is_causal))
    assert len({passed.kind for passed in passes}) == 1
    assert len({tuple(passed.sample.positions.tolist()) for passed in passes}) > 1
    assert_pooled([passed.stats() for passed in passes])
