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

    def __init__(self, attend, kv_heads=HEADS):
        super().__init__()
        self.attend, self.kv_heads, self.multiplier = attend, kv_heads, DIM**-0.5
        self.query = nn.Linear(HEADS * DIM, HEADS * DIM)
        self.key, self.value = (nn.Linear(HEADS * DIM, kv_heads * DIM) for _ in range(2))
        self.pairs, self.bias = nn.Linear(5, HEADS * DIM), nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))

    def project(self, x):
        return (each(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for each in (self.query, self.key, self.value))

    def scores(self, query, key):
        return query * self.multiplier @ key.mT

    def sdpa(self, query, key, value, **options):
        return F.scaled_dot_product_attention(query, key, value, scale=self.multiplier, **options)

    def forward(self, x):
        return self.attend(self, *self.project(x))


def hidden_keys():
    return torch.arange(LENGTH) >= torch.tensor([LENGTH, 7, 4])[:, None, None, None]


def grouped(model, query, key, value):
    return model.sdpa(query, key, value, enable_gqa=True)


def padded(model, query, key, value):
    return model.sdpa(query, key, value, attn_mask=~hidden_keys())


def biased(model, query, key, value):
    return model.sdpa(query, key, value, attn_mask=model.bias)


def cached(model, query, key, value):
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[-4:]
    return model.sdpa(query[:, :, -4:], key, value, attn_mask=mask)


def written(model, query, key, value):
    return (model.scores(query, key) + model.bias).masked_fill(hidden_keys(), -torch.inf).softmax(-1) @ value


def capped(model, query, key, value):
    return (2.0 * torch.tanh(model.scores(query, key) / 2.0)).softmax(-1) @ value


def turned(model, query, key, value):
    """Keys stand left of the queries, values left of the weights."""
    return (value.mT @ (key @ (model.multiplier * query).mT).softmax(-2)).mT


def sunk(model, query, key, value):
    """A score of no key's takes part in the softmax."""
    sink = torch.full((BATCH, HEADS, LENGTH, 1), 0.7)
    return torch.cat([model.scores(query, key), sink], -1).softmax(-1)[..., :-1] @ value


def by_pair(model, query, key, value):
    """A key for each pair of positions."""
    place = torch.arange(LENGTH).float()
    apart = ((place[:, None] - place)[..., None] * torch.arange(1, 6) / 7).sin()
    keys = key.unsqueeze(2) + model.pairs(apart).unflatten(-1, (HEADS, DIM)).permute(2, 0, 1, 3)
    return (query.unsqueeze(-2) * model.multiplier @ keys.mT).squeeze(-2).softmax(-1) @ value


def twice(model, query, key, value):
    again = model.sdpa(query[:2], key[:2], value[:2], is_causal=True)
    return torch.cat([model.sdpa(query, key, value, is_causal=True), again])


def pooled(model, query, key, value):
    """Its values cannot be read."""
    return (model.scores(query, key).softmax(-1).unsqueeze(-1) * value.unsqueeze(2)).sum(-2)


@pytest.mark.parametrize("attend", [grouped, padded, biased, cached, written, capped, turned, sunk, by_pair, twice])
def test_current_weights_and_change_are_those_of_the_model(attend):
    model = Attention(attend, kv_heads=1 if attend is grouped else HEADS).eval()
    x = 2 * torch.randn(BATCH, LENGTH, HEADS * DIM)
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
        output, (_, _, value) = before[0], model.project(x)
    if attend in (padded, written):  # queries of padding do not count
        before, after = (each * ~hidden_keys().mT for each in (before, after))
    assert table["half"].output_change == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-3)
    for head in range(HEADS):
        weights, met = layer.weights(head), value[0, min(head, model.kv_heads - 1)]
        expected = output[head, : len(weights)]  # one query, where each has keys of its own
        torch.testing.assert_close(weights[:, : len(met)] @ met, expected, rtol=1e-4, atol=1e-5)


def test_the_change_of_an_output_that_is_not_known_is_not_told():
    audit = attnscale.audit(Attention(pooled), torch.randn(BATCH, LENGTH, HEADS * DIM))
    (name,) = audit.layers
    table = audit.what_if(name)
    assert math.isnan(table["unscaled"].output_change)
    assert "–" in str(table)
    with pytest.raises(SettingError, match=f"Expected one of: {name}"):
        audit.what_if("blocks.1")


def test_weights_are_not_shown_where_nothing_was_kept():
    with attnscale.watch(model := Attention(capped)) as seen:
        model(torch.randn(BATCH, LENGTH, HEADS * DIM))
    (layer,) = seen.layers.values()
    with pytest.raises(SettingError, match="keep=True"):
        layer.weights(0)
