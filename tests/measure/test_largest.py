"""The largest score of heads that pass a limit, against the full matrix."""

import pytest
import torch

from attnscale.attending.call import Call
from attnscale.measure.largest import raise_largest_
from attnscale.visibility import Visibility


def full_matrix(call):
    """Every score, −∞ where hidden, in float64: (batch, heads, rows, keys)."""
    key = call.key.double().repeat_interleave(call.group, 1)
    scores = call.query.double() @ key.mT * call.scale
    scores = scores if call.softcap is None else call.softcap * torch.tanh(scores / call.softcap)
    added = call.visibility.added(slice(0, scores.shape[-2]), slice(0, scores.shape[-1]), scores)
    return scores if added is None else scores + added


def visibilities(batch, heads, rows, keys):
    shown = torch.rand(batch, 1, rows, keys) < 0.6
    padding = torch.zeros(batch, rows, dtype=torch.bool)
    padding[:, rows // 2 :] = True
    return {
        "everything": Visibility(),
        "causal": Visibility.of(None, is_causal=True),
        "window": Visibility.causal(offset=2, window=5),
        "mask": Visibility(mask=shown),
        "key padding": Visibility(mask=shown[:, :, :1]),
        "bias": Visibility(mask=3 * torch.randn(1, heads, rows, keys)),
        "causal and bias": Visibility(last=0, mask=torch.randn(rows, keys)[None, None]),
        "rows left out": Visibility.of(None, is_causal=True).without_rows(padding),
        "documents": Visibility(documents=(torch.arange(rows) // 4, torch.arange(keys) // 4)),
    }


NAMES = list(visibilities(1, 1, 2, 2))


def made(name, heads=4, kv_heads=2, softcap=None, seed=0):
    torch.manual_seed(seed)
    query, key = 3 * torch.randn(2, heads, 23, 8), torch.randn(2, kv_heads, 29, 8)
    query[:, 0] *= 4
    return Call(query, key, key, visibilities(2, heads, 23, 29)[name], 0.0, 0.5, softcap)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_heads_over_the_limit_have_their_largest_score(name, softcap):
    call = made(name, softcap=softcap)
    expected = full_matrix(call).amax((0, 2, 3))
    limit = float(expected.sort().values[1:3].mean())  # two heads are over it
    largest = torch.full((4,), -torch.inf)
    raise_largest_(largest, torch.tensor(limit), torch.zeros(()), call)
    over = expected > limit
    assert torch.allclose(largest[over], expected[over].float(), rtol=1e-5)
    assert (largest[~over] <= limit).all()


def test_a_maximum_is_raised_and_never_lowered():
    call, largest = made("causal"), torch.tensor([1e3, -torch.inf, 1e3, -torch.inf])
    raise_largest_(largest, torch.tensor(0.1), torch.zeros(()), call)
    assert largest[0] == largest[2] == 1e3
    assert largest[1] > 0.1


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_score_that_is_no_number_counts_as_infinite(wrong):
    call = made("causal")
    call.query[1, 1, 5, 0] = wrong
    largest = torch.full((4,), -torch.inf)
    raise_largest_(largest, torch.tensor(1e4), torch.zeros(()), call)
    assert largest.tolist() == [-torch.inf, torch.inf, -torch.inf, -torch.inf]


def test_nothing_is_asked_of_an_empty_batch():
    call = made("everything")
    largest = torch.full((4,), -torch.inf)
    empty = Call(call.query[:0], call.key[:0], call.key[:0], call.visibility, 0.0, 1.0, None)
    calls = torch.zeros(())
    raise_largest_(largest, torch.tensor(1.0), calls, empty)
    assert (largest == -torch.inf).all()
    assert calls == 1
