import math

import pytest

from attnscale.claims.settings import SETTINGS, find, language_models, llama4_temperature


@pytest.mark.parametrize(
    ("model", "relative"),
    [
        ("GPT-2", 1.0),
        ("LLaMA-2 7B", 1.0),
        ("T5-base", 8.0),
        ("Gemma-2 27B", math.sqrt(128 / 144)),
        ("Granite 3.1 2B", 1 / 8),
    ],
)
def test_a_multiplier_is_told_relative_to_one_over_root_dim(model, relative):
    assert find(model).relative == pytest.approx(relative)
    assert find(model).standard == (relative == 1.0)


def test_every_setting_says_where_it_is_stated_and_a_learned_one_is_not_standard():
    assert all(setting.stated for setting in SETTINGS)
    assert not find("Swin-v2").standard


def test_language_models_are_picked_by_year_and_size():
    assert {setting.model for setting in language_models(since=2019, before=2020)} == {"GPT-2", "T5-base"}
    assert "stories15M" not in {setting.model for setting in language_models(millions=100)}
    assert "Swin-v2" not in {setting.model for setting in language_models()}


def test_llama_4_leaves_its_first_8191_tokens_at_the_standard_scale():
    assert llama4_temperature(8190) == 1.0
    assert llama4_temperature(8191) == pytest.approx(1 + 0.1 * math.log(2))
