"""Kernels that ran one after another, measured together: of those that are alike, all in one go."""

from collections.abc import Sequence

import torch

from attnscale.attending.call import Call
from attnscale.measure.lengths import mean_lengths
from attnscale.measure.together import goes_with_others, measured_together
from attnscale.numerics import without_autocast
from attnscale.watching.kernels.kernel_call import KernelCall, Measured


def measured_of(kernels: Sequence[KernelCall], rows: int) -> list[Measured | None]:
    """What is measured of each; None of one that goes with no others, and is measured by itself."""
    found: list[Measured | None] = [None] * len(kernels)
    alike: dict[tuple[object, ...], list[tuple[int, Call]]] = {}
    for index, kernel in enumerate(kernels):
        if kernel.score_mod is None and kernel.hidden is None and goes_with_others(kernel.scored, rows):
            kind = kernel.query.shape, kernel.key.shape, kernel.query.dtype, kernel.visibility.last
            alike.setdefault(kind, []).append((index, kernel.scored))
    for group in alike.values():
        indices = [index for index, _ in group]
        with torch.no_grad(), without_autocast(kernels[indices[0]].query):
            calls = [call for _, call in group]
            stats = measured_together(calls, rows, [kernels[index].lse for index in indices])
            some = zip(*(kernels[index].some()[:2] for index in indices), strict=True)
            query, key = (mean_lengths(torch.cat(each, 1)).split(each[0].shape[1]) for each in some)
        for index, *each in zip(indices, stats, query, key, strict=True):
            found[index] = Measured(*each)
    return found
