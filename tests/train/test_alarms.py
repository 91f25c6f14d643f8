"""Alarms of a run: by what softmax feels, from where a trained model began, each once, with advice that fits."""

import math

import pytest
import torch

from attnscale import Monitor
from attnscale.diagnose import LayerSnapshot, Thresholds, layer_alarm
from attnscale.models import load_bundled
from attnscale.train import LayerRecord, Record, summarise
from attnscale.train.history import WINDOW, History
from attnscale.train.run import grouped_alarms
from tests.zoo.entry import SelfAttention

FACTORS = {"scale_applied": [0.1], "query_norm": [8.0], "key_norm": [8.0], "alignment": [0.1]}


def layer(largest, above=None, entropy=0.5, gain=0.5, **changed):
    numbers = {
        "max": [largest], "max_above_mean": [largest if above is None else above], "max_bound": [2 * largest],
        "entropy_ratio": [entropy], "jacobian_trace": [gain], **FACTORS,
    }  # fmt: skip
    numbers |= {name: [value] for name, value in changed.items() if name in FACTORS}
    return LayerRecord(7, numbers, **{name: value for name, value in changed.items() if name not in FACTORS})


def raised(layers, trained=False):
    history, found = History(Thresholds(), trained), []
    for step, one in enumerate(layers):
        found += [(10 * step, alarm) for alarm in history.add(10 * step, {"layer": one})]
    return found


def test_a_score_that_shifts_its_whole_row_raises_no_alarm():
    assert raised([layer(5.0), layer(80_000.0, above=48.0)]) == []
    ((_, alarm),) = raised([layer(5.0), layer(80_000.0, above=1200.0)])
    assert (alarm.severity, alarm.measured) == ("warning", 1200.0)
    assert "The largest score is 80,000, 1,200 above the mean of its row, at step 10;" in alarm.message
    ((_, alarm),) = raised([layer(5.0), LayerRecord(7, {"max": [1200.0], **FACTORS})])  # of an older log
    assert alarm.measured == 1200.0


def test_a_trained_model_at_its_first_step_is_a_baseline_and_no_alarm():
    sharp = layer(1500.0, entropy=0.03, gain=0.02)
    assert raised([sharp] * 9, trained=True) == []
    assert [alarm.code for _, alarm in raised([sharp] * 9)] == ["exploding"]
    assert [
        (step, alarm.code, alarm.severity)
        for step, alarm in raised([sharp, layer(1600.0, entropy=0.029, gain=0.019), layer(10_500.0, gain=0.001)], True)
    ] == [(20, "exploding", "error")]


def test_a_trained_model_that_monitor_is_given_is_judged_from_where_it_begins(caplog):
    model, tokens = load_bundled()
    with torch.no_grad():
        model.blocks[0].attention.query.weight.mul_(30)  # sharp, as published models may be
    state = None
    for _ in range(2):  # the second is resumed
        monitor = Monitor(model, every=1)
        if state is not None:
            monitor.load_state_dict(state)
        model(tokens[:, :64]).sum().backward()
        monitor.step()
        assert monitor.last.layers["blocks.0.attention"].effective_max[0] > 100
        assert (monitor.last.alarms, caplog.records) == ([], [])
        state = monitor.state_dict()
        monitor.close()


def test_a_layer_has_one_alarm_and_another_only_when_things_get_more_serious():
    growing = [
        layer(5.0 * math.exp(0.5 * step), entropy=0.5 / (1 + step) ** 2, gain=0.5 / (1 + step) ** 2)
        for step in range(24)
    ]
    found = raised(growing)
    expected = [("sharp", "warning"), ("exploding", "warning"), ("exploding", "error")]
    assert [(alarm.code, alarm.severity) for _, alarm in found] == expected
    assert [alarm.code for _, alarm in raised([layer(5.0), layer(150.0), layer(1500.0), layer(15_000.0)])] == [
        "exploding"
    ] * 3


