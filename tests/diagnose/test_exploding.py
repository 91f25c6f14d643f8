"""Scores are too large by what softmax sees of them: above the mean of their row, not by a shift of all of it."""

from dataclasses import replace

import pytest
import torch

from attnscale import audit, score_stats
from attnscale.diagnose.scores import score_findings
from tests.real_models import anarcii

from .layers import layer_of, random_layer


def shifted_by(shift, spread=1.0):
    """Scores of this spread, every row of which is shifted as a whole: a large query times what all keys share."""
    query, key = torch.randn(2, 3, 23, 11), spread * torch.randn(2, 3, 23, 11)
    query[..., 0], key[..., 0] = shift, 1.0
    return layer_of(query, key, 1.0)


def exploding(layer, trained=True):
    return [found for found in score_findings(layer, trained) if found.code == "exploding"]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("shift", [1.5e2, 8e4])
def test_a_shift_of_whole_rows_is_a_note_that_says_so(shift, trained):
    (found,) = exploding(shifted_by(shift), trained)
    assert found.severity == "note"
    assert found.measured == pytest.approx(shift, rel=0.2)
    assert "above the mean of its row" in found.message


@pytest.mark.parametrize(("spread", "severity"), [(60.0, "note"), (600.0, "warning"), (6000.0, "error")])
def test_scores_that_lie_apart_within_their_rows_are_judged_by_how_far(spread, severity):
    (found,) = exploding(random_layer(query_std=spread))
    assert found.severity == severity
    assert "above the mean" not in found.message


def test_a_shift_does_not_hide_what_lies_apart():
    (found,) = exploding(shifted_by(2e4, spread=200.0))
    assert found.severity == "warning"
    assert found.measured > 1e4


def test_rows_far_below_zero_are_no_explosion():
    query, key = torch.randn(1, 3, 5, 11), torch.randn(1, 3, 2000, 11)
    slopes = -torch.arange(2000.0).flip(0).expand(1, 1, 5, -1)  # as ALiBi's: none above zero
    stats = score_stats(query, key, attn_mask=slopes)
    assert float(stats.max_above_mean.max()) > 900
    assert exploding(replace(layer_of(query, key), stats=stats)) == []


def test_a_published_model_whose_rows_are_shifted_by_ten_thousands_is_not_accused_of_it():
    model, inputs = anarcii()
    found = audit(model, *inputs)
    crossed = [each for each in found.findings if "encoder_attention" in each.layer and each.code == "exploding"]
    assert [each.severity for each in crossed] == ["note", "note"]
    assert max(each.measured for each in crossed) == pytest.approx(7.9e4, rel=0.05)
    shifted = found.layers["decoder.layers.0.encoder_attention.multihead_attn"].stats
    assert float(shifted.max_above_mean.max()) < 100
    assert {each.code for each in found.findings if each.severity == "warning"} == {"exploding"}  # 7,300, and no shift
