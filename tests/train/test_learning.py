"""Loss and learning rate in records, logs and sinks."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from attnscale import Monitor
from attnscale.errors import NotRecordedWarning
from attnscale.train import Record, summarise
from attnscale.train.sinks import scalars

from .logs import line
from .test_sinks import record
from .training import batch, loss_of, small_model


@pytest.fixture
def run():
    """A model, its monitor of every second step, and the records."""
    model, records = small_model(), []
    monitor = Monitor(model, every=2, rows=4, sinks=[records.append])
    yield model, monitor, records
    monitor.close()


def test_they_are_given_with_the_step(run):
    model, monitor, records = run
    losses = []
    for step in range(3):
        loss = loss_of(model, batch(seed=step))
        loss.backward()
        losses.append(loss.item())
        monitor.note(loss=loss, lr=0.1 / (step + 1))
        loss.detach().fill_(9.0)  # as a loop may
        with pytest.warns(NotRecordedWarning, match="could not convert") if step == 0 else nullcontext():
            monitor.step(loss="low" if step == 0 else None)  # no number, which loses no record
    assert [found.loss for found in records] == pytest.approx(losses[::2])
    assert [found.lr for found in records] == pytest.approx([0.1, 0.1 / 3])


def test_or_inside_of_it_where_the_latest_stand_and_are_of_that_step_alone(run):
    model, monitor, records = run
    monitor.cancel()
    with monitor:
        loss_of(model, batch()).backward()
        monitor.note(loss=7.0, lr=torch.tensor(0.5))
        monitor.note(loss=torch.tensor([1.0, 3.0]))  # of two devices
    for _ in range(2):
        with monitor:
            loss_of(model, batch()).backward()
    assert [(found.loss, found.lr) for found in records] == [(2.0, 0.5), (None, None)]


def test_the_loss_of_a_step_that_is_not_sampled_is_not_looked_at(run):
    _, monitor, _ = run
    monitor.steps = 1
    monitor.cancel()
    monitor.step(loss="which would be no number", lr=0.1)


def test_a_log_keeps_them_and_tells_one_that_was_none_from_one_that_was_not_given():
    given = replace(record(), loss=math.nan, lr=3e-4).to_line()
    assert (json.loads(given)["loss"], json.loads(given)["lr"]) == (None, 3e-4)
    found, old = Record.from_line(given), Record.from_line(line().encode())
    assert (math.isnan(found.loss), found.lr, old.loss, old.lr) == (True, 3e-4, None, None)
    assert not {"loss", "lr"} & record().to_dict().keys()


def test_sinks_have_them_as_curves_and_a_run_as_a_pair():
    found = dict(scalars(replace(record(), loss=2.5, lr=math.nan)))
    assert found["attnscale/loss"] == 2.5
    assert "attnscale/lr" not in found
    records = [replace(record(step), loss=loss) for step, loss in ((0, 3.0), (1, None), (2, 2.0))]
    assert summarise(records).losses == (3.0, 2.0)
    assert summarise(records).to_dict()["losses"] == [3.0, 2.0]
