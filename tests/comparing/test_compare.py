"""compare: names what changed, and nothing else."""

import copy
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

import attnscale
from attnscale.comparing import StatisticChange
from attnscale.comparing.profiles import save_profile
from attnscale.comparing.sides import profile_of
from attnscale.errors import SettingError
from tests.comparing.models import bundled, encoder, texts, with_a_head

LENGTH = 96


@pytest.fixture(scope="module")
def model():
    return bundled()


@pytest.fixture(scope="module")
def batch():
    return texts(6, LENGTH)


def named(comparison):
    return {(head.layer, head.head) for head in comparison.changed}


def unknown(profile):
    """Forget the parameters, as a log does."""
    return replace(profile, layers={name: replace(layer, weights="") for name, layer in profile.layers.items()})


@pytest.mark.parametrize(
    ("block", "head", "factor", "side"), [(0, 0, 1.1, "query"), (1, 3, 0.5, "key"), (3, 2, 1.03, "query")]
)
def test_a_copy_with_one_head_changed_names_that_head_and_no_other(model, batch, block, head, factor, side):
    found = attnscale.compare(model, with_a_head(model, block, head, factor, side), batch)
    assert named(found) == {(f"blocks.{block}.attention", head)}
    moves = found.changed[0].moves
    assert moves["spread"].change == pytest.approx(np.log(factor), abs=1e-4)
    assert moves[f"{side}_norm"].is_significant
    assert not moves["scale_applied"].is_significant
    assert not moves["alignment"].is_significant
    assert found.changed[0].by_factor.grown_factor() == ("norms" if factor > 1 else "")
    assert f"blocks.{block}.attention, head {head}" in found.conclusion
    assert bool(found.worse) == (factor > 1)


def test_heads_with_changed_inputs_are_listed_separately(model, batch):
    other = with_a_head(model, 0, 1, 3.0)
    with torch.no_grad():
        other.blocks[0].attention.output.weight *= 6.0
    found = attnscale.compare(model, other, batch)
    assert named(found) == {("blocks.0.attention", 1)}
    assert found.carried
    assert all(head.layer != "blocks.0.attention" for head in found.carried)


def test_two_samples_of_one_model_name_none_even_where_parameters_are_unknown(model):
    profiles = [
        unknown(profile_of(model, "model", (texts(6, LENGTH, start),), {}, None)) for start in range(0, 5000, 900)
    ]
    told = [attnscale.compare(one, other) for one, other in combinations(profiles, 2)]
    assert sum(bool(found.changed) for found in told) <= 1  # of 15: one in twenty may, by chance
    assert all("inputs differ" in " ".join(found.notes) for found in told)


def test_sampled_rows_of_one_model_name_none(model, batch):
    found = attnscale.compare(*(unknown(profile_of(model, "model", (batch,), {}, 16)) for _ in range(2)))
    assert not found.changed


def test_other_inputs_still_name_the_head_that_changed(model):
    other = with_a_head(model, 2, 1, 3.0)
    sides = [profile_of(each, "model", (texts(6, LENGTH, at),), {}, None) for each, at in ((model, 0), (other, 700))]
    found = attnscale.compare(*sides)
    assert ("blocks.2.attention", 1) in named(found)
    assert len(named(found)) == 1


def test_packed_projections_know_their_heads():
    model, batch = encoder(), torch.randn(5, 17, 66)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layers[0].self_attn.in_proj_weight[22:44] *= 2.0  # queries of the second of three heads
    found = attnscale.compare(model, other, batch)
    assert named(found) == {("layers.0.self_attn", 1)}


def test_a_new_rule_is_a_change_of_every_head_by_its_scale(model, batch):
    other = copy.deepcopy(model)
    for block in other.blocks:
        block.attention.scale = "inverse_dim"
    found = attnscale.compare(model, other, batch[:, :48])
    assert len(found.changed) == 16
    assert all(head.moves["scale_applied"].is_significant for head in found.changed)


