import numpy as np
import pytest

from attnscale.claims.judging import CONFIRMED, QUALIFIED, REFUTED, Entry, Evidence, Limit, judge


def judged(claimed, computed):
    return judge(Entry("n", "A number.", claimed, lambda: computed), "notes")


@pytest.mark.parametrize(
    ("claimed", "computed"),
    [("3", 2.5), ("2", 2.5), ("0.2", 0.15), ("0.1", 0.15), ("-0.68", -0.675), ("22,026", 22026.5), ("0.00", 0.005)],
)
def test_half_a_unit_of_the_last_printed_digit_is_confirmed(claimed, computed):
    assert judged(claimed, computed).verdict == CONFIRMED


@pytest.mark.parametrize(
    ("claimed", "computed"),
    [("3", 2.4999), ("0.2", 0.1499), ("22,027", 22026.0), ("0.972", 0.971), ("1.0", 0.94), ("-8", 8.0)],
)
def test_more_than_half_a_unit_is_refuted(claimed, computed):
    assert judged(claimed, computed).verdict == REFUTED


def test_printed_zeros_make_a_claim_more_exact():
    assert judged("152.8", 152.76).verdict == CONFIRMED
    assert judged("152.780", 152.76).verdict == REFUTED


def test_a_vector_is_refuted_by_one_wrong_entry():
    right, wrong = judged("0.5 0.3 0.2", [0.5, 0.3, 0.2]), judged("0.5 0.3 0.2", [0.5, 0.4, 0.1])
    assert (right.verdict, wrong.verdict) == (CONFIRMED, REFUTED)
    assert right.claimed == [0.5, 0.3, 0.2]


@pytest.mark.parametrize(
    ("claimed", "computed", "note"),
    [
        ("5", 5000.0, "Claimed is 1000 times too small."),
        ("600", 200.0, "Claimed is 3 times too large."),
        ("1.5", 1.25, "Claimed is 0.25 too high."),
        ("1.25", 1.5, "Claimed is 0.25 too low."),
        ("1", 0.0, "Claimed is 1 too high."),
        ("0.5 0.1", [0.6, 0.4], "Largest difference 0.3; the claimed weights sum to 0.6."),
        ("0.9 0.1", [0.6, 0.4], "Largest difference 0.3."),
        ("5 1", [2.0, 1.0], "Largest difference 3."),
        ("2.0", 2.0, ""),
    ],
)
def test_a_note_says_by_how_much_a_number_misses(claimed, computed, note):
    assert judged(claimed, computed).note == note


def test_a_recomputed_number_shows_two_more_digits_than_the_claimed_one():
    assert judged("0.97", 0.971423).computed == 0.9714
    assert judged("3", 3.0).computed == 3
    assert str(judged("0", -0.0).computed) == "0"


@pytest.mark.parametrize("as_bool", [bool, np.bool_])
@pytest.mark.parametrize(
    ("under", "beyond", "verdict", "note"),
    [
        (True, None, CONFIRMED, "Mind."),
        (False, None, REFUTED, "Mind."),
        (True, True, CONFIRMED, "True here, and also there. Mind."),
        (True, False, QUALIFIED, "True here. False there. Mind."),
        (False, True, REFUTED, "False even here. Mind."),
        (False, False, REFUTED, "False even here. Mind."),
    ],
)
def test_a_statement_is_judged_by_its_condition_and_its_counterexample(under, beyond, verdict, note, as_bool):
    limit = None if beyond is None else Limit("here", "there", lambda: Evidence(as_bool(beyond), "two"))
    claim = judge(Entry("s", "It is so.", "so", lambda: Evidence(as_bool(under), "one"), "Mind.", limit), "notes")
    assert (claim.verdict, claim.note) == (verdict, note)
    assert claim.computed == ("one" if beyond is None else "one; two")


def test_a_condition_that_the_source_sets_itself_is_no_qualification():
    def stated(under, beyond):
        limit = Limit("here", "there", lambda: Evidence(beyond, "two"), is_stated=True)
        return judge(Entry("s", "It is so.", "so", lambda: Evidence(under, "one"), limit=limit), "notes")

    assert (stated(True, False).verdict, stated(True, True).verdict) == (CONFIRMED, CONFIRMED)
    assert stated(False, True).verdict == REFUTED
    assert stated(True, False).note == "True here, as the source says. False there."
