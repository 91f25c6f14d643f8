"""Results in a notebook: HTML, one line, data frames and plots."""

import copy
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import attnscale
from attnscale.errors import AttnscaleError
from attnscale.show.live_table import LiveTable
from attnscale.show.notebook import MOST_ROWS
from attnscale.train import read_log
from tests.train.training import batch, loss_of, small_model

LAYERS, HEADS, EVIL = 2, 2, "<img src=x onerror=alert(1)>"


class Unscaled(nn.Module):
    def __init__(self, width=22):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Unscaled() for _ in range(LAYERS))), torch.randn(3, 13, 22)
    other = copy.deepcopy(model)
    other[1].qkv.weight.data.mul_(2.0)
    with attnscale.watch(model) as seen:
        model(x)
    audit = attnscale.audit(model, x)
    path = tmp_path_factory.mktemp("log") / "scores.jsonl"
    trained = small_model()
    monitor = attnscale.Monitor(trained, every=2, sinks=[path])
    for _ in range(5):
        loss_of(trained, batch()).backward()
        monitor.step(loss=1.5)
    monitor.close()
    return {
        "Audit": audit,
        "Seen": seen,
        "ScoreStats": seen.layers["0"].stats,
        "WhatIf": audit.what_if("0"),
        "Comparison": attnscale.compare(model, other, x),
        "Record": monitor.last,
        "Monitor": monitor,
        "Log": read_log(path),
        "ClipReport": attnscale.clip_qk_(model, seen, threshold=0.5),
    }


OF_HEADS = {"layer", "head", "scale_applied", "spread", "query_norm"}
# How the line of each result begins, and names of its data frame.
RESULTS = {
    "Audit": ("Not fine: in 2 of 2 layers, the scores reach the softmax as q·k", OF_HEADS | {"verdict"}),
    "Seen": ("2 attention layers, 2 calls>", OF_HEADS | {"scale_expected", "alignment"}),
    "ScoreStats": ("2 heads, 78 rows (every row): spread ", {"head", "spread", "entropy", "jacobian_trace", "max"}),
    "WhatIf": ("Now the scores spread by ", {"candidate", "scale", "spread", "output_change"}),
    "Comparison": ("", {"layer", "head", "statistic", "before", "after", "change", "error"}),
    "Record": ("Step 4, loss 1.5: 2 layers, no new alarm>", OF_HEADS | {"step", "loss"}),
    "Monitor": (
        "step 5, sampled every 2 steps. Step 4, loss 1.5: 2 layers, no new alarm>",
        OF_HEADS | {"step", "loss"},
    ),
    "Log": ("1 run, 3 records, steps 0 to 4, 0 alarms>", OF_HEADS | {"step", "loss"}),
    "ClipReport": ("2 heads clipped to 0.5>", {"layer", "head", "max", "max_bound", "factor"}),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_one_line_an_html_table_with_the_verdict_first_and_a_data_frame(results, name):
    result, (line, columns) = results[name], RESULTS[name]
    assert repr(result).startswith(f"<{name}: {line}")
    assert "\n" not in repr(result)
    html = result._repr_html_()
    assert html.index("<b>") < html.index("<table")
    assert not any(word in html for word in ("<script", "src=", "href=", "url("))
    pytest.importorskip("pandas")
    frame = result.to_pandas()
    assert set(frame.columns) >= columns
    assert len(frame) > 0


def test_rows_of_a_data_frame_are_heads(results):
    pytest.importorskip("pandas")
    frame, layers = results["Audit"].to_pandas(), results["Audit"].layers
    assert list(zip(frame["layer"], frame["head"], strict=True)) == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    assert frame["spread"].tolist()[2:] == pytest.approx(layers["1"].stats.std_within_rows.tolist())
    assert frame["scale_applied"].tolist() == pytest.approx([1.0] * 4)
    log = results["Log"].to_pandas()
    assert log.groupby("step").size().to_dict() == {0: 6, 2: 6, 4: 6}


def test_plots_show_the_spread_by_layer_or_a_statistic_over_the_steps_of_a_log(results):
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    try:
        ax = results["Audit"].plot()
        labels = [text.get_text() for text in ax.get_legend().get_texts()]
        assert labels == ["one head", "mean of the layer", "critical spread √(2 ln n)"]
        assert ax.lines[-1].get_ydata()[0] == pytest.approx((2 * torch.tensor(13.0).log()).sqrt().item(), rel=1e-5)
        curves = results["Log"].plot("entropy_ratio").lines
        assert [list(curve.get_xdata()) for curve in curves] == [[0, 2, 4]] * 2
        assert all(0 <= value <= 100 for curve in curves for value in curve.get_ydata())
        with pytest.raises(AttnscaleError, match=r"Expected a statistic to plot, one of rows, .*, got 'nothing'"):
            results["Log"].plot("nothing")
    finally:
        plt.close("all")


@pytest.mark.parametrize(("package", "use"), [("pandas", "to_pandas"), ("matplotlib.pyplot", "plot")])
def test_a_package_that_is_missing_is_named(results, package, use, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    name = package.partition(".")[0]
    with pytest.raises(AttnscaleError, match=rf"{use}\(\) needs the package {name}.*pip install {name}\."):
        getattr(results["Seen"], use)()


def test_names_are_escaped_and_long_tables_are_cut(results):
    audit = results["Audit"]
    layers = {f"{EVIL}{at}": replace(audit.layers["0"], name=f"{EVIL}{at}") for at in range(MOST_ROWS + 7)}
    html = replace(audit, layers=layers)._repr_html_()
    assert EVIL not in html
    assert "&lt;img src=x" in html
    assert "And 7 more rows: .to_pandas() has all." in html


def test_the_live_table_in_a_notebook_updates_one_output(results, monkeypatch):
    shown = []
    cell = SimpleNamespace(update=lambda html: shown.append(("update", html)))

    def display(html, display_id):
        shown.append(("display", html))
        return cell

    fake = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    table = LiveTable()
    for record in results["Log"].records:
        table(record)
    table.close()
    assert [how for how, _ in shown] == ["display", "update", "update"]
    assert "Step 4, loss 1.5" in shown[-1][1]


def test_dir_lists_public_names_only(results):
    assert dir(results["Seen"]) == ["calls", "layers", "plot", "to_pandas"]
    assert set(dir(attnscale.train)) == set(attnscale.train.__all__)
