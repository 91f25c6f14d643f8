"""A record that a GPU is not waited for: written when the next step is over, or when it is asked for; never lost."""

import subprocess
import sys

import pytest

from attnscale import Monitor
from attnscale.acting import clip_qk_
from attnscale.train.tally import PendingTallies

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
def test_it_is_written_when_the_next_step_is_over_or_when_it_is_asked_for_and_once(run, asks):
    monitor, records = run
    asks(monitor)
    assert [record.step for record in records] == [0]
    monitor.close()
    assert len(records) == 1


def test_an_exception_in_the_next_step_does_not_lose_it(run):
    monitor, records = run
    with pytest.raises(ZeroDivisionError), monitor:
        raise ZeroDivisionError
    assert [record.step for record in records] == [0]


def test_clipping_needs_not_wait_for_the_record(run):
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


def test_a_process_that_ends_without_closing_its_monitors_writes_it_and_says_nothing():
    ended = subprocess.run([sys.executable, "-c", ENDS_EARLY], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "step 0\nstep 0\n", "")
