"""Records of sampled steps: written without waiting for a GPU and never lost, with loss and learning rate."""

import json
import math
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from attnscale import Monitor
from attnscale.acting import clip_qk_
from attnscale.errors import NotRecordedWarning
from attnscale.train import Record, summarise
from attnscale.train.sinks import scalars
from attnscale.train.tally import PendingTallies

from .logs import line
from .test_sinks import record
from .training import batch, loss_of, small_model


@pytest.fixture
def busy(monkeypatch):
    """A device that is never done when it is asked."""
    monkeypatch.setattr(PendingTallies, "has_arrived", False)


@pytest.fixture
def run(busy):
    model, records = small_model(), []
    monitor = Monitor(model, every=2, rows=None, sinks=[records.append])
    loss_of(model, batch()).backward()
    monitor.step()
    assert not records
    return monitor, records


@pytest.mark.parametrize(
    "asks",
    [
        lambda monitor: monitor.step(),
        lambda monitor: monitor.last,
        lambda monitor: monitor.history,
        lambda monitor: monitor.growth("blocks.0.attention"),
        lambda monitor: monitor.state_dict(),
        lambda monitor: monitor.load_state_dict({"steps": 0, "history": {}}),
        lambda monitor: monitor.close(),
    ],
)
def test_a_late_record_is_written_once_when_the_next_step_ends_or_when_it_is_read(run, asks):
    monitor, records = run
    asks(monitor)
    assert [record.step for record in records] == [0]
    monitor.close()
    assert len(records) == 1


def test_an_exception_in_the_next_step_does_not_lose_the_record(run):
    monitor, records = run
    with pytest.raises(ZeroDivisionError), monitor:
        raise ZeroDivisionError
    assert [record.step for record in records] == [0]


def test_clipping_does_not_wait_for_the_record(run):
    monitor, records = run
    largest = max(float(layer.stats.max.max()) for layer in monitor.layers.values())
    assert clip_qk_(monitor.model, monitor, threshold=largest / 2).heads
    assert not records
    assert max(layer.whole("max") for layer in monitor.last.layers.values()) == pytest.approx(largest)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_record_is_of_the_sampled_step_whether_it_is_late_or_not(is_late, monkeypatch):
    monkeypatch.setattr(PendingTallies, "has_arrived", not is_late)
    model, records, largest = small_model(), [], []
    monitor = Monitor(model, every=1, rows=None, sinks=[records.append])
    for step in range(3):
        loss_of(model, batch(4, step)).backward()
        monitor.step()
        assert len(records) == step + (not is_late)
        largest.append(max(float(layer.stats.max.max()) for layer in monitor.layers.values()))
    monitor.close()
    recorded = [max(layer.whole("max") for layer in record.layers.values()) for record in records]
    assert ([record.step for record in records], recorded) == ([0, 1, 2], pytest.approx(largest))


ENDS_EARLY = """
from attnscale import Monitor
from attnscale.train.tally import PendingTallies
from tests.train.training import batch, loss_of, small_model
PendingTallies.has_arrived = False
monitors = [Monitor(small_model(), every, sinks=[lambda record: print("step", record.step)]) for every in (1, 2)]
for monitor in monitors:
    loss_of(monitor.model, batch()).backward()
    monitor.step()
raise SystemExit(3)
"""


def test_a_process_that_ends_without_closing_its_monitors_writes_their_records():
    ended = subprocess.run([sys.executable, "-c", ENDS_EARLY], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "step 0\nstep 0\n", "")


@pytest.fixture
def learning():
    """A model, its monitor of every second step, and the records."""
    model, records = small_model(), []
    monitor = Monitor(model, every=2, rows=4, sinks=[records.append])
    yield model, monitor, records
    monitor.close()


def test_loss_and_learning_rate_are_given_with_the_step(learning):
    model, monitor, records = learning
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


def test_within_a_step_the_latest_loss_and_rate_count_and_for_that_step_only(learning):
    model, monitor, records = learning
    monitor.cancel()
    with monitor:
        loss_of(model, batch()).backward()
        monitor.note(loss=7.0, lr=torch.tensor(0.5))
        monitor.note(loss=torch.tensor([1.0, 3.0]))  # of two devices
    for _ in range(2):
        with monitor:
            loss_of(model, batch()).backward()
    assert [(found.loss, found.lr) for found in records] == [(2.0, 0.5), (None, None)]


def test_the_loss_of_a_step_that_is_not_sampled_is_not_read(learning):
    _, monitor, records = learning
    monitor.steps = 1
    monitor.cancel()
    monitor.step(loss="not a number", lr=0.1)
    assert (monitor.steps, records) == (2, [])


def test_a_log_distinguishes_a_loss_that_was_nan_from_one_that_was_not_given():
    given = replace(record(), loss=math.nan, lr=3e-4).to_line()
    assert (json.loads(given)["loss"], json.loads(given)["lr"]) == (None, 3e-4)
    found, old = Record.from_line(given), Record.from_line(line().encode())
    assert (math.isnan(found.loss), found.lr, old.loss, old.lr) == (True, 3e-4, None, None)
    assert not {"loss", "lr"} & record().to_dict().keys()


def test_sinks_have_loss_and_rate_as_curves_and_a_run_has_the_first_and_last_loss():
    found = dict(scalars(replace(record(), loss=2.5, lr=math.nan)))
    assert found["attnscale/loss"] == 2.5
    assert "attnscale/lr" not in found
    records = [replace(record(step), loss=loss) for step, loss in ((0, 3.0), (1, None), (2, 2.0))]
    assert summarise(records).losses == (3.0, 2.0)
    assert summarise(records).to_dict()["losses"] == [3.0, 2.0]
