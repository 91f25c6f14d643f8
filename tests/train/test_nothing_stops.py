"""What goes wrong beside a monitor stops no training and loses no record."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from attnscale import Monitor
from attnscale.errors import NotFollowedWarning
from attnscale.models import CausalTransformer

from .training import batch, loss_of, small_model

NEVER_CLOSED = """
from attnscale import Monitor
from tests.train.training import batch, loss_of, small_model
monitors = [Monitor(small_model(), every=every) for every in (1, 2)]
for monitor in monitors:
    loss_of(monitor.model, batch()).backward()
    monitor.step()
"""


def test_monitors_that_are_never_closed_say_nothing_at_exit():
    ended = subprocess.run([sys.executable, "-c", NEVER_CLOSED], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


def new_attention(model):
    """One of two heads, in place of the first."""
    torch.manual_seed(1)
    fresh = CausalTransformer(31, d_model=24, layers=1, heads=2, head_dim=8).blocks[0].attention
    model.blocks[0].attention = fresh


@pytest.mark.parametrize("when", ["as a step begins", "while none is sampled"])
def test_an_attention_that_is_replaced_is_recorded_in_its_place(when):
    model, records = small_model(), []
    monitor = Monitor(model, every=2, rows=None, sinks=[records.append])
    for step in range(8):
        is_missed = when == "as a step begins" and step == 4  # its probe is in the attention that was replaced
        if step == (4 if when == "as a step begins" else 3):
            new_attention(model)
        with pytest.warns(NotFollowedWarning, match=r"blocks\.0") if is_missed else nullcontext():
            loss_of(model, batch(4, step)).backward()
            monitor.step()
    monitor.close()
    heads = [len(layer.numbers["max"]) for record in records if (layer := record.layers.get("blocks.0.attention"))]
    assert heads == ([3, 3, 2] if when == "as a step begins" else [3, 3, 2, 2])
    assert all("blocks.1.attention" in record.layers for record in records)


@pytest.mark.filterwarnings("default")  # a teacher runs without gradients
def test_another_model_that_runs_inside_is_no_part_of_it():
    """A frozen teacher, which the model holds in a list."""

    class Taught(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teachers = small_model(), [small_model()]

        def forward(self, tokens):
            with torch.no_grad():
                self.teachers[0](tokens)
            return self.student(tokens)

    model, records = Taught(), []
    monitor = Monitor(model, every=1, rows=None, sinks=[records.append])
    for step in range(3):
        loss_of(model, batch(4, step)).backward()
        monitor.step()
    monitor.close()
    assert {name for record in records for name in record.layers if name.startswith("student")} == {
        "student.blocks.0.attention",
        "student.blocks.1.attention",
    }
