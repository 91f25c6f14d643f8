"""The Triton kernels against the oracle, run by Triton's interpreter where there is no GPU."""

import math

import numpy as np
import pytest
import torch

from attnscale import reference
from attnscale.attending.call import Call
from attnscale.measure import ScoreStats
from attnscale.measure.lengths import BOUND_SLACK
from attnscale.measure.pooled import Table, pack, pool_rows
from attnscale.measure.row_sums import RowSums
from attnscale.measure.sampling import Sample
from attnscale.numerics import KERNEL_DTYPES
from attnscale.visibility import Visibility

from .interpreting import UNFIT, mended_interpreter  # noqa: F401
from .oracle import ROW_NAMES, assert_rows, assert_stats, expected_rows

if UNFIT:
    pytest.skip(UNFIT, allow_module_level=True)

from attnscale.measure.cuda.finish import finish
from attnscale.measure.cuda.launch import sample_tiles, tiles
from attnscale.measure.cuda.masked_rows import score_masked_rows
from attnscale.measure.cuda.rows import attend_rows, score_rows

EXACT = 6e-6  # float32 sums of up to 160 terms


def qkv(heads=2, kv_heads=2, q_len=37, kv_len=53, head_dim=16):
    return (
        torch.randn(1, heads, q_len, head_dim),
        torch.randn(1, kv_heads, kv_len, head_dim),
        torch.randn(1, kv_heads, kv_len, head_dim),
    )


