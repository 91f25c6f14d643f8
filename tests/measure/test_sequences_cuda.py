"""Sequences laid end to end on a GPU: each as if it were alone, whatever lies beside it."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from attnscale.attending.call import Call
from attnscale.bench.costs import _captured
from attnscale.measure import attention_varlen_with_stats
from attnscale.measure.row_blocks import measure_rows
from attnscale.visibility import Visibility
from tests.others import OTHERS_MAY_WARN

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SUMS = ("max", "total", "gap", "participation", "mean", "deviation", "first", "visible")
LENGTHS = [(5, 0, 300, 1, 129), (128, 256), (700, 64, 65, 63), (1,) * 70, (333,)]
HEADS = [(2, 2, 64), (4, 2, 128), (2, 1, 256), (3, 3, 80)]
CASES = [
    *((torch.bfloat16, 0.1, lengths, heads) for lengths in LENGTHS for heads in HEADS),
    *((torch.float16, -0.2, LENGTHS[0], heads) for heads in HEADS),
    *((torch.float32, 0.1, LENGTHS[0], heads) for heads in HEADS),
]


def kernels():
    from attnscale.measure.cuda import rows
    from attnscale.measure.cuda.launch import layout_key, on_hopper, positive_scale

    found = {"triton": rows.attend_rows}
    if on_hopper(0):
        from attnscale.measure.cuda import hopper

        def attend(query, key, value, scale, starts, is_causal):
            rising, scale = positive_scale(query, scale)
            layouts = map(layout_key, (rising, key, value))
            return hopper.Attention(*layouts, is_causal, True)(rising, key, value, scale, starts)

        found["hopper"] = attend
    return found


def tokens(lengths, heads, kv_heads, width, dtype, behind=5):
    """With others behind the last sequence that are no numbers."""
    total = sum(lengths)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    made = [torch.randn(total + behind, count, width, device="cuda").to(dtype) for count in (heads, kv_heads, kv_heads)]
    for each in made:
        each[total:] = torch.nan
    return made, starts


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("dtype", "scale", "lengths", "heads"), CASES)
def test_every_sequence_is_measured_as_if_it_were_alone(lengths, heads, is_causal, dtype, scale):
    made, starts = tokens(lengths, *heads, dtype)
    query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in made)
    for name, kernel in kernels().items():
        if name == "hopper" and dtype == torch.float32:
            continue
        output, lse, sums = kernel(query, key, value, scale, starts.int(), is_causal=is_causal)
        for begin, end in pairwise(starts.tolist()):
            own, theirs, values = (each[:, :, begin:end].double().cpu() for each in (query, key, value))
            theirs, values = (each.repeat_interleave(heads[0] // heads[1], 1) for each in (theirs, values))
            if end == begin:
                continue
            seen = Visibility.of(None, is_causal)
            alone = measure_rows(Call(own, theirs, theirs, seen, 0.0, scale, None))
            for place, statistic in enumerate(SUMS):
                expected = getattr(alone, statistic).double().expand_as(alone.max)
                found = sums[place, :, :, begin:end].double().cpu()
                assert torch.allclose(found, expected, rtol=2e-3, atol=2e-4), (name, statistic)
            scores = own @ theirs.mT * scale
            hidden = (
                torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1) if is_causal else torch.tensor(False)
            )
            scores = scores.masked_fill(hidden, -torch.inf)
            assert torch.allclose(lse[:, :, begin:end].double().cpu(), scores.logsumexp(-1), atol=1e-4), name
            wanted = (scores.softmax(-1) @ values)[0].transpose(0, 1)
            limit = 4 * torch.finfo(dtype).eps
            if dtype == torch.float32:  # whose rounding is that of scores, by a head's width
                rounded = F.scaled_dot_product_attention(
                    *(each[:, :, begin:end] for each in (query, key, value)),
                    is_causal=is_causal, scale=scale, enable_gqa=True,
                )  # fmt: skip
                limit += 4 * float((rounded[0].transpose(0, 1).double().cpu() - wanted).abs().max())
            assert torch.allclose(output[begin:end].double().cpu(), wanted, rtol=limit, atol=limit), name


@OTHERS_MAY_WARN
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 64), (4, 2, 128), (2, 2, 72)])
def test_gradients_are_those_of_each_sequence(heads, kv_heads, width, is_causal):
    lengths = [300, 64, 0, 517]
    made, starts = tokens(lengths, heads, kv_heads, width, torch.bfloat16, behind=0)
    given = [each.requires_grad_() for each in made]
    output, stats = attention_varlen_with_stats(*given, starts, is_causal=is_causal, enable_gqa=True)
    assert stats.exact
    assert stats.rows.tolist() == [sum(lengths)] * heads
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, given, grad)
    wide = [each.detach().float().requires_grad_() for each in given]
    expected, _ = attention_varlen_with_stats(*wide, starts, is_causal=is_causal, enable_gqa=True)
    wanted = torch.autograd.grad(expected, wide, grad.float())
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.float() - theirs).abs().max() <= 0.02 * theirs.abs().max()


def test_a_step_that_waits_is_not_captured_and_leaves_random_numbers_as_they_were():
    assert _captured(lambda: torch.randn(4, device="cuda").sum().item(), 2) is None
    assert torch.randn(3, device="cuda").isfinite().all()
    assert _captured(lambda: torch.randn(4, device="cuda").sum(), 2) is not None


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_host_waits_for_sequences():
    made, starts = tokens([300, 64, 517], 4, 4, 64, torch.bfloat16, behind=0)
    attention_varlen_with_stats(*made, starts, is_causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_varlen_with_stats(*made, starts, is_causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
