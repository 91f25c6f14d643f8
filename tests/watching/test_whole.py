"""Products of heads that arrive whole in inference mode: what is told of them is what their parts tell."""

import pytest
import torch
from torch import nn

from attnscale import score_stats, watch
from attnscale.watching import watcher


class Written(nn.Module):
    def __init__(self, heads, contiguous):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(24, 24) for _ in range(3))
        self.heads, self.contiguous = heads, contiguous

    def forward(self, x):
        parts = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
        query, key, value = (part.contiguous() if self.contiguous else part for part in parts)
        self.operands = query, key
        return torch.matmul(torch.matmul(query * 3, key.transpose(-1, -2)).softmax(-1), value)


def seen_of(model, x, inference, monkeypatch):
    names = []
    traits_of = watcher.traits_of
    with monkeypatch.context() as patched, torch.inference_mode(inference):
        patched.setattr(watcher, "traits_of", lambda op: names.append(traits_of(op).name) or traits_of(op))
        with watch(model, rows=None) as seen:
            model(x)
    return seen, names


@pytest.mark.parametrize(
    ("batch", "heads", "contiguous", "whole"),
    [(1, 4, False, True), (3, 1, False, True), (2, 4, True, True), (2, 4, False, False)],
)
def test_products_of_heads_tell_the_same_whole_and_in_parts(monkeypatch, batch, heads, contiguous, whole):
    torch.manual_seed(0)
    model, x = Written(heads, contiguous), torch.randn(batch, 31, 24)
    (told, names), (plain, _) = (seen_of(model, x, inference, monkeypatch) for inference in (True, False))
    assert ("bmm" not in names) == whole
    layer, like = told.layers["Written"], plain.layers["Written"]
    exact = score_stats(model.operands[0].detach() * 3, model.operands[1].detach(), scale="unscaled")
    torch.testing.assert_close(layer.stats.std, exact.std, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(layer.stats.entropy, exact.entropy, rtol=1e-5, atol=0.0)
    for field in ("heads", "kv_heads", "head_dim", "causal", "calls", "softcap", "model_dims", "wiring"):
        assert getattr(layer, field) == getattr(like, field), field
    assert layer.scale_applied == pytest.approx(3.0, rel=1e-5)
    rows = [[each.rows.tolist() for each in call.query.sources()] for call in layer.origins]
    assert rows == [[each.rows.tolist() for each in call.query.sources()] for call in like.origins]
