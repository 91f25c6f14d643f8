"""How long vectors are, a head at a time, against float64."""

import pytest
import torch

from attnscale.measure.lengths import head_lengths, mean_lengths

LAYOUTS = {
    "in a row": lambda x: x,
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one of three": lambda x: torch.stack([x, 2 * x, 3 * x], 3)[:, :, :, 0],
    "features first": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
}


def test_a_vector_that_is_no_number_is_seen_in_its_head_alone():
    vectors = torch.ones(1, 2, 300, 4)
    vectors[0, 1, 3, 2] = torch.nan
    assert head_lengths(vectors).isnan().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keys", [1, 2, 6])
@pytest.mark.parametrize("leaves_out", ["nothing", "some", "all"])
def test_means_are_over_what_counts_and_each_head_has_those_of_its_key(leaves_out, keys, layout, dtype):
    torch.manual_seed(0)
    sides = [LAYOUTS[layout](torch.randn(3, heads, length, 72).to(dtype)) for heads, length in ((6, 137), (keys, 400))]
    share = {"nothing": 0.0, "some": 0.3, "all": 1.0}[leaves_out]
    out = [torch.rand(1, side.shape[2]) < share for side in sides]
    given = (None, None) if leaves_out == "nothing" else tuple(out)
    for side, found, left_out in zip(sides, mean_lengths(*sides, given), out, strict=True):
        squares = side.double().square().sum(-1)
        counted = squares if leaves_out == "all" else squares[:, :, ~left_out[0]]
        expected = counted.mean((0, 2)).sqrt().repeat_interleave(6 // side.shape[1])
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_vectors_left_out_may_be_nan():
    query, left_out = torch.ones(1, 2, 5, 4), torch.tensor([[False, True, False, False, True]])
    query[:, :, left_out[0]] = torch.nan
    assert [found.tolist() for found in mean_lengths(query, query, (left_out, left_out))] == [[2.0, 2.0]] * 2
