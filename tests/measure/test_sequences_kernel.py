"""The pass over sequences that are laid end to end, in triton's interpreter, against each of them alone in float64."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from attnscale.attending.call import Call
from attnscale.measure.row_blocks import measure_rows
from attnscale.visibility import Visibility

from .interpreting import UNFIT, mended_interpreter  # noqa: F401

if UNFIT:
    pytest.skip(UNFIT, allow_module_level=True)

from attnscale.measure.cuda import sequence_tiles
from attnscale.measure.cuda.rows import attend_rows, score_rows

SUMS = ("max", "total", "gap", "participation", "mean", "deviation", "first", "visible")


def by_sequence(query, key, starts, scale, is_causal):
    for begin, end in pairwise(starts):
        if end > begin:
            own, theirs = query[:, :, begin:end].double(), key[:, :, begin:end].double()
            yield measure_rows(Call(own, theirs, theirs, Visibility.of(None, is_causal), 0.0, scale, None))


@pytest.mark.parametrize("lengths", [(5, 0, 40, 1, 17), (16, 32), (3,), (0, 0, 9), (1,) * 7])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "scale"), [(2, 2, 0.3), (4, 2, -0.5)])
def test_every_sequence_is_measured_as_if_it_were_alone(lengths, is_causal, heads, kv_heads, scale):
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    total, width = starts[-1], 20
    query = torch.randn(total, heads, width).transpose(0, 1).unsqueeze(0)
    key, value = (torch.randn(total, kv_heads, width).transpose(0, 1).unsqueeze(0) for _ in range(2))
    offsets = torch.tensor(starts, dtype=torch.int32)
    output, lse, sums = attend_rows(query, key, value, scale, offsets, is_causal=is_causal)
    alone = list(by_sequence(query, key.repeat_interleave(heads // kv_heads, 1), starts, scale, is_causal))
    for place, name in enumerate(SUMS):
        expected = torch.cat([getattr(each, name).double().expand_as(each.max) for each in alone], -1)
        assert torch.allclose(sums[place].double(), expected, rtol=1e-4, atol=1e-5), name
    assert torch.allclose(lse.double(), torch.cat([each.max + each.total.log() for each in alone], -1), atol=1e-5)
    rising = query if scale > 0 else -query  # torch's own causal attention makes NaN of a negative scale
    parts = [
        F.scaled_dot_product_attention(*tensors, is_causal=is_causal, scale=abs(scale), enable_gqa=True)
        for tensors in zip(*(x.split(lengths, dim=2) for x in (rising, key, value)), strict=True)
    ]
    assert torch.allclose(output.transpose(0, 1).unsqueeze(0), torch.cat(parts, 2), atol=1e-5)
    assert torch.equal(score_rows(query, key, scale, is_causal, offsets.long()), sums)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of NumPy, which interprets: the neighbour is NaN,
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # and its rows are to be
def test_what_lies_in_a_neighbour_is_not_seen():
    tokens = torch.randn(1, 2, 30, 8)
    tokens[:, :, 13:] = torch.nan
    output, lse, sums = attend_rows(tokens, tokens, tokens, 1.0, torch.tensor([0, 13, 30]))
    assert output[:13].isfinite().all()
    assert lse[..., :13].isfinite().all()
    assert sums[..., :13].isfinite().all()
    assert output[13:].isnan().all()


def test_tokens_of_no_sequence_see_nothing():
    tokens = torch.randn(1, 2, 30, 8)
    for starts, rows in ((torch.zeros(3, dtype=torch.int32), 0), (torch.tensor([0, 17, 20]), 20)):
        _, _, sums = attend_rows(tokens, tokens, tokens, 1.0, starts, is_causal=True)
        assert sums[-1].gt(0).sum(-1).tolist() == [[rows, rows]]


def tiles_by_sequence(starts):
    return [
        (begin, end - begin, row)
        for begin, end in pairwise(starts.tolist())
        for row in reversed(range(0, end - begin, 16))
    ]


@pytest.mark.parametrize("count", [1, 3, 300])
@pytest.mark.parametrize(("is_causal", "most_sorted"), [(False, 1024), (True, 1024), (True, 0)])
def test_tiles_are_those_of_each_sequence_and_causal_rows_that_see_most_come_first(
    count, is_causal, most_sorted, monkeypatch
):
    monkeypatch.setattr(sequence_tiles, "MOST_SORTED", most_sorted)
    lengths = torch.randint(0, 400, (count,))
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    tiles = sequence_tiles.tiles_of(starts, int(starts[-1]), 16, is_causal)
    expected = tiles_by_sequence(starts)
    if is_causal and count <= most_sorted:
        expected.sort(key=lambda tile: -tile[2])
    assert tiles[0, 0] == len(expected) <= len(tiles) - 1
    assert [tuple(tile) for tile in tiles[1 : 1 + len(expected), :3].tolist()] == expected
