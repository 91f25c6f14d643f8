"""A running model -> the attentions it computes, and what was really applied in them."""

from attnscale.watching.layer import Layer, Wiring
from attnscale.watching.seen import Seen
from attnscale.watching.watch import watch

__all__ = ["Layer", "Seen", "Wiring", "watch"]
