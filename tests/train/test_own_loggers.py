"""What the callbacks give to the loggers of the Hugging Face Trainer and of Lightning themselves."""

import csv
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback

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

from .test_huggingface import LAYERS
from .test_huggingface import trainer as trainer_of
from .training import batch, loss_of, small_model

SPREAD, LARGEST = f"attnscale_spread/{LAYERS[0]}", f"attnscale_max/{LAYERS[0]}"


def trainer(folder, callback, **options):
    return trainer_of(folder, callback, save_strategy="no", eval_strategy="no", **options)


def points(run, name):
    """Step and value of a curve in the history of a trainer."""
    return [(entry["step"], entry[name]) for entry in run.state.log_history if name in entry]


def test_the_trainers_history_has_the_numbers_of_every_record_at_the_steps_of_its_losses(tmp_path, capsys):
    run = trainer(
        tmp_path, ScoreCallback(every=3, sinks=[tmp_path / "scores.jsonl"]), logging_strategy="steps", logging_steps=1
    )
    run.train()
    assert "attnscale" not in capsys.readouterr().out  # Trainer prints its log
    records = read_log(tmp_path / "scores.jsonl").records
    assert [step for step, _ in points(run, SPREAD)] == [1, 4, 7]
    assert {step for step, _ in points(run, SPREAD)} <= {step for step, _ in points(run, "loss")}
    spreads = [record.layers[LAYERS[0]].whole("spread") for record in records]
    assert [value for _, value in points(run, SPREAD)] == pytest.approx(spreads, rel=1e-4)
    names = {f"attnscale_{entry.name}/{layer}" for entry in in_place(Place.LIVE) for layer in LAYERS}
    assert {name for entry in run.state.log_history for name in entry if name.startswith("attnscale")} == names


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_of_report_to_has_each_point_once_in_one_file_also_of_a_device_that_is_late(tmp_path, monkeypatch):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    monkeypatch.setattr(PendingTallies, "is_here", False)
    trainer(tmp_path, ScoreCallback(every=3), report_to="tensorboard", max_steps=7).train()
    (_,) = (tmp_path / "events").iterdir()
    found = events.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert [point.step for point in found.Scalars(f"train/{SPREAD}")] == [1, 4, 7]


def test_it_can_be_named_what_is_logged_or_nothing(tmp_path):
    few = trainer(tmp_path, ScoreCallback(every=3, log=["max"]), max_steps=1)
    few.train()
    assert points(few, LARGEST)
    assert not points(few, SPREAD)
    none = trainer(tmp_path, ScoreCallback(every=3, log=False), max_steps=1)
    none.train()
    assert not any(name.startswith("attnscale") for entry in none.state.log_history for name in entry)
    for wrong in (["height"], "max"):
        with pytest.raises(SettingError, match="Expected log as True, False or a list of total_spread, spread"):
            ScoreCallback(log=wrong)


class Logger(TrainerCallback):
    def __init__(self):
        self.given = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.given += [state.global_step] if SPREAD in logs else []


class FailingLogger(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if SPREAD in logs:
            raise ConnectionError("no such host")


def test_a_logger_that_fails_stops_nobody(tmp_path):
    run, other = trainer(tmp_path, ScoreCallback(every=3)), Logger()
    run.add_callback(FailingLogger())
    run.add_callback(other)
    with pytest.warns(SinkWarning, match="no such host"):
        run.train()
    assert other.given == [1, 4, 7]


def test_only_the_first_process_logs(tmp_path):
    run = trainer(tmp_path, ScoreCallback(every=3), max_steps=1)
    run.is_world_process_zero = lambda: False
    run.train()
    assert not points(run, SPREAD)


def test_a_callback_that_no_trainer_calls_says_so():
    callback, state = ScoreCallback(), SimpleNamespace(stateful_callbacks={}, global_step=0)
    with pytest.warns(SinkWarning, match="log=False"):
        callback.on_train_begin(None, state, None, model=small_model())
    callback.on_train_end(None, state, None)


def test_how_many_heads_were_clipped_is_in_the_trainers_log(tmp_path):
    callback = QKClipCallback(threshold=1e-4)
    run = trainer(
        tmp_path, callback, learning_rate=1e-2, logging_strategy="steps", logging_steps=2,
        max_steps=4,
    )  # fmt: skip
    run.train()
    assert points(run, CLIPPED_HEADS) == [(2, 8), (4, 8)]


lightning = pytest.importorskip("lightning.pytorch")
OF_LIGHTNING = "attnscale_spread/model.blocks.0.attention"


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = small_model()

    def training_step(self, tokens, index):
        loss = loss_of(self.model, tokens)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


@pytest.fixture
def fit(tmp_path):
    """Run Lightning with a CSVLogger; the rows of its file."""

    def run(callback):
        logger = lightning.loggers.CSVLogger(tmp_path, name="", version="")
        lightning.Trainer(
            accelerator="cpu", max_steps=7, accumulate_grad_batches=2, callbacks=[callback], logger=logger,
            log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        ).fit(Module(), DataLoader(batch(28, 1), batch_size=2))  # fmt: skip
        with (tmp_path / "metrics.csv").open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    return run


def known(rows, name):
    return {int(row["step"]): float(row[name]) for row in rows if row.get(name)}


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning", "ignore:.*does not have many workers")
class TestLightning:
    def test_its_loggers_have_the_numbers_of_every_record_at_the_steps_of_its_losses(self, fit, tmp_path):
        rows = fit(LightningScoreCallback(every=3, sinks=[tmp_path / "scores.jsonl"]))
        records = read_log(tmp_path / "scores.jsonl").records
        spreads = {record.step: record.layers["model.blocks.0.attention"].whole("spread") for record in records}
        assert known(rows, OF_LIGHTNING) == pytest.approx(spreads, rel=1e-4)
        assert list(spreads) == [0, 3, 6]
        assert set(known(rows, "loss")) == set(range(7))

    def test_nothing_is_logged_where_that_is_asked(self, fit):
        assert not any(name.startswith("attnscale") for name in fit(LightningScoreCallback(every=3, log=False))[0])

    def test_how_many_heads_were_clipped_is_in_its_loggers(self, fit):
        callback = LightningQKClipCallback(threshold=1e-4)
        found = known(fit(callback), CLIPPED_HEADS)
        assert set(found) == set(range(7))
        assert found[0] == 6  # all of them
        assert found[6] == len(callback.clip.last.heads) < 6
