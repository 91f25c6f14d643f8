"""Attention computed by a fused kernel: what its arguments mean."""
