"""A monitor that knows a model misses no attention of a step at which it runs otherwise, or says that it may."""

import math
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnscale
from attnscale import Monitor
from attnscale.errors import NotFollowedWarning, NotInsideWarning

from ..zoo.entry import SelfAttention

BATCH, LENGTH, HEADS, HEAD_DIM = 2, 7, 3, 11
LARGER = 13.0  # queries, the second time
MORE = {  # of attention than was traced
    "beside": lambda q, k, v, out: out + F.scaled_dot_product_attention(LARGER * q, k, v),
    "chained": lambda q, k, v, out: F.scaled_dot_product_attention(LARGER * q, k, out),
    "with other heads": lambda q, k, v, out: out + F.scaled_dot_product_attention(
        LARGER * q[:, :1], k[:, :1], v[:, :1]
    ),
    "detached": lambda q, k, v, out: out + F.scaled_dot_product_attention(LARGER * q, k, v).detach(),
    "dropped": lambda q, k, v, out: (out, F.scaled_dot_product_attention(LARGER * q, k, v))[0],
}  # fmt: skip


class Attends(SelfAttention):
    """Attends once, and then what it is told to; or not at all."""

    attends, then = True, None

    def forward(self, x):
        query, key, value = self.project(x)
        if not self.attends:
            return self.merge(value)
        out = F.scaled_dot_product_attention(query, key, value)
        return self.merge(out if self.then is None else self.then(query, key, value, out))


class Towers(nn.Module):
    """Attentions, of which some steps leave some out; run again in the backward pass where `again` says how."""

    def __init__(self, again=None):
        super().__init__()
        self.towers = nn.ModuleList(Attends(HEADS * HEAD_DIM, HEADS) for _ in range(2))
        self.used, self.again, self.factors = (0, 1), again, ()

    def forward(self, x):
        for number in self.used:
            tower = self.towers[number]
            x = x + (tower(x) if self.again is None else checkpoint(tower, x, use_reentrant=self.again))
        for factor in self.factors:
            x = factor * x
        return x


class Run:
    """A model in training, every step of which is sampled and recorded."""

    def __init__(self, again=None):
        torch.manual_seed(0)
        self.model, self.records = Towers(again), []
        self.monitor = Monitor(self.model, 1, None, [self.records.append])
        self.x = torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM, requires_grad=True)

    def step(self, told=None):
        with nullcontext() if told is None else pytest.warns(NotFollowedWarning, match=told):
            self.model(self.x).square().mean().backward()
            self.monitor.step()
        return self.records[-1].layers

    def largest(self, tower):
        """The largest score of a tower that was recorded last, and the true one."""
        copied = deepcopy(self.model)  # whose runs are not recorded
        copied.again = None
        with torch.no_grad(), attnscale.watch(copied, rows=None) as seen:
            copied(self.x)
        name = f"towers.{tower}"
        recorded = [max(each.numbers["max"]) for path, each in self.records[-1].layers.items() if name in path]
        true = [float(each.stats.max.max()) for path, each in seen.layers.items() if name in path]
        return max(recorded), pytest.approx(max(true), rel=1e-5)


AGAIN_IN_BACKWARD = pytest.mark.parametrize(
    "again",
    [None, False, pytest.param(True, marks=pytest.mark.filterwarnings("ignore:Attention ran with gradients off"))],
    ids=["plain", "checkpointed", "reentrant"],
)


@AGAIN_IN_BACKWARD
@pytest.mark.parametrize("way", MORE)
def test_a_module_that_attends_more_than_planned_is_reported_and_traced_at_the_next_step(way, again):
    run = Run(again)
    for _ in range(2):
        run.step()
    run.model.towers[1].then = MORE[way]
    layers = run.step(told=r"towers\.1: its attention differs from the trace")
    assert layers["towers.0"].whole("scale_applied") == pytest.approx(HEAD_DIM**-0.5)
    layers = run.step()
    assert list(layers) == ["towers.0", "towers.1", "towers.1#2"]
    assert all(math.isfinite(each.whole("scale_applied")) for each in layers.values())
    recorded, true = run.largest(1)
    assert recorded == true


def attends_now(run):
    run.model.towers[1].attends = True
    return r"towers\.1: it attends now, but did not when the model was traced"


def runs_now(run):
    run.model.used = (0, 1)
    return r"towers\.1: it did not run when the model was traced"


@pytest.mark.parametrize("again", [None, False], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("begin", [attends_now, runs_now])
def test_a_module_that_begins_to_attend_gives_a_warning_and_is_recorded_from_the_next_step(begin, again):
    run = Run(again)
    run.model.towers[1].attends, run.model.used = begin is runs_now, (0,) if begin is runs_now else (0, 1)
    for _ in range(2):
        assert list(run.step()) == ["towers.0"]
    run.step(told=begin(run))
    assert list(run.step()) == ["towers.0", "towers.1"]
    recorded, true = run.largest(1)
    assert recorded == true


def test_a_module_that_attends_at_some_steps_only_is_missed_twice_and_then_never():
    run, missed = Run(), []
    tower = run.model.towers[1]

    def steps():
        for number in range(17):
            tower.attends = number % 3 == 2
            found = run.step(told="it attends now, but did not" if len(missed) < 2 and tower.attends else None)
            if tower.attends and "towers.1" not in found:
                missed.append(number)

    with pytest.warns(NotInsideWarning, match="the whole model is traced.*: they missed attentions twice"):
        steps()
    assert missed == [2, 5]


@pytest.mark.filterwarnings("ignore::attnscale.errors.NotFollowedWarning")
def test_attention_that_is_missed_seldom_does_not_end_probing():
    run, missed = Run(), []
    for number in range(120):
        run.model.towers[1].attends = is_due = number % 40 == 39
        if is_due != ("towers.1" in run.step()):
            missed.append(number)
    assert missed == [39, 79, 119]  # a traced step would have it


@AGAIN_IN_BACKWARD
def test_other_operations_that_come_and_go_give_no_warning_and_all_attention_is_read(again):
    run = Run(again)
    run.model.towers[0].then = MORE["beside"]  # always: it is seen by a mode
    run.step()
    for run.model.factors in ((), (2.0,), (2.0, 3.0), ()):
        layers = run.step()
        assert list(layers) == ["towers.0", "towers.0#2", "towers.1"]
