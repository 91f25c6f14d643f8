"""Attention and the exact statistics of its rows in one pass on a Hopper GPU."""

from attnscale.measure.cuda.hopper.launch import DEFAULT, VARIANTS, Variant, attend_rows, sequence_rows, supported

__all__ = ["DEFAULT", "VARIANTS", "Variant", "attend_rows", "sequence_rows", "supported"]
