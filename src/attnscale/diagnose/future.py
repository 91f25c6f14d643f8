"""A layer that sees the future in a stack that does not."""

import re
from collections.abc import Iterator, Mapping

from attnscale.diagnose.finding import Finding
from attnscale.watching.layer import Layer


def future_findings(layers: Mapping[str, Layer], trained: bool) -> Iterator[Finding]:
    """`attends_to_future`: of layers that differ by their number alone, most are causal and some are not."""
    stacks: dict[str, list[Layer]] = {}
    for layer in layers.values():
        if layer.query_len == layer.key_len > 1:
            stacks.setdefault(re.sub(r"\d+", "*", layer.name), []).append(layer)
    for stack in stacks.values():
        open_ones = [layer for layer in stack if not layer.causal]
        if 2 * len(open_ones) < len(stack):
            yield from (_finding(layer, len(stack)) for layer in open_ones)


def _finding(layer: Layer, stack: int) -> Finding:
    return Finding(
        layer.name,
        None,
        "attends_to_future",
        "warning",
        f"Its queries see later keys, where most of the {stack} layers of its stack see none: what they learn to "
        "predict is in plain sight.",
        None,
        None,
        "Give it the causal mask of the others (is_causal=True).",
    )
