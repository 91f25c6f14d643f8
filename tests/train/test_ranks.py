"""Ranks give the numbers of one process on the whole batch, and outlive each other."""

import json
import socket
import time
from dataclasses import replace

import pytest

from attnscale.measure.statistics import logged
from attnscale.train import read_log
from tests.ranks import on_ranks, processes

from . import rank_runs

HAD = set(logged()) - {"learned_sink"}  # the model has none


def spawn(run, world, folder, *more):
    on_ranks(run, world, world, str(folder), *more)
    return read_log(folder / "scores.jsonl").records


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def assert_same(found, expected, rel=1e-4):
    assert [record.step for record in found] == [record.step for record in expected]
    for left, right in zip(found, expected, strict=True):
        assert list(left.layers) == list(right.layers)
        assert (left.loss, left.lr) == pytest.approx((right.loss, right.lr), rel=rel)
        for name, layer in right.layers.items():
            assert left.layers[name].rows == layer.rows
            assert left.layers[name].numbers.keys() == layer.numbers.keys() >= HAD
            for number in HAD:
                assert left.layers[name].numbers[number] == pytest.approx(layer.numbers[number], rel=rel), number


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4)])
def test_data_parallel_ranks_give_the_numbers_of_one_process(tmp_path, kind, world):
    found = spawn(rank_runs.data_parallel, world, tmp_path, kind)
    unwrapped = [
        replace(r, layers={name.removeprefix("module."): layer for name, layer in r.layers.items()}) for r in found
    ]
    assert_same(unwrapped, rank_runs.single())
    assert [record.ranks for record in found] == [world] * rank_runs.STEPS
    lasts = [read(tmp_path, f"last{rank}")["layers"] for rank in range(world)]
    assert all(last == lasts[0] for last in lasts)  # every rank holds the merged numbers
    assert not list(tmp_path.glob("*.rank*"))


def test_tensor_parallel_ranks_lay_their_heads_side_by_side(tmp_path):
    found = spawn(rank_runs.tensor_parallel, 3, tmp_path)
    assert all(len(layer.numbers["max"]) == 3 for record in found for layer in record.layers.values())
    assert_same(found, rank_runs.single(), rel=1e-3)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def after_one_stops(folder, world, how, who):
    """What each other rank was told, and the seconds of its steps."""
    run, kind, port = rank_runs.one_rank_stops, processes(), free_port()
    ranks = [kind.Process(target=run, args=(rank, world, str(folder), port, how, who)) for rank in range(world)]
    for process in ranks:
        process.start()
    others = [rank for rank in range(world) if rank != who]
    deadline = time.monotonic() + 120
    for rank in others:
        ranks[rank].join(max(1, deadline - time.monotonic()))
    for process in ranks:
        process.kill()
        process.join()
    found = {rank: read(folder, f"told{rank}") for rank in others}
    for _, seconds in found.values():
        assert max(seconds) < rank_runs.TIMEOUT + 2  # training goes on within the time-out
    return {rank: told for rank, (told, _) in found.items()}


@pytest.mark.parametrize(("world", "how"), [(2, "stopped"), (3, "killed"), (3, "stopped")])
def test_a_rank_that_stops_answering_is_left_out_with_a_warning(tmp_path, world, how):
    told = after_one_stops(tmp_path, world, how, who=1)
    records = read_log(tmp_path / "scores.jsonl").records
    assert [(record.step, record.ranks) for record in records] == [(0, world), (1, world - 1), (2, world - 1)]
    (sentence,) = told[0]
    assert (
        "Rank 1 did not answer rank 0 at step 1 within 2.5 s; it answered last at step 0. Only measurements" in sentence
    )
    assert not any(told[rank] for rank in told if rank)
    assert not list(tmp_path.glob("*.rank*"))


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_ranks_keep_their_own_records_where_the_first_stops_that_hosts_their_store(tmp_path, how):
    told = after_one_stops(tmp_path, 3, how, who=0)
    assert [(record.step, record.ranks) for record in read_log(tmp_path / "scores.jsonl").records] == [(0, 3)]
    for rank in (1, 2):
        records = read_log(tmp_path / f"scores.rank{rank}.jsonl").records
        assert [(record.step, record.ranks, record.rank) for record in records] == [(1, 1, rank), (2, 1, rank)]
        assert "Training goes on" in told[rank][0]


def test_ranks_raise_the_same_alarms_and_tell_no_error_of_merged_rows(tmp_path):
    on_ranks(rank_runs.near_a_floor, 2, 2, str(tmp_path))
    for rank in range(2):
        above, below, errors = read(tmp_path, f"found{rank}")
        assert above == []
        assert "blocks.0.attention" in below
        assert errors == [None, None, None]


@pytest.fixture(scope="module")
def found(made_once):
    folder = made_once("steps-of-ranks", lambda folder: on_ranks(rank_runs.everything, 2, 2, str(folder)))
    return [read(folder, rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("skips_a_batch", [2, 2, 1, 1, 1, 1, 1]),
        ("loads_the_state_alone", [2, 2, 1, 1, 1, 1, 1]),
        ("raises", [2, 2, 1, 1, 1, 1, 1]),
        ("sees_nothing", [2, 2, 2, 2, 2, 2, 2]),
    ],
)
def test_ranks_at_different_steps_are_not_merged_with_one_warning(found, case, ranks):
    records, told = found[0][case]
    assert records == [[step, number] for step, number in enumerate(ranks)]
    mismatches = [sentence for sentence in told if "only measurements of the same step are merged" in sentence.lower()]
    assert len(mismatches) == (case != "sees_nothing")


def test_a_rank_that_was_late_costs_its_share_of_one_record(found):
    records, told = found[0]["is_late"]
    assert records == [[step, 1 if step == 2 else 2] for step in range(rank_runs.APART[0])]
    (sentence,) = (sentence for sentence in told if sentence.startswith("LostRankWarning"))
    assert "Rank 1 did not answer rank 0 at step 2 within 1 s; it answered last at step 1" in sentence


def test_closing_a_monitor_leaves_no_descriptors_and_no_threads(found):
    for rank in found:
        counts = rank["left behind"]
        assert counts[-1] == counts[1]
