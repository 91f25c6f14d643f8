"""The catalogue of statistics tells the truth about ScoreStats."""

import math

import pytest
import torch

from attnscale import ScoreStats, score_stats
from attnscale.errors import SettingError
from attnscale.measure.statistics import STATISTICS, Place, in_place, of_scores


@pytest.fixture(scope="module")
def stats():
    """Of heads that are flat, healthy and frozen, every row and a few of them."""
    query, key = torch.randn(2, 3, 23, 11), torch.randn(2, 3, 23, 11)
    query = query * torch.tensor([0.01, 1.0, 100.0]).view(3, 1, 1)
    return [score_stats(query, key, is_causal=True, rows=rows) for rows in (None, 7)]


@pytest.mark.parametrize("attribute", of_scores())
def test_every_value_lies_in_the_range_that_the_catalogue_gives(stats, attribute):
    low, high = of_scores()[attribute].range
    for each in stats:
        values = getattr(each, attribute)
        assert values.shape == (3,)
        unknown = values.isnan() & of_scores()[attribute].may_be_unknown
        assert (unknown | (values >= low - 1e-12) & (values <= high + 1e-12)).all()


@pytest.mark.parametrize("attribute", of_scores())
def test_stderr_refuses_statistics_without_a_standard_error(stats, attribute):
    if of_scores()[attribute].has_error:
        assert stats[1].stderr(attribute).shape == (3,)
    else:
        with pytest.raises(SettingError, match="to have a standard error"):
            stats[1].stderr(attribute)


def test_the_bad_end_is_where_a_frozen_head_lies(stats):
    for entry in in_place(Place.CHECK):
        if entry.name == "sink":
            continue  # the first key of a random head is like any other
        _, healthy, frozen = entry.of(stats[0]).tolist()
        assert (frozen > healthy) == (entry.bad == "large"), entry.name


def test_every_public_statistic_of_score_stats_is_in_the_catalogue():
    properties = {name for name, value in vars(ScoreStats).items() if isinstance(value, property)}
    assert properties - {"keys", "pooled"} == set(of_scores())  # keys are of the mask, pooled is what all are told from


def test_every_statistic_shown_from_a_log_is_in_the_log():
    for place in (Place.LIVE, Place.RUN, Place.MAP):
        assert all(entry.places & Place.LOG for entry in in_place(place))


def test_no_two_statistics_share_a_heading():
    for headings in ([entry.short for entry in STATISTICS.values()], [entry.long for entry in STATISTICS.values()]):
        assert len(set(headings)) == len(headings)


@pytest.mark.parametrize(("name", "whole"), [("spread", 3.0), ("max", 5.0), ("rows", 6.0)])
def test_a_number_over_heads_leaves_out_unknown_heads(name, whole):
    assert STATISTICS[name].over_heads([1.0, math.nan, 5.0]) == whole
    assert math.isnan(STATISTICS[name].over_heads([math.nan]))
