import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnscale import attention, audit, score_stats, watch, what_if
from attnscale.diagnose import Candidate
from attnscale.diagnose.what_if import TRIED, what_if_calls
from attnscale.errors import SettingError
from attnscale.measure.statistics import STATISTICS
from attnscale.rules import RULES, yarn


@pytest.fixture
def tensors():
    return [std * torch.randn(2, 3, 17, 11) for std in (30.0, 1.0, 1.0)]


def test_every_rule_two_caps_and_a_clip_are_tried(tensors):
    table = what_if(*tensors)
    names = [row.name for row in table.rows]
    assert names[0] == "current"
    assert [name.partition(":")[0] for name in names[1 : 1 + len(RULES)]] == list(RULES)
    assert names[1 + len(RULES) :] == ["softcap:30", "softcap:50", "clip:100"]
    assert (table["softcap:30"].max <= 30, table["softcap:50"].max <= 50) == (True, True)
    assert table["calibrated"].spread == pytest.approx(1.0, rel=0.1)
    sampled = what_if(*tensors, rows=8)
    assert sampled["unscaled"].spread == pytest.approx(table["unscaled"].spread, rel=0.3)


def test_a_line_is_what_the_operator_and_the_statistics_say(tensors):
    query, key, value = tensors
    table = what_if(query, key, value, {"mine": 0.05}, is_causal=True, scale=0.02)
    line, stats = table["mine"], score_stats(query, key, scale=0.05, is_causal=True)
    before, after = (attention(query, key, value, is_causal=True, scale=scale) for scale in (0.02, 0.05))
    assert line.scale == pytest.approx(0.05)
    assert line.spread == pytest.approx(float(stats.std_within_rows.mean()))
    assert line.entropy_ratio == pytest.approx(float(stats.entropy_ratio.mean()))
    assert line.max == pytest.approx(float(stats.max.max()))
    assert line.output_change == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-5)
    assert (table["current"].scale, table["current"].output_change) == (pytest.approx(0.02), 0.0)


def test_a_clip_brings_each_head_down_to_a_hundred_and_leaves_small_heads_alone(tensors):
    query = torch.tensor([1.0, 500.0]).view(2, 1, 1) * torch.randn(1, 2, 17, 11)
    table = what_if(query, torch.randn(1, 2, 17, 11))
    assert table["current"].max > 100
    assert table["clip:100"].max == pytest.approx(100.0, rel=1e-4)
    assert table["clip:100"].spread < table["current"].spread
    assert what_if(tensors[0] / 30, *tensors[1:])["clip:100"].output_change == 0.0


def test_normalised_rules_count_by_the_norms_they_leave(tensors):
    query, key, _ = tensors
    expected = 10 * math.sqrt(query[..., 0].numel() * key[..., 0].numel()) / float(query.norm() * key.norm())
    assert what_if(*tensors)["Cosine"].scale == pytest.approx(expected, rel=1e-4)


def test_grouped_queries_are_as_their_keys_repeated(tensors):
    query, key, value = (tensor[:, :heads] for tensor, heads in zip(tensors, (2, 1, 1), strict=True))
    grouped = what_if(query, key, value, enable_gqa=True)
    repeated = what_if(query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1))
    assert grouped == repeated
    assert what_if(query, key.repeat(1, 2, 1, 1)) == what_if(query, key, key, enable_gqa=True)  # the key stands in
    with pytest.raises(SettingError, match="divide"):
        what_if(tensors[0], tensors[1][:, :2], enable_gqa=True)


def test_a_mask_is_kept(tensors):
    mask = torch.ones(17, 17, dtype=torch.bool).tril()
    masked, causal = what_if(*tensors, attn_mask=mask), what_if(*tensors, is_causal=True)
    for row, same in zip(masked.rows, causal.rows, strict=True):
        assert row.spread == pytest.approx(same.spread, rel=1e-5)
        assert row.output_change == pytest.approx(same.output_change, abs=1e-5)


def test_candidates_are_rules_names_numbers_or_settings(tensors):
    tried = {"a": "yarn:4", "b": yarn(4.0), "c": Candidate(0.1, softcap=20.0), "d": "LearnedTemperature", "e": None}
    table = what_if(*tensors, tried)
    assert [row.name for row in table.rows] == ["current", *tried]
    assert table["a"].spread == table["b"].spread
    assert table["c"].max <= 20
    assert table["e"].output_change == table["d"].output_change == 0.0
    with pytest.raises(KeyError, match="Expected one of: current, a, b"):
        table["yours"]


def test_the_table_fits_a_terminal_and_json(tensors):
    table = what_if(*tensors, {"a name far longer than any column would be": 1.0, "unscaled": "unscaled"})
    lines = str(table).splitlines()
    assert len(lines) == 5
    assert {len(line) for line in lines} == {80}
    assert lines[0].split() == ["entropy", "output"]
    assert lines[1].split() == ["scale", "spread", "entropy", "%", "of", "max", "top-1", "1−Σp²", "max", "change"]
    assert json.loads(json.dumps(table.to_dict()))["rows"][2]["name"] == "unscaled"


@pytest.mark.parametrize("shape", [(17, 11), (3, 17, 11)])
def test_tensors_without_a_batch_are_accepted(shape):
    assert what_if(torch.randn(shape), torch.randn(shape))["calibrated"].spread == pytest.approx(1.0, rel=0.1)


# An audit tries other settings on the layer itself: its bias, padding, keys, sequences and values.
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
    found = audit(model, x)
    (name,) = found.layers
    layer, half = found.layers[name], model.multiplier / 2
    table = found.what_if(name, {"same": model.multiplier, "half": half})
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


def test_the_change_of_an_unknown_output_is_not_shown():
    found = audit(Attention(pooled), torch.randn(BATCH, LENGTH, HEADS * DIM))
    (name,) = found.layers
    table = found.what_if(name)
    assert math.isnan(table["unscaled"].output_change)
    assert "–" in str(table)
    with pytest.raises(SettingError, match=f"Expected one of: {name}"):
        found.what_if("blocks.1")


def test_weights_are_not_shown_where_nothing_was_kept():
    with watch(model := Attention(capped)) as seen:
        model(torch.randn(BATCH, LENGTH, HEADS * DIM))
    (layer,) = seen.layers.values()
    with pytest.raises(SettingError, match="keep=True"):
        layer.weights(0)
