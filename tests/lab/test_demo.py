import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from markupsafe import escape
from typer.testing import CliRunner

from attnscale.cli import app
from attnscale.lab.demo import SCALES, Demo, TwinTraining, explanation, on_gradient, verdict
from attnscale.lab.shares import shares
from attnscale.lab.threads import one_thread
from tests.busy import busy_cores
from tests.processes import started


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    page = tmp_path_factory.mktemp("demo") / "report.html"
    run = CliRunner().invoke(app, ["demo", "--json", "--html", str(page)])
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout), page.read_text(encoding="utf-8")


def last_loss(run):
    return sum(loss for _, loss in run["losses"][-10:]) / 10


def test_the_scaled_twin_learns_and_the_unscaled_one_does_not(shown):
    scaled, unscaled = shown[0]["runs"]
    assert [scaled["name"], unscaled["name"]] == list(SCALES)
    assert last_loss(scaled) < 0.1
    assert last_loss(unscaled) > 1.2
    assert shown[0]["verdict"].startswith("With 1/√d_k the model learned the task")


def test_both_start_from_the_same_weights_and_see_the_same_batches():
    training = TwinTraining(Demo(head_dim=16, steps=2, seed=3))
    one, other = (dict(model.named_parameters()) for model in training.models.values())
    assert all(one[name].equal(other[name]) for name in one)
    assert len(list(training.steps())) == 2


def test_only_the_unscaled_twin_is_found_saturated(shown):
    scaled, unscaled = ({finding["code"] for finding in run["findings"]} for run in shown[0]["runs"])
    assert "saturated" in unscaled
    assert "saturated" not in scaled


def test_the_report_has_both_runs_and_the_verdict(shown):
    told, page = shown
    assert told["verdict"] in page
    assert all(name in page for name in SCALES)
    assert all(str(escape(paragraph)) in page for paragraph in told["explanation"])


def test_the_explanation_names_what_was_measured(shown):
    first = shown[0]["runs"][1]["records"][0]["layers"]
    heads = [spread for layer in first.values() for spread in layer["spread"]]
    assert f"unscaled scores spread by {sum(heads) / len(heads):.1f}" in shown[0]["explanation"][0]


@pytest.mark.parametrize(
    ("scaled", "unscaled", "said"),
    [
        (0.001, 1.4, "learned the task (loss 0.001); without it, it did not (1.40)"),
        (0.5, 1.4, "came to 0.50, without it only to 1.40"),
        (0.51, 0.5, "No difference here"),
        (1.4, 0.5, "the unscaled model did better: 0.50 against 1.40"),
        (0.5, math.nan, "Without 1/√d_k training broke down"),
        (0.01, 0.09, "No difference here"),
    ],
)
def test_the_verdict_follows_the_losses_whichever_way_they_fall(scaled, unscaled, said):
    assert said in verdict(scaled, unscaled)


@pytest.mark.filterwarnings(
    "ignore:At sampled steps the whole model is traced"
)  # a rotation of one pair looks like a factor
def test_a_small_head_starts_under_the_freezing_point_and_the_explanation_says_so():
    training = TwinTraining(demo := Demo(head_dim=2, steps=1))
    list(training.steps())
    told = explanation(demo, training.records, training.received, unscaled_loss=0.5)
    assert "the unscaled model starts under it" in told[0]
    assert len(told) == 2  # 0.5 is not the loss of guessing


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--head-dim", "7"], "Expected an even --head-dim"),
        (["--steps", "1"], "Expected --steps from 2 to"),
        (["--head-dim", "100000000"], "Expected --head-dim from 2 to 4096"),
        (["--seed", str(2**70)], "Expected --seed from 0 to"),
        (["--html", "."], "is a folder"),
    ],
)
def test_bad_input_is_answered_before_anything_is_trained(arguments, said):
    run = CliRunner().invoke(app, ["demo", *arguments])
    assert said in str(run.exception)


EVEN, UNEVEN = shares(torch.ones(100)), shares(torch.tensor([1e-4] * 90 + [100.0] * 10))
FAINT = shares(torch.tensor([1e-9] * 90 + [1e-3] * 10))


def test_the_gradient_is_told_as_it_was_measured_whichever_way_it_fell():
    assert on_gradient(EVEN, UNEVEN).startswith("The gradient is not gone, it is uneven.")
    assert on_gradient(EVEN, FAINT).startswith("The gradient is less even.")
    assert "only 0.00032 times as large" in on_gradient(EVEN, FAINT)
    assert on_gradient(UNEVEN, EVEN).startswith("The gradient is no less even.")


def test_without_the_scale_more_gradient_reaches_the_queries_and_a_few_of_them(shown):
    scaled, unscaled = (dict(run["received"]) for run in shown[0]["runs"])
    assert unscaled[0.5] < 0.02 < 0.05 < scaled[0.5]  # of the half that receives least
    assert unscaled[0.9] < scaled[0.9]
    assert "not gone, it is uneven" in shown[0]["explanation"][1]
    assert "Who receives the gradient, before the first step" in shown[1]


def test_every_measured_number_of_the_demo_stands_once(shown):
    told = " ".join([shown[0]["verdict"], *shown[0]["explanation"]])
    measured = Counter(re.findall(r"\d+\.\d+%?|\d+%", told))
    assert measured
    assert set(measured.values()) == {1}, measured


@pytest.mark.filterwarnings("ignore:At sampled steps the whole model is traced")
def test_torch_has_its_threads_back_after_every_step():
    threads = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    training = TwinTraining(Demo(head_dim=2, steps=2))
    torch.set_num_threads(2)
    try:
        for _ in training.steps():
            assert torch.get_num_threads() == 2
        training.twins()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot leave out denormal numbers")
@pytest.mark.parametrize("before", [False, True])
def test_denormal_numbers_are_zero_meanwhile_and_what_they_were_afterwards(before):
    tiny = torch.tensor(torch.finfo(torch.float32).tiny)
    torch.set_flush_denormal(before)
    try:
        with one_thread():
            inside = (tiny / 2).item()
        outside = (tiny / 2).item()
    finally:
        torch.set_flush_denormal(False)
    assert inside == 0
    assert (outside == 0) is before


DEMO = """
import sys
import attnscale.lab.demo, attnscale.show.demo, attnscale.show.report
from attnscale.cli import main
print("imported", flush=True)
sys.stdin.readline()
main()
"""


def test_on_busy_cores_torchs_default_threads_cost_no_more_than_one(tmp_path):
    """Two threads that wait for each other on busy cores took thirteen times as long as one."""

    def seconds(**threads):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | threads
        command = [sys.executable, "-c", DEMO, "demo", "--steps", "20", "--html", str(tmp_path / "page.html")]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with started(command, env=environment, text=True, encoding="utf-8", **pipes) as process:
            assert process.stdout.readline() == "imported\n"
            with busy_cores():
                start = time.perf_counter()
                _, complaints = process.communicate("begin\n")
                taken = time.perf_counter() - start
        assert process.returncode == 0, complaints
        return taken

    assert seconds() < 2.5 * seconds(OMP_NUM_THREADS="1")