def test_an_alarm_has_its_cause_then_its_number_and_its_step_then_what_to_do():
    steady = [*[layer(5.0)] * 6, *[layer(704.0, query_norm=48.0)] * 2]
    (_, alarm), *_ = raised(steady)
    assert alarm.message.startswith("‖q‖ × 6 since the first sampled step. The largest score is 704 at step 60; ")
    assert alarm.advice.endswith("attnscale.QKClip(model).attach(optimizer).")
    found = raised([layer(5.0), layer(134.0), *[layer(704.0)] * 3])
    assert [(step, alarm.severity) for step, alarm in found] == [(10, "note"), (30, "warning")]
    assert "The largest score passed 100 at step 10 and is 704 at step 30; QK-Clip would act" in found[1][1].message
    assert "in the last 30 steps; if this goes on, it will pass 1,000 about step" in found[1][1].message


def test_a_number_that_wavers_about_a_limit_raises_one_alarm():
    assert len(raised([layer(95.0 + 10 * (step % 2)) for step in range(20)])) == 1
    assert len(raised([layer(5.0, gain=0.045 + 0.01 * (step % 2)) for step in range(20)])) == 1
    assert len(raised([layer(105.0 if step % 2 else 5.0) for step in range(4)])) == 2  # it was over in between


@pytest.mark.parametrize(
    ("moved", "advice"),
    [
        ({"query_norm": 800.0}, "or clip: attnscale.QKClip(model)"),
        ({"scale_applied": 10.0}, "bound it"),
        ({"alignment": 0.9}, "add a soft-cap"),
        ({"query_norm": 800.0, "softcap": 2000.0}, "add a QK-norm"),
        ({"query_norm": 800.0, "clipped": [0.1]}, "apply it at every step"),
    ],
)
def test_the_advice_fits_the_factor_that_grew_and_the_measures_in_use(moved, advice):
    ((_, alarm),) = raised([layer(5.0), layer(1200.0, **moved)])
    assert advice in alarm.advice
    assert not ("softcap" in moved and "add a soft-cap" in alarm.advice)


def test_equal_alarms_are_shown_once_with_their_layers_and_steps():
    history, alarms = History(Thresholds()), []
    for step in range(12):
        found = history.add(10 * step, {f"blocks.{index}.attention": layer(4.0 * 2**step) for index in range(3)})
        alarms += [(10 * step, alarm) for alarm in found]
    (told,) = grouped_alarms(alarms)
    assert told.group.layers == tuple(f"blocks.{index}.attention" for index in range(3))
    assert told.group.first.severity == "warning"
    assert len(alarms) > 3
    assert told.when == f"{len(told.steps)} steps from {told.steps[0]} to {told.steps[-1]}"


class Tempered(SelfAttention):
    """Attention whose queries are multiplied by a learned temperature after their projection."""

    def __init__(self, *args):
        super().__init__(*args)
        self.temperature = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        query, key, value = self.project(x)
        return self.merge(torch.nn.functional.scaled_dot_product_attention(query * self.temperature, key, value))


@pytest.mark.filterwarnings("ignore::attnscale.errors.NotInsideWarning")  # it is traced: its factor is no constant
def test_growth_by_a_query_temperature_is_not_blamed_on_the_weights():
    model, records = Tempered(22, 2), []
    monitor = Monitor(model, every=1, sinks=[records.append])
    for _ in range(6):
        model(torch.randn(3, 13, 22)).sum().backward()
        monitor.step()
        with torch.no_grad():
            model.temperature.mul_(8)
    monitor.close()
    exploding = [alarm for record in records for alarm in record.alarms if alarm.code == "exploding"]
    assert "scale × 512" in exploding[0].message
    assert "The scale has grown" in exploding[-1].advice


def growing(steps, rate=0.01):
    return [(step, 5.0 * math.exp(rate * step)) for step in steps]


