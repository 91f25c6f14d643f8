import numpy as np
import pytest

from attnscale.claims.judging import CONFIRMED, QUALIFIED, REFUTED, Entry, Evidence, Limit, judge


def judged(claimed, computed):
    return judge(Entry("n", "A number.", claimed, lambda: computed), "notes")


@pytest.mark.parametrize(
    ("claimed", "computed", "verdict"),
    [("3", 2.5, CONFIRMED), ("2", 2.5, CONFIRMED), ("0.2", 0.15, CONFIRMED), ("0.1", 0.15, CONFIRMED),
     ("-0.68", -0.675, CONFIRMED), ("22,026", 22026.5, CONFIRMED), ("0.00", 0.005, CONFIRMED),
     ("152.8", 152.76, CONFIRMED), ("3", 2.4999, REFUTED), ("0.2", 0.1499, REFUTED), ("22,027", 22026.0, REFUTED),
     ("0.972", 0.971, REFUTED), ("1.0", 0.94, REFUTED), ("-8", 8.0, REFUTED), ("152.780", 152.76, REFUTED)],
)  # fmt: skip
def test_half_a_unit_of_the_last_printed_digit_is_confirmed_and_more_is_refuted(claimed, computed, verdict):
    assert judged(claimed, computed).verdict == verdict


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
    ("under", "beyond", "stated", "verdict", "note"),
    [
        (True, None, False, CONFIRMED, ""),
        (False, None, False, REFUTED, ""),
        (True, True, False, CONFIRMED, "True here, and also there. "),
        (True, False, False, QUALIFIED, "True here. False there. "),
        (False, True, False, REFUTED, "False even here. "),
        (False, False, False, REFUTED, "False even here. "),
        (True, False, True, CONFIRMED, "True here, as the source says. False there. "),
        (True, True, True, CONFIRMED, "True here, and also there. "),
        (False, True, True, REFUTED, "False even here. "),
    ],
)
def test_a_statement_is_judged_by_its_condition_and_its_counterexample(under, beyond, stated, verdict, note, as_bool):
    limit = None if beyond is None else Limit("here", "there", lambda: Evidence(as_bool(beyond), "two"), stated)
    claim = judge(Entry("s", "It is so.", "so", lambda: Evidence(as_bool(under), "one"), "Mind.", limit), "notes")
    assert (claim.verdict, claim.note) == (verdict, f"{note}Mind.")
    assert claim.computed == ("one" if beyond is None else "one; two")
