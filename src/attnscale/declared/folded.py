"""What attnscale itself folded into the weights of a module: a part of its scale that its code does not show."""

from torch import nn

from attnscale.declared.parents import Parents

FOLDED = "_attnscale_folded"  # travels with the module when it is copied or pickled, not in its state_dict


def note_folded(module: nn.Module, factor: float) -> None:
    """The queries and keys that a module makes were multiplied, together, by this."""
    setattr(module, FOLDED, getattr(module, FOLDED, 1.0) * factor)


def folded_factor(parents: Parents) -> float | None:
    """What was folded into the module that attends; None where nothing was."""
    factor = getattr(parents[0][1], FOLDED, None) if parents else None
    return factor if isinstance(factor, float) else None
