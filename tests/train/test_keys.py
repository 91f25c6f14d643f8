"""Ranks that share out the keys of their rows give the numbers of one process that has all of them."""

import pytest
import torch

from attnscale.measure.statistics import logged
from attnscale.train import read_log
from tests.ranks import on_ranks

from . import key_runs

# how long keys are at most is known of each shard alone
OF_A_SHARD = {"max_bound"}


@pytest.fixture(scope="module", params=[2, 4])
def logs(request, made_once):
    world = request.param
    return made_once(f"keys-of-{world}", lambda folder: on_ranks(key_runs.everything, world, world, str(folder)))


def layers(folder, name):
    records = read_log(folder / f"{name}.jsonl").records
    assert [record.step for record in records] == list(range(key_runs.STEPS))
    assert all(list(record.layers) == ["Attention"] for record in records)
    return [record.layers["Attention"] for record in records]


def assert_same(found, whole, left_out=frozenset(OF_A_SHARD)):
    for left, right in zip(found, whole, strict=True):
        assert left.rows == right.rows
        for number in {*logged()} & {*right.numbers} - left_out:
            assert left.numbers[number] == pytest.approx(right.numbers[number], rel=2e-4), number
        assert left.numbers["max_bound"] >= left.numbers["max"]
        assert left.numbers["key_norm"] == pytest.approx(right.numbers["key_norm"], rel=2e-4)
        assert not any(name.endswith("gradient") for name in left.numbers)


@pytest.mark.parametrize("case", key_runs.CASES)
def test_rows_are_put_together_over_the_keys_of_all_ranks(logs, case):
    assert_same(layers(logs, case), layers(logs, f"{case} whole"))


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_the_turns_of_a_ring_are_put_together_on_each_rank(logs, kind):
    assert_same(layers(logs, f"ring {kind}"), layers(logs, "every row whole"))


def test_key_groups_of_a_data_parallel_run_add_their_rows(logs):
    assert_same(layers(logs, "two groups"), layers(logs, "two batches whole"))


def test_a_batch_that_runs_twice_is_no_pair_of_shards(logs):
    for twice, once in zip(layers(logs, "same batch twice"), layers(logs, "every row whole"), strict=True):
        assert twice.rows == 2 * once.rows
        assert twice.numbers["entropy_ratio"] == pytest.approx(once.numbers["entropy_ratio"])


def test_a_key_group_without_queries_in_common_or_with_parts_of_them_is_told_of(logs):
    common, parts = (told for told in torch.load(logs / "told0.pt") if "At sampled steps" not in told)
    assert "with the same queries and other keys, and found none" in common
    assert "with all of their queries and with the last of them alone" in parts
