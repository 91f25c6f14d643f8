"""Queries of padding are left out, the same on every path: a padded batch is measured as its sequences alone are."""

import pytest
import torch
from torch import nn

import attnscale
from attnscale.train import Monitor

LENGTHS, LONGEST = (11, 7, 3), 11
NAMES = ("rows", "count", "mean", "std", "std_within_rows", "max", "entropy", "top1", "jacobian_trace")


def padded(sequences):
    batch = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    hidden = torch.arange(LONGEST) >= torch.tensor(LENGTHS)[:, None]
    return batch, hidden


def assert_alike(layer, alone):
    for name in NAMES:
        torch.testing.assert_close(
            getattr(layer.stats, name).double(), getattr(alone.stats, name).double(), rtol=1e-4, atol=1e-5, msg=name
        )
    torch.testing.assert_close(layer.query_norm, alone.query_norm, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(layer.key_norm, alone.key_norm, rtol=1e-4, atol=0.0)
    assert layer.padding == sum(LONGEST - length for length in LENGTHS)
    assert layer.queries == LONGEST * len(LENGTHS)
    assert alone.padding == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_every_path_of_an_encoder_leaves_the_same_rows_out():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 2, 48, batch_first=True), 2).eval()
    sequences = [3 * torch.randn(length, 24) for length in LENGTHS]
    batch, hidden = padded(sequences)
    with attnscale.watch(model, rows=None) as alone:
        for sequence in sequences:
            model(sequence[None])
    kinds = set()
    for nested in (True, False):
        for learns in (True, False):
            model.enable_nested_tensor = nested
            with torch.set_grad_enabled(learns), attnscale.watch(model, rows=None) as seen:
                model(batch, src_key_padding_mask=hidden)
            layer = seen.layers["layers.1.self_attn"]
            kinds.add(layer.kind)
            assert_alike(layer, alone.layers["layers.1.self_attn"])
            assert "Left out as padding: 12 of 33 queries in every layer." in str(seen)
    assert kinds == {"fast path", "sdpa"}


@pytest.mark.parametrize("left", [False, True])
def test_a_scale_that_follows_the_length_is_that_of_the_sequences_alone(left):
    model = attnscale.MultiheadAttention(24, 2, batch_first=True, scale="log_length").eval()
    sequences = [torch.randn(length, 24) for length in LENGTHS]
    batch, hidden = padded(sequences)
    if left:
        batch = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_side="left")
        hidden = hidden.flip(1)
    with attnscale.watch(model, rows=None) as alone:
        for sequence in sequences:
            model(sequence[None], sequence[None], sequence[None], need_weights=False)
    with attnscale.watch(model, rows=None) as seen:
        model(batch, batch, batch, key_padding_mask=hidden, need_weights=False)
    assert_alike(seen.layers["MultiheadAttention"], alone.layers["MultiheadAttention"])
    scales = [each.layers["MultiheadAttention"].scale_applied for each in (seen, alone)]
    assert scales[0] == pytest.approx(scales[1], rel=1e-6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_on_torchs_fast_paths_are_their_sequences_alone():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 2, 48, batch_first=True), 2).eval()
    layer = nn.MultiheadAttention(24, 2, batch_first=True).eval()
    sequences = [3 * torch.randn(length, 24) for length in LENGTHS]
    nested = torch.nested.as_nested_tensor(sequences)
    for model, run in ((encoder, encoder), (layer, lambda x: layer(x, x, x, need_weights=False))):
        with torch.no_grad():
            with attnscale.watch(model, rows=None) as alone:
                for sequence in sequences:
                    run(sequence[None])
            with attnscale.watch(model, rows=None) as seen:
                run(nested)
        for own, single in zip(seen.layers.values(), alone.layers.values(), strict=True):
            assert own.kind == "fast path"
            assert_alike(own, single)


class Written(nn.Module):
    """Self-attention by hand, and cross-attention where it is given other keys."""

    def __init__(self, hide):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(24, 24) for _ in range(3))
        self.hide = hide

    def forward(self, x, hidden, memory=None):
        memory = x if memory is None else memory
        given = zip((self.query, self.key, self.value), (x, memory, memory), strict=True)
        q, k, v = (project(t).unflatten(-1, (2, 12)).transpose(1, 2) for project, t in given)
        scores = self.hide(q @ k.mT / 12**0.5, hidden[:, None, None, :])
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def infinite(scores, hidden):
    return scores.masked_fill(hidden, -torch.inf)


def lowest(scores, hidden):
    return scores + hidden * torch.finfo(scores.dtype).min


def ten_thousand(scores, hidden):
    return scores + (1.0 - (~hidden).float()) * -10_000.0


@pytest.mark.parametrize("hide", [infinite, lowest, ten_thousand])
@pytest.mark.parametrize("window", [LONGEST, 2])
@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_with_all_keys_hidden_by_any_number_are_padding(hide, window, side):
    """Causal rows before the first token, and rows with a window after the last token."""

    def in_window(scores, hidden):
        shown = torch.ones(scores.shape[-2:], dtype=torch.bool).tril().triu(1 - window)
        return hide(scores, hidden | ~shown)

    model = Written(in_window)
    sequences = [3 * torch.randn(length, 24) for length in LENGTHS]
    batch, hidden = padded(sequences if side == "right" else [sequence.flip(0) for sequence in sequences])
    batch, hidden = (batch, hidden) if side == "right" else (batch.flip(1), hidden.flip(1))
    with attnscale.watch(model, rows=None) as alone:
        for sequence in sequences:
            model(sequence[None], torch.zeros(1, len(sequence), dtype=torch.bool))
    with attnscale.watch(model, rows=None) as seen:
        model(batch, hidden)
    (layer,), (single,) = seen.layers.values(), alone.layers.values()
    assert layer.causal
    assert_alike(layer, single)


def test_queries_of_cross_attention_all_count():
    model, (batch, hidden) = Written(infinite), padded([torch.randn(length, 24) for length in LENGTHS])
    with attnscale.watch(model, rows=None) as seen:
        model(torch.randn(3, LONGEST, 24), hidden, batch)
    multihead = nn.MultiheadAttention(24, 2, batch_first=True)
    with attnscale.watch(multihead, rows=None) as fused:
        multihead(torch.randn(3, LONGEST, 24), batch, batch, key_padding_mask=hidden, need_weights=False)
    for layer in (*seen.layers.values(), *fused.layers.values()):
        assert (layer.padding, layer.stats.rows.tolist()) == (0, [3 * LONGEST] * 2)


def test_a_monitor_that_knows_the_model_leaves_them_out():
    layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    batch, hidden = padded([torch.randn(length, 24) for length in LENGTHS])
    found = []
    monitor = Monitor(model, every=1, rows=None, sinks=[found.append])
    for _ in range(3):
        model(batch, src_key_padding_mask=hidden).square().mean().backward()
        monitor.step()
    monitor.close()
    rows = [record.layers["layers.0.self_attn"].rows for record in found]
    assert rows == [2 * sum(LENGTHS)] * 3
    norms = [record.layers["layers.0.self_attn"].numbers["query_norm"] for record in found]
    assert norms[0] == pytest.approx(norms[-1], rel=1e-5)
