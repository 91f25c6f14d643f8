"""Modules that attend at some steps alone: QKClip misses none of them for more than one."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import attnscale
from attnscale import QKClip
from attnscale.errors import NotInsideWarning

from .clip_runs import Attention, Block, WrittenOut, data

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what its compiler imports
    pytest.mark.filterwarnings("ignore:Using `torch.compile"),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature"),
]
THRESHOLD = 0.5


class Towers(nn.Module):
    """Blocks of which some steps leave some out, as a batch without pictures does."""

    def __init__(self, kind=Attention):
        super().__init__()
        self.blocks, self.used = nn.ModuleList(Block(kind, None) for _ in range(3)), (0, 1, 2)

    def forward(self, x):
        for number in self.used:
            x = self.blocks[number](x)
        return x


def towers(kind=Attention):
    torch.manual_seed(0)
    model = Towers(kind)
    model(data(0))
    with torch.no_grad():
        for block in model.blocks:
            block.attention.q_proj.weight *= 7.0
    return model


def clipped(model, run, steps):
    """The blocks that were over the threshold at each step, those that were clipped, and whether it ends inside."""
    found = []
    with QKClip(model, THRESHOLD) as clip:
        for number, model.used in enumerate(steps):
            over = {f"blocks.{used}.attention" for used in model.used}
            with torch.no_grad():
                for used in model.used:
                    model.blocks[used].attention.q_proj.weight *= 7.0
            run(data(number)).square().mean().backward()
            report = clip.step()
            found.append((over, set() if report is None else {head.layer for head in report.heads}))
        return found, clip.is_inside


WAYS = {
    "eager": lambda model: model,
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager"),
    "one graph": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
}


@pytest.mark.parametrize("kind", [Attention, WrittenOut])
@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_begins_to_run_is_clipped_from_its_second_step_on(way, kind):
    torch._dynamo.reset()
    model = towers(kind)
    found, is_inside = clipped(model, WAYS[way](model), [(0, 1)] * 3 + [(0, 1, 2)] * 4)
    late = "blocks.2.attention"
    assert [(number, over - done) for number, (over, done) in enumerate(found) if over != done] == [(3, {late})]
    assert is_inside


def test_modules_that_run_in_turns_are_followed_at_every_step_and_that_is_told():
    model = towers()
    with pytest.warns(NotInsideWarning, match=r"at some steps only|did not run where they ran"):
        found, is_inside = clipped(model, model, [(0, 1), (0, 1), (0, 2), (0, 1), (0, 2)] * 3)
    assert not is_inside
    assert [number for number, (over, done) in enumerate(found) if over != done] == [2, 4]


class Again(Attention):
    """Attends a second time, from larger queries, where it is told to."""

    is_told = False  # its own, once a step has begun: Dynamo of torch 2.11 does not look at a class again

    def forward(self, x):
        once = super().forward(x)
        return once + super().forward(3.0 * x) if self.is_told else once


class AgainWrittenOut(WrittenOut):
    """The same, written out."""

    is_told = False

    def forward(self, x):
        once = super().forward(x)
        return once + super().forward(3.0 * x) if self.is_told else once


def maxima(model, run, steps):
    """The largest score of the first layer at each step, that which was told, and whether it ends inside."""
    found = []
    with QKClip(model, THRESHOLD) as clip:
        for number, is_told in enumerate(steps):
            with torch.no_grad():
                for block in model.blocks:
                    block.attention.is_told = is_told
                    block.attention.q_proj.weight *= 7.0
            copied = deepcopy(model)
            with torch.no_grad(), attnscale.watch(copied, rows=None) as seen:
                copied(data(number))
            largest = max(float(each.stats.max.max()) for name, each in seen.layers.items() if "blocks.0" in name)
            run(data(number)).square().mean().backward()
            report = clip.step()
            found.append((largest, max(head.maximum for head in report.heads if "blocks.0" in head.layer)))
        return found, clip.is_inside


def steps_missed(found):
    return [number for number, (largest, told) in enumerate(found) if told != pytest.approx(largest, rel=1e-4)]


@pytest.mark.parametrize("kind", [Again, AgainWrittenOut])
@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_begins_to_attend_twice_is_clipped_by_both_from_the_next_step_on(way, kind):
    torch._dynamo.reset()
    model = towers(kind)
    found, is_inside = maxima(model, WAYS[way](model), [False] * 3 + [True] * 4)
    assert steps_missed(found) == [3]
    assert is_inside


def test_a_module_that_attends_twice_at_some_steps_is_followed_at_every_step_and_that_is_told():
    model = towers(Again)
    with pytest.warns(NotInsideWarning, match="run more often, at some steps only"):
        found, is_inside = maxima(model, model, [False, False, True] * 7)
    assert not is_inside
    assert steps_missed(found) == [2, 5, 8, 11, 14, 17]


def test_a_model_that_seldom_attends_twice_keeps_its_probes():
    model, found = towers(Again), []
    with QKClip(model, THRESHOLD) as clip:
        for number in range(250):
            for block in model.blocks:
                block.attention.is_told = number % 40 == 39
            model(data(number)).square().mean().backward()
            clip.step()
            found.append(clip.is_inside)
    assert found[-1]
    assert found.count(False) == 6
