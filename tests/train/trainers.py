"""Small runs of the Hugging Face Trainer and of Lightning."""

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from .training import batch, loss_of, small_model

try:
    import lightning.pytorch as lightning
except ImportError:
    lightning = None

LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def causal_lm():
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
        causal_lm(),
        TrainingArguments(**settings | options),
        train_dataset=examples,
        eval_dataset=examples[:4],
        callbacks=[callback],
    )


class Module(lightning.LightningModule if lightning else torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.losses = small_model(), []

    def training_step(self, tokens, index):
        loss = loss_of(self.model, tokens)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, tokens, index):
        loss_of(self.model, tokens)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(folder, callback, max_steps, checkpoint=None, logger=False):
    """Run Lightning, two micro-batches of two sequences a step; the trainer and its module."""
    run = lightning.Trainer(
        accelerator="cpu", max_steps=max_steps, accumulate_grad_batches=2, callbacks=[callback], logger=logger,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        log_every_n_steps=1,
    )  # fmt: skip
    module, loader = Module(), DataLoader(batch(16, 1), batch_size=2)  # four steps an epoch
    run.fit(module, loader, loader, ckpt_path=checkpoint)
    return run, module
