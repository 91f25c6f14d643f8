"""The kernel that measures the vectors of each head, in triton's interpreter, against float64."""

import pytest
import torch

from .interpreting import UNFIT, mended_interpreter  # noqa: F401

if UNFIT:
    pytest.skip(UNFIT, allow_module_level=True)

from attnscale.measure.cuda import triton as kernels
from attnscale.measure.cuda.triton import lengths


@pytest.mark.parametrize(("batch", "heads", "length", "width"), [(2, 3, 37, 8), (1, 1, 1, 1), (3, 2, 130, 20)])
@pytest.mark.parametrize("layout", ["in a row", "heads inside", "features first"])
def test_lengths_are_those_of_float64(monkeypatch, batch, heads, length, width, layout):
    monkeypatch.setattr(lengths, "TILE", 256)
    lengths.prepared_lengths.cache_clear()
    shapes = {
        "in a row": ((batch, heads, length, width), (0, 1, 2, 3)),
        "heads inside": ((batch, length, heads, width), (0, 2, 1, 3)),
        "features first": ((batch, heads, width, length), (0, 1, 3, 2)),
    }
    shape, order = shapes[layout]
    vectors = torch.randn(shape).permute(order)
    found = kernels.head_lengths(vectors)
    assert found.tolist() == pytest.approx(vectors.double().square().sum((0, 2, 3)).sqrt().tolist(), rel=1e-6)


def test_a_vector_that_is_no_number_is_seen_in_its_head_alone():
    vectors = torch.ones(1, 2, 5, 4)
    vectors[0, 1, 3, 2] = torch.nan
    assert kernels.head_lengths(vectors).isnan().tolist() == [False, True]


@pytest.mark.parametrize("entries", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_mean_leaves_out_what_does_not_count_and_all_of_nothing(monkeypatch, share, entries):
    monkeypatch.setattr(lengths, "TILE", 256)
    lengths.prepared_lengths.cache_clear()
    vectors, out = torch.randn(3, 2, 130, 20), torch.rand(entries, 260)[:, ::2] < share
    kept = ~out.expand(3, -1) if share < 1.0 else torch.ones(3, 130, dtype=torch.bool)
    expected = [float(vectors[:, head][kept].double().square().sum(-1).mean().sqrt()) for head in range(2)]
    assert kernels.mean_lengths(vectors, out).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("sizes", [(37, 37), (5, 130), (130, 1)])
def test_queries_and_keys_are_measured_in_one_launch_each_key_for_all_who_share_it(monkeypatch, sizes, heads):
    monkeypatch.setattr(lengths, "TILE", 256)
    lengths.prepared_lengths.cache_clear()
    query, key = torch.randn(2, sizes[0], heads[0], 20).transpose(1, 2), torch.randn(2, heads[1], sizes[1], 20)
    own, theirs = (x.double().square().sum((0, 2, 3)) for x in (query, key))
    shared = theirs.repeat_interleave(heads[0] // heads[1])
    found = kernels.lengths_of_both(query, key)
    assert torch.allclose(found, torch.stack([own, shared]).sqrt(), rtol=1e-6)
    mean = kernels.lengths_of_both(query, key, is_mean=True)
    assert torch.allclose(mean, torch.stack([own / (2 * sizes[0]), shared / (2 * sizes[1])]).sqrt(), rtol=1e-6)


@pytest.mark.parametrize("left_out", [(True, False), (False, True), (True, True)])
def test_queries_and_keys_leave_out_what_is_left_out_of_them(monkeypatch, left_out):
    monkeypatch.setattr(lengths, "TILE", 256)
    lengths.prepared_lengths.cache_clear()
    query, key = torch.randn(3, 4, 37, 20), torch.randn(3, 2, 53, 20)
    out = [
        torch.rand(1, 2 * x.shape[2])[:, ::2] < 0.4 if is_out else None
        for x, is_out in zip((query, key), left_out, strict=True)
    ]
    found = kernels.lengths_of_both(query, key, tuple(out), is_mean=True)
    expected = kernels.mean_lengths(query, out[0]), kernels.mean_lengths(key, out[1]).repeat_interleave(2)
    assert torch.allclose(found, torch.stack(expected), rtol=1e-6)
