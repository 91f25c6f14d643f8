"""Modules that attend at some steps alone: QKClip and Monitor miss none of them."""

import pytest
import torch
from torch import nn

import attnscale
from attnscale import Monitor, QKClip
from attnscale.errors import NotFollowedWarning, NotInsideWarning

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
    with pytest.warns(NotInsideWarning, match="some of them run at some steps alone"):
        found, is_inside = clipped(model, model, [(0, 1), (0, 1), (0, 2), (0, 1), (0, 2)] * 3)
    assert not is_inside
    assert [number for number, (over, done) in enumerate(found) if over != done] == [2]


def test_nothing_is_left_in_place_of_modules_that_were_looked_out_for():
    model = towers()
    clipped(model, model, [(0, 1)] * 3)
    assert not [module for module in model.modules() if "LookedAt" in str(type(module).__mro__)]


def test_a_monitor_inside_tells_of_a_module_that_begins_to_run_and_records_it():
    torch._dynamo.reset()
    model, records = towers(), []
    run = torch.compile(model, backend="aot_eager")
    monitor = Monitor(model, 1, None, [records.append])

    def step(used):
        model.used = used
        run(data(0)).square().mean().backward()
        monitor.step()

    step((0, 1))
    step((0, 1))
    with pytest.warns(NotFollowedWarning, match=r"blocks\.2: it did not run when the model was followed"):
        step((0, 1, 2))
    step((0, 1, 2))
    monitor.close()
    assert set(records[-1].layers) == {f"blocks.{number}.attention" for number in range(3)}
    with torch.no_grad(), attnscale.watch(model, rows=None) as seen:
        model(data(0))
    for name, layer in seen.layers.items():
        assert records[-1].layers[name].numbers["max"] == pytest.approx(layer.stats.max.tolist(), rel=1e-4)
