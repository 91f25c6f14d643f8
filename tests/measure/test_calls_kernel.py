"""The calls that a GPU serves, from tensors to statistics, with kernels in triton's interpreter."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from attnscale.attending.call import Call
from attnscale.measure.pooled import TABLE
from attnscale.measure.row_blocks import measure_rows
from attnscale.measure.sampling import design
from attnscale.measure.stats import ScoreStats
from attnscale.visibility import Visibility

from .interpreting import UNFIT, mended_interpreter  # noqa: F401
from .oracle import assert_stats

if UNFIT:
    pytest.skip(UNFIT, allow_module_level=True)

from attnscale.measure import attending
from attnscale.measure.cuda import sampled
from attnscale.measure.cuda.finish import finish

batch, heads, kv_heads, q_len, kv_len, head_dim = 2, 6, 2, 37, 53, 16


class Drawn:
    """Rows drawn on a CPU, where a GPU has some at hand."""

    def __init__(self, planned, entries, device):
        self.planned, self.entries = planned, entries
        self.weights = planned.sample(planned.stratum).weights.double()

    def next(self):
        return self.planned.sample(torch.from_numpy(self.planned.draws(self.entries)))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(sampled, "drawn_ahead", Drawn)
    monkeypatch.setattr("attnscale.measure.cuda.launch._are_taken", lambda vectors: True)
    monkeypatch.setattr(attending, "on_hopper", lambda device: False)


def call_of(seen, length=q_len):
    query, key, value = (
        torch.randn(batch, count, rows, head_dim)
        for count, rows in ((heads, length), (kv_heads, kv_len), (kv_heads, kv_len))
    )
    return Call(query, key, value, seen, 0.0, 0.3, None)


def attend_by_kernel(call, in_sequences=False):
    tensors = call.query, call.key, call.value
    kernel = attending.kernel_for(*tensors, call.scale, call.visibility.is_causal, in_sequences)
    return partial(attending._attend_by_kernel, kernel, finish, call.scale)


def scores_of(call):
    scores = call.query.double() @ call.key.double().repeat_interleave(call.group, 1).mT * call.scale
    shown = call.visibility.shown(slice(0, call.query.shape[2]), slice(0, kv_len), "cpu")
    return (scores if shown is None else scores.masked_fill(~shown, -torch.inf)).numpy()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [q_len, 1])
def test_every_row_is_measured_with_the_output_and_without(length, is_causal):
    call = call_of(Visibility.of(None, is_causal), length)
    tensors = call.query, call.key, call.value
    output, lse, table = attend_by_kernel(call)(*tensors, None)
    expected = F.scaled_dot_product_attention(
        call.query, call.key, call.value, scale=call.scale, is_causal=is_causal, enable_gqa=True
    )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    assert_stats(ScoreStats(heads, True, table), scores_of(call), rtol=2e-5, atol=2e-5)
    alone = sampled.measure(call, None)
    assert_stats(alone, scores_of(call), rtol=2e-5, atol=2e-5)
    assert alone.exact
    assert torch.equal(alone.max, alone.max_bound)
    wanted = measure_rows(Call(call.query.double(), call.key.double(), call.key, call.visibility, 0.0, 0.3, None))
    torch.testing.assert_close(lse.double(), wanted.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seen", ["everything", "causal", "window"])
def test_a_sample_of_rows_is_about_what_all_rows_are(seen):
    call = call_of({"everything": Visibility(), "causal": Visibility(last=0)}.get(seen, Visibility.causal(window=9)))
    every, some = sampled.measure(call, None), sampled.measure(call, 20)
    assert_stats(every, scores_of(call), rtol=2e-5, atol=2e-5)
    assert not some.exact
    assert some.rows.max() < every.rows.min()
    assert (some.max <= every.max + 1e-5).all()
    assert (every.max <= some.max_bound).all()
    for name in ("mean", "entropy", "top1"):
        error = 8 * some.stderr(name).nan_to_num(nan=torch.inf) + 1e-4
        assert ((getattr(some, name) - getattr(every, name)).abs() <= error).all(), name


@pytest.mark.parametrize("case", ["plain", "causal", "mask", "padding"])
def test_a_probe_writes_statistics_and_lengths_to_a_buffer(case):
    call = call_of(Visibility(), kv_len)
    hidden = torch.arange(kv_len).expand(batch, -1) >= torch.tensor([[kv_len], [31]])
    mask = ~hidden[:, None, None, :] if case in ("mask", "padding") else None
    padding = hidden if case == "padding" else None
    table, lengths = torch.full((heads, TABLE), torch.nan, dtype=torch.float64), torch.zeros(2, 3, heads).double()
    hides = None if mask is None else hidden
    found = sampled.probe(
        call.query, call.key, mask, hides, case == "padding", case == "causal", 0.3, 64, table, lengths
    )
    assert found.table is table
    assert table[:, :-3].isfinite().all()
    planned = design(64, kv_len, batch, case != "plain")
    rows = planned.sample(planned.stratum).positions.shape[-1] * batch
    assert (found.stats.rows <= rows).all() if padding is not None else (found.stats.rows == rows).all()
    for vectors, left_out, (total, count, longest) in zip(
        (call.query, call.key), (padding, mask), lengths, strict=True
    ):
        counted = torch.ones_like(hidden) if left_out is None else ~hidden
        squares = (
            vectors.double()
            .square()
            .sum(-1)
            .transpose(0, 1)[:, counted]
            .repeat_interleave(heads // vectors.shape[1], 0)
        )
        torch.testing.assert_close(total, squares.sum(-1), rtol=1e-6, atol=0)
        torch.testing.assert_close(longest, squares.amax(-1), rtol=1e-6, atol=0)
        assert (count == counted.sum()).all()


@pytest.mark.parametrize("leaves_rows_out", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_probe_of_written_scores_fills_a_buffer(leaves_rows_out, softcap):
    query, key = torch.randn(batch, heads, kv_len, head_dim), torch.randn(batch, heads, kv_len, head_dim)
    hidden = torch.arange(kv_len).expand(batch, -1) >= torch.tensor([[kv_len], [31]])
    scores = query @ key.mT * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden[:, None, None, :], torch.finfo(torch.float32).min)
    table, lengths = torch.full((heads, TABLE), torch.nan, dtype=torch.float64), torch.zeros(2, 3, heads).double()
    scales, planned = torch.empty(heads, dtype=torch.float64), design(16, kv_len, batch, True)
    given = sampled.WrittenScores(scores, query, key, hidden)
    scale = torch.tensor([0, 26, 52]), torch.full((heads,), 0.2), torch.full((heads,), 0.1), softcap, 0.01
    found = sampled.probe_scores(given, leaves_rows_out, scores.amax((0, 2, 3)), scale, planned, table, lengths, scales)
    torch.testing.assert_close(scales, torch.full_like(scales, 0.15), rtol=1e-3, atol=0)  # 0.3 where 0.2 is planned
    assert (found.stats.max <= scores.amax((0, 2, 3))).all()
    counted = ~hidden if leaves_rows_out else torch.ones_like(hidden)
    for vectors, kept, numbers in zip((query, key), (counted, ~hidden), lengths, strict=True):
        squares = vectors.double().square().sum(-1).transpose(0, 1)[:, kept]
        torch.testing.assert_close(numbers[0], squares.sum(-1), rtol=1e-6, atol=0)
    first, second = found.sample.positions
    rows = len(first) + (int((second < 31).sum()) if leaves_rows_out else len(second))
    assert found.stats.rows.tolist() == [rows] * heads


def test_a_probe_returns_none_for_few_rows():
    call = call_of(Visibility(), 5)
    nothing = torch.empty(0)
    assert sampled.probe(call.query, call.key, None, None, False, False, 0.3, 64, nothing, nothing) is None


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_attend_to_themselves(is_causal):
    call = call_of(Visibility(), kv_len)
    query, key, value = (tensor[:1] for tensor in (call.query, call.key, call.value))
    seen = Visibility.of(None, is_causal)
    attend = attend_by_kernel(Call(query, key, value, seen, 0.0, 0.3, None), in_sequences=True)
    starts = torch.tensor([0, 17, 17, kv_len])
    output, stats = attending.attend_directly(attend, 0.3, is_causal, query, key, value, starts)
    for begin, end in ((0, 17), (17, kv_len)):
        own = (tensor[:, :, begin:end] for tensor in (query, key, value))
        alone = F.scaled_dot_product_attention(*own, scale=0.3, is_causal=is_causal, enable_gqa=True)
        torch.testing.assert_close(output[begin:end].transpose(0, 1), alone[0], rtol=1e-5, atol=1e-5)
    document = torch.arange(kv_len) >= 17
    seen = Visibility(last=0 if is_causal else None, documents=(document, document))
    assert_stats(stats, scores_of(Call(query, key, value, seen, 0.0, 0.3, None)), rtol=2e-5, atol=2e-5)
