"""Find the attentions that a running model computes, and measure the scale that each one applies."""

from attnscale.watching.layer import Layer, Wiring
from attnscale.watching.seen import Seen
from attnscale.watching.watch import watch

__all__ = ["Layer", "Seen", "Wiring", "watch"]
