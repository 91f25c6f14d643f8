"""Output and statistics from one pass on a CPU, as attention() and score_stats() give them, on any threads."""

import multiprocessing
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnscale import attention, attention_with_stats, score_stats
from attnscale.measure import row_blocks as cut
from attnscale.measure.threads import share

from .oracle import NAMES

batch, heads, kv_heads, q_len, kv_len, head_dim = 2, 6, 3, 157, 131, 8
HIDES = torch.rand(q_len, kv_len) < 0.5
HIDES[7] = False  # a row that sees nothing
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": HIDES},
    "bias": {"attn_mask": torch.randn(q_len, kv_len)},
    "soft-cap": {"softcap": 2.0, "is_causal": True},
}


def qkv(dtype=torch.float32, value_dim=head_dim, grad=False):
    shapes = (heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, value_dim)
    return tuple(torch.randn(batch, *shape, dtype=dtype, requires_grad=grad) for shape in shapes)


@pytest.fixture(params=[1, 2, 3])
def small_blocks(request, monkeypatch):
    """Many blocks, and so many threads, from few scores."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    small = {"WORTH_A_THREAD": 34 * kv_len, "CORE_SCORES": 34 * kv_len, "ROW_SCORES": 17 * kv_len, "LEAST_ROWS": 17}
    for name, value in small.items():
        monkeypatch.setattr(cut, name, value)
    monkeypatch.setattr(cut, "_cut_for", cut._cut_for.__wrapped__)  # none that was cut before, none kept for later
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("dtype", "value_dim"), [(torch.float32, 8), (torch.float64, 5), (torch.bfloat16, 8)])
def test_one_pass_gives_the_output_of_attention_and_the_statistics(options, dtype, value_dim):
    query, key, value = qkv(dtype, value_dim)
    options = {"enable_gqa": True, **OPTIONS[options]}
    output, stats = attention_with_stats(query, key, value, **options)
    exact = attention(query.double(), key.double(), value.double(), **options)
    torch.testing.assert_close(output, exact.to(dtype))
    alone = score_stats(query, key, **options)
    for name in NAMES:
        assert torch.equal(getattr(stats, name), getattr(alone, name))


@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_with_statistics_are_those_of_sdpa(is_causal):
    tensors = qkv(grad=True)
    output, stats = attention_with_stats(*tensors, is_causal=is_causal, enable_gqa=True)
    expected = F.scaled_dot_product_attention(*tensors, is_causal=is_causal, enable_gqa=True)
    grad = torch.randn_like(output)
    torch.testing.assert_close(torch.autograd.grad(output, tensors, grad), torch.autograd.grad(expected, tensors, grad))
    assert not stats.entropy.requires_grad


@pytest.mark.parametrize("options", ["boolean", "soft-cap"])
def test_where_torch_has_no_backward_for_it_the_output_comes_from_attention(options):
    tensors = qkv(grad=True)
    output, _ = attention_with_stats(*tensors, enable_gqa=True, **OPTIONS[options])
    assert torch.equal(output, attention(*tensors, enable_gqa=True, **OPTIONS[options]))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), tensors))


@pytest.mark.parametrize("is_causal", [False, True])
def test_second_derivatives_are_there_where_sdpa_has_them(is_causal):
    inputs = [torch.randn(1, 2, length, 3, dtype=torch.float64, requires_grad=True) for length in (5, 7, 7)]
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of a CPU have none
        assert torch.autograd.gradgradcheck(lambda *args: attention_with_stats(*args, is_causal=is_causal)[0], inputs)


def test_transforms_and_autocast_take_attention_itself():
    query, key, value = qkv()
    run = partial(attention_with_stats, enable_gqa=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(query, key, value)[0].dtype == torch.bfloat16
    gradient = torch.func.grad(lambda query: run(query, key, value)[0].sum())(query)
    assert gradient.isfinite().all()


def test_every_task_is_done_once_and_a_failure_is_raised():
    done = []
    share(done.extend, range(1000), 3)
    assert sorted(done) == list(range(1000))
    with pytest.raises(ZeroDivisionError):
        share(lambda tasks: [1 // task for task in tasks], range(10), 2)


@pytest.mark.usefixtures("small_blocks")
def test_threads_are_left_as_they_were():
    before = torch.get_num_threads()
    attention_with_stats(*qkv(), enable_gqa=True)
    found = []
    share(lambda tasks: found.extend(torch.get_num_threads() for _ in tasks), range(100), 2)
    assert set(found) == {1}
    assert len(found) == 100
    assert torch.get_num_threads() == before


def test_a_forked_child_has_threads_of_its_own():
    share(list, range(10), 2)
    child = multiprocessing.get_context("fork").Process(target=share, args=(list, range(10), 2))
    child.start()
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("rows", [None, 29])
def test_inference_mode_holds_on_any_threads(rows):
    with torch.inference_mode():
        query, key, value = qkv()
        _, stats = attention_with_stats(query, key, value, enable_gqa=True, rows=rows)
        alone = score_stats(query, key, enable_gqa=True, rows=rows)
    assert stats.entropy.isfinite().all()
    assert alone.entropy.isfinite().all()
