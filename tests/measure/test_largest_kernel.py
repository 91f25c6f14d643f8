"""The kernel that looks for the largest score, in triton's interpreter, against the full matrix."""

import pytest
import torch

from .interpreting import UNFIT, mended_interpreter  # noqa: F401
from .test_largest import NAMES, full_matrix, made

if UNFIT:
    pytest.skip(UNFIT, allow_module_level=True)

from attnscale.measure.cuda.masked_rows import raise_largest_
from attnscale.measure.largest import _highest_added


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_heads_over_the_limit_have_their_largest_score(name, softcap):
    call = made(name, softcap=softcap)
    expected = full_matrix(call).amax((0, 2, 3))
    limit = float(expected.sort().values[1:3].mean())
    largest = torch.full((4,), -torch.inf)
    added, calls = _highest_added(call), torch.zeros(1)
    raise_largest_(largest, torch.tensor([limit]), calls, call, added)
    over = expected > limit
    assert torch.allclose(largest[over], expected[over].float(), rtol=1e-5)
    assert (largest[~over] <= limit).all()
    assert calls == 1


def test_a_score_that_is_no_number_counts_as_infinite():
    call = made("causal")
    call.query[1, 1, 5, 0] = torch.nan
    largest = torch.full((4,), -torch.inf)
    raise_largest_(largest, torch.tensor([1e4]), torch.zeros(1), call, None)
    assert largest.tolist() == [-torch.inf, torch.inf, -torch.inf, -torch.inf]
