"""The kernel for masks, windows, documents and soft-caps, in triton's interpreter, against the full matrix."""

from dataclasses import replace

import pytest
import torch

from attnscale.attending.call import Call
from attnscale.attending.ragged import Layout, Ragged
from attnscale.measure.pooled import Table, pack, pool_rows
from attnscale.measure.row_blocks import measure_rows
from attnscale.measure.row_sums import RowSums
from attnscale.visibility import Visibility

from .interpreting import UNFIT, mended_interpreter  # noqa: F401

if UNFIT:
    pytest.skip(UNFIT, allow_module_level=True)

from attnscale.measure.cuda.finish import finish
from attnscale.measure.cuda.masked_rows import score_masked_rows

batch, heads, kv_heads, q_len, kv_len, head_dim = 2, 2, 1, 37, 45, 11
NAMES = ("visible", "max", "total", "gap", "participation", "mean", "deviation", "first")


def sees():
    torch.manual_seed(3)
    shown = torch.rand(batch, 1, q_len, kv_len) < 0.6
    shown[0, 0, 5] = False  # a row that sees nothing
    lengths = torch.tensor([31, kv_len])
    bias = torch.randn(1, heads, q_len, kv_len).masked_fill(torch.rand(1, heads, q_len, kv_len) < 0.3, -torch.inf)
    ids = torch.arange(q_len) // 10, torch.arange(kv_len) // 10
    padding = torch.zeros(batch, q_len, dtype=torch.bool)
    padding[0, 30:] = True
    return {
        "mask": Visibility(mask=shown),
        "key padding": Visibility(mask=(torch.arange(kv_len) < lengths[:, None])[:, None, None, :]),
        "bias": Visibility(mask=bias),
        "half bias": Visibility(mask=bias.to(torch.bfloat16)),
        "window": Visibility.causal(offset=3, window=7),
        "causal bias": Visibility(last=0, mask=bias),
        "documents": Visibility(documents=ids),
        "rows left out": Visibility(mask=shown).without_rows(padding),
        "nothing hidden": Visibility(),
    }


def call_of(name, softcap, scale=0.7):
    query = torch.randn(batch, heads, q_len, head_dim)
    key = torch.randn(batch, kv_heads, kv_len, head_dim)
    return Call(query, key, key, sees()[name], 0.0, scale, softcap)


def exact(call, rows=None):
    seen = call.visibility
    seen = replace(seen, mask=seen.mask.double()) if seen.bias is not None else seen
    return measure_rows(replace(call, query=call.query.double(), key=call.key.double(), visibility=seen), rows)


def assert_rows(found, wanted):
    assert torch.equal(found.visible, wanted.visible)
    some = wanted.visible > 0
    for name in NAMES[1:]:
        ours, theirs = (getattr(each, name).double()[some] for each in (found, wanted))
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5, msg=name)


@pytest.mark.parametrize(("softcap", "scale"), [(None, 0.7), (3.0, -0.4), (1e6, 0.7)])
@pytest.mark.parametrize("name", sees())
def test_every_row_is_that_of_the_full_matrix(name, softcap, scale):
    call = call_of(name, softcap, scale)
    sums = score_masked_rows(call, None, kv_len)[:, 0]
    assert_rows(RowSums(sums[7].long(), *sums[:7]), exact(call))


@pytest.mark.parametrize("span", [16, 48])
@pytest.mark.parametrize("name", sees())
def test_sampled_rows_merge_over_spans_into_those_of_the_full_matrix(name, span):
    call = call_of(name, 20.0)
    rows = torch.stack([torch.randperm(q_len)[:9] for _ in range(batch)])
    sums = score_masked_rows(call, rows.int(), span)
    assert_rows(RowSums(sums[7].long(), *sums[:7]).over_shards(), exact(call, rows))


@pytest.mark.parametrize("name", ["mask", "window", "rows left out"])
def test_heads_are_finished_as_on_a_cpu(name):
    call = call_of(name, None)
    sums = score_masked_rows(call, None, kv_len)
    found = finish(sums)
    wanted = pack(pool_rows(RowSums(sums[7, 0].long(), *sums[:7, 0])), errors=False)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6, equal_nan=True)
    assert Table(found)().rows.tolist() == exact(call).visible.gt(0).sum((0, 2)).tolist()


@pytest.mark.parametrize("seen", [Visibility(), Visibility.causal(), Visibility.causal(window=5), Visibility(last=2)])
@pytest.mark.parametrize("kv_lens", [[13, 0, 1, 23], [7, 5, 9, 24]])
def test_sequences_laid_end_to_end_are_documents_of_one_row(kv_lens, seen):
    q_lens = [13, 0, 1, 23]
    rows, keys = (Layout.of(lengths, torch.device("cpu")) for lengths in (q_lens, kv_lens))
    query, key = torch.randn(1, heads, sum(q_lens), head_dim), torch.randn(1, kv_heads, sum(kv_lens), head_dim)
    ragged = Ragged(Call(query, key, key, seen, 0.0, 0.7, None), rows, keys)
    call = ragged.as_documents()
    if q_lens != kv_lens and not seen.is_full:
        assert call is None
        return
    sums = score_masked_rows(call, None, key.shape[2])[:, 0]
    parts = [exact(call) for call in ragged.calls()]
    wanted = RowSums(*(torch.cat([getattr(part, name) for part in parts], -1) for name in NAMES))
    assert_rows(RowSums(sums[7].long(), *sums[:7]), wanted)
