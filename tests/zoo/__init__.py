"""Attention as people write it: correct, and with a bug each. What watching and auditing are held to.

fused, products, layouts, softmaxes, masks, norms_and_caps, positions, structures, torch_modules, unbatched and compiled
are correct, and so are, unusual as they are, designs_of_axes, designs_of_scale, designs_of_scores, designs_of_weights
and designs_of_keys; bugs_of_scale, bugs_of_wiring, bugs_of_values, bugs_of_weights and bugs_of_masks are not.
"""

from . import (
    bugs_of_masks,
    bugs_of_scale,
    bugs_of_values,
    bugs_of_weights,
    bugs_of_wiring,
    compiled,
    designs_of_axes,
    designs_of_keys,
    designs_of_scale,
    designs_of_scores,
    designs_of_weights,
    fused,
    layouts,
    masks,
    norms_and_caps,
    positions,
    products,
    softmaxes,
    structures,
    torch_modules,
    unbatched,
)
from .entry import ENTRIES, Entry, Expected
from .recording import recording

FAMILIES = (
    fused, products, layouts, softmaxes, masks, norms_and_caps, positions, structures, torch_modules, unbatched,
    compiled,
    designs_of_axes, designs_of_scale, designs_of_scores, designs_of_weights, designs_of_keys,
    bugs_of_scale, bugs_of_wiring, bugs_of_values, bugs_of_weights, bugs_of_masks,
)  # fmt: skip
CORRECT = {name: entry for name, entry in ENTRIES.items() if entry.code is None}
BUGS = {name: entry for name, entry in ENTRIES.items() if entry.code is not None}

__all__ = ["BUGS", "CORRECT", "ENTRIES", "FAMILIES", "Entry", "Expected", "recording"]
