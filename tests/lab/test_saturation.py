import pytest

from attnscale.lab.experiments import saturation
from attnscale.lab.experiments.saturation import MANY, ONE
from attnscale.measure import score_stats
from tests.lab.concluding import all_hold, concluded, made_up, quick, rerun, seen_to_be_wrong


def test_softmax_saturates_where_the_closed_forms_say():
    assert all_hold(concluded("saturation"))
    one = quick("saturation").where(part=ONE)
    assert one.band("saturates", keys=4).mean == pytest.approx(5.69, abs=0.005)


@pytest.mark.parametrize(("spread", "entropy", "top1"), [(1.0, 0.93, 0.016), (2.0, 0.73, 0.10), (8.0, 0.13, 0.69)])
def test_a_thousand_gaussian_scores_do_what_was_simulated(spread, entropy, top1):
    many = quick("saturation").where(part=MANY, keys=1024, spread=spread)
    assert many.band("entropy_ratio").mean == pytest.approx(entropy, abs=0.01)
    assert many.band("top1").mean == pytest.approx(top1, abs=0.03)


def test_an_unscaled_head_of_64_is_not_one_hot():
    many = quick("saturation").where(part=MANY, keys=1024, spread=8.0)
    assert many.band("gradient_gain").mean == pytest.approx(0.40, abs=0.015)
    assert many.band("saturated").mean == pytest.approx(0.10, abs=0.015)
    assert "far from one-hot in most rows" in concluded("saturation").text


def test_where_most_rows_are_saturated_the_conclusion_says_one_hot():
    def frozen(own, found):
        return {} if own["part"] == ONE else {"saturated": 0.9}

    text = concluded("saturation", made_up("saturation", frozen)).text
    assert "so that it is one-hot" in text
    assert "far from one-hot" not in text


def test_scores_a_tenth_too_far_apart_are_seen(monkeypatch):
    def wider(query, key, *, scale):
        return score_stats(query, key, scale=1.1 * scale)

    monkeypatch.setattr(saturation, "score_stats", wider)
    conclusion = concluded("saturation", rerun("saturation", part=MANY, keys=1024))
    assert seen_to_be_wrong(conclusion, "H/ln n over 1024 Gaussian scores")
    assert not any("over 128" in check.statement for check in conclusion.checks if not check.holds)


def test_the_published_table_would_not_fit_another_spread():
    def sharper(own, found):
        return {"bits": [0.75 * bits for bits in found["bits"]]} if own["part"] == MANY else {}

    assert seen_to_be_wrong(concluded("saturation", made_up("saturation", sharper)), "6.3 bits")
