"""A new statistic is one entry of the catalogue and the property that computes it; everything else shows it."""

import json
import sys
from types import SimpleNamespace

import pytest

import attnscale
from attnscale import Monitor, ScoreStats
from attnscale.measure.statistics import STATISTICS, Place, Statistic, of_scores
from attnscale.show.check import show_check
from attnscale.show.live_table import LiveTable
from attnscale.show.report.check import check_report
from attnscale.show.report.run import run_report
from attnscale.show.run import show_run
from attnscale.train import JsonLines, read_log, summarise
from attnscale.train.sinks import sink_from
from docs.tools.generate import PARTS
from tests.show.reports import checked
from tests.train.trackers import WandbRun
from tests.train.training import batch, loss_of, small_model

BENT = Statistic(
    "bent", "bent-\nness", "bentness of a head", "how bent the scores are", "straight at 0", attribute="bent",
    word="bent", bad="small", heads="max", range=(0.0, 40.0),
    places=Place.LOG | Place.LIVE | Place.SEEN | Place.CHECK | Place.RUN | Place.MAP,
)  # fmt: skip
LAYER = "blocks.0.attention"


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setitem(STATISTICS, "bent", BENT)
    monkeypatch.setattr(ScoreStats, "bent", property(lambda stats: stats.top1.new_full(stats.top1.shape, 33.0)), False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    of_scores.cache_clear()
    yield
    of_scores.cache_clear()


@pytest.fixture
def record():
    model = small_model()
    monitor = Monitor(model, rows=None)
    loss_of(model, batch()).backward()
    monitor.step()
    monitor.close()
    return monitor.last


def test_watch_check_and_the_guide_have_it():
    model = small_model()
    with attnscale.watch(model) as seen:
        loss_of(model, batch())
    assert seen.layers[LAYER].stats.to_dict()["bent"] == [33.0] * 3
    heading, first, *_ = str(seen).splitlines()
    assert (heading.split()[-1], first.split()[-1]) == ("bent", "33")
    assert checked().to_dict()["layers"][LAYER]["bent"] == 33.0
    assert "| `bent` | how bent the scores are | 0 to 40 | straight at 0 |" in PARTS["statistics"]()


def test_every_table_of_the_terminal_has_it(record, capsys):
    table = LiveTable()
    for show in (lambda: (table(record), table.close()), lambda: show_run(summarise([record]))):
        show()
        _has_it(capsys.readouterr().out)
    show_check(checked())
    _has_it(capsys.readouterr().out)


def _has_it(text):
    lines = text.splitlines()
    (column,) = [line.index("ness") for line in lines if "ness" in line]
    assert "33" in [line[column - 2 : column + 4].strip() for line in lines]


def test_reports_have_it_as_a_column_a_map_a_curve_and_a_word(record):
    for page in (check_report(checked(rows=7)), run_report("a run", [record])):
        blocks = {section.name: section.blocks for section in page.sections}
        assert BENT.long in [column.heading for column in blocks["layers"][0].columns]
        figures = {figure.name: figure for section in page.sections for figure in section.figures}
        view = figures["head-map"].views[BENT.long]
        assert view.values[0] == [33.0] * 3
        assert view.notice.startswith("The lowest bentness of a head is 33")
        assert blocks["method"][-1][BENT.long] == BENT.meaning
    assert figures["run-curves"].views[BENT.long].series[0].y == [33.0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_records_logs_tensorboard_and_wandb_have_it(record, tmp_path, monkeypatch):
    assert record.layers[LAYER].numbers["bent"] == [33.0] * 3
    log = tmp_path / "scores.jsonl"
    JsonLines(log)(record)
    assert json.loads(log.read_text(encoding="utf-8"))["layers"][LAYER]["bent"] == [33] * 3
    assert read_log(log).records[0].layers[LAYER].numbers["bent"] == [33.0] * 3
    run = WandbRun()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
    sink_from("wandb")(record)
    assert run.finish()[0][f"attnscale_bent/{LAYER}"] == 33.0
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = sink_from(f"tensorboard:{tmp_path}")
    sink(record)
    sink.close()
    found = events.EventAccumulator(str(tmp_path))
    found.Reload()
    assert found.Scalars(f"attnscale_bent/{LAYER}")[0].value == 33.0
