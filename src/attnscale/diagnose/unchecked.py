"""What an audit did not judge, and why: a sentence each."""

from collections.abc import Mapping

from attnscale.watching.layer import Layer
from attnscale.watching.missed import MissedAttention


def unchecked(layers: Mapping[str, Layer], missed: MissedAttention) -> tuple[str, ...]:
    """What is in no layer, and the layers whose multiplier, or weights, were seen and not judged."""
    reasons: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if layer.reading.unread:
            reasons.setdefault(f"could not be read: {layer.reading.unread}", []).append(name)
        elif layer.declared.folded is not None:
            why = f"was not judged: {layer.declared.folded:.4g} of it was folded into its weights"
            reasons.setdefault(why, []).append(name)
    told = [f"The scale of {', '.join(names)} {why}." for why, names in reasons.items()]
    obscure = [name for name, layer in layers.items() if any(softmax.is_obscure for softmax in layer.softmaxes)]
    if obscure:
        told.append(
            f"Whether the weights of {', '.join(obscure)} sum to one was not checked: they are mixed with others."
        )
    return (*missed.sentences, *told)
