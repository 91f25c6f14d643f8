"""The first sampled step is an audit."""

import pytest
import torch
import torch.nn.functional as F

from attnscale import Monitor, audit
from attnscale.errors import NotRecordedWarning
from tests.zoo.entry import Block, SelfAttention

WIDTH, HEADS = 66, 3


class Attention(SelfAttention):
    scale, forwards = None, 0

    def forward(self, x):
        self.forwards += 1
        return self.merge(F.scaled_dot_product_attention(*self.project(x), scale=self.scale))


def model_of(scale=None):
    torch.manual_seed(0)
    model = Block(WIDTH, Attention(WIDTH, HEADS))
    model.attention.scale = scale
    return model


def inputs():
    return torch.randn(2, 19, WIDTH)


def train(model, steps=4, state=None, **options):
    """Return the records of a run, and the state of its monitor."""
    records = []
    monitor = Monitor(model, every=1, rows=None, sinks=[records.append], **options)
    if state is not None:
        monitor.load_state_dict(state)
    for _ in range(steps):
        model(inputs()).sum().backward()
        monitor.step()
    monitor.close()
    return records, monitor.state_dict()


def test_the_first_record_has_the_findings_of_audit_from_the_same_forward():
    model, heard = model_of(scale=1.0), []
    records, _ = train(model, on_alarm=heard.append)
    assert model.attention.forwards == len(records)
    (alarm,) = records[0].alarms
    (expected,) = (each for each in audit(model, inputs()).findings if each.severity != "note")
    assert (alarm.code, alarm.layer, alarm.severity, alarm.message) == (
        "unscaled", "attention", "error", expected.message
    )  # fmt: skip
    assert heard == [alarm]
    assert "learning rate" not in alarm.advice
    assert [record.alarms for record in records[1:]] == [[]] * 3


def test_a_scale_that_the_configuration_sets_and_the_code_ignores_is_an_alarm():
    model = model_of()
    model.attention.args = {"softmax_scale": 0.05}
    (alarm,) = train(model, 1)[0][0].alarms
    assert (alarm.code, alarm.expected) == ("config_mismatch", 0.05)


def test_a_symptom_of_a_wrong_scale_is_no_second_alarm():
    model = model_of(scale=1.0)
    with torch.no_grad():
        for projection in (model.attention.q_proj, model.attention.k_proj):
            projection.weight.mul_(2)  # spread 6 with the scale 1, over 19 keys; 1.3 with 1/√d_k
    found = audit(model, inputs()).findings
    assert (found[0].code, found[0].severity) == ("unscaled", "error")
    symptoms = [each for each in found if each.code == "sharp"]
    assert {each.severity for each in symptoms} == {"note"}
    assert {each.advice for each in symptoms} == {"This follows from unscaled: correct the scale first."}
    assert [alarm.code for alarm in train(model)[0][0].alarms] == ["unscaled"]


def frozen():
    """A model that is fine-tuned with frozen keys."""
    model = model_of()
    model.attention.k_proj.requires_grad_(False)
    model.norm.requires_grad_(False)
    return model


@pytest.mark.parametrize("make", [model_of, frozen])
def test_a_healthy_model_has_no_alarm_at_its_first_step(make):
    assert [record.alarms for record in train(make())[0]] == [[]] * 4


def test_a_resumed_run_has_no_second_audit():
    model = model_of(scale=1.0)
    first, state = train(model, 1)
    again, _ = train(model, 1, state)
    assert [[each.code for each in records[0].alarms] for records in (first, again)] == [["unscaled"], []]


def test_an_audit_that_fails_costs_no_record(monkeypatch):
    monkeypatch.setattr("attnscale.train.monitor.diagnose", lambda *_, **__: 1 / 0)
    with pytest.warns(NotRecordedWarning, match="ZeroDivisionError"):
        records, _ = train(model_of())
    assert len(records) == 4
