import pytest

from attnscale.lab.experiments.growth import CLIP, NORM, PLAIN, THRESHOLD
from tests.lab.concluding import concluded, failing, made_up, quick


def test_scores_grow_with_the_rate_by_norms_and_both_fixes_hold_them():
    found = quick("growth")
    low, high = (found.samples("max_score", fix=PLAIN, rate=rate) for rate in (0.003, 0.3))
    assert min(high) > 100 * max(low)
    assert max(found.samples("max_score", fix=NORM, rate=0.3)) < THRESHOLD
    assert max(found.samples("max_score", fix=CLIP, rate=0.3)) < 5 * THRESHOLD  # a step overshoots before it is clipped
    assert not {
        "the largest score grows with the rate",
        "QK-norm keeps scores below those of the plain model at the highest rate",
        "scores grow by norms, not alignment",
    } & set(failing(concluded("growth")))


def test_a_clip_that_has_nothing_to_do_changes_nothing():
    found = quick("growth").where(rate=0.003)
    assert found.samples("final", fix=CLIP) == found.samples("final", fix=PLAIN)
    assert found.samples("max_score", fix=CLIP) == found.samples("max_score", fix=PLAIN)


def test_sensitivity_is_the_mean_loss_above_the_best():
    def losses(own, found):
        above = {PLAIN: 1.0, NORM: 0.2, CLIP: 1.0}[own["fix"]]
        return {"start": 5.0, "final": 2.0 + above * (own["rate"] == 0.3) + 0.01 * own["seed"]}

    conclusion = concluded("growth", made_up("growth", losses))
    rows = {row[0]: row[1:] for row in conclusion.tables[1].rows}
    assert rows[PLAIN][0] == pytest.approx(0.5)
    assert rows[NORM][0] == pytest.approx(0.1)
    assert "QK-norm lowers that (-0.4" in conclusion.text
    assert "QK-Clip makes no difference to that (+0 " in conclusion.text


def test_a_run_that_broke_counts_at_the_loss_it_began_with():
    def broken(own, found):
        return {"start": 5.0, "final": 9.0 if own["rate"] == 0.3 else 2.0, "diverged": own["rate"] == 0.3}

    conclusion = concluded("growth", made_up("growth", broken))
    assert conclusion.tables[1].rows[0][1] == pytest.approx(1.5)
    assert "9 of 18 runs diverged" in conclusion.text


@pytest.mark.parametrize(("diverged", "holds"), [(True, True), (False, False)])
def test_the_published_limit_is_held_against_the_runs_that_passed_it(diverged, holds):
    def past(own, found):
        return {"max_score": 2e4 if own["fix"] == PLAIN and own["rate"] == 0.3 else 10.0, "diverged": diverged}

    conclusion = concluded("growth", made_up("growth", past))
    assert f"of the 3 whose scores passed 10,000, {'3' if diverged else 'none'} did" in conclusion.text
    assert ("every run whose scores pass 10,000 diverges" not in failing(conclusion)) is holds


def test_growth_by_alignment_is_said_to_be_so():
    changed = made_up("growth", lambda own, found: {"norm_growth": 1.0, "alignment_growth": 4.0})
    assert "grows by alignment" in concluded("growth", changed).text
    assert "scores grow by norms, not alignment" in failing(concluded("growth", changed))
