"""The other sinks: TensorBoard read back, a stand-in for W&B, the table as it is drawn."""

import sys
from types import SimpleNamespace

import pytest

from attnscale.diagnose import Finding
from attnscale.errors import SettingError
from attnscale.measure.statistics import logged
from attnscale.show.live_table import LiveTable
from attnscale.train import LayerRecord, Record
from attnscale.train.sinks import sink_from

ALARM = Finding("blocks.0", 1, "exploding", "warning", "The largest score is 1500.", 1500.0, 1000.0, "Clip it.")


def record(step=50, **more):
    numbers = {name: [0.25, 0.75] for name in logged()} | {"max": [7.0, 1500.0]}
    return Record(step, 0.0, {"blocks.0": LayerRecord(64, numbers)}, [ALARM], **more)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_a_curve_a_layer_and_number(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = sink_from(f"tensorboard:{tmp_path}")
    sink(record(50))
    sink(record(100))
    sink.close()
    found = events.EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(point.step, point.value) for point in found.Scalars("attnscale/blocks.0/max")] == [
        (50, 1500.0),
        (100, 1500.0),
    ]
    assert found.Scalars("attnscale/blocks.0/spread")[0].value == 0.5
    assert "attnscale/alarms/text_summary" in found.Tags()["tensors"]


def test_wandb_gets_points_that_do_not_commit_a_step_and_alerts(monkeypatch):
    logged, alerts = [], []
    run = SimpleNamespace(
        log=lambda values, commit: logged.append((values, commit)), alert=lambda title, text: alerts.append(title)
    )
    stand_in = SimpleNamespace(run=None)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    sink = sink_from("wandb")
    with pytest.raises(SettingError, match=r"call wandb\.init\(\) before training"):
        sink(record())
    stand_in.run = run
    sink(record())
    ((values, commit),) = logged
    assert not commit
    assert values["attnscale/step"] == 50
    assert values["attnscale/blocks.0/max"] == 1500.0
    assert alerts == ["attnscale: exploding in blocks.0, head 1"]


def test_wandb_that_is_not_installed_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(SettingError, match="pip install wandb"):
        sink_from("wandb")


@pytest.fixture
def screen(capsys, monkeypatch):
    """What a terminal of 80 columns and no colours was sent."""
    for name, value in {"COLUMNS": "80", "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    return lambda: capsys.readouterr().out


def test_the_table_shows_layers_and_alarms(screen):
    table = LiveTable()
    table(record())
    table.close()
    drawn = screen()
    assert "step 50" in drawn
    assert "1,500" in drawn
    assert "blocks.0, head 1: The largest score is 1500." in drawn
    assert isinstance(sink_from("table"), LiveTable)


def test_only_rank_zero_of_ranks_that_are_not_merged_is_drawn(screen):
    LiveTable()(record(rank=3))
    assert screen() == ""
