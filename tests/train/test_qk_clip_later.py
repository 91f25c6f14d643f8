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
ALL = (0, 1, 2)
WAYS = {
    "eager": lambda model: model,
    "aot_eager": lambda model: torch.compile(model, backend="aot_eager"),
    "one graph": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
}


class Twice:
    """Attends a second time, from larger queries, where it is told to."""

    is_told = False  # its own, once a step has begun: Dynamo of torch 2.11 does not look at a class again

    def forward(self, x):
        once = super().forward(x)
        return once + super().forward(3.0 * x) if self.is_told else once


class Again(Twice, Attention):
    pass


class AgainWrittenOut(Twice, WrittenOut):
    pass


class Towers(nn.Module):
    """Blocks of which some steps leave some out, as a batch without pictures does."""

    def __init__(self, kind=Attention):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.used = nn.ModuleList(Block(kind, None) for _ in ALL), ALL
        self(data(0))

    def forward(self, x):
        for number in self.used:
            x = self.blocks[number](x)
        return x


def largest_by_block(heads):
    found = {}
    for layer, largest in heads:
        block = layer[: len("blocks.0")]
        found[block] = max(largest, found.get(block, 0.0))
    return found


def steps_missed(model, run, steps):
    """The steps, of blocks used and whether they attend twice, at which a block was clipped by less than its maximum.

    Also return, for each step, if it ended with probes.
    """
    missed, is_inside = [], []
    with QKClip(model, THRESHOLD) as clip:
        for number, (model.used, is_told) in enumerate(steps):
            with torch.no_grad():
                for block in model.blocks:
                    block.attention.is_told = is_told
                for used in model.used:
                    model.blocks[used].attention.q_proj.weight *= 7.0
            copied = deepcopy(model)
            with torch.no_grad(), attnscale.watch(copied, rows=None) as seen:
                copied(data(number))
            expected = largest_by_block((name, float(layer.stats.max.max())) for name, layer in seen.layers.items())
            run(data(number)).square().mean().backward()
            report = clip.step()
            heads = () if report is None else report.heads
            found = largest_by_block((head.layer, head.maximum) for head in heads)
            if found != pytest.approx(expected, rel=1e-4):
                missed.append(number)
            is_inside.append(clip.is_inside)
    return missed, is_inside


@pytest.mark.parametrize(("kind", "before", "later"), [
    (Attention, ((0, 1), False), (ALL, False)),
    (WrittenOut, ((0, 1), False), (ALL, False)),
    (Again, (ALL, False), (ALL, True)),
    (AgainWrittenOut, (ALL, False), (ALL, True)),
])  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_begins_to_attend_or_to_attend_twice_is_clipped_from_its_second_step_on(way, kind, before, later):
    torch._dynamo.reset()
    model = Towers(kind)
    missed, is_inside = steps_missed(model, WAYS[way](model), [before] * 3 + [later] * 4)
    assert missed == [3]
    assert is_inside[-1]


@pytest.mark.parametrize(
    ("kind", "turns", "message", "expected"),
    [
        (
            Attention,
            [(0, 1), (0, 1), (0, 2), (0, 1), (0, 2)] * 3,
            "at some steps only|did not run where they ran",
            [2, 4],
        ),
        (Again, [False, False, True] * 7, "run more often, at some steps only", [2, 5, 8, 11, 14, 17]),
    ],
)
def test_modules_that_attend_in_turns_are_followed_at_every_step_with_a_warning(kind, turns, message, expected):
    model = Towers(kind)
    steps = [(each, False) if isinstance(each, tuple) else (ALL, each) for each in turns]
    with pytest.warns(NotInsideWarning, match=message):
        missed, is_inside = steps_missed(model, model, steps)
    assert missed == expected
    assert not is_inside[-1]


def test_a_model_that_seldom_attends_twice_keeps_its_probes():
    model, is_inside = Towers(Again), []
    with QKClip(model, THRESHOLD) as clip:
        for number in range(250):
            for block in model.blocks:
                block.attention.is_told = number % 40 == 39
            model(data(number)).square().mean().backward()
            clip.step()
            is_inside.append(clip.is_inside)
    assert is_inside[-1]
    assert is_inside.count(False) == 6
