"""Fine-tune a Hugging Face model with ScoreCallback, at a suitable rate and at one at which the scores explode.

The model is created from a configuration and saved, so nothing is fetched; in your run, use your own folder.

    python examples/hugging_face_fine_tune.py
"""

import logging
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import attnscale
from attnscale.models.text import default_text, encode
from attnscale.train import read_log

LENGTH, STEPS = 64, 80


def make_checkpoint(folder: Path) -> None:
    """Save a small, newly initialised Llama whose tokens are bytes."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def fine_tune(checkpoint: Path, folder: Path, learning_rate: float) -> float:
    """Train on English bytes and record the scores of every fourth step; return the mean loss of the last ten."""
    rows = encode(default_text())[: 512 * LENGTH].view(-1, LENGTH)
    trainer = Trainer(
        LlamaForCausalLM.from_pretrained(checkpoint),
        TrainingArguments(
            output_dir=str(folder), learning_rate=learning_rate, max_steps=STEPS, per_device_train_batch_size=8,
            lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=10, save_strategy="no", report_to="none",
            use_cpu=True, disable_tqdm=True, seed=0,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[attnscale.train.ScoreCallback(every=4, sinks=[folder / "scores.jsonl"])],
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer.state.log_history[-2]["loss"]


def main() -> None:
    """Fine-tune twice, and print the recorded scores and alarms."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("attnscale").setLevel(logging.ERROR)  # the alarms are printed from the log below
    with tempfile.TemporaryDirectory() as name:
        checkpoint = Path(name) / "model"
        make_checkpoint(checkpoint)
        for learning_rate in (3e-3, 0.1):
            folder = Path(name) / f"{learning_rate:g}"
            folder.mkdir()
            loss = fine_tune(checkpoint, folder, learning_rate)
            records = read_log(folder / "scores.jsonl").records
            print(f"learning rate {learning_rate:g}: loss {loss:.2f} after {STEPS} steps")
            for layer in records[0].layers:
                first, last = (record.layers[layer].whole("max") for record in (records[0], records[-1]))
                print(f"  {layer}: largest score {first:.3g} at the start, {last:.3g} at step {records[-1].step}")
            alarms = [(record.step, alarm) for record in records for alarm in record.alarms]
            if alarms:
                step, first = alarms[0]
                print(f"  {len(alarms)} alarms; the first at step {step}: {first.code} in {first.layer}")
            else:
                print("  no alarm")


if __name__ == "__main__":
    main()
