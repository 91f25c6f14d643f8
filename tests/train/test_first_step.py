"""The first sampled step is an audit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from attnscale import Monitor, audit
from attnscale.errors import NotRecordedWarning

WIDTH, HEADS = 66, 3


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


def test_an_audit_that_fails_costs_no_record(monkeypatch):
    monkeypatch.setattr("attnscale.train.monitor.diagnose", lambda *_, **__: 1 / 0)
    with pytest.warns(NotRecordedWarning, match="ZeroDivisionError"):
        records = train(Model())
    assert len(records) == 4
