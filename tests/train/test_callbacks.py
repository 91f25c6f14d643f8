"""ScoreCallback and LightningScoreCallback in real runs of their trainers, and what they give to the trainers' logs."""

import csv
import sys
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerCallback

import attnscale
from attnscale.errors import SettingError, SinkWarning
from attnscale.measure.statistics import Place, in_place
from attnscale.train import (
    LightningQKClipCallback,
    LightningScoreCallback,
    QKClipCallback,
    ScoreCallback,
    read_log,
)
from attnscale.train.callbacks import CLIPPED_HEADS
from attnscale.train.tally import PendingTallies

from .trackers import WandbRun
from .trainers import LAYERS, fit, trainer
from .training import small_model

SPREAD, LARGEST = f"attnscale_spread/{LAYERS[0]}", f"attnscale_max/{LAYERS[0]}"


class Logger(TrainerCallback):
    """A tool that report_to might name."""

    def __init__(self, error=None):
        self.error, self.given = error, []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if SPREAD in logs:
            self.given.append(state.global_step)
            if self.error is not None:
                raise self.error


class WandbCallback(Logger):
    """By its name, what report_to="wandb" adds."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that samples every third step, with three loggers: one fails, and W&B, the last, is a sink as well."""
    folder, printed, wandb_run = tmp_path_factory.mktemp("trainer"), StringIO(), WandbRun()
    callback = ScoreCallback(every=3, rows=None, sinks=[folder / "scores.jsonl", "wandb"])
    training = trainer(folder, callback, learning_rate=1e-3, logging_strategy="steps", logging_steps=1)
    loggers = [Logger(ConnectionError("no such host")), Logger(), WandbCallback()]
    for each in loggers:
        training.add_callback(each)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", SimpleNamespace(run=wandb_run))
        with redirect_stdout(printed), pytest.warns(SinkWarning, match="no such host"):
            training.train()
    records = read_log(folder / "scores.jsonl").records
    given = [*(logger.given for logger in loggers), len(wandb_run.finish())]
    return SimpleNamespace(training=training, given=given, records=records, printed=printed.getvalue())


def points(training, name):
    """Step and value of a curve in the history of a trainer."""
    return [(entry["step"], entry[name]) for entry in training.state.log_history if name in entry]


def samples(callback, layer):
    """Steps of the samples that a monitor remembers of a layer."""
    return [step for step, *_ in callback.monitor.state_dict()["history"]["layers"][layer]["samples"]]


def test_a_run_is_recorded_every_so_many_optimiser_steps_with_all_their_micro_batches(run):
    assert [record.step for record in run.records] == [0, 3, 6]
    assert list(run.records[0].layers) == LAYERS
    rows = 4 * 2 * 2 * 14  # heads, sequences of two micro-batches, positions; evaluation is not among them
    assert [layer.rows for record in run.records for layer in record.layers.values()] == [rows] * 6
    assert all(value > 0 for value in run.records[0].layers[LAYERS[0]].numbers["query_gradient"])


def test_training_ends_as_it_does_without_the_callback(run, tmp_path):
    plain = trainer(tmp_path, Logger(), learning_rate=1e-3, logging_strategy="steps", logging_steps=1)
    plain.train()
    models = [each.model.parameters() for each in (run.training, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))
    assert "training_step" not in vars(run.training)


def test_records_have_the_loss_of_their_step_and_the_rate_it_was_made_with(run):
    losses = {step - 1: loss for step, loss in points(run.training, "loss")}
    assert [each.loss for each in run.records] == pytest.approx([losses[step] for step in (0, 3, 6)], rel=1e-3)
    assert [each.lr for each in run.records] == pytest.approx([1e-3 * (1 - step / 8) for step in (0, 3, 6)])


def test_the_trainers_log_has_the_numbers_of_every_record_at_the_steps_of_its_losses(run):
    assert [step for step, _ in points(run.training, SPREAD)] == [1, 4, 7]
    assert {step for step, _ in points(run.training, "loss")} == set(range(1, 9))
    spreads = [record.layers[LAYERS[0]].whole("spread") for record in run.records]
    assert [value for _, value in points(run.training, SPREAD)] == pytest.approx(spreads, rel=1e-4)
    names = {f"attnscale_{entry.name}/{layer}" for entry in in_place(Place.LIVE) for layer in LAYERS}
    history = run.training.state.log_history
    assert {name for entry in history for name in entry if name.startswith("attnscale")} == names
    assert "attnscale" not in run.printed
    assert run.given == [[1, 4, 7], [1, 4, 7], [], 3]  # W&B has them once: from the sink


