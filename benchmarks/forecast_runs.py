"""Record the training runs on which forecasts and alarms are tested: `python benchmarks/forecast_runs.py`

Small transformers on Python's help texts, watched by attnscale.Monitor. Healthy runs vary in width, depth, rate,
schedule and fix; some train a trained model further. Other runs have far too high a rate. Losses are smoothed over 20
steps. A loss departs at the first step from which it stays 0.1 nats above that of the same case with a QK-norm, or is
not finite. Each line of benchmarks/results/forecast-runs.jsonl.xz is a run: the numbers of every layer, the loss, and
the step at which it departed. `python benchmarks/forecasts.py` evaluates these runs.
"""

import argparse
import json
import logging
import lzma
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from divergence import HalfScores, departure, finite, smoothed
from torch import nn

from attnscale import Monitor
from attnscale.acting import clip_qk_
from attnscale.diagnose import is_trained
from attnscale.models import CausalTransformer, default_text, encode, load_bundled
from attnscale.models.text import VOCABULARY
from attnscale.train import Record

RESULTS = Path(__file__).parent / "results" / "forecast-runs.jsonl.xz"
TUNED, SET_ASIDE = (0, 1), (100, 101)  # seeds
BY_HEAD = ("max", "max_above_mean")
BY_LAYER = (
    "max_bound",
    "spread",
    "entropy_ratio",
    "jacobian_trace",
    "scale_applied",
    "query_norm",
    "key_norm",
    "alignment",
)
MASKED = 0.15  # share of the tokens, which an encoder predicts


def constant(step: int, steps: int) -> float:
    """Return one rate from the first step to the last."""
    return 1.0


def warmed(step: int, steps: int) -> float:
    """Return a rate that rises over a tenth of the run and then stays constant."""
    return min(1.0, 10 * (step + 1) / steps)


def cosine(step: int, steps: int) -> float:
    """Return a rate that rises over a tenth of the run and then falls to zero along a cosine."""
    return warmed(step, steps) * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def linear(step: int, steps: int) -> float:
    """Return a rate that falls linearly to zero."""
    return 1 - step / steps


def stable_then_decayed(step: int, steps: int) -> float:
    """Return a rate that rises, stays constant, and falls over the last fifth of the run."""
    return min(warmed(step, steps), 5 * (1 - step / steps))


def accident(step: int, steps: int) -> float:
    """Return 1% of the rate in the first half of the run, then the whole rate, as after an error in a schedule."""
    return 0.01 if step < steps // 2 else 1.0


@dataclass(frozen=True)
class Case:
    """A run: its model and its settings."""

    name: str
    rate: float
    d_model: int = 48
    layers: int = 2
    heads: int = 2
    steps: int = 400
    every: int = 10
    schedule: Callable[[int, int], float] = constant
    weight_decay: float = 0.0
    qk_norm: bool = False
    softcap: float | None = None
    clip: float | None = None
    start: str = "random"  # or "bundled", or "encoder"
    optimizer: str = "adam"
    half: bool = False
    length: int = 32
    batch: int = 16
    too_fast: bool = False


