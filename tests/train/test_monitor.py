"""What Monitor promises a training loop."""

import copy
import json
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint

import attnscale
from attnscale import Monitor
from attnscale.errors import InputError, NotRecordedWarning, SettingError, SinkWarning
from attnscale.measure.statistics import logged
from attnscale.train.record import Record

from .training import batch, loss_of, small_model

LAYERS = ["blocks.0.attention", "blocks.1.attention"]


def hooks(model):
    """Return the number of hooks of every module, and of the global ones."""
    own = sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())
    return own + len(torch_modules._global_forward_hooks) + len(torch_modules._global_forward_pre_hooks)


def train(model, monitor, steps, micro_batches=1):
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(steps):
        for tokens in batch(4, step).chunk(micro_batches):
            (loss_of(model, tokens) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()


def test_the_first_step_and_every_so_many_after_it_are_recorded():
    model, records = small_model(), []
    monitor = Monitor(model, every=3, sinks=[records.append])
    train(model, monitor, 8)
    monitor.close()
    assert [record.step for record in records] == [0, 3, 6]
    assert list(records[0].layers) == LAYERS
    assert set(records[0].layers[LAYERS[0]].numbers) == set(logged()) - {"learned_sink"}
    assert all(len(values) == 3 for values in records[0].layers[LAYERS[0]].numbers.values())
    assert monitor.last is records[-1]


def test_nothing_is_left_in_place_between_sampled_steps():
    model = small_model()
    before, classes, sdpa = hooks(model), [type(module) for module in model.modules()], F.scaled_dot_product_attention

    def is_plain():
        are_plain = [type(module) for module in model.modules()] == classes
        return hooks(model) == before and are_plain and F.scaled_dot_product_attention is sdpa

    monitor = Monitor(model, every=3)
    assert not is_plain()  # traced
    train(model, monitor, 1)
    assert is_plain()
    train(model, monitor, 2)
    assert not is_plain()  # probed
    monitor.close()
    assert is_plain()


def test_the_numbers_are_those_of_watching_the_same_forward():
    model = small_model()
    with attnscale.watch(model, rows=None) as seen:
        loss_of(model, batch())
    monitor = Monitor(model, rows=None)
    train(model, monitor, 1)
    for name, layer in seen.layers.items():
        found, stats = monitor.last.layers[name].numbers, layer.stats
        for number, expected in {
            "spread": stats.std_within_rows, "total_spread": stats.std, "max": stats.max,
            "max_bound": stats.max_bound, "top1": stats.top1,
            "entropy_ratio": stats.entropy_ratio, "saturated": stats.saturated, "jacobian_trace": stats.jacobian_trace,
            "scale_applied": layer.scales, "query_norm": layer.query_norm, "key_norm": layer.key_norm,
            "alignment": layer.alignment,
        }.items():  # fmt: skip
            assert found[number] == pytest.approx(expected.tolist(), rel=1e-6), number


def test_training_is_bit_identical_with_and_without_a_monitor():
    plain, watched = small_model(), small_model()
    train(plain, SimpleNamespace(step=lambda: None), 4)
    train(watched, Monitor(watched, every=2), 4)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_rows_are_counted_once(reentrant):
    model = small_model()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    monitor = Monitor(model, every=1, rows=None)
    with pytest.warns(NotRecordedWarning, match="use_reentrant=False") if reentrant else nullcontext() as told:
        train(model, monitor, 2)
    assert len(told or ()) == int(reentrant)
    assert [layer.rows for layer in monitor.last.layers.values()] == [4 * 3 * 13] * 2
    assert ("query_gradient" in monitor.last.layers[LAYERS[0]].numbers) is not reentrant
    monitor.close()


def test_as_a_context_it_is_one_step_and_an_exception_leaves_nothing():
    model, records = small_model(), []
    before = hooks(model)
    monitor = Monitor(model, every=2, sinks=[records.append])
    for _ in range(3):
        with monitor:
            loss_of(model, batch()).backward()
    assert [record.step for record in records] == [0, 2]
    with monitor:
        pass
    with pytest.raises(IndexError), monitor:
        loss_of(model, batch() + 1000)
    assert hooks(model) == before
    assert len(records) == 2


def test_state_survives_a_checkpoint_by_way_of_json():
    model = small_model()
    first, second = Monitor(model, every=2), Monitor(model, every=2)
    second.cancel()
    train(model, first, 14)
    first.close()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.growth(LAYERS[0]) == first.growth(LAYERS[0]) is not None
    train(model, second, 1)
    assert (second.steps, second.last.step) == (15, 14)
    second.close()


def test_an_alarm_is_raised_once_and_again_when_it_returns_and_repeats_are_counted(caplog):
    model, raised = small_model(), []
    weights = copy.deepcopy(model.state_dict())
    monitor = Monitor(model, every=1, on_alarm=raised.append)

    for factors in ((1, 1), (1, 100), (100, 100), (1, 1), (100, 100), (1, 100), (100, 100)):
        model.load_state_dict(weights)
        with torch.no_grad():
            for block, factor in zip(model.blocks, factors, strict=True):
                block.attention.query.weight.mul_(factor)
        loss_of(model, batch()).backward()
        monitor.step()
    monitor.close()
    exploding = [alarm for alarm in raised if alarm.code == "exploding"]
    numbers = [LAYERS.index(alarm.layer) for alarm in exploding]
    assert numbers == [1, 0, 0, 1, 0]
    assert "QK-Clip would act from 100 on" in exploding[0].message
    assert "‖q‖ × 100" in exploding[0].message
    assert [line.partition(", ")[0] for line in caplog.messages] == [
        "step 1: warning: blocks.1.attention",
        "1 more such alarm in 1 layer until step 2",
        "step 4: warning: blocks.0.attention",
        "1 more such alarm in 1 layer until step 6",
    ]
    assert "head 1 and 1 more head, in 2 layers: exploding" in caplog.messages[2]


def test_the_monitor_of_the_readme_logs_at_most_three_lines(caplog):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = (block for block in readme.split("```") if "attnscale.Monitor(" in block)
    torch.manual_seed(0)
    exec(example.removeprefix("python"), {})
    assert 1 <= len(caplog.messages) <= 3


def test_scores_that_are_nan_raise_an_error_and_are_null_in_the_log():
    model, records = small_model(), []
    with torch.no_grad():
        model.blocks[0].attention.query.weight[:8].fill_(math.nan)
    monitor = Monitor(model, sinks=[records.append])
    train(model, monitor, 1)
    monitor.close()
    (alarm, *_) = [alarm for alarm in records[0].alarms if alarm.layer == LAYERS[0]]
    assert (alarm.code, alarm.severity) == ("non_finite", "error")
    line = json.dumps(records[0].to_dict(), allow_nan=False)
    again = Record.from_dict(json.loads(line))
    assert again.layers[LAYERS[0]].broken == 1
    assert math.isnan(again.layers[LAYERS[0]].numbers["spread"][0])


def test_a_step_without_attention_gives_one_warning_and_no_record():
    model, records = small_model(), []
    monitor = Monitor(model, every=1, sinks=[records.append])
    with pytest.warns(NotRecordedWarning, match="no module of it was called"):
        monitor.step()
    monitor.step()  # a second warning would be an error
    assert not records
    train(model, monitor, 1)
    assert [record.step for record in records] == [2]
    monitor.close()
    without = Monitor(nn.Linear(3, 3))
    without.model(torch.ones(1, 3)).sum().backward()
    with pytest.warns(NotRecordedWarning, match="Expected attention in the watched model, but saw none"):
        without.step()


class Taught(nn.Module):
    """A model with a frozen teacher, which it holds in a list."""

    def __init__(self):
        super().__init__()
        self.student, self.teachers = small_model(), [small_model()]

    def forward(self, tokens):
        with torch.no_grad():
            self.teachers[0](tokens)
        return self.student(tokens)


@pytest.mark.filterwarnings("default")  # the teacher runs without gradients
def test_another_model_that_runs_inside_is_no_part_of_it():
    model, records = Taught(), []
    train(model, Monitor(model, every=1, rows=None, sinks=[records.append]), 3)
    names = {name for record in records for name in record.layers if name.startswith("student")}
    assert names == {f"student.{name}" for name in LAYERS}


def test_a_sink_or_alarm_handler_that_fails_does_not_stop_training_nor_the_other_sinks():
    def broken(given):
        raise ConnectionError("gone")

    model, records = small_model(), []
    with torch.no_grad():
        model.blocks[0].attention.query.weight.mul_(1000)
    monitor = Monitor(model, every=1, sinks=[broken, records.append], on_alarm=broken)
    with pytest.warns(SinkWarning, match="ConnectionError: gone") as told:
        train(model, monitor, 2)
    assert sorted(str(each.message).split(" failed")[0] for each in told) == ["A sink", "on_alarm"]
    assert len(records) == 2
    assert records[0].alarms
    monitor.close()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(every=0), "Expected every as a whole number of steps of at least 1, got 0"),
        (dict(sinks="scores.jsonl"), r"write sinks=\['scores.jsonl'\]"),
        (dict(sinks=["scores.csv"]), "Expected a sink as a path of a .jsonl file, 'tensorboard:DIR'"),
        (dict(sinks=[7]), "got int"),
        (dict(rows=0), "Expected rows as a whole number"),
        (dict(key_group="a group"), r"\(context parallel\) cannot be merged"),
    ],
)
def test_bad_settings_are_one_sentence(settings, sentence):
    with pytest.raises(SettingError, match=sentence):
        Monitor(small_model(), **settings)
    with pytest.raises(InputError, match=r"Expected a torch\.nn\.Module"):
        Monitor("model")


