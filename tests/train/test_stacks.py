"""In every training stack a Monitor records what one process without it would, or says in a sentence why not."""

import json

import pytest

from attnscale import Monitor
from attnscale.train import read_log
from tests.ranks import on_ranks

from . import stack_runs


def without_a_stack(has_norm):
    records = []
    model = stack_runs.biased_model(has_norm)
    stack_runs.train(model, Monitor(model, every=1, rows=None, sinks=[records.append]))
    return records


def largest_scores(records):
    return [[layer.whole("max") for layer in record.layers.values()] for record in records]


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("has_norm", [False, True], ids=["biases", "norms"])
def test_fsdp1_ranks_give_the_numbers_of_one_process(tmp_path, use_orig_params, has_norm):
    on_ranks(stack_runs.fsdp1, 2, 2, str(tmp_path), use_orig_params, has_norm)
    found, expected = read_log(tmp_path / "scores.jsonl").records, without_a_stack(has_norm)
    for left, right in zip(largest_scores(found), largest_scores(expected), strict=True):
        assert left == pytest.approx(right, rel=1e-4)
    assert [record.alarms for record in found] == [[]] * stack_runs.STEPS
    told, trained = json.loads((tmp_path / "told0.json").read_text(encoding="utf-8"))
    assert told == []
    assert trained == (has_norm or not use_orig_params)  # biases alone move too little; a flat shard is not read
