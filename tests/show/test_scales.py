"""Rules as tables: every rule whose scale is a number, and no other."""

import math
from dataclasses import dataclass

import pytest
import torch

from attnscale.rules import RULES, QKNorm, about
from attnscale.show.scales import tabulated_rules

RANGES = ((1, 1024), (2, 2**20), (0.01, 100.0))
LEARNED = {"LearnedTemperature", "QueryTemperature", "QKNorm", "Cosine"}


def tabulated():
    return {rule["name"]: rule for rule in tabulated_rules(*RANGES)}


def describe(rule):
    return about("a formula", "a source", "a use", needs_visible=True)(rule)


@describe
def by_length(query, key, visible=None):
    return query, key, query.shape[-1] ** -0.5 * (1 + 0.1 * math.log1p(key.shape[-2] / 8192))


@describe
def mixed(query, key, visible=None):
    return query, key, 1 / (query.shape[-1] + key.shape[-2])


@describe
def looking(query, key, visible=None):
    return query, key, 1 / float(query.norm())


@describe
def touching(query, key, visible=None):
    return query * 2, key, 1.0


@describe
@dataclass(frozen=True)
class two_numbers:  # noqa: N801
    first: float
    second: float

    def __call__(self, query, key, visible=None):
        return query, key, self.first * self.second


def test_every_rule_that_learns_nothing_is_tabulated():
    assert list(tabulated()) == [name for name in RULES if name not in LEARNED]


def test_a_rule_that_is_new_to_the_catalogue_is_tabulated(monkeypatch):
    monkeypatch.setitem(RULES, "by_length", by_length)
    added = tabulated()["by_length"]
    assert [factor["of"] for factor in added["factors"]] == ["d", "n"]
    assert len(added["factors"][0]["at"]) == 2 < len(added["factors"][1]["at"])  # a power of d, but not of n


@pytest.mark.parametrize("rule", [mixed, looking, touching, two_numbers, QKNorm(11, 3)])
def test_a_rule_that_is_no_product_of_numbers_is_left_out(monkeypatch, rule):
    monkeypatch.setitem(RULES, "odd", rule)
    assert "odd" not in tabulated()


def test_a_parameter_keeps_to_what_its_rule_accepts():
    rules = tabulated()
    assert rules["yarn"]["parameter"] == {"name": "factor", "low": 1.0, "high": 400.0, "start": 4.0, "integer": False}
    assert rules["mup"]["parameter"]["start"] == RULES["mup"].base
    assert rules["unscaled"]["parameter"] is None
    assert torch.tensor([rule["log_scale"] for rule in rules.values()]).isfinite().all()
