"""The kernel that looks for the largest score, in triton's interpreter, against the full matrix."""

import pytest
import torch

from .interpreting import UNFIT, loops_over_tensors  # noqa: F401
from .test_largest import NAMES, full_matrix, made

if UNFIT:
    pytest.skip(UNFIT, allow_module_level=True)

from attnscale.measure.cuda import triton as kernels
from attnscale.measure.largest import SLACK, _highest_added


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_heads_over_the_limit_have_their_largest_score(name, softcap):
    call = made(name, softcap=softcap)
    expected = full_matrix(call).amax((0, 2, 3))
    limit = float(expected.sort().values[1:3].mean())
    largest = torch.full((4,), -torch.inf)
    added = _highest_added(call)
    kernels.raise_largest_(largest, torch.tensor([limit]), call, added, SLACK, kernels.Tiles(16, 16, 4, 1))
    over = expected > limit
    assert torch.allclose(largest[over], expected[over].float(), rtol=1e-5)
    assert (largest[~over] <= limit).all()


def test_a_score_that_is_no_number_counts_as_infinite():
    call = made("causal")
    call.query[1, 1, 5, 0] = torch.nan
    largest = torch.full((4,), -torch.inf)
    kernels.raise_largest_(largest, torch.tensor([1e4]), call, torch.zeros(()), SLACK, kernels.Tiles(16, 16, 4, 1))
    assert largest.tolist() == [-torch.inf, torch.inf, -torch.inf, -torch.inf]
