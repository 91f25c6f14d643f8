"""Visibility: every limit means the same to counting, attending and measuring as to a matrix written out."""

import numpy as np
import pytest
import torch

from attnscale.attending import sdpa
from attnscale.attending.call import Call
from attnscale.attending.running import run
from attnscale.measure.attending import attend_or_measure
from attnscale.measure.measuring import measured
from attnscale.reference import scaled_dot_product_attention
from attnscale.visibility import Visibility
from tests.measure.oracle import NAMES, expected_stats

BATCH, HEADS, Q_LEN, KV_LEN, HEAD_DIM = 2, 3, 29, 37, 5
ROWS, KEYS = np.arange(Q_LEN)[:, None], np.arange(KV_LEN)[None, :]


def generator():
    return torch.Generator().manual_seed(7)


def documents(length):
    return torch.randint(0, 3, (BATCH, length), generator=generator()).sort(-1).values


BOOLEANS = torch.rand(BATCH, 1, Q_LEN, KV_LEN, generator=generator()) < 0.7
FLOATS = torch.randn(1, HEADS, Q_LEN, KV_LEN, generator=generator()).masked_fill(~BOOLEANS[:1], -torch.inf)
PADDING = torch.arange(KV_LEN) < torch.tensor([31, 11]).view(BATCH, 1, 1, 1)
OWN, THEIRS = documents(Q_LEN), documents(KV_LEN)
SAME = (OWN[:, None, :, None] == THEIRS[:, None, None, :]).numpy()
OFFSET = KV_LEN - Q_LEN

# the visibility, and the matrix it means: True where a row sees a key
CASES = {
    "everything": (Visibility(), KEYS >= 0),
    "causal": (Visibility.causal(), KEYS <= ROWS),
    "causal to the last key": (Visibility.causal(OFFSET), KEYS <= ROWS + OFFSET),
    "causal from before the first key": (Visibility.causal(-7), KEYS <= ROWS - 7),
    "a sliding window": (Visibility.causal(window=11), (KEYS <= ROWS) & (KEYS > ROWS - 11)),
    "a window to the last key": (
        Visibility.causal(OFFSET, window=5),
        (KEYS <= ROWS + OFFSET) & (KEYS > ROWS + OFFSET - 5),
    ),
    "a window to both sides": (Visibility(last=3, first=-4), (KEYS <= ROWS + 3) & (KEYS >= ROWS - 4)),
    "no key before one's own": (Visibility(first=0), KEYS >= ROWS),
    "a mask": (Visibility(mask=BOOLEANS), BOOLEANS.numpy()),
    "padding": (Visibility(mask=PADDING), PADDING.numpy()),
    "padding and causal": (Visibility(last=0, mask=PADDING), PADDING.numpy() & (KEYS <= ROWS)),
    "documents": (Visibility(documents=(OWN, THEIRS)), SAME),
    "documents and causal": (Visibility(last=0, documents=(OWN, THEIRS)), SAME & (KEYS <= ROWS)),
    "a bias": (Visibility(mask=FLOATS), (-torch.inf != FLOATS).numpy()),
    "a bias in a window": (
        Visibility(last=0, first=-6, mask=FLOATS),
        (-torch.inf != FLOATS).numpy() & (KEYS <= ROWS) & (KEYS >= ROWS - 6),
    ),
    "all at once": (
        Visibility(last=2, first=-9, mask=PADDING, documents=(OWN, THEIRS)),
        SAME & PADDING.numpy() & (KEYS <= ROWS + 2) & (KEYS >= ROWS - 9),
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    visibility, seen = CASES[request.param]
    return visibility, np.broadcast_to(seen, (BATCH, HEADS, Q_LEN, KV_LEN))


def bias_of(visibility, seen):
    added = 0.0 if visibility.bias is None else visibility.bias.double().numpy()
    return np.where(seen, np.where(np.isneginf(added), 0.0, added), -np.inf)


def call_of(visibility, softcap=None):
    torch.manual_seed(3)
    query = torch.randn(BATCH, HEADS, Q_LEN, HEAD_DIM)
    key, value = torch.randn(2, BATCH, HEADS, KV_LEN, HEAD_DIM)
    return Call(query, key, value, visibility, 0.0, 0.7, softcap)


def test_counts_are_those_of_the_matrix(case):
    visibility, seen = case
    counts = visibility.counts(Q_LEN, KV_LEN, "cpu")
    found = np.full(seen.shape[:-1], KV_LEN) if counts is None else counts.expand(seen.shape[:-1]).numpy()
    np.testing.assert_array_equal(found, seen.sum(-1))


def test_some_rows_and_keys_are_shown_as_in_the_matrix(case):
    visibility, seen = case
    rows, keys = torch.tensor([0, 5, 11, 28]), slice(3, 31)
    shown = visibility.shown(rows, keys, "cpu")
    expected = seen[:, :, rows.numpy()][..., keys]
    found = np.ones_like(expected) if shown is None else shown.expand(expected.shape).numpy()
    np.testing.assert_array_equal(found, expected)


def test_a_span_holds_every_key_that_is_seen_and_sure_keys_are_seen_by_all(case):
    visibility, seen = case
    for lowest, highest in ((0, 0), (3, 7), (0, Q_LEN - 1), (23, 28)):
        keys, block = visibility.span(lowest, highest, KV_LEN), seen[:, :, lowest : highest + 1]
        assert not block[..., : keys.start].any()
        assert not block[..., keys.stop :].any()
        assert block[..., keys.start : keys.start + visibility.sure(lowest, keys)].all()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("block_rows", [7, 512])
def test_attending_is_the_reference_under_that_mask(case, softcap, block_rows, monkeypatch):
    visibility, seen = case
    for module, name in ((sdpa, "MASK_ROWS"), ("attnscale.attending.row_blocks", "BLOCK_ROWS")):
        monkeypatch.setattr(*((module, name) if not isinstance(module, str) else (f"{module}.{name}",)), block_rows)
    call = call_of(visibility, softcap)
    tensors = (tensor.double().numpy() for tensor in (call.query, call.key, call.value))
    expected, _ = scaled_dot_product_attention(*tensors, 0.7, bias_of(visibility, seen), softcap)
    np.testing.assert_allclose(run(call).numpy(), np.where(seen.any(-1)[..., None], expected, 0.0), 1e-4, 1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_measuring_gives_the_statistics_of_the_matrix(case, softcap):
    visibility, seen = case
    call = call_of(visibility, softcap)
    scores = 0.7 * (call.query.double() @ call.key.double().mT).numpy()
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    expected = expected_stats(scores + bias_of(visibility, seen))
    stats = measured(call, rows=None)
    np.testing.assert_array_equal(stats.count.numpy(), expected["count"])
    for name in NAMES:
        np.testing.assert_allclose(getattr(stats, name).numpy(), expected[name], 1e-4, 1e-5, err_msg=name)


def test_one_pass_gives_output_and_statistics(case):
    visibility, seen = case
    call = call_of(visibility)
    output, stats = attend_or_measure(call, None)
    np.testing.assert_allclose(output.numpy(), run(call).numpy(), 1e-4, 1e-5)
    np.testing.assert_array_equal(stats.count.numpy(), seen.sum((0, 2, 3)))


def test_a_bias_keeps_its_gradient_under_other_limits():
    bias = FLOATS.clone().requires_grad_()
    visibility = Visibility(last=0, first=-6, mask=bias)
    run(call_of(visibility)).sum().backward()
    assert bool((bias.grad.abs() > 0).any())
    assert not bool(bias.grad[..., torch.from_numpy(KEYS > ROWS)].any())
