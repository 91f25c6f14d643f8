"""Train the model that ships with the package, and write its weights: `python scripts/train_bundled_model.py`.

A few minutes on two cores. The same seed on the same machine and Python gives the same weights.
"""

import hashlib
import json
import math
import platform
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from attnscale.models.bundled import split
from attnscale.models.text import VOCABULARY, default_text
from attnscale.models.transformer import CausalTransformer

SHAPE = {"vocabulary": VOCABULARY, "d_model": 128, "layers": 4, "heads": 4, "context": 256}
SEED, STEPS, BATCH = 0, 1600, 8
PEAK, WARMUP, DECAY = 3e-3, 50, 0.1  # learning rate, its warm-up in steps, weight decay of the matrices
OUT = Path(__file__).parent.parent / "src/attnscale/models/bundled.safetensors"


def main() -> None:
    """Train, measure the loss on text held out, and write weights and how they were made."""
    torch.manual_seed(SEED)
    text = default_text()
    seen, held_out = split(text)
    model = CausalTransformer(**SHAPE)
    train(model, seen)
    stored = {name: tensor.half().contiguous() for name, tensor in model.state_dict().items()}
    model.load_state_dict(stored)  # the loss that is recorded is of the weights that ship
    about = {
        "shape": json.dumps(SHAPE),
        "seed": str(SEED),
        "steps": f"{STEPS} of {BATCH} × {model.context} bytes",
        "loss_nats_per_byte": f"{loss(model, seen[: len(held_out)]):.3f}",
        "held_out_loss_nats_per_byte": f"{loss(model, held_out):.3f}",
        "corpus": f"pydoc_data.topics of Python {platform.python_version()}",
        "corpus_sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "torch": torch.__version__,
    }
    save_file(stored, sys.argv[1] if len(sys.argv) > 1 else OUT, metadata=about)
    print(json.dumps(about, indent=1))


def train(model: CausalTransformer, tokens: Tensor) -> None:
    """AdamW on windows drawn at random; warm-up, then a cosine to zero."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
    start = time.perf_counter()
    for step in range(STEPS):
        begin = torch.randint(len(tokens) - model.context, (BATCH, 1))
        window = tokens[begin + torch.arange(model.context + 1)]  # (BATCH, context + 1)
        objective = _objective(model, window)
        objective.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"step {step:4d}  loss {objective.item():.3f}  {time.perf_counter() - start:.0f} s", flush=True)


@torch.inference_mode()
def loss(model: CausalTransformer, tokens: Tensor) -> float:
    """Mean negative log-likelihood a byte over whole windows, nats."""
    windows = tokens[: len(tokens) // (model.context + 1) * (model.context + 1)].view(-1, model.context + 1)
    return sum(_objective(model, part).item() * len(part) for part in windows.split(BATCH)) / len(windows)


def _objective(model: CausalTransformer, window: Tensor) -> Tensor:
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def _rate(step: int) -> float:
    return min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / STEPS)))


if __name__ == "__main__":
    main()
