"""Only what ranks saw at the same step is merged: a rank out of step is left out and told of once."""

import json

import pytest

from tests.ranks import on_ranks

from . import step_runs


@pytest.fixture(scope="module")
def found(made_once):
    folder = made_once("steps-of-ranks", lambda folder: on_ranks(step_runs.everything, 2, 2, str(folder)))
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("skips_a_batch", [2, 2, 1, 1, 1, 1, 1]),
        ("loads_the_state_alone", [2, 2, 1, 1, 1, 1, 1]),
        ("raises", [2, 2, 1, 1, 1, 1, 1]),
        ("sees_nothing", [2, 2, 2, 2, 2, 2, 2]),
    ],
)
def test_ranks_at_different_steps_are_not_merged_and_told_of_once(found, case, ranks):
    records, told, _ = found[0][case]
    assert records == [[step, number] for step, number in enumerate(ranks)]
    mismatches = [sentence for sentence in told if "only what ranks saw at the same step is merged" in sentence]
    assert len(mismatches) == (case != "sees_nothing")


def test_ranks_that_sample_otherwise_meet_where_both_do_and_nobody_waits(found):
    records, _, taken = found[0]["samples_otherwise"]
    assert records == [[0, 2], [2, 1], [4, 1], [6, 2]]
    assert taken < step_runs.TIMEOUT


def test_a_rank_that_was_late_rejoins(found):
    records, told, _ = found[0]["is_late"]
    assert [step for step, _ in records] == list(range(step_runs.STEPS))
    assert [ranks for _, ranks in records][:3] == [2, 2, 1]
    assert [ranks for _, ranks in records][-2:] == [2, 2]
    assert len([sentence for sentence in told if sentence.startswith("LostRankWarning: Rank 1 did not answer")]) == 1


def test_closing_a_monitor_leaves_no_descriptors_and_no_threads(found):
    for rank in found:
        counts = rank["left behind"]
        assert counts[-1] == counts[1]


def test_threads_that_wait_for_a_rank_end_when_it_closes_too(found):
    (_, left_on_first), (waiting, left_on_second) = (rank["not heard from"] for rank in found)
    assert waiting > 0
    assert (left_on_first, left_on_second) == (0, 0)
