"""An audit tries other settings on the layer itself: its bias, padding, keys, sequences and values."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnscale
from attnscale.diagnose.what_if import TRIED, what_if_calls
from attnscale.errors import SettingError
from attnscale.measure.statistics import STATISTICS

HEADS, DIM, LENGTH, BATCH = 2, 12, 11, 3


class Attention(nn.Module):
    """Its output is that of the attention alone; `multiplier` is what the scores are multiplied by."""

    def __init__(self, kv_heads=HEADS):
        super().__init__()
        self.kv_heads, self.multiplier = kv_heads, DIM**-0.5
        self.query = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.key, self.value = (nn.Linear(HEADS * DIM, kv_heads * DIM) for _ in range(2))
        self.pairs, self.bias = nn.Linear(5, HEADS * DIM), nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))

    def project(self, x):
        return (each(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (self.query, self.key, self.value))

    def scores(self, query, key):
        return query * self.multiplier @ key.mT


def hidden_keys():
    return torch.arange(LENGTH) >= torch.tensor([LENGTH, 7, 4])[:, None, None, None]


class Fused(Attention):
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.project(x), scale=self.multiplier, is_causal=True)


class Grouped(Attention):
    def __init__(self):
        super().__init__(kv_heads=1)

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.project(x), scale=self.multiplier, enable_gqa=True)


class Padded(Attention):
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.project(x), attn_mask=~hidden_keys(), scale=self.multiplier)


class Biased(Attention):
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.project(x), attn_mask=self.bias, scale=self.multiplier)


class Cached(Attention):
    def forward(self, x):
        query, key, value = self.project(x)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[-4:]
        return F.scaled_dot_product_attention(query[:, :, -4:], key, value, attn_mask=mask, scale=self.multiplier)


class Written(Attention):
    def forward(self, x):
        query, key, value = self.project(x)
        scores = (self.scores(query, key) + self.bias).masked_fill(hidden_keys(), -torch.inf)
        return scores.softmax(-1) @ value


class Capped(Attention):
    def forward(self, x):
        query, key, value = self.project(x)
        return (2.0 * torch.tanh(self.scores(query, key) / 2.0)).softmax(-1) @ value


class Turned(Attention):
    """Keys stand left of the queries, values left of the weights."""

    def forward(self, x):
        query, key, value = self.project(x)
        weights = (key @ (self.multiplier * query).mT).softmax(-2)
        return (value.mT @ weights).mT


class Sunk(Attention):
    """A score of no key's takes part in the softmax."""

    def forward(self, x):
        query, key, value = self.project(x)
        sink = torch.full((BATCH, HEADS, LENGTH, 1), 0.7)
        return torch.cat([self.scores(query, key), sink], -1).softmax(-1)[..., :-1] @ value


class ByPair(Attention):
    """A key for each pair of positions."""

    def forward(self, x):
        query, key, value = self.project(x)
        place = torch.arange(LENGTH).float()
        apart = ((place[:, None] - place)[..., None] * torch.arange(1, 6) / 7).sin()
        pairs = self.pairs(apart).unflatten(-1, (HEADS, DIM)).permute(2, 0, 1, 3)
        keys = key.unsqueeze(2) + pairs
        scores = (query.unsqueeze(-2) * self.multiplier @ keys.mT).squeeze(-2)
        return scores.softmax(-1) @ value


class Twice(Attention):
    def forward(self, x):
        first = Fused.forward(self, x)
        return torch.cat([first, Fused.forward(self, 2 * x[:2])])


ALL = (Fused, Grouped, Padded, Biased, Cached, Written, Capped, Turned, Sunk, ByPair, Twice)


@pytest.mark.parametrize("kind", ALL)
def test_current_weights_and_change_are_those_of_the_model(kind):
    model, x = kind().eval(), 2 * torch.randn(BATCH, LENGTH, HEADS * DIM)
    audit = attnscale.audit(model, x)
    (name,) = audit.layers
    layer, half = audit.layers[name], model.multiplier / 2
    table = audit.what_if(name, {"same": model.multiplier, "half": half})
    again = what_if_calls(layer.kept)["current"]  # made of what was kept alone
    for statistic in TRIED:
        measured = STATISTICS[statistic].whole(layer.stats)
        assert getattr(table["current"], statistic) == measured
        assert getattr(table["same"], statistic) == pytest.approx(measured, rel=1e-4, abs=1e-5)
        assert getattr(again, statistic) == pytest.approx(measured, rel=1e-4, abs=1e-5)
    assert table["same"].output_change == pytest.approx(0.0, abs=1e-5)
    other = copy.deepcopy(model)
    other.multiplier = half
    with torch.no_grad():
        before, after = model(x), other(x)
    if kind in (Padded, Written):  # queries of padding do not count
        before, after = (each * ~hidden_keys().mT for each in (before, after))
    assert table["half"].output_change == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-3)
    with torch.no_grad():
        output, (_, _, value) = model(x)[0], model.project(x)
    for head in range(HEADS):
        weights, met = layer.weights(head), value[0, min(head, model.kv_heads - 1)]
        expected = output[head, : len(weights)]  # one query, where each has keys of its own
        torch.testing.assert_close(weights[:, : len(met)] @ met, expected, rtol=1e-4, atol=1e-5)


def test_the_change_of_an_output_that_is_not_known_is_not_told():
    class Pooled(Attention):
        def forward(self, x):
            query, key, value = self.project(x)
            return (self.scores(query, key).softmax(-1).unsqueeze(-1) * value.unsqueeze(2)).sum(-2)

    audit = attnscale.audit(Pooled(), torch.randn(BATCH, LENGTH, HEADS * DIM))
    table = audit.what_if(next(iter(audit.layers)))
    assert math.isnan(table["unscaled"].output_change)
    assert "–" in str(table)


def test_weights_are_not_shown_where_nothing_was_kept():
    with attnscale.watch(model := Fused()) as seen:
        model(torch.randn(BATCH, LENGTH, HEADS * DIM))
    (layer,) = seen.layers.values()
    with pytest.raises(SettingError, match="keep=True"):
        layer.weights(0)