def test_findings_come_and_go(batch):
    class Wrong(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.qkv, self.scale = nn.Linear(66, 198), scale

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return torch.softmax(q @ k.mT * self.scale, -1) @ v

    torch.manual_seed(0)
    right, x = Wrong(66**-0.5), torch.randn(4, 13, 66)
    wrong = copy.deepcopy(right)
    wrong.scale = 1.0
    forth, back = attnscale.compare(right, wrong, x), attnscale.compare(wrong, right, x)
    assert [finding.code for finding in forth.new] == ["unscaled"]
    assert [finding.code for finding in back.gone] == ["unscaled"]
    assert not forth.gone
    assert not back.new
    assert any("unscaled" in sentence for sentence in forth.worse)
    assert forth.changed[0].moves["scale_applied"].is_significant


def test_one_sequence_gives_no_error_estimate_and_a_note_says_so(model, batch):
    found = attnscale.compare(model, with_a_head(model, 0, 0, 2.0), batch[:1])
    assert not found.changed
    assert "one sequence" in " ".join(found.notes)


def test_a_batch_along_the_second_axis_is_not_cut_into_positions():
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(22, 2)

        def forward(self, x):
            return self.attention(x, x, x)[0]

    torch.manual_seed(0)
    model = First().eval()
    found = attnscale.compare(model, copy.deepcopy(model), torch.randn(7, 3, 22))
    assert "one sequence" in " ".join(found.notes)


def test_layers_of_one_model_only_are_noted(model, batch):
    shorter = copy.deepcopy(model)
    shorter.blocks = shorter.blocks[:3]
    found = attnscale.compare(model, shorter, batch)
    assert "the first model has the layer blocks.3.attention" in " ".join(found.notes)
    assert not found.changed


def test_sides_that_cannot_be_compared_are_refused_with_a_sentence(model):
    with pytest.raises(SettingError, match="inputs to run the models on"):
        attnscale.compare(model, model)
    with pytest.raises(SettingError, match="a model, its name, or a file"):
        attnscale.compare(3, model)
    with pytest.raises(SettingError, match="at least 0"):
        attnscale.compare(model, model, torch.zeros(1), tolerance=-1)


def test_a_change_is_shown_without_powers_of_ten():
    assert StatisticChange("spread", 1.0, 264.3, np.log(264.3), 0.04, 0.0).text == "× 264 ± 10"
    assert StatisticChange("entropy_ratio", 0.5, 0.25, -0.25, 0.0002, 0.0).text == "-25.00 ± 0.02"


class Masked(nn.Module):
    """Two layers of attention under a window each."""

    def __init__(self, *windows):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.MultiheadAttention(22, 2, batch_first=True) for _ in windows)
        self.windows = windows

    def forward(self, x):
        offsets = torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]
        for layer, window in zip(self.layers, self.windows, strict=True):
            x = x + layer(x, x, x, attn_mask=(offsets > 0) | (offsets <= -window), need_weights=False)[0]
        return x


@pytest.mark.parametrize("sequences", [1, 5])
def test_heads_whose_mask_changed_are_not_moved_by_their_inputs(sequences):
    batch = torch.randn(sequences, 13, 22)
    found = attnscale.compare(Masked(5, 7), Masked(6, 7), batch)
    assert named(found) == {("layers.0", 0), ("layers.0", 1)}
    assert all(head.sees_others and head.reason == "its mask" for head in found.changed)
    assert all(head.layer == "layers.1" for head in found.carried)
    assert "its queries see other keys" in str(found)
    assert "its queries see other keys" in found.conclusion
    same = attnscale.compare(Masked(5, 7), Masked(5, 7), batch)
    assert not any(head.sees_others for head in same.heads)


def test_a_saved_check_knows_visible_keys(tmp_path):
    sides = [profile_of(Masked(*each), "model", (torch.ones(2, 13, 22),), {}, None) for each in ((5, 7), (5, 8))]
    save_profile(sides[0], tmp_path / "before.json")
    found = attnscale.compare(tmp_path / "before.json", sides[1])
    assert {head.layer for head in found.heads if head.sees_others} == {"layers.1"}
