"""In every training stack a Monitor records what it would without: FSDP1, accelerate, peft.

DDP, FSDP2 and tensor parallel are in test_ranks, the trainers in test_callbacks.
"""

import json

import pytest
import torch

from attnscale import Monitor, QKClip
from attnscale.errors import SettingError
from attnscale.train import read_log
from tests.ranks import on_ranks

from . import rank_runs
from .trainers import causal_lm
from .training import batch


def without_a_stack(has_norm):
    records = []
    model = rank_runs.biased_model(has_norm)
    rank_runs.train_stack(model, Monitor(model, every=1, rows=None, sinks=[records.append]))
    return records


def largest_scores(records):
    return [[layer.whole("max") for layer in record.layers.values()] for record in records]


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("has_norm", [False, True], ids=["biases", "norms"])
def test_fsdp1_ranks_give_the_numbers_of_one_process(tmp_path, use_orig_params, has_norm):
    on_ranks(rank_runs.fsdp1, 2, 2, str(tmp_path), use_orig_params, has_norm)
    found, expected = read_log(tmp_path / "scores.jsonl").records, without_a_stack(has_norm)
    for left, right in zip(largest_scores(found), largest_scores(expected), strict=True):
        assert left == pytest.approx(right, rel=1e-4)
    assert [record.alarms for record in found] == [[]] * rank_runs.STEPS
    told, trained = json.loads((tmp_path / "told0.json").read_text(encoding="utf-8"))
    assert told == []
    assert trained == (has_norm or not use_orig_params)  # biases alone move too little; a flat shard is not read


def test_accelerate_gives_the_numbers_of_a_plain_loop():
    accelerate = pytest.importorskip("accelerate")
    accelerator, records = accelerate.Accelerator(cpu=True), []
    model = rank_runs.biased_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    monitor = Monitor(model, every=1, rows=None, sinks=[records.append])
    inputs = rank_runs.inputs()
    for _ in range(rank_runs.STEPS):
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss=accelerator.gather(loss))
    monitor.close()
    assert largest_scores(records) == largest_scores(without_a_stack(has_norm=True))


def attached(clip, optimizer):
    clip.attach(optimizer)
    return lambda: None


@pytest.mark.parametrize("way", [attached, lambda clip, optimizer: clip.step], ids=["attach", "step"])
def test_accelerate_clips_after_each_step_of_the_optimizer_and_none_between(way):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, plain = rank_runs.biased_model(), rank_runs.biased_model()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    clip, expected = QKClip(prepared, 0.05), QKClip(plain, 0.05)
    step, own = way(clip, optimizer), torch.optim.SGD(plain.parameters(), 0.1)
    inputs = rank_runs.inputs()
    for turn in range(8):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        (plain(inputs).square().mean() / 2).backward()
        if turn % 2:
            step()
            own.step()
            own.zero_grad()
            expected.step()
    assert clip.steps == expected.steps == 4
    assert clip.last.heads
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    clip.close()
    expected.close()


def test_an_optimizer_without_hooks_is_refused_with_a_remedy():
    clip = QKClip(rank_runs.biased_model())
    with pytest.raises(SettingError, match=r"got object; call step\(\) after its own"):
        clip.attach(object())
    clip.close()


@pytest.mark.filterwarnings("ignore:.*weight decay|.*copy keyword:DeprecationWarning")
def test_a_model_under_lora_is_recorded_without_warnings_or_alarms():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(causal_lm(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    records = []
    monitor = Monitor(model, every=1, rows=None, sinks=[records.append])
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)
    tokens = batch()
    for _ in range(3):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
    monitor.close()
    assert [len(record.layers) for record in records] == [2] * 3
    assert [record.alarms for record in records] == [[]] * 3
    scales = [layer.whole("scale_applied") for record in records for layer in record.layers.values()]
    assert scales == pytest.approx([6**-0.5] * 6)
