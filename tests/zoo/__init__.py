"""Attention as people write it: correct, and with a bug each. What watching and auditing are held to.

Modules named designs_of_… hold attention that is unusual and right, bugs_of_… wrong ones. `reported`, `reported_norms`
and `reported_ports` hold bugs that people reported, each with its fixed twin; all other modules hold correct attention.
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
    designs_of_reports,
    designs_of_scale,
    designs_of_scores,
    designs_of_weights,
    fused,
    layouts,
    masks,
    norms_and_caps,
    positions,
    products,
    reported,
    reported_norms,
    reported_ports,
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
    designs_of_reports,
    bugs_of_scale, bugs_of_wiring, bugs_of_values, bugs_of_weights, bugs_of_masks, reported, reported_norms,
    reported_ports,
)  # fmt: skip
CORRECT = {name: entry for name, entry in ENTRIES.items() if entry.code is None}
BUGS = {name: entry for name, entry in ENTRIES.items() if entry.code is not None}

__all__ = ["BUGS", "CORRECT", "ENTRIES", "FAMILIES", "Entry", "Expected", "recording"]
