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
    records, told = found[0][case]
    assert records == [[step, number] for step, number in enumerate(ranks)]
    mismatches = [
        sentence for sentence in told if "only what ranks measured at the same step is merged" in sentence.lower()
    ]
    assert len(mismatches) == (case != "sees_nothing")


def test_a_rank_that_was_late_costs_its_share_of_one_record(found):
    records, told = found[0]["is_late"]
    assert records == [[step, 1 if step == 2 else 2] for step in range(step_runs.STEPS)]
    (sentence,) = (sentence for sentence in told if sentence.startswith("LostRankWarning"))
    assert "Rank 1 did not answer rank 0 at step 2 within 1 s; it answered last at step 1" in sentence


def test_closing_a_monitor_leaves_no_descriptors_and_no_threads(found):
    for rank in found:
        counts = rank["left behind"]
        assert counts[-1] == counts[1]
