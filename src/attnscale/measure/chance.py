"""What chance alone does to Σp² of a row, were its scores Gaussian: a variance to expect where none was seen yet.

At moderate spreads Σp² hangs on a few keys in a thousand rows. A sample that misses them all looks precise; the
spread of its scores tells better. One score s among n weighs p = eˢ / (eˢ + A), A = n e^{σ²/2} being the sum of the
others, and takes Σp² from P to P + c, c = p² (1 + P) − 2 p P; the variance over rows is then n Var[c].
"""

import math

import torch
from torch import Tensor

from attnscale.measure.row_sums import RowSums

NODES = torch.linspace(-4.0, 7.0, 34, dtype=torch.float64)  # in standard deviations; the rarest of 10¹² scores is at 7
STEP = 1 / 3
DENSITY = torch.exp(-NODES.square() / 2) / math.sqrt(2 * math.pi) * STEP
RARE = 2  # scores of a head; rarer ones it may well not have
HIGHEST_VARIANCE = 0.25  # of anything between 0 and 1


def chance_of_participation(rows: RowSums, positions: int) -> Tensor:
    """The variance of Σp² for rows like these, (batch, heads, rows), for a head of so many positions."""
    keys = rows.visible.double()
    variance = rows.deviation.double() / keys.clamp(min=1)
    nodes, density = NODES.to(keys.device), DENSITY.to(keys.device)
    others = (keys - 1).clamp(min=1).log() + variance / 2
    weight = torch.sigmoid(variance.sqrt().unsqueeze(-1) * nodes - others.unsqueeze(-1))
    scores = keys * positions * rows.visible.shape[0]
    rarest = -torch.special.ndtri(RARE / scores.clamp(min=2 * RARE))
    density = density * ((rarest.unsqueeze(-1) - nodes) / STEP + 0.5).clamp(0, 1)
    usual = (keys * (density * weight.square()).sum(-1)).clamp(max=1).unsqueeze(-1)
    change = weight.square() * (1 + usual) - 2 * weight * usual
    chance = keys * ((density * change.square()).sum(-1) - (density * change).sum(-1).square())
    return torch.where(keys > 1, chance.clamp(0, HIGHEST_VARIANCE), 0.0)
