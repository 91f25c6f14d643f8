"""ScoreCallback in real runs of the Hugging Face Trainer."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import attnscale
from attnscale.train import ScoreCallback, read_log

from .training import batch

LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def trainer(folder, callback, **options):
    tokens = batch(64, 3)
    examples = [{"input_ids": row, "labels": row} for row in tokens]
    settings = dict(
        output_dir=str(folder / "out"), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=8,
        save_steps=5, report_to="none", use_cpu=True, disable_tqdm=True, logging_strategy="no", seed=0,
        eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    return Trainer(
        model(),
        TrainingArguments(**settings | options),
        train_dataset=examples,
        eval_dataset=examples[:4],
        callbacks=[callback],
    )


def test_a_run_is_recorded_every_so_many_optimiser_steps_with_all_their_micro_batches(tmp_path):
    callback = ScoreCallback(every=3, rows=None, sinks=[tmp_path / "scores.jsonl"])
    trainer(tmp_path, callback).train()
    records = read_log(tmp_path / "scores.jsonl").records
    assert [record.step for record in records] == [0, 3, 6]
    assert list(records[0].layers) == LAYERS
    rows = 4 * 2 * 2 * 14  # heads, sequences of two micro-batches, positions; evaluation is not among them
    assert [layer.rows for record in records for layer in record.layers.values()] == [rows] * 6
    assert all(value > 0 for value in records[0].layers[LAYERS[0]].numbers["query_gradient"])


def test_training_ends_as_it_does_without_the_callback(tmp_path):
    callback = ScoreCallback(every=2)
    watched, plain = trainer(tmp_path, callback), trainer(tmp_path, ScoreCallback(every=10**6))
    watched.train()
    plain.remove_callback(ScoreCallback)
    plain.train()
    assert all(torch.equal(a, b) for a, b in zip(watched.model.parameters(), plain.model.parameters(), strict=True))


def test_what_it_remembers_survives_resume(tmp_path):
    path = tmp_path / "scores.jsonl"
    trainer(tmp_path, ScoreCallback(every=1, sinks=[path])).train()
    whole = read_log(path).records
    checkpoint = tmp_path / "out" / "checkpoint-5"
    again = ScoreCallback(every=1, sinks=[path])
    trainer(tmp_path, again).train(resume_from_checkpoint=str(checkpoint))
    assert again.monitor.growth(LAYERS[0]).step == again.monitor.last.step
    assert [record.step for record in read_log(path).records] == [record.step for record in whole] == list(range(8))


def test_it_is_reached_by_its_name():
    assert attnscale.train.ScoreCallback is ScoreCallback
