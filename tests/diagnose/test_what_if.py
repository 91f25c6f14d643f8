import json
import math

import pytest
import torch

from attnscale import attention, score_stats, what_if
from attnscale.diagnose import Candidate
from attnscale.errors import SettingError
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
def test_tensors_without_a_batch_are_taken(shape):
    assert what_if(torch.randn(shape), torch.randn(shape))["calibrated"].spread == pytest.approx(1.0, rel=0.1)
