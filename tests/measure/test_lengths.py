"""How long vectors are, a head at a time, against float64."""

import pytest
import torch

from attnscale.measure.lengths import (
    head_lengths,
    lengths_of_both,
    longest,
    mean_lengths,
    mean_lengths_of_both,
)

LAYOUTS = {
    "in a row": lambda x: x,
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one of three": lambda x: torch.stack([x, 2 * x, 3 * x], 3)[:, :, :, 0],
    "features first": lambda x: x.mT.contiguous().mT,
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 3, 137, 64), (1, 1, 1, 1), (3, 5, 600, 80), (2, 2, 9, 300)])
def test_lengths_are_those_of_float64(shape, layout, dtype):
    torch.manual_seed(0)
    vectors = LAYOUTS[layout](torch.randn(shape).to(dtype))
    expected = vectors.double().square().sum((0, 2, 3)).sqrt()
    assert head_lengths(vectors).tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert torch.equal(head_lengths(vectors), head_lengths(vectors))
    each = vectors.double().square().sum(-1).amax(-1).sqrt()
    assert torch.allclose(longest(vectors).double(), each, rtol=1e-5)


def test_of_nothing_they_are_zero():
    assert head_lengths(torch.ones(2, 3, 0, 4)).tolist() == [0.0, 0.0, 0.0]


def test_a_vector_that_is_no_number_is_seen_in_its_head_alone():
    vectors = torch.ones(1, 2, 300, 4)
    vectors[0, 1, 3, 2] = torch.nan
    assert head_lengths(vectors).isnan().tolist() == [False, True]
    assert longest(vectors).isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("entries", [1, 3])
@pytest.mark.parametrize("step", [1, 4])
def test_a_mean_leaves_out_what_does_not_count(step, entries, dtype):
    torch.manual_seed(0)
    vectors = torch.randn(3, 2, 400, 64).to(dtype)
    left_out = torch.rand(entries, 400) < 0.3
    vectors[left_out.expand(3, -1)[:, None].expand(-1, 2, -1)] = torch.nan
    some, out = vectors[:, :, ::step], left_out[:, ::step]
    kept = ~out.expand(3, -1)
    expected = torch.stack([some[:, head][kept].double().square().sum(-1).mean().sqrt() for head in range(2)])
    assert mean_lengths(some, out).tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    whole = some.nan_to_num(1.0)
    everything = whole.double().square().sum(-1).mean((0, 2)).sqrt().tolist()
    assert mean_lengths(whole, torch.ones_like(out)).tolist() == pytest.approx(everything, rel=1e-5)
    assert mean_lengths(whole).tolist() == pytest.approx(everything, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keys", [1, 2, 6])
@pytest.mark.parametrize("leaves_out", [(False, False), (True, False), (True, True)])
def test_of_queries_and_keys_at_once_they_are_those_of_each(leaves_out, keys, layout, dtype):
    torch.manual_seed(0)
    query = LAYOUTS[layout](torch.randn(3, 6, 137, 72).to(dtype))
    key = LAYOUTS[layout](torch.randn(3, keys, 400, 72).to(dtype))
    out = tuple(
        torch.rand(1, each.shape[2]) < 0.3 if is_out else None
        for each, is_out in zip((query, key), leaves_out, strict=True)
    )
    expected = head_lengths(query), head_lengths(key).repeat_interleave(6 // keys)
    for found, one in zip(lengths_of_both(query, key), expected, strict=True):
        assert found.tolist() == pytest.approx(one.tolist(), rel=1e-6)
    means = mean_lengths(query, out[0]), mean_lengths(key, out[1]).repeat_interleave(6 // keys)
    for found, one in zip(mean_lengths_of_both(query, key, out), means, strict=True):
        assert found.tolist() == pytest.approx(one.tolist(), rel=1e-6)


def test_queries_and_keys_of_unlike_widths_are_measured_all_the_same():
    query, key = torch.ones(1, 2, 9, 4), torch.ones(1, 1, 4, 9)
    assert [found.tolist() for found in lengths_of_both(query, key)] == [[6.0, 6.0], [6.0, 6.0]]