def expected(query, key, value, scale, is_causal):
    """The output and the statistics, from the full matrix in float64."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.double().numpy() for x in (query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
    mask = np.tri(q.shape[-2], k.shape[-2], dtype=bool) if is_causal else None
    output, _ = reference.scaled_dot_product_attention(q, k, v, scale, mask)
    return output, expected_rows(reference.attention_scores(q, k, scale, mask))


def attend(query, key, value, scale, is_causal):
    """The output, and of each row max, total, gap, participation and lse."""
    output, lse, sums = attend_rows(query, key, value, scale, is_causal=is_causal)
    return output, torch.stack([*sums[:4], lse])


def assert_statistics(found, wanted, tolerance=EXACT):
    assert found.dtype == torch.float32
    assert_rows(found, wanted, tolerance)


def assert_attended(found, wanted):
    """The statistics beside an output: the first four of RowSums, and the lse."""
    assert_statistics(found[:4], wanted)
    lse = wanted["max"] + np.log(wanted["total"])
    assert np.abs(found[4].double().numpy() - lse).max() <= EXACT * np.abs(lse).max(initial=1.0)


def call_of(query, key, scale, is_causal):
    return Call(query, key, key, Visibility.of(None, is_causal), 0.0, scale, None)


SHAPES = {
    "one tile and a bit": dict(q_len=37, kv_len=53),
    "whole tiles": dict(q_len=64, kv_len=48),
    "one query": dict(q_len=1, kv_len=43),
    "one key": dict(q_len=41, kv_len=1),
    "more queries than keys": dict(q_len=83, kv_len=29),
    "more keys than queries": dict(q_len=31, kv_len=109),
    "groups": dict(heads=6, kv_heads=2, q_len=23, kv_len=37),
    "odd head_dim": dict(head_dim=11),
    "wide head_dim": dict(head_dim=64, q_len=35),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_rows_are_those_of_the_full_matrix(shape, is_causal):
    tensors = qkv(**SHAPES[shape])
    scale = 1.3 * tensors[0].shape[-1] ** -0.5
    output, found = attend(*tensors, scale, is_causal)
    exact, wanted = expected(*tensors, scale, is_causal)
    assert np.abs(output.double().numpy() - exact).max() < EXACT
    assert output.is_contiguous()
    assert_attended(found, wanted)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_rows_are_measured_without_values(shape, is_causal):
    query, key, value = qkv(**SHAPES[shape])
    _, wanted = expected(query, key, value, -0.4, is_causal)
    sums = score_rows(query, key, -0.4, is_causal)
    assert_statistics(sums[:7], wanted)
    visible = torch.arange(1, query.shape[2] + 1) if is_causal else torch.tensor(key.shape[2])
    assert (sums[7] == visible.clamp(max=key.shape[2])).all()
    assert torch.equal(attend_rows(query, key, value, -0.4, is_causal=is_causal)[2], sums)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")  # NumPy stands in for the GPU here
def test_past_1e19_kernels_find_the_maximum_and_no_finite_deviation():
    query, key, value = ((x * 8).round() / 8 for x in qkv(q_len=29, kv_len=47))
    _, wanted = expected(query, key, value, 1e20, True)
    found = score_rows(query, key, 1e20, True)
    assert not found[5][:, :, 1:].isfinite().any()  # squares are summed in float32: said, not wrong
    assert_rows(found[:1], wanted, tolerance=1e-5)


@pytest.mark.parametrize("factor", [1e4, 1e-4])
def test_statistics_survive_scores_of_any_size(factor):
    query, key, value = ((x * 8).round() / 8 for x in qkv(q_len=29, kv_len=47))  # so that q·k itself is exact
    exact, wanted = expected(query, key, value, factor / 4, True)
    output, found = attend(query, key, value, factor / 4, True)
    assert np.abs(output.double().numpy() - exact).max() < EXACT
    assert_attended(found, wanted)


@pytest.mark.parametrize("is_causal", [False, True])
def test_constant_rows_are_exact(is_causal):
    query, key, value = ((x * 8).round() / 8 for x in qkv(q_len=37, kv_len=53, head_dim=11))  # q·k itself is exact
    key = key[:, :, :1].expand(-1, -1, 53, -1)
    _, (_, total, gap, participation, _) = attend(query, key, value, 0.3, is_causal)
    visible = torch.arange(1.0, 38.0) if is_causal else torch.full((37,), 53.0)
    assert (total == visible).all()
    assert (gap == 0).all()
    assert (participation == 1 / visible).all()


def test_one_hot_rows_are_exact():
    length = 37
    key = torch.randn(1, 1, length, 64)
    key = key / key.norm(dim=-1, keepdim=True)
    value = torch.randn_like(key)
    order = torch.randperm(length)
    output, sums = attend(key[:, :, order], key, value, 1e4, False)
    _, total, gap, participation, _ = sums
    assert (total == 1).all()
    assert (gap == 0).all()
    assert (participation == 1).all()
    assert (output == value[:, :, order]).all()


def test_a_scale_of_zero_sees_every_key_alike():
    query, key, value = qkv()
    output, (largest, total, gap, *_) = attend(query, key, value, 0.0, True)
    assert (largest == 0).all()
    assert (gap == 0).all()
    assert (total == torch.arange(1.0, 38.0)).all()
    assert torch.allclose(output[:, :, 36], value[:, :, :37].mean(2), atol=EXACT)


def test_a_score_that_is_not_a_number_reaches_the_total():
    query, key, value = qkv()
    key[0, 0, 52] = math.nan  # in the last, masked tile
    output, (_, total, *_) = attend(query, key, value, 0.25, False)
    assert total[0, 0].isnan().all()
    assert output[0, 0].isnan().all()
    assert total[0, 1].isfinite().all()


@pytest.mark.parametrize("layout", ["transposed", "part of a wider row", "column-major"])
def test_strides_do_not_matter(layout):
    query, key, value = qkv(heads=2, kv_heads=2)
    wanted = attend(query, key, value, 0.3, True)
    change = {
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "part of a wider row": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
        "column-major": lambda x: x.mT.contiguous().mT,
    }[layout]
    found = attend(*map(change, (query, key, value)), 0.3, True)
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("is_causal", [False, True])
def test_every_element_is_written_and_none_beyond(is_causal, monkeypatch):
    query, key, value = qkv(heads=3, kv_heads=1, q_len=43, kv_len=19, head_dim=11)
    pages = []

    def page(shape, dtype, device):  # what lies behind is not the kernel's
        pages.append(torch.full((2, *shape), math.nan))
        return pages[-1][0]

    monkeypatch.setattr(torch, "empty", page)
    attend_rows(query, key, value, 0.3, is_causal=is_causal)
    monkeypatch.undo()
    assert len(pages) == 3
    assert all(page[0].isfinite().all() for page in pages)
    assert all(page[1].isnan().all() for page in pages)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_every_head_dim_has_tiles_that_fit_shared_memory(capability, dtype):
    room = {(7, 5): 64, (8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99) * 1024
    for head_dim in range(1, 257):
        width = 1 << (head_dim - 1).bit_length()
        for rows in (2, 16, 1000):
            cut = tiles(rows, head_dim, dtype, capability)
            assert (cut.rows + 2 * cut.stages * cut.keys) * width * dtype.itemsize <= room
            for banded in (False, True):  # it reads no values
                cut = sample_tiles(rows, head_dim, dtype, capability, banded)
                assert (cut.rows + cut.stages * cut.keys) * width * dtype.itemsize <= room


@pytest.mark.parametrize("span", [16, 48, 128])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shape", ["one query", "one key", "more queries than keys", "more keys than queries", "groups"]
)
def test_rows_sampled_span_by_span_merge_into_those_of_the_full_matrix(shape, is_causal, span):
    query, key, value = qkv(**SHAPES[shape])
    kv_len = key.shape[2]
    _, wanted = expected(query, key, value, -0.4, is_causal)
    count = 1 + query.shape[2] // 2
    rows = torch.stack([torch.randperm(query.shape[2])[:count] for _ in query]).int()  # of each entry others
    sums = score_masked_rows(call_of(query, key, -0.4, is_causal), rows, span)
    counts = ((rows + 1).clamp(max=kv_len) if is_causal else torch.full_like(rows, kv_len)).unsqueeze(1)
    merged = RowSums(sums[7].long(), *sums[:7]).over_shards()
    assert (merged.visible == counts).all()
    found = torch.stack([getattr(merged, name).float() for name in ROW_NAMES])
    at = rows.long().numpy()[:, None]
    assert_statistics(found, {name: np.take_along_axis(values, at, axis=2) for name, values in wanted.items()})


FINISHED = {
    "groups": dict(heads=2, kv_heads=1, q_len=37, kv_len=53),
    "more queries than keys": dict(heads=2, kv_heads=2, q_len=71, kv_len=29, head_dim=11),
    "one head": dict(heads=1, kv_heads=1, q_len=101, kv_len=101),
}


@pytest.mark.parametrize("offset", [0.0, 2.0, 30.0])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", FINISHED)
def test_heads_are_finished_as_from_the_full_matrix(shape, is_causal, offset):
    query, key, _ = qkv(**FINISHED[shape])
    query, key = query + offset * torch.randn(query.shape[-1]), key + offset * torch.randn(query.shape[-1])
    scale = 0.3 / (1 + offset)  # so that rows are not one-hot
    group = query.shape[1] // key.shape[1]
    q, k = (x.double().numpy() for x in (query, key.repeat_interleave(group, 1)))
    mask = np.tri(q.shape[-2], k.shape[-2], dtype=bool) if is_causal else None
    scores = reference.attention_scores(q, k, scale, mask)
    sums = score_rows(query, key, scale, is_causal)
    for sinks in (None, torch.randn(query.shape[1], dtype=torch.float64) + 2.0):
        table = finish(sums.unsqueeze(1), sinks=sinks)
        assert_stats(ScoreStats(query.shape[1], True, Table(table)), scores, rtol=2e-5, atol=2e-5, sinks=sinks)


@pytest.mark.parametrize("bounds", ["of heads", "none"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_sampled_heads_are_finished_as_on_a_cpu(is_causal, bounds):
    query, key, _ = qkv(heads=3, kv_heads=3, q_len=97, kv_len=61)
    query, key = query.repeat(2, 1, 1, 1) * torch.tensor([1.0, 0.4]).view(2, 1, 1, 1), key.repeat(2, 1, 1, 1)
    rows = torch.tensor([[0, 7, 50, 96], [0, 20, 21, 60]]).int()
    weights, span = torch.tensor([1.0, 30.5, 40, 25.5]).double(), 16
    sums = score_masked_rows(call_of(query, key, 0.4, is_causal), rows, span)
    bounds = torch.randn(3) if bounds == "of heads" else None
    for sinks in (None, torch.tensor([-torch.inf, 0.7, 30.0], dtype=torch.float64)):
        found, wanted = finish(sums, weights, bounds, sinks), on_a_cpu(sums, bounds, rows, weights, sinks)
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6, equal_nan=True)


def on_a_cpu(sums, bounds, rows, weights, sinks):
    merged = RowSums(sums[7].long(), *sums[:7].double()).over_shards()
    merged = merged if sinks is None else merged.with_sinks(sinks)
    if bounds is None:
        highest = merged.max.amax((0, 2)).double()
    else:
        highest = bounds.double()
        highest = highest + BOUND_SLACK * highest.abs().clamp(min=1.0)
    each = torch.arange(rows.shape[1])
    return pack(pool_rows(merged, highest, Sample(rows, each, weights)), errors=False)