def test_the_state_of_a_monitor_survives_resume(tmp_path):
    path = tmp_path / "scores.jsonl"
    trainer(tmp_path, ScoreCallback(every=1, sinks=[path])).train()
    again = ScoreCallback(every=1, sinks=[path])
    trainer(tmp_path, again).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-5"))
    assert samples(again, LAYERS[0]) == list(range(8))
    assert [record.step for record in read_log(path).records] == list(range(8))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_of_report_to_has_each_point_once_in_one_file_also_of_a_device_that_is_late(tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    monkeypatch.setattr(PendingTallies, "has_arrived", False)
    trainer(tmp_path, ScoreCallback(every=3), report_to="tensorboard", max_steps=7).train()
    (_,) = (tmp_path / "events").iterdir()
    found = events.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert [point.step for point in found.Scalars(f"train/{SPREAD}")] == [1, 4, 7]


def test_log_chooses_the_statistics_and_only_the_first_process_logs(tmp_path):
    for log, is_first, expected in ((["max"], True, {LARGEST}), (False, True, set()), (True, False, set())):
        training = trainer(tmp_path, ScoreCallback(log=log), max_steps=1)
        training.is_world_process_zero = lambda is_first=is_first: is_first
        training.train()
        assert {name for entry in training.state.log_history for name in entry} & {SPREAD, LARGEST} == expected
    for wrong in (["height"], "max"):
        with pytest.raises(SettingError, match="Expected log as True, False or a list of total_spread, spread"):
            ScoreCallback(log=wrong)


def test_a_callback_that_no_trainer_calls_says_so():
    callback, state = ScoreCallback(), SimpleNamespace(stateful_callbacks={}, global_step=0)
    with pytest.warns(SinkWarning, match="log=False"):
        callback.on_train_begin(None, state, None, model=small_model())
    callback.on_train_end(None, state, None)


def test_how_many_heads_were_clipped_is_in_the_trainers_log(tmp_path):
    settings = dict(learning_rate=1e-2, logging_strategy="steps", logging_steps=2, max_steps=4)
    training = trainer(tmp_path, QKClipCallback(threshold=1e-4), **settings)
    training.train()
    assert points(training, CLIPPED_HEADS) == [(2, 8), (4, 8)]


def test_callbacks_are_reached_by_their_names():
    assert attnscale.train.ScoreCallback is ScoreCallback
    assert attnscale.train.QKClipCallback is QKClipCallback


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning", "ignore:.*does not have many workers")
class TestLightning:
    @pytest.fixture
    def logged(self, tmp_path):
        """Run Lightning with a CSVLogger under a name; the run's module and the rows of the file."""
        loggers = pytest.importorskip("lightning.pytorch.loggers")

        def run(callback, name="CSVLogger"):
            logger = type(name, (loggers.CSVLogger,), {})(tmp_path, name="", version="")
            _, module = fit(tmp_path, callback, 7, logger=logger)
            with (tmp_path / "metrics.csv").open(encoding="utf-8") as file:
                return module, list(csv.DictReader(file))

        return run

    def test_a_run_is_recorded_with_all_micro_batches_and_its_loggers_have_the_numbers(self, logged, tmp_path):
        layer = "model.blocks.0.attention"
        module, rows = logged(LightningScoreCallback(every=3, rows=None, sinks=[tmp_path / "scores.jsonl"]))
        records = read_log(tmp_path / "scores.jsonl").records
        assert [record.step for record in records] == [0, 3, 6]
        assert [each.layers[layer].rows for each in records] == [3 * 2 * 2 * 13] * 3  # validation is not among them
        means = [sum(module.losses[first : first + 2]) / 2 for first in (0, 6, 12)]
        assert [each.loss for each in records] == pytest.approx(means, rel=1e-4)
        assert [each.lr for each in records] == pytest.approx([1e-2, 1e-2 / 4, 1e-2 / 7], rel=1e-4)
        spreads = {record.step: record.layers[layer].whole("spread") for record in records}
        assert known(rows, f"attnscale_spread/{layer}") == pytest.approx(spreads, rel=1e-4)
        assert set(known(rows, "loss")) == set(range(7))

    @pytest.mark.parametrize("settings", [dict(log=False), dict(sinks=["wandb"])], ids=str)
    def test_nothing_is_logged_where_that_is_asked_or_a_sink_does_it(self, logged, monkeypatch, settings):
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=WandbRun()))
        _, (row, *_) = logged(LightningScoreCallback(every=3, **settings), "WandbLogger")
        assert not any(name.startswith("attnscale") for name in row)

    def test_how_many_heads_were_clipped_is_in_its_loggers(self, logged):
        found = known(logged(LightningQKClipCallback(threshold=1e-4))[1], CLIPPED_HEADS)
        assert set(found) == set(range(7))
        assert found[0] == 6  # all of them
        assert found[6] < 6  # since the log before

    def test_the_state_of_a_monitor_survives_resume(self, tmp_path):
        path = tmp_path / "scores.jsonl"
        training, _ = fit(tmp_path, LightningScoreCallback(every=1, sinks=[path]), 4)
        training.save_checkpoint(tmp_path / "four.ckpt")
        again = LightningScoreCallback(every=1, sinks=[path])
        fit(tmp_path, again, 7, tmp_path / "four.ckpt")
        assert samples(again, "model.blocks.0.attention") == list(range(7))
        assert [record.step for record in read_log(path).records] == list(range(7))


def known(rows, name):
    return {int(row["step"]): float(row[name]) for row in rows if row.get(name)}
