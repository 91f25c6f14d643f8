"""Attentions measured together are measured as each would be alone."""

from dataclasses import fields

import pytest
import torch

from attnscale.attending.call import Call
from attnscale.measure.foreseen import foreseen_variance, foreseen_variances
from attnscale.measure.row_blocks import look_at_alike, look_at_rows
from attnscale.measure.together import goes_with_others, measured_together
from attnscale.visibility import EVERYTHING, Visibility

CAUSAL = Visibility.of(None, True)


def calls_of(visibility, sizes=(0.3, 1.0, 30.0), heads=4, kv_heads=2, length=97, dtype=torch.float32):
    torch.manual_seed(0)
    made = []
    for size in sizes:
        query, key = torch.randn(1, heads, length, 16), torch.randn(1, kv_heads, length, 16)
        made.append(Call(size * query.to(dtype), key.to(dtype), key.to(dtype), visibility, 0.0, 0.25, None))
    return made


def lse_of(call):
    key = call.key.repeat_interleave(call.group, 1)
    return (call.query @ key.mT * call.scale).logsumexp(-1)


@pytest.mark.parametrize("visibility", [EVERYTHING, CAUSAL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_are_those_of_each_call_alone(visibility, dtype):
    calls = calls_of(visibility, dtype=dtype)
    positions = [torch.randperm(97)[:24].sort().values for _ in calls]
    for found, call, at in zip(look_at_alike(calls, positions), calls, positions, strict=True):
        alone = look_at_rows(call, at)()
        for each in fields(alone):
            torch.testing.assert_close(getattr(found(), each.name), getattr(alone, each.name), rtol=0, atol=0)


def test_scores_past_float32_of_one_call_leave_all_finite():
    calls = calls_of(EVERYTHING, sizes=(1.0, 1e25))
    positions = [torch.arange(0, 97, 4)] * 2
    small, large = (found() for found in look_at_alike(calls, positions))
    assert small.deviation.isfinite().all()
    assert large.deviation.isfinite().all()


def test_what_is_foreseen_is_that_of_each_call_alone():
    calls = calls_of(EVERYTHING)
    lses = [lse_of(call) for call in calls]
    for found, call, lse in zip(foreseen_variances(calls, lses), calls, lses, strict=True):
        torch.testing.assert_close(found, foreseen_variance(call, lse), rtol=0, atol=0)


def test_one_that_has_no_finite_lse_leaves_the_others():
    calls = calls_of(EVERYTHING)
    lses = [lse_of(call) for call in calls]
    lses[1] = lses[1].clone()
    lses[1][0, 0, 5] = torch.inf
    found = foreseen_variances(calls, lses)
    torch.testing.assert_close(found[0], foreseen_variance(calls[0], lses[0]), rtol=0, atol=0)
    torch.testing.assert_close(found[1], foreseen_variance(calls[1]), rtol=0, atol=0)


@pytest.mark.parametrize("visibility", [EVERYTHING, CAUSAL])
@pytest.mark.parametrize("told", [True, False])
def test_standard_errors_hold_what_was_not_looked_at(visibility, told):
    calls = calls_of(visibility, sizes=(0.3, 1.0, 3.0), kv_heads=4, length=400)
    lses = [lse_of(call) if told and visibility is EVERYTHING else None for call in calls]
    for stats, call in zip(measured_together(calls, 64, lses), calls, strict=True):
        scores = (call.query @ call.key.mT * call.scale).double()
        if visibility is CAUSAL:
            scores = scores.masked_fill(~torch.ones(400, 400, dtype=torch.bool).tril(), -torch.inf)
        entropy = torch.special.entr(scores.softmax(-1)).sum(-1).mean(-1).squeeze(0)
        assert not stats.exact
        assert ((stats.entropy - entropy).abs() < 6 * stats.stderr("entropy") + 1e-6).all()
        assert (stats.max_bound >= scores.amax((0, 2, 3)).float()).all()


@pytest.mark.parametrize(
    ("change", "goes"),
    [
        (lambda call: call, True),
        (lambda call: Call(call.query, call.key, call.key, CAUSAL, 0.0, 0.25, None), True),
        (lambda call: Call(call.query, call.key, call.key, EVERYTHING, 0.0, 0.25, 5.0), False),
        (
            lambda call: Call(
                *(x.expand(2, -1, -1, -1) for x in (call.query, call.key, call.key)), EVERYTHING, 0.0, 1.0, None
            ),
            False,
        ),
        (lambda call: Call(call.query[:, :, :9], call.key, call.key, EVERYTHING, 0.0, 0.25, None), False),
        (
            lambda call: Call(
                call.query, call.key, call.key, Visibility.of(torch.ones(1, 1, 97, 97).bool(), False), 0.0, 0.25, None
            ),
            False,
        ),
    ],
)
def test_which_go_together(change, goes):
    assert goes_with_others(change(calls_of(EVERYTHING)[0]), rows=24) is goes
