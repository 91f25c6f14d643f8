"""Train and eval: a model in its other mode, for a moment, and left as it was."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from attnscale.diagnose.finding import Finding
from attnscale.watching.layer import Layer

MODES = {True: "training", False: "evaluation"}
TOLERANCE = 0.02  # relative: a slope fitted to scores in half precision


@contextmanager
def in_other_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation for training and the other way round; flags, buffers and random numbers are put back."""
    flags = {module: module.training for module in model.modules()}
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    with torch.random.fork_rng():
        model.train(not model.training)
        try:
            yield
        finally:
            for module, flag in flags.items():
                module.training = flag
            with torch.no_grad():
                for module, name, buffer, before in buffers:
                    buffer.copy_(before)
                    setattr(module, name, buffer)  # a forward may put another in its place


def mode_findings(layers: Mapping[str, Layer], others: Mapping[str, Layer], is_training: bool) -> Iterator[Finding]:
    """Layers whose multiplier is another in the other mode; `is_training` says which one `layers` ran in."""
    for name, layer in layers.items():
        other = others.get(name)
        if other is None or other.heads != layer.heads:
            continue
        ours, theirs = layer.scales.double().cpu(), other.scales.double().cpu()
        is_read = ours.isfinite() & theirs.isfinite()
        if torch.allclose(ours[is_read], theirs[is_read], rtol=TOLERANCE, atol=0):
            continue
        by_mode = {is_training: layer.scale_applied, not is_training: other.scale_applied}
        yield Finding(
            name,
            None,
            "scale_depends_on_mode",
            "warning",
            f"The scores are multiplied by {by_mode[True]:.4g} in training and by {by_mode[False]:.4g} in evaluation.",
            by_mode[False],
            by_mode[True],
            "Apply the same scale in both, or the model is evaluated with other weights than it was trained with.",
        )
