"""The first sampled step is an audit; a loss that diverges while scores are in range is an alarm of its own."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnscale import Monitor, audit
from attnscale.diagnose.alarm import Thresholds, diverged_from
from attnscale.errors import NotRecordedWarning
from attnscale.train import LayerRecord
from attnscale.train.history import History

WIDTH, HEADS = 66, 3
FACTORS = {"scale_applied": [0.1], "query_norm": [8.0], "key_norm": [8.0], "alignment": [0.1]}


class Attention(nn.Module):
    def __init__(self, scale=None, gain=1.0):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale, self.gain = scale, gain

    def forward(self, x):
        query, key, value = (
            p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.query, self.key, self.value)
        )
        output = F.scaled_dot_product_attention(self.gain * query, key, value, scale=self.scale)
        return x + output.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.forwards = 0
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(**options)

    def forward(self, x):
        self.forwards += 1
        return self.attention(self.norm(x))


def train(model, losses=(0.0,) * 4, **options):
    records = []
    monitor = Monitor(model, every=1, rows=None, sinks=[records.append], **options)
    for loss in losses:
        model(torch.randn(2, 19, WIDTH)).sum().backward()
        monitor.step(loss=loss)
    monitor.close()
    return records


def test_the_first_record_has_the_findings_of_audit_from_the_same_forward():
    model, heard = Model(scale=1.0), []
    records = train(model, on_alarm=heard.append)
    assert model.forwards == len(records)
    (alarm,) = records[0].alarms
    (expected,) = (each for each in audit(model, torch.randn(2, 19, WIDTH)).findings if each.severity != "note")
    assert (alarm.code, alarm.layer, alarm.severity, alarm.message) == (
        "unscaled", "attention", "error", expected.message
    )  # fmt: skip
    assert heard == [alarm]
    assert "learning rate" not in alarm.advice
    assert [record.alarms for record in records[1:]] == [[]] * 3


def test_a_scale_that_the_configuration_sets_and_the_code_ignores_is_an_alarm():
    model = Model()
    model.attention.args = {"softmax_scale": 0.05}
    (alarm,) = train(model)[0].alarms
    assert (alarm.code, alarm.expected) == ("config_mismatch", 0.05)


def test_what_follows_from_a_wrong_scale_is_no_second_alarm():
    model = Model(scale=1.0)
    with torch.no_grad():
        for projection in (model.attention.query, model.attention.key):
            projection.weight.mul_(2)  # spread 6 with the scale 1, over 19 keys; 1.3 with 1/√d_k
    found = audit(model, torch.randn(2, 19, WIDTH)).findings
    assert (found[0].code, found[0].severity) == ("unscaled", "error")
    symptoms = [each for each in found if each.code == "sharp"]
    assert symptoms
    assert {each.severity for each in symptoms} == {"note"}
    assert {each.advice for each in symptoms} == {"This follows from unscaled: correct the scale first."}
    assert [alarm.code for alarm in train(model)[0].alarms] == ["unscaled"]


def test_a_healthy_model_has_no_alarm_at_its_first_step_and_a_resumed_run_no_second_audit():
    assert [record.alarms for record in train(Model())] == [[]] * 4
    model = Model(scale=1.0)
    first = Monitor(model, every=1)
    model(torch.randn(2, 19, WIDTH)).sum().backward()
    first.step()
    again = Monitor(model, every=1)
    again.load_state_dict(first.state_dict())
    model(torch.randn(2, 19, WIDTH)).sum().backward()
    again.step()
    assert [[each.code for each in monitor.last.alarms] for monitor in (first, again)] == [["unscaled"], []]
    first.close()
    again.close()


def test_frozen_keys_of_a_fine_tuned_model_are_no_alarm():
    model = Model()
    model.attention.key.requires_grad_(False)
    model.norm.requires_grad_(False)
    assert train(model)[0].alarms == []


# Alarms of a history


def layer(largest, entropy=0.5, gain=0.5):
    numbers = {"max": [largest], "max_bound": [2 * largest], "entropy_ratio": [entropy], "jacobian_trace": [gain]}
    return LayerRecord(7, numbers | FACTORS)


def alarms_of(losses, largest=5.0):
    history, found = History(Thresholds()), []
    for step, loss in enumerate(losses):
        found += [(step, alarm) for alarm in history.add(step, {"layer": layer(largest)}, loss=loss)]
    return found


FALLING = [10.8 * math.exp(-step / 5) + 3.0 for step in range(30)]


@pytest.mark.parametrize("bad", [[12.0, 12.5, 13.0, 14.0], [math.nan] * 4, [math.inf] * 4])
def test_a_loss_that_diverges_while_scores_are_in_range_is_one_alarm_that_says_so(bad):
    ((step, alarm),) = alarms_of([*FALLING, *bad])
    assert step == (len(FALLING) + 2 if math.isfinite(bad[0]) else len(FALLING))
    assert (alarm.code, alarm.layer, alarm.severity) == ("loss_diverges", "", "error")
    assert alarm.message.startswith("The loss diverges, and attention is not the cause.")
    assert f"at step {step}" in alarm.message
    assert "the largest is 5" in alarm.message
    assert str(alarm).startswith("error: the whole model: loss_diverges: ")


def test_the_alarm_of_the_loss_can_be_turned_off():
    history = History(Thresholds(loss=False))
    assert not [alarm for step in range(3) for alarm in history.add(step, {"layer": layer(5.0)}, loss=math.nan)]


def test_where_scores_raise_alarms_the_loss_raises_none():
    assert {alarm.code for _, alarm in alarms_of([*FALLING, 12.0, 12.5, 13.0], largest=2000.0)} == {"exploding"}


def test_a_loss_that_comes_back_and_diverges_again_is_told_of_again():
    found = alarms_of([*FALLING, 12.0, 12.0, 12.0, *FALLING[9:], 12.0, 12.0, 12.0])
    assert [alarm.code for _, alarm in found] == ["loss_diverges"] * 2


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


def test_a_run_that_diverges_from_the_start_is_told_of():
    assert diverged_from([10.8, 11.0, 15.0, 30.0, 60.0, 200.0, 500.0]) == 11.0
    assert diverged_from([10.8, 10.7]) is None


def test_an_audit_that_fails_costs_no_record(monkeypatch):
    monkeypatch.setattr("attnscale.train.monitor.diagnose", lambda *_, **__: 1 / 0)
    with pytest.warns(NotRecordedWarning, match="ZeroDivisionError"):
        records = train(Model())
    assert len(records) == 4
