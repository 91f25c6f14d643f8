"""The input of a softmax, by head and by row, whatever axes it has."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attnscale.watching.written.axes import Axes


@dataclass(frozen=True)
class ScoreRows:
    """Scores as a model wrote them, in the shape of its axes."""

    axes: Axes
    scores: Tensor

    def at(self, positions: Tensor) -> Tensor:
        """The scores of these rows, (batch, heads, rows, keys)."""
        chosen = self._last.index_select(-2, positions.to(self.scores.device))
        return self._by_head(chosen.reshape(-1, *chosen.shape[-2:]))

    def highest(self) -> Tensor:
        """The largest there is, a value a head."""
        return self._by_head(self._last.amax((-2, -1)).reshape(-1)).amax(0).double()

    @cached_property
    def _last(self) -> Tensor:
        """A view of them: (…other axes…, queries, keys)."""
        axes = self.axes
        moving = (*axes.other_axes, *axes.query_axes, axes.key_axis)
        single = [axis for axis in range(len(axes.shape)) if axis not in moving]
        view = self.scores.permute(*single, *moving)
        return view.flatten(-1 - len(axes.query_axes), -2) if axes.query_axes else view.unsqueeze(-2)

    def _by_head(self, each: Tensor) -> Tensor:
        """What there is of each combination of the other axes, (batch, heads, …); a view where they are in order."""
        groups = self.axes.groups
        if groups.size == len(each) and (np.diff(groups.ravel()) == 1).all():
            return each.view(*groups.shape, *each.shape[1:])
        return each[torch.from_numpy(groups).to(each.device)]
