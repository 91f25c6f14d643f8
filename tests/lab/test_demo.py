import json
import math
import re
from collections import Counter

import pytest
import torch
from markupsafe import escape
from typer.testing import CliRunner

from attnscale.cli import app
from attnscale.lab.demo import SCALES, TwinTraining, explanation, on_gradient, verdict
from attnscale.lab.training import gradient_shares


def demo(folder, *arguments):
    page = folder / "report.html"
    run = CliRunner().invoke(app, ["demo", "--json", "--html", str(page), *arguments])
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout), page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A demo of a few steps."""
    return demo(tmp_path_factory.mktemp("demo"), "--steps", "4")


@pytest.mark.slow
def test_the_scaled_model_learns_and_the_unscaled_one_does_not(tmp_path):
    found, _ = demo(tmp_path)
    scaled, unscaled = (sum(loss for _, loss in run["losses"][-10:]) / 10 for run in found["runs"])
    assert scaled < 0.1
    assert unscaled > 1.2
    assert found["verdict"].startswith("With 1/√d_k the model learned the task")
    codes = [{finding["code"] for finding in run["findings"]} for run in found["runs"]]
    assert "sharp" not in codes[0]
    assert "sharp" in codes[1]


def test_the_report_has_both_runs_the_verdict_and_the_explanation(shown):
    found, page = shown
    assert [run["name"] for run in found["runs"]] == list(SCALES)
    assert found["verdict"] in page
    assert all(name in page for name in SCALES)
    assert all(str(escape(paragraph)) in page for paragraph in found["explanation"])


def test_the_explanation_states_the_measured_spread_and_no_number_twice(shown):
    first = shown[0]["runs"][1]["records"][0]["layers"]
    heads = [spread for layer in first.values() for spread in layer["spread"]]
    assert f"unscaled scores have a spread of {sum(heads) / len(heads):.1f}" in shown[0]["explanation"][0]
    measured = Counter(re.findall(r"\d+\.\d+%?|\d+%", " ".join([shown[0]["verdict"], *shown[0]["explanation"]])))
    assert set(measured.values()) == {1}, measured


def test_without_the_scale_more_gradient_reaches_the_queries_less_evenly(shown):
    scaled, unscaled = (dict(run["received"]) for run in shown[0]["runs"])
    assert 20 * unscaled[0.5] < scaled[0.5]  # share of the half that receives least
    assert unscaled[0.9] < scaled[0.9]
    assert "larger without the scale, but shared less evenly" in shown[0]["explanation"][1]


@pytest.mark.parametrize(
    ("scaled", "unscaled", "said"),
    [
        (0.001, 1.4, "learned the task (loss 0.001). Without it, it did not (1.40)"),
        (0.5, 1.4, "the loss is 0.50, without it 1.40"),
        (0.51, 0.5, "No difference here"),
        (1.4, 0.5, "the unscaled model did better: loss 0.50, with 1/√d_k 1.40"),
        (0.5, math.nan, "Without it training broke down"),
        (0.01, 0.09, "No difference here"),
    ],
)
def test_the_verdict_follows_the_losses(scaled, unscaled, said):
    assert said in verdict(scaled, unscaled)


EVEN = gradient_shares(torch.ones(100))
LARGE, SMALL = (gradient_shares(torch.tensor([1e-9] * 90 + [most] * 10)) for most in (100.0, 1e-3))


@pytest.mark.parametrize(
    ("scaled", "unscaled", "said"),
    [
        (EVEN, LARGE, "is larger without the scale, but shared less evenly"),
        (EVEN, SMALL, "is smaller without the scale, and shared less evenly. Its root mean square is 0.00032 times"),
        (SMALL, EVEN, "is larger without the scale, and shared as evenly"),
    ],
)
def test_the_gradient_is_described_as_it_was_measured(scaled, unscaled, said):
    assert said in on_gradient(scaled, unscaled)


@pytest.mark.filterwarnings("ignore:At sampled steps the whole model is traced")  # rotating one pair looks like a scale
def test_both_start_from_the_same_weights_and_torch_has_its_threads_back():
    training, threads = TwinTraining(head_dim=2, steps=2), torch.get_num_threads()
    one, other = (dict(model.named_parameters()) for model in training.models.values())
    assert all(one[name].equal(other[name]) for name in one)
    torch.set_num_threads(2)
    try:
        assert [torch.get_num_threads() for _ in training.steps()] == [2, 2]
        training.twins()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    told = explanation(2, training.records, training.received, unscaled_loss=0.5)
    assert "the unscaled model starts below it" in told[0]
    assert len(told) == 2  # 0.5 is not the loss of guessing


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--head-dim", "7"], "Expected an even --head-dim"),
        (["--steps", "1"], "Invalid value for '--steps'"),
        (["--head-dim", "100000000"], "Invalid value for '--head-dim'"),
        (["--seed", str(2**70)], "Invalid value for '--seed'"),
        (["--html", "."], "got the folder"),
    ],
)
def test_bad_input_is_refused_before_training(arguments, said):
    run = CliRunner().invoke(app, ["demo", *arguments])
    assert said in f"{run.exception} {run.output}"
