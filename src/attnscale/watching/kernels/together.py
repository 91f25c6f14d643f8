"""Kernels that ran one after another, measured together: those that are alike in one go."""

from collections.abc import Sequence

import torch

from attnscale.measure import together
from attnscale.measure.lengths import mean_lengths
from attnscale.numerics import without_autocast
from attnscale.watching.kernels.kernel_call import KernelCall, Measured


def measured_together(kernels: Sequence[KernelCall], rows: int) -> list[Measured | None]:
    """What is measured of each; None of one that goes with no others, and is measured by itself."""
    found: list[Measured | None] = [None] * len(kernels)
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, kernel in enumerate(kernels):
        if kernel.is_plain and together.goes_with_others(kernel.scored, rows):
            kind = kernel.query.shape, kernel.key.shape, kernel.query.dtype, kernel.visibility
            alike.setdefault(kind, []).append(index)
    for group in alike.values():
        for index, measured in zip(group, _measured_alike([kernels[index] for index in group], rows), strict=True):
            found[index] = measured
    return found


def _measured_alike(kernels: Sequence[KernelCall], rows: int) -> list[Measured]:
    with torch.no_grad(), without_autocast(kernels[0].query):
        calls, lses = [kernel.scored for kernel in kernels], [kernel.lse for kernel in kernels]
        stats = together.measured_together(calls, rows, lses)
        query, key = (
            mean_lengths(torch.cat(some, dim=1)).split(some[0].shape[1])
            for some in zip(*(kernel.some()[:2] for kernel in kernels), strict=True)
        )
    return [Measured(*each) for each in zip(stats, query, key, strict=True)]
