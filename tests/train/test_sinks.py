"""The other sinks: TensorBoard read back, a stand-in for W&B, the table as it is drawn."""

import inspect
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnscale import Monitor
from attnscale.diagnose import Finding
from attnscale.errors import SettingError
from attnscale.measure.statistics import logged
from attnscale.show.live_table import LiveTable
from attnscale.train import LayerRecord, Record
from attnscale.train.sinks import SINKS, sink_from

from .training import batch, loss_of, small_model

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
    assert [(point.step, point.value) for point in found.Scalars("attnscale_max/blocks.0")] == [
        (50, 1500.0),
        (100, 1500.0),
    ]
    assert found.Scalars("attnscale_spread/blocks.0")[0].value == 0.5
    assert "attnscale/alarms/text_summary" in found.Tags()["tensors"]
    assert "custom_scalars__config__" in found.Tags()["tensors"]  # a chart a number, in which layers are the lines


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
    assert values["attnscale_max/blocks.0"] == 1500.0
    assert alerts == ["attnscale: exploding in blocks.0, head 1"]


def test_mlflow_gets_points_at_their_step_under_names_that_it_takes_and_alarms_as_tags(monkeypatch):
    points, tags = [], {}
    stand_in = SimpleNamespace(
        active_run=lambda: None,
        log_metrics=lambda values, step: points.append((values, step)),
        set_tag=tags.__setitem__,
    )
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    sink = sink_from("mlflow")
    with pytest.raises(SettingError, match=r"call mlflow\.start_run\(\) before training"):
        sink(record())
    stand_in.active_run = SimpleNamespace
    sink(replace(record(), layers={"blocks[0]": record().layers["blocks.0"]}))
    ((values, step),) = points
    assert step == 50
    assert values["attnscale_max/blocks_0_"] == 1500.0
    assert "1500" in tags["attnscale.exploding"]
    sink(record(rank=1))
    assert len(points) == 1


def test_mlflow_that_is_not_installed_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(SettingError, match="pip install mlflow"):
        sink_from("mlflow")


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


MLFLOW = """
class MLflow:
    written = []

    def __init__(self, experiment):
        self.experiment = experiment

    def __call__(self, record):
        self.written.append((self.experiment, record.step))
"""


def test_a_new_sink_is_one_file_and_one_line(tmp_path, monkeypatch):
    (tmp_path / "sink_for_comet.py").write_text(MLFLOW, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(SINKS, "comet:EXPERIMENT", "sink_for_comet:MLflow")
    model = small_model()
    monitor = Monitor(model, sinks=["comet:first"])
    loss_of(model, batch()).backward()
    monitor.step()
    monitor.close()
    assert monitor.sinks[0].written == [("first", 0)]
    with pytest.raises(SettingError, match=r"'table', 'comet:EXPERIMENT', or any callable, got 'comet'\."):
        Monitor(model, sinks=["comet"])


@pytest.mark.parametrize("given", ["wandb:project", "table:wide", "tensorboard:", "tensorboard", "scores.csv", "x:y"])
def test_a_sink_that_is_none_is_told_every_way_to_name_one(given):
    with pytest.raises(SettingError) as told:
        sink_from(given)
    assert all(repr(written) in str(told.value) for written in SINKS)
    assert str(told.value).endswith(f"got {given!r}.")


@pytest.mark.parametrize("written", SINKS)
def test_every_named_sink_is_where_it_is_said_to_be_and_takes_what_its_name_says(written):
    module, _, name = SINKS[written].partition(":")
    taken = inspect.signature(getattr(import_module(module), name)).parameters
    assert len(taken) == written.count(":")
    assert all(parameter.default is parameter.empty for parameter in taken.values())


def test_a_path_is_a_log_whatever_it_is_called(tmp_path):
    assert sink_from(tmp_path / "table").path == tmp_path / "table"
    assert sink_from("wandb.jsonl").path.name == "wandb.jsonl"


def test_the_tour_names_every_sink():
    tour = Path("docs/tour.md").read_text(encoding="utf-8")
    assert all(f"`{written}`" in tour for written in SINKS)