HEALTHY = (
    Case("width 32, 1e-3", 1e-3, d_model=32, steps=500),
    Case("width 64, 1e-3", 1e-3, d_model=64),
    Case("width 64, 3e-3", 3e-3, d_model=64),
    Case("width 96, 2e-3", 2e-3, d_model=96, heads=4, steps=300),
    Case("width 48, 1e-2", 1e-2, schedule=warmed),
    Case("depth 1, 3e-3", 3e-3, layers=1, steps=600),
    Case("depth 4, 2e-3", 2e-3, layers=4, steps=300),
    Case("depth 6, 1e-3", 1e-3, d_model=32, layers=6, steps=300, every=5),
    Case("warm-up and cosine, 3e-3", 3e-3, schedule=cosine),
    Case("warm-up and cosine, 1e-2", 1e-2, schedule=cosine),
    Case("linear decay, 2e-3", 2e-3, schedule=linear),
    Case("decay at the end, 3e-3", 3e-3, schedule=stable_then_decayed),
    Case("weight decay 0.1, 3e-3", 3e-3, weight_decay=0.1),
    Case("weight decay 1, 3e-3", 3e-3, weight_decay=1.0),
    Case("QK-norm, 3e-3", 3e-3, qk_norm=True),
    Case("QK-norm, 1e-2", 1e-2, qk_norm=True),
    Case("soft-cap 50, 3e-3", 3e-3, softcap=50.0),
    Case("soft-cap 20, 1e-2", 1e-2, softcap=20.0),
    Case("QK-Clip 10, 1e-2", 1e-2, clip=10.0, steps=200, every=5),
    Case("QK-Clip 100, 3e-2", 3e-2, clip=100.0, steps=200, every=5),
    Case("SGD with momentum", 0.3, optimizer="sgd"),
    Case("96 tokens, every 25", 3e-3, length=96, batch=8, steps=500, every=25),
    Case("encoder, 1e-3", 1e-3, d_model=32, start="encoder"),
    Case("encoder, 1e-4", 1e-4, d_model=32, start="encoder"),
    Case("trained model, 1e-4", 1e-4, start="bundled", length=64, batch=8, steps=150, every=5),
    Case("trained model, 1e-3", 1e-3, start="bundled", length=64, batch=8, steps=150, every=5, schedule=warmed),
)
TOO_FAST = tuple(
    replace(case, too_fast=True)
    for case in (
        Case("0.1", 0.1, steps=200, every=5, schedule=warmed),
        Case("0.3", 0.3, steps=200, every=5, schedule=warmed),
        Case("0.3, scores in float16", 0.3, steps=200, every=5, schedule=warmed, half=True),
        Case("0.1 at once", 0.1, steps=200, every=5),
        Case("depth 4, 0.1", 0.1, layers=4, steps=200, every=5, schedule=warmed),
        Case("width 96, 0.1", 0.1, d_model=96, heads=4, steps=200, every=5, schedule=warmed),
        Case("0.3 by accident", 0.3, steps=300, every=5, schedule=accident),
    )
)


@dataclass
class RunColumns:
    """Sink that collects the recorded columns of a run."""

    every: int
    steps: list[int] = field(default_factory=list)
    layers: dict[str, dict[str, list[object]]] = field(default_factory=dict)
    clipped: dict[str, list[float]] = field(default_factory=dict)

    def __call__(self, record: Record) -> None:
        """Add a record if its step is a multiple of `every`."""
        if record.step % self.every:
            return
        self.steps.append(record.step)
        for name, layer in record.layers.items():
            columns = self.layers.setdefault(name, {})
            for number in BY_HEAD:
                columns.setdefault(number, []).append([short(value) for value in layer.numbers[number]])
            for number in BY_LAYER:
                columns.setdefault(number, []).append(short(layer.whole(number)))
            columns.setdefault("broken", []).append(layer.broken)
            columns.setdefault("clipped", []).append(
                [short(factor) for factor in self.clipped.pop(name, [1.0] * len(layer.numbers["max"]))]
            )

    def clip(self, model: nn.Module, monitor: Monitor, threshold: float) -> None:
        """Apply QK-Clip, and store its factors for the next record."""
        for head in clip_qk_(model, monitor, threshold).heads:
            factors = self.clipped.setdefault(head.layer, [1.0] * monitor.layers[head.layer].heads)
            factors[head.head] *= head.gamma


