"""Attention and the exact statistics of its rows in one pass on a Hopper GPU."""

from attnscale.measure.cuda.hopper.kernel import attend_rows, takes

__all__ = ["attend_rows", "takes"]