@pytest.mark.parametrize(("options", "warned"), [({}, True), ({"softcap": 50.0}, False), ({"qk_norm": True}, False)])
def test_growth_that_a_soft_cap_or_a_qk_norm_stops_is_not_warned_of(options, warned):
    """Queries that grow by half a step: without either the scores follow, and will pass 1,000."""
    model, raised = small_model(**options), []
    monitor = Monitor(model, every=1, rows=8, on_alarm=raised.append)
    for _ in range(18):
        loss_of(model, batch()).backward()
        monitor.step()
        with torch.no_grad():
            model.blocks[0].attention.query.weight.mul_(1.4)
    monitor.close()
    forecasts = [alarm for alarm in raised if "will pass" in alarm.message and alarm.layer == LAYERS[0]]
    assert bool(forecasts) == warned
    assert monitor.last.layers[LAYERS[0]].softcap == options.get("softcap")


def test_a_step_in_unlike_micro_batches_is_a_step_on_the_whole_batch():
    """9 samples and 1 of longer vectors: the mean norm was 7.2, for 3.75."""
    whole, parts = (Monitor(small_model(), rows=None) for _ in range(2))
    tokens = batch(10, 3)
    tokens[9] = tokens[9, 0]  # one token over and over: other norms than the rest
    with torch.no_grad():
        for monitor in (whole, parts):
            monitor.model.embedding.weight[tokens[9, 0]] *= 50
            for block in monitor.model.blocks:
                block.attention.query.weight.mul_(3)
        parts.model.eval()(batch(7))  # evaluation is no part of the step
        parts.model.train()
    for monitor, sizes in ((whole, [10]), (parts, [9, 1])):
        for some in tokens.split(sizes):
            (loss_of(monitor.model, some) * len(some) / 10).backward()
        monitor.step()
        monitor.close()
    for name in LAYERS:
        first, second = (monitor.last.layers[name] for monitor in (whole, parts))
        assert first.rows == second.rows
        for number in first.numbers:
            assert second.numbers[number] == pytest.approx(first.numbers[number], rel=1e-4, abs=1e-9), number
