"""The other sinks: TensorBoard read back, stand-ins for W&B and MLflow, the table as it is drawn."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnscale import Monitor
from attnscale.diagnose import Finding
from attnscale.errors import SettingError
from attnscale.measure.statistics import logged
from attnscale.train import LayerRecord, Record, read_log
from attnscale.train.sinks import SINKS, TensorBoard, WeightsAndBiases, scalars, sink_from

from .trackers import Mlflow, WandbRun
from .training import batch, loss_of, small_model

ALARM = Finding("blocks.0", 1, "exploding", "warning", "The largest score is 1500.", 1500.0, 1000.0, "Clip it.")


def record(step=50, **more):
    numbers = {name: [0.25, 0.75] for name in logged()} | {"max": [7.0, 1500.0]}
    return Record(step, 0.0, **{"layers": {"blocks.0": LayerRecord(64, numbers)}, "alarms": [ALARM]} | more)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_a_curve_a_layer_and_number_and_each_head_where_that_is_asked_for(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for folder, sink in (("layers", sink_from(f"tensorboard:{tmp_path}/layers")), ("heads", by_head(tmp_path))):
        sink(record(50))
        sink(record(100))
        sink.close()
        found = events.EventAccumulator(str(tmp_path / folder))
        found.Reload()
        points = [(point.step, point.value) for point in found.Scalars("attnscale_max/blocks.0")]
        assert points == [(50, 1500.0), (100, 1500.0)]
        assert found.Scalars("attnscale_spread/blocks.0")[0].value == 0.5
        assert "attnscale/alarms/text_summary" in found.Tags()["tensors"]
        assert "custom_scalars__config__" in found.Tags()["tensors"]  # a chart a number, in which layers are the lines
        heads = {name: found.Scalars(name)[0].value for name in found.Tags()["scalars"] if "_max/blocks.0/" in name}
        assert heads == (BY_HEAD if folder == "heads" else {})


BY_HEAD = {"attnscale_max/blocks.0/head_0": 7.0, "attnscale_max/blocks.0/head_1": 1500.0}


def by_head(folder):
    return TensorBoard(str(folder / "heads"), heads=True)


@pytest.fixture
def wandb(monkeypatch):
    stand_in = SimpleNamespace(run=None)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    return stand_in


@pytest.fixture
def mlflow(monkeypatch):
    stand_in = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", stand_in)
    return stand_in


@pytest.mark.parametrize(
    ("name", "start"), [("wandb", r"call wandb\.init\(\)"), ("mlflow", r"call mlflow\.start_run\(\)")]
)
def test_a_tool_needs_its_package_and_an_open_run(name, start, wandb, mlflow, monkeypatch):
    with pytest.raises(SettingError, match=f"{start} before training"):
        sink_from(name)(record())
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SettingError, match=f"pip install {name}"):
        sink_from(name)


def test_wandb_gets_curves_over_a_step_of_their_own_and_alerts(wandb):
    wandb.run = WandbRun()
    WeightsAndBiases(heads=True)(record())
    (row,) = wandb.run.finish()
    assert (row["attnscale/step"], row["attnscale_max/blocks.0"]) == (50, 1500.0)
    assert row.items() >= BY_HEAD.items()
    curves = dict.fromkeys(("attnscale/*", "attnscale_*"), "attnscale/step")
    assert wandb.run.metrics == curves | {"attnscale/step": None}
    assert [title for title, _ in wandb.run.alerts] == ["attnscale: exploding in blocks.0, head 1"]


LOOPS = {
    "without a step": lambda run, step: run.log({"loss": step}),
    "with the training step": lambda run, step: run.log({"loss": step}, step=step),
    "with a count of tokens": lambda run, step: run.log({"loss": step}, step=1000 * step),
    "twice a step": lambda run, step: (run.log({"loss": step}), run.log({"lr": step})),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("logs_first", [False, True])
def test_wandb_loses_no_record_and_nothing_of_the_loop_however_that_logs(wandb, tmp_path, loop, every, logs_first):
    wandb.run = run = WandbRun()
    sinks = [sink_from("wandb"), sink_from(tmp_path / "scores.jsonl")]
    for step in range(40):
        calls = [lambda step=step: [sink(record(step)) for sink in sinks]] if step % 4 == 0 else []
        calls += [lambda step=step: LOOPS[loop](run, step)] if step % every == 0 else []
        for call in calls[::-1] if logs_first else calls:
            call()
    rows = run.finish()
    assert [row["loss"] for row in rows if "loss" in row] == list(range(0, 40, every))
    found = [row for row in rows if "attnscale/step" in row]
    logged_records = read_log(tmp_path / "scores.jsonl").records
    assert [row["attnscale/step"] for row in found] == [each.step for each in logged_records] == list(range(0, 40, 4))
    for row, each in zip(found, logged_records, strict=True):
        expected = dict(scalars(each))
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_mlflow_gets_points_and_alarms_at_their_step_under_names_that_it_takes(mlflow):
    mlflow.start_run()
    sink, error = sink_from("mlflow"), replace(ALARM, severity="error", message="x" * 9000)
    records = [record(50), record(100, layers={"blocks[0]": record().layers["blocks.0"]}, alarms=[ALARM, error])]
    for each in (*records, record(150, rank=1)):
        sink(each)
    assert mlflow.points[0] == (50, dict(scalars(records[0])))
    assert [step for step, _ in mlflow.points] == [50, 100]
    assert mlflow.points[1][1]["attnscale_max/blocks_0_"] == 1500.0
    tags = [f"attnscale.exploding.{each}" for each in ("error.step_100", "warning.step_100", "warning.step_50")]
    assert sorted(mlflow.tags) == tags
    assert mlflow.tags[tags[2]].startswith("step 50: warning: blocks.0, head 1: exploding: The largest")


def test_the_table_shows_layers_and_alarms(capsys, monkeypatch):
    for name, value in {"COLUMNS": "80", "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    table = sink_from("table")
    table(record())
    table.close()
    drawn = capsys.readouterr().out
    assert all(text in drawn for text in ("step 50", "1,500", "blocks.0, head 1: The largest score is 1500."))
    sink_from("table")(record(rank=3))  # of ranks that are not merged, the first alone
    assert capsys.readouterr().out == ""


class Comet:
    """A sink that somebody adds."""

    def __init__(self, experiment):
        self.experiment, self.written = experiment, []

    def __call__(self, record):
        self.written.append(record.step)


def test_a_new_sink_is_one_class_and_one_line(monkeypatch):
    monkeypatch.setitem(SINKS, "comet:EXPERIMENT", f"{__name__}:Comet")
    monitor = Monitor(small_model(), sinks=["comet:first"])
    loss_of(monitor.model, batch()).backward()
    monitor.step()
    monitor.close()
    (sink,) = monitor.sinks
    assert (sink.experiment, sink.written) == ("first", [0])
    with pytest.raises(SettingError, match=r"'table', 'comet:EXPERIMENT', or any callable, got 'comet'\."):
        Monitor(monitor.model, sinks=["comet"])


@pytest.mark.parametrize("given", ["wandb:project", "table:wide", "tensorboard:", "tensorboard", "scores.csv", "x:y"])
def test_an_invalid_sink_is_refused_with_every_way_to_name_one(given):
    with pytest.raises(SettingError) as told:
        sink_from(given)
    assert all(repr(written) in str(told.value) for written in SINKS)
    assert str(told.value).endswith(f"got {given!r}.")


def test_a_path_with_any_ending_is_a_log(tmp_path):
    assert sink_from(tmp_path / "table").path == tmp_path / "table"
    assert sink_from("wandb.jsonl").path.name == "wandb.jsonl"


def test_the_tour_names_every_sink():
    tour = Path("docs/tour.md").read_text(encoding="utf-8")
    assert all(f"`{written}`" in tour for written in SINKS)