RUNS = {  # with the rate at which each grows in the end
    "a few samples": (growing(range(0, 70, 10)), 0.01),
    "more than the window": (
        [*growing(range(0, 100, 10), rate=-0.02), *growing(range(100, 100 + 10 * WINDOW, 10))], 0.01
    ),
    "a resumed run that repeats steps": (
        [*growing(range(0, 200, 10)), *growing(range(50, 400, 10), rate=0.03)], 0.03
    ),
    "scores that are not numbers": (
        [(step, math.nan if step % 30 == 0 else value) for step, value in growing(range(0, 200, 10))], 0.01
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_monitor_and_its_log_have_the_same_growth_over_the_latest_samples(name):
    run, rate = RUNS[name]
    history = History(Thresholds())
    for step, largest in run:
        history.add(step, {"layer": layer(largest)})
    (summary,) = summarise([Record(step, 0.0, {"layer": layer(largest)}) for step, largest in run]).layers
    assert summary.growth == history.growth("layer")
    assert summary.growth.rate == pytest.approx(rate, rel=1e-3)


def test_the_effective_maximum_is_that_of_the_first_of_the_largest_heads():
    numbers = {"max": [math.nan, 3.0, 5.0, 5.0, 7.0], "max_above_mean": [1.0, 9.0, 4.0, math.nan, 5.0]}
    assert LayerRecord(7, numbers).effective_max == (5.0, 3)
    largest, head = LayerRecord(7, {"max": [float("nan"), math.nan]}).effective_max
    assert math.isnan(largest)
    assert head == 0


def alarms_of(losses, limits=None, largest=5.0):
    history, found = History(limits or Thresholds()), []
    for step, loss in enumerate(losses):
        found += [(step, alarm) for alarm in history.add(step, {"layer": layer(largest)}, loss=loss)]
    return found


FALLING = [10.8 * math.exp(-step / 5) + 3.0 for step in range(30)]


@pytest.mark.parametrize("bad", [[12.0, 12.5, 13.0, 14.0], [math.nan] * 4, [math.inf] * 4])
def test_a_loss_that_diverges_while_scores_are_in_range_is_one_alarm_that_says_so(bad):
    ((step, alarm),) = alarms_of([*FALLING, *bad])
    assert alarms_of([*FALLING, *bad], Thresholds(loss=False)) == []
    assert step == (len(FALLING) + 2 if math.isfinite(bad[0]) else len(FALLING))
    assert (alarm.code, alarm.layer, alarm.severity) == ("loss_diverges", "", "error")
    assert alarm.message.startswith("The loss diverges, and attention is not the cause.")
    assert f"at step {step}" in alarm.message
    assert "the largest is 5" in alarm.message
    assert str(alarm).startswith("error: the whole model: loss_diverges: ")


@pytest.mark.parametrize(
    ("losses", "largest", "codes"),
    [
        ([*FALLING, 12.0, 12.5, 13.0], 2000.0, ["exploding"]),  # where scores raise alarms the loss raises none
        ([10.8, 11.0, 15.0, 30.0, 60.0, 200.0, 500.0], 5.0, ["loss_diverges"]),  # from the start
        ([*FALLING, 12.0, 12.0, 12.0, *FALLING[9:], 12.0, 12.0, 12.0], 5.0, ["loss_diverges"] * 2),  # it came back
    ],
)
def test_a_loss_raises_an_alarm_each_time_it_diverges_unless_scores_do(losses, largest, codes):
    assert [alarm.code for _, alarm in alarms_of(losses, largest=largest)] == codes


@pytest.mark.parametrize(("error", "is_raised"), [(0.0, True), (0.001, True), (0.02, False)])
def test_an_alarm_within_its_error_of_a_floor_is_not_raised(error, is_raised):
    snapshot = LayerSnapshot("layer", 1.0, 0, 0.5, 0.04, 0, error={"jacobian_trace": error}.__getitem__)
    assert (layer_alarm(snapshot, Thresholds(), {})[0] is not None) == is_raised


HEALTHY = {
    "noise": lambda g: 2.0 + 0.5 * torch.randn(400, generator=g),
    "heavy tails": lambda g: torch.randn(400, generator=g).exp(),
    "falling": lambda g: 10.8 * torch.exp(-torch.arange(400) / 40) + 3 + 0.2 * torch.randn(400, generator=g),
    "harder data": lambda g: torch.cat([torch.full((200,), 2.0), torch.full((200,), 2.4)])
    + 8 * torch.exp(-torch.arange(400) / 20) + 0.05 * torch.randn(400, generator=g),
    "spikes": lambda g: 3.0 + 20.0 * (torch.arange(400) % 50 == 49) + 0.1 * torch.randn(400, generator=g),
    "negative": lambda g: -5.0 - torch.arange(400) / 100 + torch.randn(400, generator=g),
    "constant": lambda g: torch.full((400,), 0.69),
    "restarts": lambda g: 3.0 + 0.4 * torch.sin(torch.arange(400) / 10) + 0.1 * torch.randn(400, generator=g),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_noisy_losses_raise_nothing(name):
    for seed in range(20):
        assert alarms_of(HEALTHY[name](torch.Generator().manual_seed(seed)).tolist()) == []
