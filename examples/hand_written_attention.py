"""Find a bug that raises no error in a hand-written attention, fix it, and train both versions on one task.

The task is recall. A row shows sixteen pairs of a key and a value, then one of the keys; the answer is its value.

    python examples/hand_written_attention.py
"""

from textwrap import fill

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnscale

WIDTH, KEYS, PAIRS, STEPS = 256, 64, 16, 120


class Attention(nn.Module):
    """One head of hand-written cross-attention."""

    def __init__(self, width: int, scaled: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        for projection in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(projection.weight)
        self.scale = width**-0.5 if scaled else 1.0  # the bug: without 1/√d_k

    def forward(self, asked: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Look up the key `asked`, (batch, 1, width), among the keys, (batch, pairs, width)."""
        scores = self.query(asked) @ self.key(keys).mT * self.scale
        return scores.softmax(dim=-1) @ self.value(values)


class Recall(nn.Module):
    """A model of embeddings and attention that predicts the value of the key `asked`."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(KEYS, WIDTH), nn.Embedding(KEYS, WIDTH)
        self.attention = Attention(WIDTH, scaled)
        self.guess = nn.Linear(WIDTH, KEYS)

    def forward(self, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """Return logits over values, (batch, KEYS)."""
        return self.guess(self.attention(self.keys(asked)[:, None], self.keys(keys), self.values(values))[:, 0])


def batch(rows: int = 64) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Draw pairs of keys and values, one of the keys, and its value as the target."""
    keys = torch.rand(rows, KEYS).argsort(dim=1)[:, :PAIRS]
    values = torch.randint(0, KEYS, (rows, PAIRS))
    place = torch.randint(0, PAIRS, (rows, 1))
    return (keys, values, keys.gather(1, place)[:, 0]), values.gather(1, place)[:, 0]


def train(model: nn.Module) -> float:
    """Return the share of right answers after training."""
    torch.manual_seed(1)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(STEPS):
        inputs, answer = batch()
        optimiser.zero_grad()
        F.cross_entropy(model(*inputs), answer).backward()
        optimiser.step()
    inputs, answer = batch(2000)
    return float((model(*inputs).argmax(-1) == answer).float().mean())


def main() -> None:
    """Audit the model with the bug and the fixed model, and train both."""
    torch.set_flush_denormal(True)  # gradients of a saturated softmax are denormal numbers, which are slow on a CPU
    torch.manual_seed(0)
    inputs, _ = batch()
    for title, scaled in (("as it was written", False), ("mended", True)):
        torch.manual_seed(0)
        model = Recall(scaled)
        audit = attnscale.audit(model, *inputs)
        print(f"{title}:")
        for finding in audit.findings or ["nothing found"]:
            print(fill(str(finding), 100, initial_indent="  ", subsequent_indent="    "))
        trace = float(audit.layers["attention"].stats.jacobian_trace.mean())
        print(f"  1 − Σp² is {trace:.2f}; after {STEPS} steps {train(model):.0%} right\n")


if __name__ == "__main__":
    main()
