"""The kernel of lengths, in triton's interpreter, adds up what torch does."""

import pytest
import torch

from .interpreting import UNFIT, mended_interpreter  # noqa: F401

if UNFIT:
    pytest.skip(UNFIT, allow_module_level=True)

from attnscale.measure.cuda.lengths import add_lengths_

BATCH, HEADS, Q_LEN, KV_LEN, HEAD_DIM = 2, 6, 79, 83, 40


def expected(vectors, group, left_out=None):
    squares = vectors.double().square().sum(-1).transpose(0, 1)  # (heads, batch, positions)
    counted = torch.ones(squares.shape[1:], dtype=torch.bool) if left_out is None else ~left_out.expand(BATCH, -1)
    squares = torch.where(counted, squares, 0.0).flatten(1)
    count = counted.sum().double().expand(len(squares))
    return torch.stack([squares.sum(1), count, squares.amax(1)]).repeat_interleave(group, 1)


@pytest.mark.parametrize("keys", [6, 2])
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_of_two_calls_add_up(keys, hides, dtype):
    generator, sums = torch.Generator().manual_seed(0), torch.zeros(2, 3, HEADS, dtype=torch.float64)
    wanted = torch.zeros_like(sums)
    for _ in range(2):
        query = torch.randn(BATCH, Q_LEN, HEADS, HEAD_DIM, generator=generator).to(dtype).transpose(1, 2)
        key = torch.randn(BATCH, keys, KV_LEN, HEAD_DIM, generator=generator).to(dtype)
        rows, columns = (torch.rand(1, length, generator=generator) < 0.3 for length in (Q_LEN, KV_LEN))
        left_out = (rows, columns.repeat(BATCH, 1)) if hides else (None, None)
        add_lengths_(sums, query, key, *left_out)
        found = torch.stack([expected(query, 1, left_out[0]), expected(key, HEADS // keys, left_out[1])])
        wanted[:, :2] += found[:, :2]
        wanted[:, 2] = torch.maximum(wanted[:, 2], found[:, 2])
    torch.testing.assert_close(sums, wanted, rtol=1e-6, atol=0)