def short(value: float) -> float | None:
    """Return the value rounded to four digits; None if it is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


class Encoder(nn.Module):
    """A small BERT, which predicts masked bytes."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, case.d_model)
        self.places = nn.Parameter(0.02 * torch.randn(case.length, case.d_model))
        layer = nn.TransformerEncoderLayer(case.d_model, case.heads, 4 * case.d_model, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, case.layers, enable_nested_tensor=False)
        self.head = nn.Linear(case.d_model, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of every token."""
        logits: torch.Tensor = self.head(self.encoder(self.embedding(tokens) + self.places))
        return logits


def model_of(case: Case) -> nn.Module:
    """Return the initial model of a case."""
    if case.start == "bundled":
        return load_bundled()[0].train()
    if case.start == "encoder":
        return Encoder(case)
    model = CausalTransformer(
        VOCABULARY, case.d_model, case.layers, case.heads, softcap=case.softcap, qk_norm=case.qk_norm
    )
    for block in model.blocks if case.half else ():
        block.attention.__class__ = HalfScores
    return model


def loss_of(case: Case, model: nn.Module, tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the loss of the next byte, or of the masked bytes for an encoder."""
    if case.start != "encoder":
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    tokens = tokens[:, :-1]
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED
    return F.cross_entropy(model(tokens.masked_fill(hidden, 0))[hidden], tokens[hidden])


def train(case: Case, seed: int, text: torch.Tensor) -> tuple[dict[str, object], list[float]]:
    """Train once; return the record of the run, and its smoothed loss."""
    torch.manual_seed(seed)
    model = model_of(case)
    trained = is_trained(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), case.rate, betas=(0.9, 0.95), weight_decay=case.weight_decay
    )
    if case.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), case.rate, momentum=0.9)
    generator, losses, kept = torch.Generator().manual_seed(seed), [], RunColumns(case.every)
    monitor = Monitor(model, every=1 if case.clip else case.every, sinks=[kept])
    for step in range(case.steps):
        for group in optimizer.param_groups:
            group["lr"] = case.rate * case.schedule(step, case.steps)
        starts = torch.randint(0, len(text) - case.length - 1, (case.batch,), generator=generator)
        loss = loss_of(case, model, text[starts[:, None] + torch.arange(case.length + 1)], generator)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
        if case.clip is not None:
            kept.clip(model, monitor, case.clip)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
    monitor.close()
    curve = smoothed(losses)
    settings = {name: value for name, value in asdict(case).items() if name not in ("name", "schedule", "too_fast")}
    found = {
        "case": case.name, "seed": seed, "settings": {**settings, "schedule": case.schedule.__name__},
        "trained": trained, "steps": kept.steps, "loss": [short(curve[step]) for step in kept.steps],
        "last_loss": short(curve[-1]), "layers": kept.layers,
    }  # fmt: skip
    if case.clip is None:
        for columns in kept.layers.values():
            del columns["clipped"]
    return found, curve


def runs_of(case: Case, seed: int, text: torch.Tensor) -> list[dict[str, object]]:
    """Return the run of a case; if its rate is too high, also the same run with a QK-norm, as the reference."""
    found, curve = train(case, seed, text)
    if not case.too_fast:
        return [found | {"departs": None}]
    tamed, reference = train(replace(case, name=f"{case.name}, QK-norm", qk_norm=True), seed, text)
    return [found | {"departs": departure(curve, reference)}, tamed | {"departs": None}]


def main() -> None:
    """Train all cases in turn, and write the runs."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[*TUNED, *SET_ASIDE])
    arguments.add_argument("--out", type=Path, default=RESULTS)
    given = arguments.parse_args()
    torch.set_num_threads(1)  # such small matrices are no faster on two threads
    logging.getLogger("attnscale").setLevel(logging.ERROR)
    text, start = encode(default_text()), time.perf_counter()
    with lzma.open(given.out, "wt", encoding="utf-8", preset=9) as file:
        for seed in given.seeds:
            for case in (*HEALTHY, *TOO_FAST):
                for run in runs_of(case, seed, text):
                    file.write(f"{json.dumps(finite(run), separators=(',', ':'))}\n")
                    highest = max(
                        (value for columns in run["layers"].values() for heads in columns["max"] for value in heads
                         if value is not None), default=math.nan,
                    )  # fmt: skip
                    print(
                        f"{run['case']}, seed {seed}: loss {run['last_loss']}, largest score {highest:.4g}, "
                        f"departs at {run['departs']}; {time.perf_counter() - start:.0f} s",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
